"""The observers of this process: its steps, reductions, meshes and settings.

Nothing here may change the job: an error is recorded as not observed and never raised, except that
of ``--require``. Of torch, ``init_process_group`` and the constructor of meshes are replaced by
functions that call them.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshplan._observing import OBSERVING
from meshplan._torch import default_store
from meshplan._uncompiled import never_compiled
from meshplan.replicas._coverage import coverage
from meshplan.replicas._tensors import collect_values
from meshplan.run import RunSettings
from meshplan.run._chain import CertificateFile
from meshplan.run._exchange import Exchange
from meshplan.run._hazards import Judged
from meshplan.run._holders import (
    ParameterTable,
    ReductionTable,
    remember_modules_and_meshes,
)
from meshplan.run._leaves import Leaves, find_wrong_sums
from meshplan.run._ledger import KINDS
from meshplan.run._probe import Probe
from meshplan.run._report import build, read_settings, write_file
from meshplan.run._require import Requirement
from meshplan.run._shares import Begun, Item, Shares
from meshplan.run._signals import is_of_handler
from meshplan.topology._locate import locate_rank

_FINISH_SECONDS = 10.0
# Launchers end all ranks of a job after one has failed.
_FAILED_SECONDS = 2.0
_NOTES = 50
# All optimizers step in frames of this code: a container's is around those of its parts.
_STEP_CODE = Optimizer.profile_hook_step(lambda optimizer: None).__code__
_STATE_INITIALISATION = os.path.join("distributed", "checkpoint", "state_dict.py")


class Observation:
    """The observation of this process, from the first process group on."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._pid = os.getpid()
        self.notes: list[str] = []
        self._parameters = ParameterTable()
        self._reductions = ReductionTable(self._parameters)
        self._shares = Shares(self._parameters, self._note)
        if settings.keep_leaves:
            self._shares.leaves = leaves = Leaves(settings.keep_leaves << 20)
            leaves.due = self._is_compared(1)
            self._reductions.skip = leaves.add
        certify = settings.certify
        self._certificate = CertificateFile(certify) if certify is not None else None
        self._offsets: dict[int, int] = {}  # by unit: steps before this process
        self._exchange: Exchange | None = None
        self._probe = Probe(self._note)
        self._backend, self.rank = "", 0
        # A unit is the number of an optimizer, whose parameters step together.
        self._by_optimizer: Any = weakref.WeakKeyDictionary()
        self._steps: list[int] = []  # by unit
        self._reduced: dict[int, dict[Any, int]] = {}  # elements before the step, by unit
        self._nested: Any = weakref.WeakSet()
        self._begun: Any = weakref.WeakKeyDictionary()  # before a step, by optimizer
        self._step_times: list[float] = []  # of the first and the last step
        self.requirement = Requirement(settings.backend) if settings.require else None
        self._coverage = self.requirement or coverage()
        self._lock = threading.RLock()
        self._starting = self._ended = self._is_saved = False
        self._saving = threading.Lock()
        self._report: dict[str, Any] | None = None
        self.judged = Judged()

    def start(self) -> None:
        with self._lock:
            # A signal handler may run this meanwhile.
            begun = self._starting or self._exchange is not None
            if begun or self._ended or not dist.is_initialized():
                return
            self._starting = True
            try:
                # A rank that fails below issues the probe's sums too.
                if self._coverage.open_step is None:
                    self._coverage.start().open_step = self._reductions
                self._start()
            finally:
                self._starting = False

    def _start(self) -> None:
        self._backend, self.rank = dist.get_backend(), dist.get_rank()
        place = locate_rank(os.environ).to_json()
        hello = {"location": place, "settings": read_settings()}
        self._shares.rank = self.rank
        exchange = Exchange(
            self.rank,
            dist.get_world_size(),
            default_store(),
            self._shares.answer,
            self._write,
            self._note,
        )
        if self.settings.keep_leaves:
            exchange.ledger.find_wrong_sums = find_wrong_sums
        exchange.post(lambda: {"hello": hello})
        self._exchange = exchange
        if self.requirement is not None:
            self.requirement.exchange = exchange
        exchange.start()

    def call(self, observe: Callable[[Observation], None]) -> None:
        """Call an observer, which never raises into the job, nor runs in a forked child of it. What
        a signal handler of the job raises meanwhile is the job's own.
        """
        if os.getpid() == self._pid and not self._ended:
            # What a captured graph replays calls no observer, and would write into old words.
            cuda: Any = torch.cuda
            if cuda.is_initialized() and cuda.is_current_stream_capturing():
                self._note("steps in a CUDA graph")
                return
            with self._noting():
                self.start()
                if self._exchange is not None:
                    observe(self)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_of_handler(error):
                raise
            self._note(f"{type(error).__name__}: {str(error)[:200]}")

    def before_step(self, optimizer: Optimizer, closure: object) -> None:
        """Look at gradients, which some optimizers change or free in a step."""
        # Gradients are also in the certificate.
        if self.settings.gradients and closure is None and _is_nested(sys._getframe()) is False:
            self._look(optimizer, ["gradient"], ahead=1)

    def after_step(self, optimizer: Optimizer, closure: object) -> None:
        """Count a step, and look at what it wrote."""
        assert self._exchange is not None
        nested = _is_nested(sys._getframe())
        if nested:
            self._nested.add(optimizer)
        if nested is not False:
            return
        unit = self._unit_of(optimizer)
        self._steps[unit] += 1
        if unit == 0:
            self._step_times[1:] = [time.monotonic()]
        if self._shares.leaves is not None:
            self._shares.leaves.due = any(self._is_compared(step + 1) for step in self._steps)
        # A closure computes them in the step.
        late = self.settings.gradients and closure is not None
        self._look(optimizer, ["gradient"] * late + ["parameter", "optimizer state", "buffer"])
        self._reduced[unit] = self._reductions.elements.copy()
        self._probe.collect(self._exchange.post)

    def _look(self, optimizer: Optimizer, kinds: Sequence[str], ahead: int = 0) -> None:
        """Begin words of tensors for comparisons and links, and post those of the step after it."""
        assert self._exchange is not None
        unit = self._unit_of(optimizer)
        step = self._steps[unit] + ahead
        whole = self._is_compared(step)
        if self._shares.leaves is not None:
            self._shares.leaves.end(unit, step, ended=not ahead)
        # A later default group may have other ranks.
        place = self.rank, self._exchange.world_size
        if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != place:
            self._note("steps over a later default group of other ranks")
            return
        begun = self._begun.pop(optimizer, None)
        if begun is None or ahead:  # else a step has raised
            begun = Begun([], [])
        certified = self.settings.certify is not None
        if not certified and not whole:
            return
        items = self._shares.pop_values() if certified and not ahead else []
        for kind in kinds:
            if certified or kind in KINDS:
                items += self._list_tensors(optimizer, kind)
        now, before = self._reductions.elements.copy(), self._reduced.get(unit, {})
        reduced = [(*at, n - before.get(at, 0), before.get(at, 0)) for at, n in now.items()]
        self._shares.begin(
            begun, unit, step, items, whole=whole, certified=certified, reduced=reduced
        )
        if ahead:
            self._begun[optimizer] = begun
            return
        number = step + self._find_offset(optimizer, unit) if certified else None
        make = self._shares.take(begun, unit, step, whole=whole, number=number)
        if make is not None:
            self._exchange.post(make)

    def _is_compared(self, step: int) -> bool:
        first, every = self.settings.first, self.settings.every
        # Most differences begin early, and a trial of 50 steps may never reach ``every``.
        return step <= first or step % every == 0 or (first > 0 and step.bit_count() == 1)

    def _unit_of(self, optimizer: Optimizer) -> int:
        with self._lock:
            unit: int = self._by_optimizer.setdefault(optimizer, len(self._steps))
            self._steps += [0] * (unit == len(self._steps))
        return unit

    def _find_offset(self, optimizer: Optimizer, unit: int) -> int:
        """Steps before this process: a resumed job has those of its optimizer's state."""
        if unit not in self._offsets:
            states = (self._state_of(optimizer, one) for one in _parameters_of(optimizer))
            taken = next((one["step"] for one in states if "step" in one), None)
            # A number on a device, or of a DTensor, is not read: that waits.
            if type(taken) is Tensor and taken.device.type == "cpu":
                taken = taken.item()
            start = self._steps[unit]
            self._offsets[unit] = int(taken) - start if isinstance(taken, int | float) else 0
        return self._offsets[unit]

    def _list_tensors(self, optimizer: Optimizer, kind: str) -> Iterator[Item]:
        """Those of one kind, in the order of the optimizer's parameters."""
        every, table = _parameters_of(optimizer), self._parameters
        if any(table.name_of(one) is None for one in every):
            table.refresh()
        if kind == "buffer":
            yield from (Item(kind, *one) for one in table.buffers_beside(every))
            return
        for number, parameter in enumerate(every):
            name = table.name_of(parameter) or f"parameter {number}"
            if kind == "parameter":
                yield Item(kind, name, parameter, parameter)
            elif kind == "optimizer state":
                state = self._state_of(optimizer, parameter)
                for below, value in collect_values(name, state):
                    # Numbers of steps are compared as such.
                    if value.dim() or not below.endswith(".step"):
                        yield Item(kind, below, parameter, value)
            elif parameter.grad is not None:
                yield Item(kind, name, parameter, parameter.grad)

    def _state_of(self, optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
        states = (one.state.get(parameter) for one in (optimizer, *self._nested))
        return next(filter(None, states), {})

    def _note(self, text: str) -> None:
        """Record what was not observed."""
        if text not in self.notes and len(self.notes) < _NOTES:
            self.notes.append(text)

    def _write(self) -> None:
        if self.settings.report is not None or self.settings.certify is not None:
            self.call(lambda _: self._save(self._describe("running", None)))

    def _save(self, report: dict[str, Any]) -> None:
        """Write what has a file; a failure does not cost the verdict."""
        # The thread may still write that the job runs when it has ended.
        with self._saving:
            if self._is_saved:
                return
            self._is_saved = report["state"] != "running"
            for what in ("certificate", "report"):
                try:
                    self._save_one(what, report)
                except OSError as fault:
                    # Later reports have this too.
                    self._note(f"the {what} could not be written: {fault}")
                    notes = dict.fromkeys(report["not_observed"] + self.notes)
                    report["not_observed"] = list(notes)

    def _save_one(self, what: str, report: dict[str, Any]) -> None:
        if what == "report" and self.settings.report is not None:
            text, is_last = json.dumps(report, indent=1), report["state"] != "running"
            write_file(self.settings.report, text, is_last=is_last)
        elif what == "certificate" and self._certificate is not None:
            assert self._exchange is not None
            with self._exchange.lock:
                records = self._exchange.ledger.chain.take_records()
            self._certificate.append(records, report)

    def _describe(self, state: str, error: BaseException | None) -> dict[str, Any]:
        assert self._exchange is not None
        times = self._step_times
        steps = self._steps[0] - 1 if self._steps else 0
        own = {
            "backend": self._backend,
            "rows": self._list_reductions(),
            "notes": list(self.notes),
            "uses": self._parameters.uses.copy(),
            "seconds_per_step": (times[-1] - times[0]) / steps if steps > 0 else None,
        }
        with self._exchange.lock:
            ledger = self._exchange.ledger
            report, self.judged = build(ledger, own, state, error)
            report["steps"]["every"] = self.settings.every
            if self.settings.certify is not None:
                chain = ledger.chain.describe()
                report["certificate"] = {"file": self.settings.certify} | chain
        return report

    def _list_reductions(self) -> list[dict[str, Any]]:
        with self._noting():
            return self._reductions.describe(self.rank)
        return []

    def finish(self, error: BaseException | None) -> dict[str, Any] | None:
        """End the observation of a job that has ended, by ``error`` or well. Returns the report on
        rank 0; ``None`` on other ranks, without a process group, and in forked children.
        """
        self.call(lambda _: self._finish(error))
        return self._report if os.getpid() == self._pid else None

    def _finish(self, error: BaseException | None) -> None:
        assert self._exchange is not None
        if self.requirement is not None:
            self.requirement.explain(error)
        if not self._steps:
            self._note("no optimizer step was seen (compiled steps are not)")
        self._probe.finish(self._exchange.post, _FAILED_SECONDS)
        # What one rank cannot describe does not cost the verdict.
        final = {"notes": self.notes, "rows": self._list_reductions()}
        taken = {str(unit): count for unit, count in enumerate(self._steps)}
        taken |= {name: self._steps[unit] for name, unit in self._shares.owners.items()}
        self._exchange.post(lambda: {"final": final, "taken": taken})
        self._exchange.finish(_FINISH_SECONDS if error is None else _FAILED_SECONDS)
        self._ended = True
        self._coverage.stop()
        if self.rank == 0:
            self._report = self._describe("ended" if error is None else "failed", error)
            self._save(self._report)

    def abandon(self) -> None:
        """End the thread before the interpreter, which a thread in C++ would abort."""
        if self._exchange is not None and os.getpid() == self._pid:
            self._exchange.stop()


_observation: Observation | None = None


def observe(settings: RunSettings) -> Observation:
    """Observe this process from now on; a second call returns the first observation.

    Call it before you register a handler of ``atexit`` that calls ``finish``: the observation ends
    its thread in a handler of its own, which then runs later.
    """
    global _observation
    if _observation is not None:
        return _observation
    one = _observation = Observation(settings)
    atexit.register(one.abandon)
    remember_modules_and_meshes()

    def hook(observer: Callable[[Observation, Optimizer, object], None]) -> Callable[..., None]:
        @never_compiled
        def observe_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                closure = args[1] if len(args) > 1 else kwargs.get("closure")
                one.call(lambda one: observer(one, optimizer, closure))
                if os.getpid() == one._pid and one._exchange is not None:
                    one._coverage._check()

        return observe_step

    if settings.probe:
        OBSERVING.before = one._probe.begin
    if (leaves := one._shares.leaves) is not None:
        OBSERVING.keep = never_compiled(lambda *new: one.call(lambda _: leaves.keep(*new)))
    if settings.gradients or settings.require:
        register_optimizer_step_pre_hook(hook(Observation.before_step))
    register_optimizer_step_post_hook(hook(Observation.after_step))
    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        init(*arguments, **options)
        one.call(lambda _: None)

    dist.init_process_group = c10d.init_process_group = init_process_group
    return one


def log_value(name: str, value: Tensor | float) -> None:
    """Add a value to the certificate of this process, if it has one."""
    if (one := _observation) is not None and one.settings.certify is not None:
        one.call(lambda one: one._shares.add_value(str(name), value))


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _is_nested(frame: Any) -> bool | None:
    """Whether a step is a part of another optimizer's; ``None``: it initialises a state."""
    steps = 0
    while frame is not None:
        if frame.f_code.co_filename.endswith(_STATE_INITIALISATION):
            return None
        steps += frame.f_code is _STEP_CODE
        frame = frame.f_back
    return steps > 1
