"""What to observe, as options and as the text of ``MESHPLAN_RUN``."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from meshplan._message_text import suggest
from meshplan.errors import PolicyError


class RunSettings(NamedTuple):
    """How to observe a job.

    Attributes:
        report: path of the JSON report, which rank 0 writes again at each observed step.
        every: optimizer steps from one comparison of replicas to the next.
        first: how many steps at the start are compared, each of them.
        gradients: compare gradients before each observed step too.
        strict: exit with status 3 if replicas differ or a reduction is outside the contract.
        html: path of a page for browsers, which rank 0 writes at the end.
        backend: of the default group, ``meshplan``; ``None`` leaves the job's own.
        certify: path of the certificate, to which rank 0 adds a link for each step.
    """

    report: str | None = None
    every: int = 100
    first: int = 3
    gradients: bool = False
    strict: bool = False
    html: str | None = None
    backend: str | None = None
    certify: str | None = None

    @classmethod
    def parse(cls, text: str) -> RunSettings:
        """The settings of a text such as ``report=run.json every=50 gradients strict``.

        Raises:
            PolicyError: an unknown key, or a value that the key does not accept.
        """
        found: dict[str, str | int | bool] = {}
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise PolicyError(f"MESHPLAN_RUN={text!r} has an open quotation: {error}") from None
        for word in words:
            key, equals, value = word.partition("=")
            default = cls._field_defaults.get(key, word)
            if key not in cls._fields:
                raise PolicyError(
                    f"{word!r} is not a setting of a run{suggest(key, cls._fields)}; use "
                    f"{', '.join(cls._fields)}"
                )
            if isinstance(default, bool):
                if equals:
                    raise PolicyError(f"{word!r}: {key} has no value; pass {key} alone")
                found[key] = True
            elif isinstance(default, int):
                least = 1 if key == "every" else 0
                if not value.isdecimal() or int(value) < least:
                    raise PolicyError(f"{word!r}: pass a number of steps, {least} or more")
                found[key] = int(value)
            elif not value:
                raise PolicyError(f"{word!r}: pass {key}= with a value")
            else:
                found[key] = value
        return cls(**found)  # type: ignore[arg-type]
