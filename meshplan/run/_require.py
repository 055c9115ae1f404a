"""``--require bitwise``: the one option of a run that may stop a job.

A rank stops by an error that its script sees, before a reduction outside the contract, and before
any reduction or optimizer step under a setting that varies bits. At an operator of torch's list,
torch itself raises an error, because its deterministic mode is on. The rank posts the reason to
rank 0, which passes it on: the other ranks stop at their next reduction or step. Each later
reduction or step of a stopped rank raises the error again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from meshplan.errors import BitwiseRequirementError
from meshplan.replicas._coverage import Coverage, Kind
from meshplan.run._ledger import Message
from meshplan.run._report import list_causes, read_settings
from meshplan.run._verdict import find_program_fix

if TYPE_CHECKING:
    from meshplan.run._exchange import Exchange

_CUDA, _MODE = "torch.backends.cuda.matmul", "torch.use_deterministic_algorithms(True)"
_CUDNN = "torch.backends.cudnn"
# Of the settings in the report, by name: values that keep bits, and the fix of another one. Those
# of GPUs apply once the process uses one: TF32 depends on the GPU, cuDNN's benchmark on times.
_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "deterministic_algorithms": ((True,), f"keep {_MODE}, without warn_only"),
}
_SETTINGS_OF_GPUS: dict[str, tuple[tuple[Any, ...], str]] = {
    "matmul_precision": (("none", "ieee"), f"set {_CUDA}.fp32_precision = 'ieee'"),
    "convolution_precision": (("none", "ieee"), f"set {_CUDNN}.conv.fp32_precision = 'ieee'"),
    "rnn_precision": (("none", "ieee"), f"set {_CUDNN}.rnn.fp32_precision = 'ieee'"),
    "cudnn_benchmark": ((False,), f"set {_CUDNN}.benchmark = False"),
}
_OPERATOR_FIX = f"use an operator that the documentation of {_MODE} does not list"


class Requirement(Coverage):
    """Counts reductions, and stops this process."""

    def __init__(self, backend: str | None) -> None:
        super().__init__(False, None, 1)
        self._backend, self._is_explained = backend, False
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
        other = find_program_fix([{"site": site}]).action
        ways = [] if self._backend else ["pass --backend meshplan"]
        self._stop(about, fix or ", or ".join(filter(None, [*ways, other])))

    def _check(self) -> None:
        """Stop if this process or another rank has stopped, or a setting varies bits."""
        if self.refusal is None and self.exchange is not None:
            self.refusal = self.exchange.ledger.refused
        if self.refusal is not None:
            raise _make_error(self.refusal)
        settings, table = read_settings(), _SETTINGS
        cuda: Any = torch.cuda
        if cuda.is_initialized():
            table = table | _SETTINGS_OF_GPUS
        for name, (values, fix) in table.items():
            if settings[name] not in values:
                self._stop(f"{name} is {settings[name]!r}, which varies bits", fix)

    def explain(self, error: BaseException | None) -> None:
        """Name code and fix below the traceback of an error that torch has raised at an operator of
        its list, or after this process had stopped, whatever a trainer has raised from it.
        """
        causes = list_causes(error)
        for text in (str(one) for one in causes if isinstance(one, RuntimeError)):
            if self.refusal is None and _MODE[:-1] in text:
                self._post(text.partition(", but")[0], _OPERATOR_FIX)
        if error is None or self.refusal is None or self._is_explained:
            return
        self._is_explained = True
        if not any(isinstance(one, BitwiseRequirementError) for one in causes):
            error.add_note(str(_make_error(self.refusal)))

    def _stop(self, what: str, fix: str) -> None:
        raise _make_error(self._post(what, fix))

    def _post(self, what: str, fix: str) -> Message:
        found = {"what": what, "fix": fix}
        if self.refusal is None and self.exchange is not None:
            self.exchange.post(lambda: {"refused": found})
        self.refusal = found
        return found


def _make_error(refusal: Message) -> BitwiseRequirementError:
    where = f"rank {refusal['rank']} stopped: " if "rank" in refusal else ""
    return BitwiseRequirementError(f"--require bitwise: {where}{refusal['what']}; {refusal['fix']}")
