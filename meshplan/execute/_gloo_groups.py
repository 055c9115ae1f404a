"""Process groups over gloo: which ones are, and the end of one whose reduction has failed."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._torch import backend_of
from meshplan.execute._groups import StepGroups

# Of messages that no rank sends.
_TAG = 0x6D706D
_known: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()


def is_gloo(tensor: Tensor, groups: StepGroups) -> bool:
    """Whether tensors like this one travel over gloo in ``groups``."""
    return tensor.device.type == "cpu" and all(_over_gloo(group) for group in groups.levels)


def _over_gloo(group: ProcessGroup) -> bool:
    found = _known.get(group)
    if found is None:
        try:
            backend = backend_of(group, torch.device("cpu"))
            found = group.size() > 1 and backend.name() == "gloo"
        except RuntimeError:
            # A group that is written in Python has no backend.
            found = False
        _known[group] = found
    return found


def break_connections(groups: StepGroups) -> None:
    """Abort the gloo groups of a failed reduction: all their waits fail, on all ranks. A rank that
    has failed sends nothing more. Ranks that wait for it, without a connection to the missing rank,
    would otherwise only fail at the timeout of the group.
    """
    memory = torch.empty(1, dtype=torch.uint8, device="cpu")
    for group in filter(_over_gloo, groups.all):
        for peer in range(group.size()):
            # A wait that ends early closes the connections to all ranks. It takes one to a rank
            # that is still connected.
            with suppress(RuntimeError):
                if peer != group.rank():
                    group.recv([memory], peer, _TAG).wait(timedelta(milliseconds=1))
