"""Who is missing where a reduction has failed in the backend."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from meshplan.flatten._agree import roll_call
from meshplan.flatten._answering import AnsweringStore
from meshplan.flatten._create import default_timeout, this_rank
from meshplan.flatten._forks import inherited

__all__ = ["missing_members"]

_SECONDS = 10.0


def missing_members(
    group: ProcessGroup, ranks: tuple[int, ...], device_type: str, name: str = ""
) -> tuple[tuple[int, ...] | None, float]:
    """Call the roll of ``ranks``, whose reduction has failed on this rank.

    Args:
        group: one that they reduce on. How long it allows its collectives bounds the wait.
        ranks: global ranks of all that reduce together.
        device_type: of the tensors.
        name: tells groups of the same ranks apart; the same on all of them.

    Returns:
        The ranks that did not report the failure as well, as ``roll_call`` says; and for how many
        seconds they were waited for. Nobody is waited for without a store.
    """
    wait = min(_SECONDS, default_timeout(device_type, group))
    if inherited():
        return (), 0.0
    name = f"{'-'.join(map(str, ranks))} {name}"
    try:
        store = AnsweringStore(c10d._get_default_store(), wait)
        return roll_call(store, name, ranks=ranks, rank=this_rank(), wait=wait), wait
    except (RuntimeError, ValueError):
        # The store has gone with the rank that served it, or the default group with its owner.
        return (), 0.0
