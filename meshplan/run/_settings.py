"""What to observe, as options and as the text of ``MESHPLAN_RUN``."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from meshplan._message_text import suggest
from meshplan.errors import PolicyError


class RunSettings(NamedTuple):
    """How to observe a job; the options of the command describe each."""

    report: str | None = None
    every: int = 100
    first: int = 3  # steps at the start that are compared, each of them
    gradients: bool = False
    strict: bool = False
    html: str | None = None
    backend: str | None = None  # ``None`` leaves the job's own
    certify: str | None = None

    @classmethod
    def parse(cls, text: str) -> RunSettings:
        """The settings of a text such as ``report=run.json every=50 gradients strict``;
        ``PolicyError`` for an unknown key, or a value that the key does not accept.
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
