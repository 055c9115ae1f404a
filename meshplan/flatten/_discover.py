"""Where all ranks of the job sit, gathered once over the store.

A vote that is held for an answer (docs/adr/0007): each rank writes its own place, the one that
decides merges all of them, and every rank reads the verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial

from meshplan._torch import Store
from meshplan.errors import TopologyError, TopologyInputError
from meshplan.flatten._agree import (
    AnsweringStore,
    Members,
    open_round,
    vote,
)
from meshplan.flatten._join import refusal
from meshplan.record import Record
from meshplan.topology._locate import RankLocation, locate_rank
from meshplan.topology._merge_locations import merge_locations
from meshplan.topology._model import (
    Cluster,
    pack_cluster,
    unpack_cluster,
)

# No compressed answer begins with it.
_FAILED = "failed: "


def discover(
    store: Store,
    rank: int,
    world_size: int,
    timeout: float,  # seconds to wait for the other ranks, from this rank's arrival
    *,
    # The purpose of the wait, in the words of an error.
    what: str = "the exchange of rank locations",
    # Finds this rank's place; from its environment by default.
    place: Callable[[], RankLocation] | None = None,
    # That needs the places, in words that all ranks have; empty: none does.
    call: str = "",
) -> Cluster:
    """Gather the places of all ranks of the job into the cluster, the same on all ranks. Raises
    GroupAgreementError, GroupStateError, or TopologyInputError for an invalid place.
    """
    store = AnsweringStore(store, timeout)
    members = Members(store, tuple(range(world_size)), rank, timeout, call)
    prefix, past = open_round(members, f"places/{world_size}")
    mine = place() if place is not None else locate_rank(os.environ)
    # Before the vote: who sees all ranks there sees all places.
    store.set(
        f"{prefix}/place/{rank}",
        json.dumps(mine.to_json(), separators=(",", ":")),
    )
    answer = partial(_gathered, store, prefix, world_size)
    verdict = past or vote(members, prefix, Record.of(vote="place"), answer=answer)
    if not verdict.unanimous:
        raise refusal(verdict, members, what)
    if verdict.answer.startswith(_FAILED):
        raise TopologyInputError(verdict.answer.removeprefix(_FAILED))
    return unpack_cluster(verdict.answer)


def _gathered(store: Store, prefix: str, world_size: int) -> str:
    keys = [f"{prefix}/place/{rank}" for rank in range(world_size)]
    try:
        places = [RankLocation.from_json(json.loads(text)) for text in store.multi_get(keys)]
        return pack_cluster(merge_locations(places))
    except (TopologyError, ValueError) as error:
        # Told to all, rather than raised on one rank while the others wait.
        return f"{_FAILED}{error.args[0]}"
