"""The switch for one-shot reductions, under the name that other systems gave it."""

from __future__ import annotations

import os

from meshplan.errors import PolicyError

ONE_SHOT_VARIABLE = "MESHPLAN_USE_1STAGE_ALLREDUCE"
"""The environment variable that forces one-shot (``1``) or forbids it (``0``)."""


def one_shot_switch() -> bool | None:
    """``MESHPLAN_USE_1STAGE_ALLREDUCE``, for path ``auto`` only. ``1``: always one-shot (True).
    ``0``: never (False). Unset or empty: the faster path (None). Others raise PolicyError.
    """
    value = os.environ.get(ONE_SHOT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise PolicyError(
            f"{ONE_SHOT_VARIABLE}={value!r} is no switch; write 1 for one-shot reductions wherever "
            "the path is auto, 0 for none, or unset it"
        )
    return {"0": False, "1": True}.get(value)
