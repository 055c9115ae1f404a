"""The program that issues the reductions of a job, and the integrations that reach them.

A line of code is offered as a fix only if it is true for that program: `meshplan.install` where
DTensor reduces, else the process-group backend, which every reduction of ``torch.distributed``
passes. Tests cover the lines (`tests/test_lint_programs.py` names them), and the cost has a remark
if the program itself was not run. Programs that reduce in other ways get another mesh or launch,
which is checked before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Program = Literal[
    "unknown",
    "torch",
    "torchtitan",
    "fsdp1",
    "megatron",
    "vllm",
    "sglang",
    "serving",
    "deepspeed",
    "colossalai",
    "horovod",
    "nemo",
    "verl",
    "prime-rl",
    "accelerate",
    "axolotl",
    "lightning",
    "nanotron",
]
"""The program or library that issues the reductions of a job.

* torch: DTensor, FSDP2 or DDP of PyTorch, by ``framework``.
* fsdp1: ``FullyShardedDataParallel``.
* serving: an unnamed inference engine, identified by its options.
* unknown: the input does not specify it.
"""

PROGRAMS: Mapping[Program, str] = {
    "unknown": "an unknown program",
    "torch": "PyTorch",
    "torchtitan": "torchtitan",
    "fsdp1": "FullyShardedDataParallel",
    "megatron": "Megatron-LM",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "serving": "an inference engine",
    "deepspeed": "DeepSpeed",
    "colossalai": "Colossal-AI",
    "horovod": "Horovod",
    "nemo": "NeMo",
    "verl": "verl",
    "prime-rl": "prime-rl",
    "accelerate": "accelerate",
    "axolotl": "axolotl",
    "lightning": "Lightning",
    "nanotron": "nanotron",
}


@dataclass(frozen=True, slots=True)
class Integration:
    """Lines of code after which every reduction of a program adds in one fixed order.

    Attributes:
        lines: what to call.
        cost: what it takes, or leaves out.
    """

    lines: str
    cost: str


_COST = "the layout stays; every reduction adds in one fixed order"
_BACKEND = "torch.distributed.init_process_group('meshplan')"
# By program, or by framework where the program is torch.
INTEGRATIONS: Mapping[str, Integration] = {
    "unknown": Integration(
        _BACKEND,
        f"one word, {_COST}; not for vLLM, SGLang or Horovod, which bypass it",
    ),
    "dtensor": Integration(
        "meshplan.install()",
        f"two lines, {_COST}",
    ),
    "fsdp2": Integration(_BACKEND, f"one word, {_COST}"),
    "ddp": Integration(_BACKEND, f"one word, {_COST}"),
    "torchtitan": Integration(
        "meshplan.install() and meshplan.integrations.fsdp.apply(part)",
        "two lines and their imports, the layout stays; the norm over pipeline stages is not "
        "covered",
    ),
}

_LINES: Mapping[Program, str] = {
    "lightning": "DDPStrategy or ModelParallelStrategy with process_group_backend='meshplan'",
    "accelerate": f"{_BACKEND} before Accelerator()",
}
# Their groups are of torch.distributed, and tests run the backend under the first two only.
_ON_TORCH_GROUPS: tuple[Program, ...] = (
    *("lightning", "accelerate", "megatron", "nemo", "verl", "prime-rl", "axolotl"),
    *("deepspeed", "colossalai", "fsdp1", "nanotron"),
)

_MODULES: Mapping[str, Program] = {
    "megatron": "megatron",
    "nemo": "megatron",
    "vllm": "vllm",
    "sglang": "sglang",
    "deepspeed": "deepspeed",
    "colossalai": "colossalai",
    "horovod": "horovod",
}
_WORD = re.compile(r"(?<![a-z0-9_])(megatron|vllm|sglang|deepspeed|horovodrun)(?![a-z0-9])", re.I)


def is_reached(program: Program) -> bool:
    """Whether meshplan may run the reductions of a program: it does, or the program is unknown."""
    return program in ("unknown", "torch", "torchtitan")


def uses_torch_groups(program: Program) -> bool:
    """Whether the reductions of a program that `is_reached` excludes pass torch's groups."""
    return program in _ON_TORCH_GROUPS


def find_integration(program: Program, framework: str) -> Integration | None:
    """The lines for a program; for an unknown one, what holds if it reduces by torch.distributed.

    Args:
        program: that reduces.
        framework: ``dtensor``, ``fsdp2`` or ``ddp``, if the program is torch.
    """
    if uses_torch_groups(program):
        tried = "" if program in _LINES else f"; not yet run with {PROGRAMS[program]}"
        return Integration(_LINES.get(program, _BACKEND), f"one line, {_COST}{tried}")
    if not is_reached(program):
        return None
    return INTEGRATIONS[framework if program == "torch" else program]


def find_program_of_modules(modules: frozenset[str], *, torch_reduces: bool) -> Program:
    """The program that Python with these imports belongs to.

    Args:
        modules: first parts of the names of modules that are imported.
        torch_reduces: whether the file uses DTensor, FSDP2 or DDP. Then an import of another
            library leaves it open which of the two reduces along a mesh.
    """
    others = [program for module, program in _MODULES.items() if module in modules]
    if torch_reduces:
        return "unknown" if others else "torch"
    return others[0] if others else "unknown"


def find_program_of_text(text: str) -> Program:
    """The program that a script or a list of arguments starts, by its name."""
    found = _WORD.search(text)
    if found is None:
        return "unknown"
    return _MODULES[found[1].lower().removesuffix("run")]
