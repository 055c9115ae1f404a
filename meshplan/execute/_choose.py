"""Which path a reduction takes: a table, from facts that all its ranks share.

No bit depends on it, but by ``native``, which is outside the contract. The first row whose
condition holds decides. Ranks share the step, the groups and the configuration; the shape and the
dtype of the summand are compared in the first message, whose room is the same on every path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from meshplan.contract import Contract, check_dtype
from meshplan.definition import partial_dtype
from meshplan.errors import (
    ContractError,
    ContractTypeError,
    FallbackRefusedError,
    PolicyError,
)
from meshplan.execute._deferred import is_deferred
from meshplan.execute._gloo import inline_bytes
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import RankHeader
from meshplan.execute._provenance import Event
from meshplan.execute._wire import Wire
from meshplan.execute.paths import Outcome, Path, get_path
from meshplan.execute.paths._exchange import PATH as EXCHANGE
from meshplan.execute.paths._halving import PATH as HALVING
from meshplan.execute.paths._halving import why_not_simulated
from meshplan.execute.paths._hierarchical import PATH as HIERARCHICAL
from meshplan.execute.paths._native import PATH as NATIVE
from meshplan.execute.paths._reference import PATH as REFERENCE
from meshplan.execute.paths._shared_memory import FASTER_MODE, ONE_SHOT, TWO_SHOT
from meshplan.planner import Reach, Step, find_halving_sizes, one_message_bytes
from meshplan.topology._links import CPU_LINKS

PathChoice = str
"""The name of a path: one of ``PATHS``."""


class SizeDependentPath(Path):
    """Chooses by size when a traced graph runs over gloo, whose sizes are unknown before."""

    name = "auto"

    def now(self, step: Step, groups: StepGroups, tensor: Tensor) -> Path:
        """The path for the size of ``tensor``: the one that ``choose`` returns without a graph."""
        if is_small(step, groups, tensor.nbytes):
            return REFERENCE
        return HALVING if is_halved(step, groups, tensor) else EXCHANGE

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        return self.now(step, groups, tensor).all_reduce(tensor, step, groups, wire)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        return self.now(step, groups, tensor).reduce_scatter(tensor, step, groups, wire)


BY_SIZE = SizeDependentPath()


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

    @property
    def small(self) -> bool:
        """Whether one all-gather is cheaper than the exchange of the plan. Except over gloo, graphs
        hold the exchange itself: ranks whose graphs know different sizes still issue the same
        collectives.
        """
        if self.traced and not self.over_gloo:
            return False
        return self.nbytes is not None and is_small(self.step, self.groups, self.nbytes)

    @property
    def halved(self) -> bool:
        """Whether halving is cheaper than the exchange of the plan; not in the same graphs."""
        if self.traced and not self.over_gloo:
            return False
        return self.nbytes is not None and is_halved(self.step, self.groups, self.tensor)

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


def may_be_small(step: Step, groups: StepGroups) -> bool:
    """Whether a flat exchange of ``step`` is two collectives, which one all-gather could save."""
    return step.inner == 1 and (not step.scatter or groups.gather is not None)


def is_small(step: Step, groups: StepGroups, nbytes: int) -> bool:
    """Whether one all-gather of ``nbytes`` is cheaper than the exchange."""
    return may_be_small(step, groups) and 0 < nbytes <= small_bytes(step)


def small_bytes(step: Step) -> int:
    """Up to how many bytes one all-gather costs less than other paths. The planner's model decides,
    with each rank on a host of its own. The bound is at most the room behind a header in the first
    message over gloo: beyond that, there are two collectives again.
    """
    return min(one_message_bytes(step.sizes, CPU_LINKS), inline_bytes(step.group_size))


def is_halved(step: Step, groups: StepGroups, tensor: Tensor) -> bool:
    """Whether halving is cheaper than a flat exchange, and possible."""
    if step.inner > 1:
        return False
    least, most = halving_sizes(step, tensor)
    return least < tensor.nbytes <= most and not HALVING.why_not(step, groups, tensor)


def halving_sizes(step: Step, tensor: Tensor) -> tuple[int, int]:
    """Above and up to how many bytes halving costs less than a flat exchange, by the planner."""
    assert step.op is not None
    assert step.contract is not None
    sizes = step.halving
    if sizes is None:
        sizes = find_halving_sizes(Reach.unknown(step.sizes, CPU_LINKS))
    # A graph brings the real and the imaginary parts of complex numbers.
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    wide = partial_dtype(step.op, dtype, step.contract).itemsize > dtype.itemsize
    return sizes[wide]


def _explain_halving(request: PathRequest) -> str:
    least, most = halving_sizes(request.step, request.tensor)
    reach = f" above {least} bytes" * (least > 0) + f" up to {most} bytes" * (most < sys.maxsize)
    return f"halving is predicted to cost less than an exchange{reach}"


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
        lambda r: BY_SIZE,
        lambda r: f"{r.prefix}; {r.no_memory}",
    ),
    Row(
        lambda r: r.small,
        lambda r: REFERENCE,
        lambda r: (
            f"{r.prefix}; {r.no_memory}; one all-gather costs less than an exchange up to "
            f"{small_bytes(r.step)} bytes"
        ),
    ),
    Row(
        lambda r: r.halved,
        lambda r: HALVING,
        lambda r: f"{r.prefix}; {r.no_memory}; {_explain_halving(r)}",
    ),
    Row(lambda r: True, lambda r: r.flat, lambda r: f"{r.prefix}; {r.no_memory}"),
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
    backend = not path.shares_memory
    eager = backend and not request.over_gloo and not request.traced
    return ChosenPath(
        path,
        row.why(request),
        row.fallback(request),
        wanted,
        over_gloo=request.over_gloo and backend,
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
    """Raise ContractError if it is no contract."""
    if not isinstance(contract, Contract):
        raise ContractError(
            f"contract={contract!r} is not a contract; pass contract=meshplan.Contract()"
        )
