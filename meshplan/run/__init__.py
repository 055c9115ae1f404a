"""A job observed from its start, without a change of its code.

``observe(settings)`` hooks torch in this process. After observed optimizer steps words of
replicas go to rank 0, which compares them and writes the report. Except for the probe's, the job
issues no collective for it, creates no group, and waits for no rank before its end.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from meshplan._message_text import suggest
from meshplan.errors import PolicyError, ReplicaInputError

if TYPE_CHECKING:
    from torch import Tensor


class RunSettings(NamedTuple):
    """How to observe a job; the options of the command describe each."""

    report: str | None = None
    every: int = 100
    first: int = 3  # steps at the start that are compared, and later powers of two; 0: none
    gradients: bool = False
    strict: bool = False
    html: str | None = None
    backend: str | None = None  # ``None`` leaves the job's own
    certify: str | None = None
    probe: bool = False  # the same on all ranks
    require: str | None = None
    keep_leaves: int = 0  # MiB of the reductions of compared steps; 0: none

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
                    raise PolicyError(f"{word!r}: pass a whole number, {least} or more")
                found[key] = int(value)
            elif not value:
                raise PolicyError(f"{word!r}: pass {key}= with a value")
            else:
                found[key] = value
        return cls(**found)  # type: ignore[arg-type]


def log_value(name: str, value: Tensor | float) -> None:
    """Add a value, such as the loss, to the next link of the certificate of ``meshplan run``.

    A DTensor counts as a whole; for shards that are not a DTensor, pass
    ``DTensor.from_local(shard, mesh, placements)``. Any other value must have the same bits on all
    ranks that log it, else it is listed as not certified. Without ``--certify`` nothing happens.
    The value is copied, and no rank waits.

    Args:
        name: names the value in the certificate, the same on all ranks.
        value: a tensor of any shape and dtype, or a number, which counts as float64.

    Raises:
        ReplicaInputError: ``value`` is neither a tensor nor a number.
    """
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if not is_tensor and not isinstance(value, int | float):
        raise ReplicaInputError(
            f"{name} is of type {type(value).__name__}, and only tensors and numbers can be "
            "certified; pass one of these"
        )
    if (module := sys.modules.get("meshplan.run._observation")) is not None:
        module.log_value(name, value)
