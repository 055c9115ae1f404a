"""``--probe``: the order in which each group adds, from sums that show it.

Before its first reduction, where all members are, a group adds vectors whose sum depends on the
order of additions. Ranks may begin with different groups, and members that wait here could wait for
each other. So the sums are issued in front of that reduction, with which they pair, and read after
they have ended. Only what is equal on all members decides whether a group is probed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan._inputs import order_sensitive
from meshplan._observing import within
from meshplan._torch import disable_current_modes
from meshplan._uncompiled import never_compiled
from meshplan.contract import Accumulate, Contract, Rounding
from meshplan.definition import reduce_leaves
from meshplan.errors import ContractError
from meshplan.kernel import integers
from meshplan.orders import ORDERS
from meshplan.replicas._verify import digest
from meshplan.run._holders import find_layouts, name_groups
from meshplan.run._ledger import Message, format_ranks
from meshplan.run._signals import is_of_handler

DTYPES = (torch.float32, torch.bfloat16)
# Elements that are repeated, so that an element has the same summands at each size.
PATTERN = 251
REPEATS = (1, 64, 4096)

_Make = Callable[[], Message]


class Probe:
    """The sums of this process, until they are posted."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._begun: Any = weakref.WeakKeyDictionary()
        self._collecting = threading.Lock()
        self._pending: list[tuple[tuple[int, ...], list[dist.Work], _Make]] = []

    @never_compiled
    def begin(self, group: Any, device: torch.device) -> None:
        """Issue the sums of a group before its first reduction."""
        mark = object()
        if self._begun.setdefault(group, mark) is not mark or not _is_probed(group, device):
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        find_layouts()  # meshes may be gone when the sums are described
        cuda: Any = torch.cuda
        stream = nullcontext()
        if device.type == "cuda":  # the job's may wait for another group
            stream = cuda.stream(cuda.Stream(device))
        options = dist.AllreduceOptions()
        options.asyncOp = True
        with (
            disable_current_modes(),
            torch.inference_mode(False),
            stream,
        ):
            leaves = [make_leaf(dtype, group.rank(), group.size()) for dtype in DTYPES]
            sums = [one.repeat(n).to(device) for one, n in product(leaves, REPEATS)]
            calls = [partial(group.allreduce, [one], options) for one in sums]
            # Members wait for a rank that stops above: its reduction fails. An unsupported dtype
            # raises on all of them here, and after a failure of the group its reduction does.
            try:
                works = [within("counted", one) for one in calls]
            except Exception as error:
                if is_of_handler(error):
                    raise
                self._note_failure(ranks, error)
                return
        about = group.rank(), group.group_name, group.name()
        make = partial(describe, *about, ranks, sums)
        self._pending.append((ranks, works, make))

    def _note_failure(self, ranks: tuple[int, ...], why: object) -> None:
        self._note(f"probe of {format_ranks(ranks)}: {str(why)[:200]}")

    def collect(self, post: Callable[[_Make], None]) -> None:
        """Post what has ended."""
        # Other threads may step and begin groups, and so may handlers.
        if not self._collecting.acquire(blocking=False):
            return
        try:
            ended = [one for one in self._pending if all(work.is_completed() for work in one[1])]
            for one in ended:
                self._pending.remove(one)
        finally:
            self._collecting.release()
        for ranks, works, make in ended:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._note_failure(ranks, error)
            else:
                post(make)

    def finish(self, post: Callable[[_Make], None], seconds: float) -> None:
        """Post the rest: of gloo, later sums may end before earlier ones."""
        deadline = time.monotonic() + seconds
        self.collect(post)
        while self._pending and time.monotonic() < deadline:
            time.sleep(0.01)
            self.collect(post)
        for ranks, *_ in self._pending:
            self._note_failure(ranks, "not all members have reduced")


def _is_probed(group: Any, device: torch.device) -> bool:
    # A group that another library writes in Python may change its members.
    own = type(group) is dist.ProcessGroup or type(group).__module__.startswith("meshplan.")
    if group.size() == 1 or group.name() == "fake" or not own:
        return False
    try:
        dist.get_process_group_ranks(group)
    except Exception:  # torch does not know it
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def describe(
    place: int,
    name: str,
    backend: str,
    ranks: tuple[int, ...],
    sums: list[Tensor],
) -> Message:
    """A message on the sums of a group, in which this rank is at ``place``."""
    rows = [one.cpu().view(-1, PATTERN) for one in sums]
    columns = [torch.cat(one) for one in zip(*[iter(rows)] * len(REPEATS), strict=True)]
    firsts = [one[0] for one in columns]
    changes = any(bool((integers(one) != integers(one[:1])).any()) for one in columns)
    label = name_groups(ranks[place]).get(tuple(sorted(ranks)))
    # One member is enough.
    contracts = find_contracts(firsts, len(ranks)) if not (place or changes) else []
    return {
        "probe": {
            "name": name,
            "ranks": ranks,
            "group": label or format_ranks(ranks),
            "backend": backend,
            "words": " ".join(map(digest, columns)),
            "size_changes_bits": changes,
            "contracts": contracts,
        }
    }


def find_contracts(sums: list[Tensor], members: int) -> list[str]:
    """Ids of all contracts with the bits of these sums, one pattern for each dtype."""
    leaves = [[make_leaf(one.dtype, place, members) for place in range(members)] for one in sums]
    names = []
    for words in product(ORDERS, get_args(Accumulate), get_args(Rounding)):
        try:
            contract = Contract(*words)
        except ContractError:  # an order that rounds once
            continue
        expected = [reduce_leaves(one, "sum", (members,), contract) for one in leaves]
        if all(
            map(
                torch.equal,
                map(integers, sums),
                map(integers, expected),
            )
        ):
            names.append(contract.id)
    return names


def make_leaf(dtype: torch.dtype, place: int, members: int) -> Tensor:
    return order_sensitive(PATTERN, rank=place, world_size=members, dtype=dtype)
