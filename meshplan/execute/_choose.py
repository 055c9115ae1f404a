"""Which path a reduction takes: a table, from facts that all its ranks share.

No bit depends on it, but by ``native``, which is outside the contract. The first row whose
condition holds decides. Ranks share the step, the groups and the configuration; the shape and the
dtype of the summand are compared in the first message, whose room is the same on every path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from meshplan._dtypes import name_of
from meshplan.contract import Contract, check_dtype
from meshplan.errors import (
    ContractError,
    ContractTypeError,
    FallbackRefusedError,
    PolicyError,
)
from meshplan.execute._deferred import is_deferred
from meshplan.execute._gloo import MOST_AT_ONCE, inline_bytes
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import RankHeader
from meshplan.execute._provenance import Event
from meshplan.execute.paths import Path, get_path
from meshplan.execute.paths._exchange import PATH as EXCHANGE
from meshplan.execute.paths._exchange import ExchangePath
from meshplan.execute.paths._halving import PATH as HALVING
from meshplan.execute.paths._halving import why_not_simulated
from meshplan.execute.paths._hierarchical import PATH as HIERARCHICAL
from meshplan.execute.paths._native import PATH as NATIVE
from meshplan.execute.paths._reference import PATH as REFERENCE
from meshplan.execute.paths._shared_memory import FASTER_MODE, ONE_SHOT, TWO_SHOT
from meshplan.flatten import HOSTS, TIMED_BYTES
from meshplan.layout import Layout
from meshplan.planner import Between, Reach, Step, find_fastest, find_groups
from meshplan.planner._path_costs import ReductionStrategy
from meshplan.topology import Link, Topology
from meshplan.topology._links import CPU_LINKS

PathChoice = str
"""The name of a path: one of ``PATHS``."""
BY_SIZE = ExchangePath("auto"), ExchangePath("auto, strict")
"""In graphs over gloo of unknown sizes: they choose when they run."""


@dataclass(frozen=True)
class PathRequest:
    """The facts that decide on a path."""

    step: Step
    groups: StepGroups
    tensor: Tensor
    wanted: str  # one of ``PATHS``
    # For ``auto``: always or never one-shot; ``None``: the faster form.
    one_shot: bool | None = None
    traced: bool = False  # the call becomes part of a graph of torch
    captured: bool = False  # the call becomes part of a CUDA graph
    over_gloo: bool = False  # the tensor travels over gloo, where a graph holds one operator
    strict: bool = False  # the same choice in every run, whatever links were timed

    @cached_property
    def planned(self) -> str:
        """The path of the plan."""
        return self.step.path or NATIVE.name

    @property
    def auto(self) -> bool:
        """Whether the path is chosen here."""
        return self.planned == EXCHANGE.name and self.wanted == "auto" and not self.one_shot

    @property
    def flat(self) -> Path:
        """The exchange of the plan."""
        return HIERARCHICAL if self.step.inner > 1 else EXCHANGE

    @cached_property
    def named(self) -> Path:
        """The path that the plan, the configuration or the switch names."""
        if self.planned != EXCHANGE.name:
            return get_path(self.planned)
        name = ONE_SHOT.name if self.wanted == "auto" else self.wanted
        return self.flat if name == EXCHANGE.name else get_path(name)

    @cached_property
    def why_not(self) -> str:
        """Why ``named`` cannot run; empty if it can."""
        if not self.over_gloo or self.named.shares_memory:
            if self.captured and not self.named.captured:
                return f"path {self.named.name} cannot be captured in a CUDA graph"
            if self.traced and not self.captured and not self.named.traced:
                return f"path {self.named.name} cannot be traced"
        return self.named.why_not(self.step, self.groups, self.tensor)

    @cached_property
    def no_memory(self) -> str:
        """Why the ranks do not reduce through shared memory; empty if they do."""
        return ONE_SHOT.why_not(self.step, self.groups, self.tensor)

    @cached_property
    def no_contract(self) -> str:
        """Why the summand's dtype is outside the contract; empty if it is not."""
        if self.step.op != "avg" and self.step.contract is None:
            return ""
        assert self.step.op is not None
        dtype = self.tensor.dtype
        if dtype.is_complex and self.step.op in ("sum", "avg") and self.step.norm is None:
            dtype = dtype.to_real()
        try:
            check_dtype(self.step.op, dtype, self.step.contract)
        except ContractTypeError as error:
            if self.step.op == "avg" and not self.tensor.dtype.is_floating_point:
                raise
            return str(error)
        return ""

    @cached_property
    def nbytes(self) -> int | None:
        """Of the summand; ``None`` while torch traces with a size that it does not know."""
        numel = self.tensor.numel()
        return numel * self.tensor.element_size() if isinstance(numel, int) else None

    @cached_property
    def fastest(self) -> tuple[int, Between, int]:
        """``find_fastest`` of the ways to reduce without shared memory. Except over gloo, graphs
        hold the exchange of the plan: ranks whose graphs know different sizes still issue the same
        collectives.
        """
        step, nbytes = self.step, self.nbytes
        if nbytes is None or step.inner > 1 or step.leaves or (self.traced and not self.over_gloo):
            return 1, "exchange", 0
        assert step.contract is not None
        assert step.op is not None
        # A graph passes the real and the imaginary parts of complex numbers.
        dtype = self.tensor.dtype.to_real() if self.tensor.is_complex() else self.tensor.dtype
        name = name_of(dtype)
        ratio = step.contract.partial(step.op, name).nbytes // dtype.itemsize
        halves = not HALVING.why_not(step, self.groups, self.tensor)
        # One message holds the summand, where a flat exchange is two collectives.
        flat = not step.scatter or self.groups.gather is not None
        single = flat and 0 < nbytes <= inline_bytes(step.group_size)
        cpus = Reach.unknown(step.sizes, CPU_LINKS)
        given = step.reach is not None and step.reach.links != CPU_LINKS
        hosts = HOSTS.get(self.groups.flat) if self.over_gloo and not given else None
        if hosts is None:
            # Links of a plan may lack the work of a process for each message.
            if single and find_fastest(cpus, nbytes, ratio, (0, 1), halves)[0] == 0:
                return 0, "exchange", 0
            return find_fastest(
                step.reach or cpus,
                nbytes,
                ratio,
                (1,),
                halves,
            )
        links, axes = CPU_LINKS, (*range(len(step.sizes)),)
        if hosts.large and not self.strict:
            # A small message takes the time of a start, which messages inside a host take too.
            small, large = TIMED_BYTES
            network = Link(0.0, (large - small) / max(hosts.large - hosts.small, 1e-6))
            node = Link(0.0, links.node.bandwidth)
            links = replace(links, node=node, network=network, launch=hosts.small)
        topology = Topology.uniform(
            step.group_size,
            node_size=hosts.near,
            links=links,
        )
        facts = find_groups(Layout(sizes=step.sizes), topology)
        parts = step.contract.has_parts(step.op, name) and step.group_size <= MOST_AT_ONCE
        blocks = facts.blocks(axes) if parts else ()
        sharded = tuple(i for i in axes if step.axes[i] in dict(step.scatter))
        reach = facts.find_reach(ReductionStrategy(axes, sharded, max((1, *blocks))))
        return find_fastest(reach, nbytes, ratio, (0,) * single + (1, *blocks), halves)

    @property
    def by_cost(self) -> tuple[Path, str]:
        """The path of ``fastest``, and why it is not the exchange of the plan."""
        inner, between, _ = self.fastest
        if inner > 1:
            return HIERARCHICAL, "; ranks of a host reduce first"
        if inner == 0:
            return (
                REFERENCE,
                "; one all-gather costs less than an exchange of this size",
            )
        if between == "halving":
            return (
                HALVING,
                "; halving is predicted to cost less than an exchange of this size",
            )
        return self.flat, ""

    @property
    def prefix(self) -> str:
        """The plan's reason, why blocks exchange instead of halving, and the switch."""
        found = self.step.why
        if self.step.inner > 1 and self.step.between == "halving" and (why := why_not_simulated()):
            found = f"{found}; {why}"
        if self.planned != EXCHANGE.name or self.wanted != "auto" or self.one_shot is None:
            return found
        return f"{found}; {self.switch}"

    @property
    def switch(self) -> str:
        """The switch, as it is set."""
        return f"{ONE_SHOT_VARIABLE}={int(bool(self.one_shot))}"


@dataclass(slots=True, eq=False)
class ChosenPath:
    """A path for tensors of one dtype, shape and device, and what their reductions by it share."""

    path: Path
    why: str
    step: Step  # as it runs: in blocks, where ranks know their hosts
    fallback: bool = False  # whether it is less than the requested one
    wanted: str = ""  # the requested path, in the words of an error
    over_gloo: bool = False  # headers travel with the data; never if ranks share memory
    deferred: bool = False  # headers are compared on the device
    pairs: bool = False  # real and imaginary parts are two elements
    header: RankHeader | None = None  # of this rank; packed at first use
    # By the names of the collectives that a call has issued.
    events: dict[tuple[str, ...], Event] = field(default_factory=dict)
    # The kernel's call, if a reduction is no more than that, and whether it was looked for.
    kernel: Callable[[Tensor, Tensor, int], None] | None = None
    was_sought: bool = False


class Row(NamedTuple):
    """If ``when`` holds, ``path`` runs, because of ``why``."""

    when: Callable[[PathRequest], object]
    path: Callable[[PathRequest], Path]
    why: Callable[[PathRequest], str]
    fallback: Callable[[PathRequest], bool] = lambda r: False


def faster_mode(request: PathRequest) -> Path:
    """The faster path through the memory that the ranks share."""
    peers, nbytes = request.groups.peers, request.nbytes
    assert peers is not None
    assert nbytes is not None
    return get_path(peers.faster_mode(nbytes))


TABLE = (
    # A dtype that the contract does not define is the backend's; so is what the plan leaves to it.
    Row(
        lambda r: r.no_contract,
        lambda r: NATIVE,
        lambda r: r.no_contract,
        lambda r: r.step.contract is not None,
    ),
    Row(lambda r: r.planned == NATIVE.name, lambda r: NATIVE, lambda r: r.step.why),
    Row(
        lambda r: not r.auto and not r.named.in_contract,
        lambda r: r.named,
        lambda r: f"path {r.named.name} was requested",
        lambda r: True,
    ),
    # A path that was named runs where it can; where it cannot, an exchange always can.
    Row(lambda r: not r.auto and not r.why_not, lambda r: r.named, lambda r: r.prefix),
    Row(
        lambda r: not r.auto,
        lambda r: r.flat,
        lambda r: f"{r.prefix}; {r.why_not}",
        lambda r: True,
    ),
    # Shared memory is faster than any message; which mode is, depends on the size.
    Row(
        lambda r: not r.no_memory and r.one_shot is False,
        lambda r: TWO_SHOT,
        lambda r: r.prefix,
    ),
    Row(
        lambda r: not r.no_memory and r.nbytes is None,
        lambda r: FASTER_MODE,
        lambda r: r.prefix,
    ),
    Row(lambda r: not r.no_memory, faster_mode, lambda r: r.prefix),
    # Without it, a small message costs what its collectives cost: one is less than two.
    Row(
        lambda r: r.over_gloo and r.nbytes is None and r.step.inner == 1,
        lambda r: BY_SIZE[r.strict],
        lambda r: f"{r.prefix}; {r.no_memory}",
    ),
    Row(
        lambda r: True,
        lambda r: r.by_cost[0],
        lambda r: f"{r.prefix}; {r.no_memory}{r.by_cost[1]}",
    ),
)
"""The rows, first to last."""


def choose(request: PathRequest) -> ChosenPath:
    """The path of a reduction, by ``TABLE``. Raises ContractTypeError for an average of integers,
    and PolicyError for an unknown path.
    """
    row = next(row for row in TABLE if row.when(request))
    wanted = request.wanted
    if wanted == "auto" and request.one_shot and request.planned == EXCHANGE.name:
        wanted = f"{ONE_SHOT.name} ({request.switch})"
    step, tensor, path = request.step, request.tensor, row.path(request)
    if path is HIERARCHICAL and step.inner == 1:
        inner, between, chunk = request.fastest
        step = replace(step, inner=inner, between=between, chunk=chunk)
    over_gloo = request.over_gloo and not path.shares_memory
    eager = not (request.over_gloo or request.traced or path.shares_memory)
    return ChosenPath(
        path,
        row.why(request) + "; copied to the host for gloo" * (over_gloo and not tensor.is_cpu),
        step,
        row.fallback(request),
        wanted,
        over_gloo=over_gloo,
        deferred=eager and is_deferred(tensor, request.groups),
        pairs=tensor.is_complex() and step.op in ("sum", "avg") and step.norm is None,
    )


def check_fallback(chosen: ChosenPath, request: PathRequest, strict: bool, call: str) -> None:
    """Raise FallbackRefusedError for a fallback that ``strict`` or the requested path excludes."""
    replaceable = request.wanted == "auto" or get_path(request.wanted).replaceable
    if not chosen.fallback or (replaceable and not strict):
        return
    if request.no_contract:
        raise FallbackRefusedError(
            f"{call}: {request.tensor.dtype} would run on the backend's own {request.step.op}, "
            "in its own order; convert the tensor, or pass strict=False"
        )
    if not chosen.path.in_contract:
        raise FallbackRefusedError(
            f"{call}: path {chosen.path.name} is outside the contract; pass another "
            "path, or strict=False"
        )
    raise FallbackRefusedError(
        f"{call}: path {chosen.wanted} was requested and "
        f"{chosen.path.reported_name} would run: {chosen.why}; pass another path"
        + ", or strict=False"
        * replaceable
    )


# The switch for one-shot reductions, under the name that other systems gave it.

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


def check_one_shot(switch: bool | None) -> None:
    """Raise PolicyError if the ``switch`` forbids path ``one_shot``."""
    if switch is False:
        raise PolicyError(
            f"path='one_shot' is forbidden by {ONE_SHOT_VARIABLE}=0; unset the variable, or pass "
            "path='auto'"
        )


def check_contract(contract: object) -> None:
    """Raise ContractError if it is not a contract."""
    if not isinstance(contract, Contract):
        raise ContractError(
            f"contract={contract!r} is not a contract; pass contract=meshplan.Contract()"
        )
