"""The reductions of a job by call site: under the contract, native by request, or outside.

Reductions under the contract are counted where they are recorded; all others at the operators of
torch that every reduction of a process group passes. The caller is looked up on its own thread.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan import _observing
from meshplan._dtypes import name_of
from meshplan._observing import OBSERVING, Source
from meshplan._torch.process_group import unwatch_groups, watch_groups
from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan.errors import FallbackRefusedError, InstallError, PolicyError
from meshplan.execute._provenance import format_bytes

# Who calls a reduction: the first frame outside torch, meshplan and Python's own library.

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MESHPLAN = str(Path(__file__).parents[1]) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Decorators of torch's functions.
_WRAPPERS = ("typing_extensions.py",)

# By the parts of torch that a reduction comes through.
_PARTS = {
    "autograd/graph.py": "backward",
    "distributed/fsdp/_fully_shard/": "FSDP2",
    "distributed/fsdp/": "FSDP1",
    "distributed/tensor/debug/": "",
    "distributed/tensor/": "DTensor",
    "distributed/optim/": "optimizer",
    "distributed/algorithms/ddp_comm_hooks/": "DDP hook",
    "nn/utils/clip_grad.py": "clip_grad_norm_",
    "_inductor/": "compiled",
    "_functorch/": "compiled",
}
# Parts that reduce without a redistribution of a DTensor, and a package that does.
_CPP = "C++, such as DDP's reducer"
_LIBRARIES = ("FSDP2", "FSDP1", "DDP hook", _CPP)
_SPMD_TYPES = os.sep + "spmd_types" + os.sep


class CallSite(NamedTuple):
    """``text``: file, line, function and the parts of torch in between, outermost first.

    ``falls_through``: whether the policy lets the reduction fall through to torch.
    ``library``: the one that reduces where ``install`` has no part in it; empty for other callers.
    """

    text: str
    falls_through: bool
    library: str


def find_call_site() -> CallSite:
    """The caller of this thread's reduction. Threads of C++ have no frame outside of torch."""
    frame: FrameType | None = sys._getframe(1)
    parts: list[str] = []
    inner: str | None = None
    left = False
    while frame is not None:
        part = _part_of(frame.f_code.co_filename)
        if part is None:
            break
        # DDP's reducer calls an operator from C++, which the engine of autograd has called.
        if inner is None and part != _OWN:
            inner = part
            if part == "backward":
                parts.append(_CPP)
        # The seam notes it for an observer.
        if part == "DTensor" and not left and OBSERVING.observer is not None:
            left = OBSERVING.falls_through is not None and OBSERVING.falls_through(frame)
        if part and part != _OWN and part not in parts:
            parts.append(part)
        frame = frame.f_back
    through = f" ({', '.join(reversed(parts))})" if parts else ""
    library = ""
    if "DTensor" not in parts:
        library = next((one for one in _LIBRARIES if one in parts), "")
    if frame is None:
        if inner is None:
            # Autograd's threads for devices have no frame at all, and no name that is theirs.
            return CallSite(f"a thread without Python ({_CPP})", left, _CPP)
        return CallSite(f"thread {threading.current_thread().name}{through}", left, library)
    code = frame.f_code
    if _SPMD_TYPES in code.co_filename:
        library = "spmd_types"
    place = _format_place(code.co_filename, frame.f_lineno, code.co_name)
    return CallSite(f"{place}{through}", left, library)


@functools.lru_cache(maxsize=4096)
def _format_place(filename: str, line: int, name: str) -> str:
    _, inside, path = filename.rpartition("-packages/")
    if not inside:
        path = "/".join(Path(filename).parts[-2:])
    name = _DIVIDED.sub(r"\1", name)
    return f"{path}:{line} {name}"


_OWN = "meshplan"
# The name of a function that torch.compile has divided.
_DIVIDED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


@functools.lru_cache(maxsize=4096)
def _part_of(filename: str) -> str | None:
    """The part of torch or of another library; ``None`` for callers."""
    if filename.startswith(_MESHPLAN):
        return _OWN
    if filename.startswith(_TORCH):
        rest = filename.removeprefix(_TORCH)
        return next((part for place, part in _PARTS.items() if rest.startswith(place)), "")
    # Code that torch generates has no file, or one in the cache of its compiler.
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torchinductor_"
    if "<eval_with_key>" in filename or generated in filename:
        return "compiled"
    if os.path.basename(filename) in _WRAPPERS or filename.startswith("<frozen"):
        return ""
    standard = filename.startswith(_STANDARD) and not any(one in filename for one in _INSTALLED)
    return "" if standard else None


MAX_ROWS = 1024
"""Rows of a step; further ones are dropped from its table, and counted in its totals."""

Kind = Literal["outside", "native", "any order", "contract"]
"""``outside``: in the order of another backend. ``native``: the same, as requested by policy or
path. ``any order``: no order of additions can change the result. ``contract``: under the contract.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)

_members: Any = dist.ReduceOp.RedOpType.__members__
_OPS: dict[int, str] = {int(kind): name for name, kind in _members.items()}
_ANY_ORDER = ("MAX", "MIN", "BAND", "BOR", "BXOR")


class CoverageRow(NamedTuple):
    kind: Kind
    reduction: str
    dtype: str
    ranks: int
    site: str


@dataclass(slots=True)
class _Tally:
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, count: int, nbytes: int, seconds: float) -> None:
        self.count += count
        self.bytes += nbytes
        self.seconds += seconds


class CoverageStep:
    """The reductions of one step. ``str(step)`` is one line.

    Attributes:
        number: of the step, from 1 on.
        dropped: reductions that are in no row, because there were ``MAX_ROWS`` before.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._lock = threading.RLock()
        self._rows: dict[CoverageRow, _Tally] = {}
        self._totals = {kind: _Tally() for kind in KINDS}
        self.dropped = 0

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """By kind, reduction and call site: JSON-ready dicts with ``count``, bytes and seconds."""
        with self._lock:
            # The text of all steps reads the fields of both in this order.
            return tuple(row._asdict() | asdict(tally) for row, tally in self._rows.items())

    def to_scalars(self) -> dict[str, float]:
        """Numbers for TensorBoard or W&B, such as ``meshplan/outside/count``."""
        with self._lock:
            return {
                f"meshplan/{kind.replace(' ', '_')}/{name}": value
                for kind, tally in self._totals.items()
                for name, value in asdict(tally).items()
            }

    def add(self, row: CoverageRow, nbytes: int, seconds: float, source: Source | None) -> None:
        """Count a reduction in ``row``: ``nbytes`` of this rank's summand, ``seconds`` of the host.
        ``source`` has more about it, for those who observe a job.
        """
        with self._lock:
            self._totals[row.kind].add(1, nbytes, seconds)
            tally = self._rows.get(row)
            if tally is None:
                if len(self._rows) >= MAX_ROWS:
                    self.dropped += 1
                    return
                tally = self._rows[row] = _Tally()
            tally.add(1, nbytes, seconds)

    def __str__(self) -> str:
        counts = ", ".join(f"{tally.count} {kind}" for kind, tally in self._totals.items())
        size = format_bytes(sum(tally.bytes for tally in self._totals.values()))
        seconds = sum(tally.seconds for tally in self._totals.values())
        return f"[meshplan] step {self.number}: {counts} ({size}, {seconds:.3f} s)"


class Coverage:
    """The reductions of this process from ``start`` to ``stop``; ``with`` calls both.

    Args:
        strict, on_step, keep: of ``coverage``.

    Attributes:
        strict: as above.
        open_step: the step that has not ended; ``None`` before ``start`` and after ``stop``.
    """

    def __init__(
        self,
        strict: bool,
        on_step: Callable[[CoverageStep], object] | None,
        keep: int,
    ) -> None:
        self.strict = strict
        self._on_step = on_step
        self._ended: deque[CoverageStep] = deque(maxlen=keep)
        self.open_step: CoverageStep | None = None

    def _check(self) -> None:
        """Called for each reduction of any kind; an error ends it."""

    def _admit(self, kind: Kind, about: str, fix: str, site: str) -> None:
        """Called before a reduction outside the contract, which an error ends."""
        if self.strict and kind == "outside":
            raise FallbackRefusedError(
                f"{about}; {fix or _FIX}, or pass strict=False to meshplan.coverage"
            )

    @property
    def steps(self) -> tuple[CoverageStep, ...]:
        """The last ``keep`` steps that have ended, oldest first."""
        return tuple(self._ended)

    def end_step(self) -> CoverageStep:
        """End the step: later reductions belong to the next one. Calls ``on_step``.

        Raises:
            InstallError: nothing is counted: before ``start``, or after ``stop``.
        """
        with _LOCK:
            step = self.open_step
            if step is None:
                raise InstallError(
                    "end_step was called while nothing is counted; call it after each step, "
                    "between start and stop of meshplan.coverage(), or in its block"
                )
            self.open_step = CoverageStep(step.number + 1)
            self._ended.append(step)
        if self._on_step is not None:
            self._on_step(step)
        return step

    @never_compiled
    def start(self) -> Coverage:
        """Begin to count.

        Returns:
            This object, so that ``counted = meshplan.coverage().start()`` is one line.

        Raises:
            InstallError: it has been started before, or torch compiles.
        """
        global _active
        refuse_in_graph("meshplan.coverage")
        with _LOCK:
            if self.open_step is not None or self._ended:
                raise InstallError(
                    "this coverage was started before; start a new one: meshplan.coverage().start()"
                )
            self.open_step = CoverageStep(1)
            _active += (self,)
            _follow()
        return self

    @never_compiled
    def stop(self) -> None:
        """Count no more, and end the step that is open, if anything was reduced in it."""
        global _active
        with _LOCK:
            step, self.open_step = self.open_step, None
            if step is None:
                return
            _active = tuple(one for one in _active if one is not self)
            _follow()
            if step.rows or not self._ended:
                self._ended.append(step)

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __str__(self) -> str:
        rows: dict[CoverageRow, _Tally] = {}
        for step in self.steps:
            for *key, count, nbytes, seconds in map(dict.values, step.rows):
                rows.setdefault(CoverageRow(*key), _Tally()).add(count, nbytes, seconds)
        lines = [str(step) for step in self.steps]
        head = ("kind", "count", "bytes", "host s", "call site: reduction (dtype, ranks)")
        table = [head] if rows else []
        for row, tally in sorted(rows.items(), key=lambda one: (KINDS.index(one[0].kind), one[0])):
            what = f"{row.site}: {row.reduction} ({row.dtype}, {row.ranks} ranks)"
            size, seconds = format_bytes(tally.bytes), f"{tally.seconds:.3f}"
            table.append((row.kind, str(tally.count), size, seconds, what))
        lines += ["{:<9}  {:>7}  {:>10}  {:>8}  {}".format(*cells) for cells in table]
        dropped = sum(step.dropped for step in self.steps)
        if dropped:
            lines.append(f"({dropped} reductions of further call sites are in the totals only)")
        return "\n".join(lines)


_LOCK = threading.Lock()
# Replaced as a whole: threads that reduce read it without the lock.
_active: tuple[Coverage, ...] = ()
_report: Callable[[str, str], object] | None = None
_following = False


def report_libraries(report: Callable[[str, str], object] | None) -> None:
    """Call ``report`` with the name of a library and the reduction in words, before each one that
    FSDP, DDP or spmd_types makes outside the contract; ``None``: no more.
    """
    global _report
    with _LOCK:
        _report = report
        _follow()


def _follow() -> None:
    """Follow reductions while someone counts or reports; the lock is held."""
    global _following
    OBSERVING.observer = _Caller if _active else None
    before, _following = _following, bool(_active) or _report is not None
    if _following and not before:
        watch_groups(_watch)
    elif before and not _following:
        unwatch_groups()


@never_compiled
def coverage(
    *,
    strict: bool = False,
    on_step: Callable[[CoverageStep], object] | None = None,
    keep: int = 1,
) -> Coverage:
    """Count the reductions of this process on all threads, while its block runs.

    Without a block, such as in callbacks of a trainer, call ``start`` and ``stop`` of the result.

    A reduction belongs to the step in which it was called. Wait for asynchronous ones before the
    step ends. Enter the first block of a process where no other thread reduces. Outside of blocks
    nothing is counted; after the first one, a reduction of C++ takes a call of Python longer.

    Args:
        strict: raise an error before a floating-point or complex reduction that is outside the
            contract and was not requested so. Pass the same on every rank.
        on_step: called with each step that ``end_step`` ends, e.g. to log ``step.to_scalars()``.
        keep: how many of the last steps to keep.

    Raises:
        PolicyError: ``keep`` is not positive.
        InstallError: called where torch compiles.
        FallbackRefusedError: ``strict``, from the reduction; it names the call site.
    """
    refuse_in_graph("meshplan.coverage")
    if keep < 1:
        raise PolicyError(f"keep={keep!r} steps; pass 1 or more")
    return Coverage(strict, on_step, keep)


class _Caller:
    """The caller of a reduction on this thread, and the steps."""

    def __init__(self) -> None:
        for one in _active:
            one._check()
        self.site = find_call_site()
        self.steps = [step for one in _active if (step := one.open_step) is not None]

    def count(
        self,
        what: str,
        dtype: str,
        ranks: int,
        nbytes: int,
        seconds: float,
        kind: Kind = "contract",
        source: Source | None = None,
    ) -> None:
        row = CoverageRow(kind, what, dtype, ranks, self.site.text)
        for step in self.steps:
            step.add(row, nbytes, seconds, source)


@never_compiled
def _watch(
    group: dist.ProcessGroup,
    name: str,
    op: Any,
    given: Any,
    reduction: Callable[[], Any],
) -> Any:
    """Run a reduction over a group of another backend, and count it."""
    extent, report = _observing.current_extent(), _report
    if extent == "counted" or group.size() == 1:
        return reduction()
    tensors = list(_flatten(given))
    if not tensors:
        return reduction()
    dtype, op = tensors[0].dtype, _op_name(op)
    any_order = op in _ANY_ORDER or not (dtype.is_floating_point or dtype.is_complex)
    is_counted = bool(_active) or OBSERVING.before is not None
    # Else it is at most reported, if a library makes it.
    if not is_counted and (report is None or any_order or not find_call_site().library):
        return reduction()
    if OBSERVING.before is not None and not any_order:
        OBSERVING.before(group, tensors[0].device)
    caller = _observing.find_origin()
    if not isinstance(caller, _Caller):
        # No coverage counts, or the block has just ended.
        if report is None or any_order:
            return reduction()
        caller = _Caller()
    site = caller.site
    native = extent == "native" or site.falls_through
    kind: Kind = "any order" if any_order else "native" if native else "outside"
    what = f"{_short(name)} {op.lower()} over {group.name()}"
    if not any_order:
        about = (
            f"{site.text}: {what}, {group.size()} ranks, of {name_of(dtype)} is outside the "
            "contract, in the backend's own order"
        )
        fix = _FIXES.get("native" if native else extent, "")
        if kind == "outside" and report is not None and site.library and extent != "fallback":
            report(site.library, f"{about}; {_FIX}")
        for one in _active:
            one._admit(kind, about, fix, site.text)
    if not caller.steps:
        return reduction()
    started = time.perf_counter()
    result = _observing.within("counted", reduction)
    seconds = time.perf_counter() - started
    nbytes = sum(one.nbytes for one in tensors if one.layout is torch.strided)
    caller.count(
        what,
        name_of(dtype),
        group.size(),
        nbytes,
        seconds,
        kind,
        Source(group, tensors),
    )
    return result


_FIX = 'create the group by init_process_group("meshplan") or new_group(backend="meshplan")'
_FIXES = {
    "fallback": "convert the tensor to a dtype and layout of the contract",
    "native": "remove the policy or path that requests this order",
}


def _flatten(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    else:
        for one in given:
            yield from _flatten(one)


def _op_name(op: Any) -> str:
    # An operator gets an object of C++, a method a ``ReduceOp`` or one of its kinds.
    kind = getattr(op, "op", op)
    return _OPS[kind() if isinstance(op, torch.ScriptObject) else int(kind)]


def _short(name: str) -> str:
    words = (
        ("allreduce", "all_reduce"),
        ("scatter", "reduce_scatter"),
        ("reduce", "reduce"),
    )
    return next((found for part, found in words if part in name), name)
