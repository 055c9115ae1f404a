"""``--require bitwise``: the one option of a run that may stop a job.

A rank stops by an error that its script sees, before a reduction outside the contract, and at any
reduction or step under a setting that varies bits. Torch raises at operators of its list, in
its deterministic mode. The rank posts the reason to rank 0, which passes it on: the other ranks
stop at their next one. Each later reduction, step or forward of a stopped rank raises again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from meshplan.errors import BitwiseRequirementError
from meshplan.replicas._coverage import Coverage, Kind
from meshplan.run._ledger import Message
from meshplan.run._report import BACKENDS, list_causes, read_settings
from meshplan.run._verdict import find_program_fix

if TYPE_CHECKING:
    from meshplan.run._exchange import Exchange

_MODE = "torch.use_deterministic_algorithms(True)"
_OPERATOR_FIX = f"use an operator that the documentation of {_MODE} does not list"


class Requirement(Coverage):
    """Counts reductions, and stops this process."""

    def __init__(self, backend: str | None) -> None:
        super().__init__(False, None, 1)
        self._backend = backend
        self._has_stopped = self._is_explained = False
        self.exchange: Exchange | None = None
        self.refusal: Message | None = None  # what stopped this process, and its fix
        # Torch reports operators of its list in this mode alone.
        torch.use_deterministic_algorithms(True)
        hook = sys.excepthook

        def explain_and_show(kind: Any, error: BaseException, trace: Any) -> None:
            self.explain(error)
            hook(kind, error, trace)

        sys.excepthook = explain_and_show

    def _admit(self, kind: Kind, about: str, fix: str, site: str) -> None:
        """Stop at a reduction that is outside the contract, by request or not."""
        if not fix:
            ways = [find_program_fix([{"site": site}]).action]
            if self._backend is None:
                ways.insert(0, "pass --backend meshplan")
            fix = ", or ".join(filter(None, ways))
        self._stop(self._post(about, fix))

    def _check(self) -> None:
        """Stop if this process or another rank has stopped, or a setting varies bits."""
        elsewhere = None if self.exchange is None else self.exchange.ledger.refused
        if refusal := self.refusal or elsewhere:
            self._stop(refusal)
        cuda: Any = torch.cuda
        found, mode = read_settings(), "deterministic_algorithms"
        fixes = {} if found[mode] is True else {mode: f"keep {_MODE}, without warn_only"}
        for name, (path, values) in BACKENDS.items() if cuda.is_initialized() else ():
            if found[name] not in values:
                fixes[name] = f"set torch.backends.{path} = {values[0]!r}"
        for name, fix in fixes.items():
            self._stop(self._post(f"{name} is {found[name]!r}, which varies bits", fix))

    def _stop(self, refusal: Message) -> NoReturn:
        # After an error in backward, a forward of DDP would fail with an error of its own.
        if not self._has_stopped:
            register_module_forward_pre_hook(lambda *_: self._check())
        self.refusal, self._has_stopped = refusal, True
        raise _make_error(refusal)

    def _post(self, what: str, fix: str) -> Message:
        found = {"what": what, "fix": fix}
        if self.exchange is not None:
            self.exchange.post(lambda: {"refused": found})
        return found

    def explain(self, error: BaseException | None) -> None:
        """Name code and fix below the traceback of an error that torch has raised at an operator of
        its list, or that came after the first one, whatever a trainer has raised from it.
        """
        for one in list_causes(error):
            text = str(one)
            if self.refusal is None and isinstance(one, RuntimeError) and _MODE[:-1] in text:
                self.refusal = self._post(text.partition(", but")[0], _OPERATOR_FIX)
        if error is None or self.refusal is None or self._is_explained:
            return
        self._is_explained = True
        if not isinstance(error, BitwiseRequirementError):
            error.add_note(str(_make_error(self.refusal)))


def _make_error(refusal: Message) -> BitwiseRequirementError:
    where = f"rank {refusal['rank']} stopped: " if "rank" in refusal else ""
    return BitwiseRequirementError(f"--require bitwise: {where}{refusal['what']}; {refusal['fix']}")
