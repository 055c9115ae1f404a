"""GPUs on which the paths were timed, and what ``auto`` takes there: ``timed_gpus.json``.

``make bench-gpu`` writes the file, by name of the GPU and ranks of a group. A group shares memory
at every size or at none: ranks whose sizes differ by mistake meet in one call, which compares them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import NamedTuple


class TimedPaths(NamedTuple):
    """The fastest paths on a GPU, for groups of some ranks on one host."""

    one_shot_bytes: int  # up to so many bytes ``one_shot`` is faster than ``two_shot``
    # Whether the faster one of these is at least as fast as ``exchange`` at all sizes.
    share_memory: bool


@lru_cache(maxsize=1)
def _read() -> dict[str, dict[str, dict[str, int]]]:
    text = resources.files("meshplan.kernel").joinpath("timed_gpus.json").read_text()
    found: dict[str, dict[str, dict[str, int]]] = json.loads(text)
    return found


def timed_paths(name: str, ranks: int) -> TimedPaths | str:
    """The times of GPUs called ``name`` by ``torch.cuda.get_device_name``, for groups of ``ranks``
    with a GPU each; or the reason why memory is not shared.
    """
    row = _read().get(name, {}).get(str(ranks))
    if row is None:
        return (
            f"one_shot and two_shot were not timed on {name} with {ranks} ranks; write the path "
            "that you want, or time them with make bench-gpu"
        )
    found = TimedPaths(row["one_shot_bytes"], bool(row["share_memory"]))
    if not found.share_memory:
        return f"exchange was timed to be faster on {name} with {ranks} ranks"
    return found
