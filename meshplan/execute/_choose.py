"""Which path a reduction takes, from facts that all its ranks share.

No bit depends on it, but by ``native``, which is outside the contract. Ranks share the step, the
groups and the configuration; the shape and the dtype of the summand are compared in the first
message, whose room is the same on every path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from meshplan._dtypes import name_of
from meshplan.contract import Contract, check_dtype
from meshplan.errors import (
    ContractError,
    ContractTypeError,
    FallbackRefusedError,
)
from meshplan.execute._deferred import is_deferred
from meshplan.execute._gloo import inline_bytes
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
from meshplan.execute.paths._shared_memory import FASTER_MODE, ONE_SHOT
from meshplan.flatten import HOSTS
from meshplan.layout import Layout
from meshplan.planner import Between, Reach, Step, find_fastest, find_groups
from meshplan.planner._path_costs import ReductionStrategy
from meshplan.topology import Topology
from meshplan.topology._links import CPU_LINKS

PathChoice = str
"""The name of a path: one of ``PATHS``."""
BY_SIZE = ExchangePath("auto"), ExchangePath("auto, strict")
"""In graphs over gloo of unknown sizes: they choose when they run."""


@dataclass(frozen=True)
class PathRequest:
    step: Step
    groups: StepGroups
    tensor: Tensor
    wanted: str  # one of ``PATHS``
    traced: bool = False  # the call becomes part of a graph of torch
    captured: bool = False  # the call becomes part of a CUDA graph
    over_gloo: bool = False  # the tensor travels over gloo, where a graph holds one operator
    strict: bool = False  # the same choice in every run, whatever links were timed

    @property
    def nbytes(self) -> int | None:
        """Bytes of the summand; ``None`` while torch traces with an unknown size."""
        numel = self.tensor.numel()
        return numel * self.tensor.element_size() if isinstance(numel, int) else None


@dataclass(slots=True, eq=False)
class ChosenPath:
    """A path for tensors of one dtype, shape and device, and what their reductions by it share."""

    path: Path
    why: str
    step: Step  # as it runs: in blocks, where ranks know their hosts
    fallback: bool = False  # whether it is less than the requested one
    over_gloo: bool = False  # headers travel with the data; never if ranks share memory
    deferred: bool = False  # headers are compared on the device
    pairs: bool = False  # real and imaginary parts are two elements
    header: RankHeader | None = None  # of this rank; packed at first use
    # By the names of the collectives that a call has issued.
    events: dict[tuple[str, ...], Event] = field(default_factory=dict)
    # If a reduction is no more than the kernel's call: that, and its event.
    direct: tuple[Callable[[Tensor, Tensor, int], None], Event] | None = None


def choose(request: PathRequest) -> ChosenPath:
    """The path of a reduction. Raises ContractTypeError for an average of integers, and PolicyError
    for an unknown path.
    """
    step, groups, tensor, fallback = (
        request.step,
        request.groups,
        request.tensor,
        False,
    )
    path: Path
    why = step.why
    if step.inner > 1 and step.between == "halving" and (simulated := why_not_simulated()):
        why += f"; {simulated}"
    if no_contract := _why_outside(step, tensor):
        # A dtype that the contract does not define is the backend's.
        path, why, fallback = NATIVE, no_contract, step.contract is not None
    elif (step.path or NATIVE.name) == NATIVE.name:
        path, why = NATIVE, step.why
    elif step.path != EXCHANGE.name or request.wanted != "auto":
        path, why, fallback = _choose_named(request, why)
    elif no_memory := ONE_SHOT.why_not(step, groups, tensor):
        path, why, step = _choose_fastest(request, f"{why}; {no_memory}")
    # Shared memory is faster than any message; which mode is, depends on the size.
    elif request.nbytes is None:
        path = FASTER_MODE
    else:
        assert groups.peers is not None
        path = get_path(groups.peers.faster_mode(request.nbytes))
    over_gloo = request.over_gloo and not path.shares_memory
    eager = not (request.over_gloo or request.traced or path.shares_memory)
    return ChosenPath(
        path,
        why + "; copied to the host for gloo" * (over_gloo and not tensor.is_cpu),
        step,
        fallback,
        over_gloo=over_gloo,
        deferred=eager and is_deferred(tensor, groups),
        pairs=tensor.is_complex() and step.op in ("sum", "avg") and step.norm is None,
    )


def _choose_named(request: PathRequest, why: str) -> tuple[Path, str, bool]:
    """The path that the plan or the configuration names, where it can run; where it cannot, an
    exchange always can.
    """
    step, name = request.step, request.step.path or ""
    if name == EXCHANGE.name:
        name = request.wanted
    flat = HIERARCHICAL if step.inner > 1 else EXCHANGE
    path = flat if name == EXCHANGE.name else get_path(name)
    if not path.in_contract:
        return path, f"path {name} was requested", True
    why_not = ""
    if not request.over_gloo or path.shares_memory:
        if request.captured and not path.captured:
            why_not = f"path {path.name} cannot be captured in a CUDA graph"
        elif request.traced and not request.captured and not path.traced:
            why_not = f"path {path.name} cannot be traced"
    why_not = why_not or path.why_not(step, request.groups, request.tensor)
    return (flat, f"{why}; {why_not}", True) if why_not else (path, why, False)


def _choose_fastest(request: PathRequest, why: str) -> tuple[Path, str, Step]:
    """The path with the least predicted cost, without shared memory."""
    step = request.step
    if request.over_gloo and request.nbytes is None and step.inner == 1:
        return BY_SIZE[request.strict], why, step
    inner, between, chunk = _find_fastest(request)
    if inner > 1:
        step = replace(step, inner=inner, between=between, chunk=chunk)
        return HIERARCHICAL, f"{why}; ranks of a host reduce first", step
    less = "less than an exchange of this size"
    if between == "halving":
        return HALVING, f"{why}; halving is predicted to cost {less}", step
    if inner == 0:
        # A small message costs what its collectives cost: one is less than two.
        return REFERENCE, f"{why}; one all-gather costs {less}", step
    return HIERARCHICAL if step.inner > 1 else EXCHANGE, why, step


def _why_outside(step: Step, tensor: Tensor) -> str:
    """Why the summand's dtype is outside the contract; empty if it is not."""
    if step.op != "avg" and step.contract is None:
        return ""
    assert step.op is not None
    dtype = tensor.dtype
    if dtype.is_complex and step.op in ("sum", "avg") and step.norm is None:
        dtype = dtype.to_real()
    try:
        check_dtype(step.op, dtype, step.contract)
    except ContractTypeError as error:
        if step.op == "avg" and not tensor.dtype.is_floating_point:
            raise
        return str(error)
    return ""


def _find_fastest(request: PathRequest) -> tuple[int, Between, int]:
    """``find_fastest`` of the ways to reduce without shared memory. Except over gloo, graphs hold
    the exchange of the plan: ranks whose graphs know different sizes still issue the same
    collectives.
    """
    step, groups, nbytes = request.step, request.groups, request.nbytes
    traced = request.traced and not request.over_gloo
    if nbytes is None or step.inner > 1 or step.leaves or traced:
        return 1, "exchange", 0
    assert step.contract is not None
    assert step.op is not None
    # A graph passes the real and the imaginary parts of complex numbers.
    dtype = request.tensor.dtype.to_real() if request.tensor.is_complex() else request.tensor.dtype
    name = name_of(dtype)
    ratio = step.contract.partial(step.op, name).nbytes // dtype.itemsize
    halves = not HALVING.why_not(step, groups, request.tensor)
    # One message holds the summand, where a flat exchange is two collectives.
    flat = not step.scatter or groups.gather is not None
    single = flat and 0 < nbytes <= inline_bytes(step.group_size)
    cpus = Reach.unknown(step.sizes, CPU_LINKS)
    given = step.reach is not None and step.reach.links != CPU_LINKS
    hosts = HOSTS.get(groups.flat) if request.over_gloo and not given else None
    if hosts is None:
        # Links of a plan may lack the work of a process for each message.
        if single and find_fastest(cpus, nbytes, ratio, (0, 1), halves)[0] == 0:
            return 0, "exchange", 0
        return find_fastest(step.reach or cpus, nbytes, ratio, (1,), halves)
    axes = (*range(len(step.sizes)),)
    links = CPU_LINKS if hosts.timed and request.strict else hosts.links or CPU_LINKS
    topology = Topology.uniform(step.group_size, node_size=hosts.near, links=links)
    facts = find_groups(Layout(sizes=step.sizes), topology)
    blocks = facts.blocks(axes) if step.contract.has_parts(step.op, name) else ()
    sharded = tuple(i for i in axes if step.axes[i] in dict(step.scatter))
    reach = facts.find_reach(ReductionStrategy(axes, sharded, max((1, *blocks))))
    return find_fastest(reach, nbytes, ratio, (0,) * single + (1, *blocks), halves)


def check_fallback(chosen: ChosenPath, request: PathRequest, call: str) -> None:
    wanted = request.wanted
    replaceable = wanted == "auto" or get_path(wanted).replaceable
    if not chosen.fallback or (replaceable and not request.strict):
        return
    if _why_outside(request.step, request.tensor):
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
        f"{call}: path {wanted} was requested and "
        f"{chosen.path.reported_name} would run: {chosen.why}; pass another path"
        + ", or strict=False"
        * replaceable
    )


def check_contract(contract: object) -> None:
    if not isinstance(contract, Contract):
        raise ContractError(
            f"contract={contract!r} is not a contract; pass contract=meshplan.Contract()"
        )
