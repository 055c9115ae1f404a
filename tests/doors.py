"""The doors through which a program reduces over one process group, behind one call.

``seam``: a redistribution of a DTensor while meshplan is installed. ``functions``: a deterministic
collective. ``backend``: a plain collective of torch over a group of the backend ``meshplan``.

Values encode the call: a sum over different calls is the sum of no call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
import meshplan.backend
import meshplan.collectives
import meshplan.dtensor
from meshplan.contract import Contract, Op
from meshplan.testing import bits, reference_reduce
from meshplan.topology import Topology
from tests.processes import set_timeout

DOORS = ("seam", "functions", "backend")
# Seconds that no wait of a passing test takes.
LONG = 200.0
# Added to the summands of each further group and of each call.
PER_GROUP, PER_CALL = 100_000, 1_000

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def call_values(
    call: int, group: int, rank: int, numel: int = 8, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The summand of one rank, in which call, group and rank can be read."""
    base = PER_CALL * call + PER_GROUP * group + rank
    steps = torch.arange(numel)
    if not dtype.is_floating_point:
        return (base + steps).to(dtype)
    # Sevenths: the additions round, so that their order shows.
    return (base * (1 + steps.to(torch.float64) / 7)).to(dtype)


def expected_words(
    call: int,
    group: int,
    world_size: int,
    *,
    numel: int = 8,
    dtype: torch.dtype = torch.float32,
    op: Op = "sum",
    contract: Contract = Contract(),
) -> tuple[int, ...]:
    """The bits of the reduction of one call, as signed integers; by exact arithmetic."""
    width = 8 * dtype.itemsize
    leaves = [
        [word % (1 << width) for word in bits(call_values(call, group, r, numel, dtype)).tolist()]
        for r in range(world_size)
    ]
    found = reference_reduce(leaves, dtype, op, (world_size,), contract)
    return tuple(word - (word >> (width - 1) << width) for word in found)


class Member(NamedTuple):
    """A process group of all ranks, its number, and the mesh over it for the seam. The calls of
    each have values of their own.
    """

    number: int
    group: ProcessGroup
    mesh: DeviceMesh | None


@dataclass
class Door:
    """Reductions through one door, with the same path and contract on every rank.

    Attributes:
        name: one of ``DOORS``.
        path: of the data.
        contract: the order of additions.
        topology: for the seam; ``None``: its ranks exchange their placement.
    """

    name: str
    path: str = "auto"
    contract: Contract = Contract()
    topology: Topology | None = None
    _seconds: float = field(default=LONG, init=False)

    @property
    def backend(self) -> str:
        """The backend of the default group."""
        return "meshplan" if self.name == "backend" else "gloo"

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Variables with which the default group is created as the other groups are."""
        chosen = {"MESHPLAN_PATH": self.path, "MESHPLAN_CONTRACT": self.contract.id}
        with mock.patch.dict(os.environ, chosen if self.name == "backend" else {}):
            yield

    def open(self, seconds: float = LONG) -> Member:
        """The default group, where no wait takes more than ``seconds``."""
        group = c10d._get_default_group()
        mesh = None
        if self.name == "seam":
            self._install(seconds)
            mesh = init_device_mesh("cpu", (group.size(),))
            # torch gives groups of meshes half an hour.
            group = mesh.get_group(0)
        set_timeout(timedelta(seconds=seconds), group)
        return Member(0, group, mesh)

    def open_another(
        self, number: int, seconds: float = LONG, contract: Contract | None = None
    ) -> Member:
        """Another group of all ranks; every rank calls it in the same order. No wait takes more
        than ``seconds``. ``contract``: for the backend; ``None``: the door's.
        """
        options: Any = None
        if self.name == "backend":
            options = meshplan.BackendOptions(contract or self.contract, path=self.path)
        group = dist.new_group(
            backend=self.backend, timeout=timedelta(seconds=seconds), pg_options=options
        )
        mesh = DeviceMesh.from_group(group, "cpu") if self.name == "seam" else None
        return Member(number, group, mesh)

    def wait_at_most(self, seconds: float, *members: Member) -> None:
        """Limit later waits of this rank over ``members``."""
        if self.name == "seam":
            self._install(seconds)
        for member in members:
            set_timeout(timedelta(seconds=seconds), member.group)

    def _install(self, seconds: float, contract: Contract | None = None) -> None:
        self._seconds = seconds
        meshplan.install(
            path=self.path,
            contract=contract or self.contract,
            timeout=seconds,
            topology=self.topology,
        )

    def reduce(
        self, member: Member, tensor: Tensor, op: Op = "sum", contract: Contract | None = None
    ) -> Tensor:
        """All-reduce ``tensor``; ``contract``: other than the door's, but for the backend."""
        if self.name == "backend":
            dist.all_reduce(tensor, _OPS[op], group=member.group)
            return tensor
        if self.name == "functions":
            return meshplan.deterministic_all_reduce(
                tensor,
                op=op,
                path=self.path,
                contract=contract or self.contract,
                group=member.group,
            )
        assert member.mesh is not None
        if contract is not None:
            self._install(self._seconds, contract)
        try:
            placements = [Partial(op)] * member.mesh.ndim
            summand = DTensor.from_local(tensor, member.mesh, placements, run_check=False)
            return summand.full_tensor()
        finally:
            if contract is not None:
                self._install(self._seconds)


class Result(NamedTuple):
    """How a call ended on one rank.

    Attributes:
        words: the bits of its result, or ``None``.
        error: the class of its error, or ``""``.
        code: of an error of meshplan, or ``""``.
        text: of its error.
        missing: the ranks that the error has as missing.
    """

    words: tuple[int, ...] | None = None
    error: str = ""
    code: str = ""
    text: str = ""
    missing: tuple[int, ...] = ()

    def reading(self, expected: tuple[int, ...]) -> str:
        """``right``, ``wrong``, or the code or class of the error."""
        if self.words is None:
            return self.code or self.error
        return "right" if self.words == expected else "wrong"

    def names_a_rank(self) -> bool:
        """Whether the text of the error has the number of a rank."""
        return re.search(r"\branks? \d", self.text) is not None


def attempt(function: Callable[[], Tensor]) -> Result:
    """The bits that ``function`` returns, or its error."""
    try:
        return Result(words=tuple(bits(function()).flatten().tolist()))
    except BaseException as error:
        return Result(
            error=type(error).__name__,
            code=getattr(error, "code", ""),
            text=str(error),
            missing=tuple(getattr(error, "missing", ())),
        )
