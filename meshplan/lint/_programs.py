"""The program that issues the reductions of a job, and the one table of fixes by program.

The linter, rule pages, reports and ``meshplan run`` take their texts from `FIXES`. A fix is offered
only if it reaches the reductions of that program: tests run it (`tests/test_lint_programs.py` names
them). The cost notes a program that was not run itself. Another mesh or launch is a fix for every
program, and is judged before it is offered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
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

Way = Literal["install()", "backend", "plugin", "other sizes"]
"""How the reductions of a program come under the contract.

* install(): meshplan replaces DTensor's redistribution.
* backend: the process-group backend, which all reductions of ``torch.distributed`` pass.
* plugin: of the program.
* other sizes: meshplan does not reach them; another mesh or launch may place groups identically.
"""


@dataclass(frozen=True, slots=True)
class ProgramFix:
    """A row of the table."""

    name: str
    way: Way = "other sizes"  # to reach its reductions
    action: str = ""  # what to do, imperative; empty if meshplan does not reach them
    cost: str = ""  # what it takes, or leaves out


_COST = "the layout stays; every reduction adds in one fixed order"
_BACKEND = "torch.distributed.init_process_group('meshplan')"


def _use_backend(name: str, *, tried: bool = False) -> ProgramFix:
    untried = "" if tried else f"; not yet run with {name}"
    action = f"call {_BACKEND} in the training script"
    return ProgramFix(name, "backend", action, f"one word, {_COST}{untried}")


FIXES: Mapping[str, ProgramFix] = {
    "dtensor": ProgramFix(
        "DTensor",
        "install()",
        "call meshplan.install() in the training script",
        f"two lines, {_COST}",
    ),
    "fsdp2": _use_backend("FSDP2", tried=True),
    "ddp": _use_backend("DDP", tried=True),
    "torchtitan": ProgramFix(
        "torchtitan",
        "backend",
        "set torch.distributed.Backend.default_device_backend_map[device_type] = 'meshplan' in "
        "the module that --module names",
        f"a module of four lines, as in examples/torchtitan.md; {_COST}",
    ),
    "lightning": ProgramFix(
        "Lightning",
        "backend",
        "use DDPStrategy or ModelParallelStrategy with process_group_backend='meshplan' in the "
        "training script",
        f"one line, {_COST}",
    ),
    "accelerate": ProgramFix(
        "Accelerate",
        "backend",
        f"call {_BACKEND} before Accelerator() in the training script",
        f"one line, {_COST}",
    ),
    "megatron": _use_backend("Megatron-LM"),
    "nemo": _use_backend("NeMo"),
    "verl": _use_backend("verl"),
    "prime-rl": _use_backend("prime-rl"),
    "axolotl": _use_backend("axolotl"),
    "deepspeed": _use_backend("DeepSpeed"),
    "colossalai": _use_backend("Colossal-AI"),
    "nanotron": _use_backend("nanotron"),
    "fsdp1": _use_backend("FullyShardedDataParallel"),
    "vllm": ProgramFix(
        "vLLM",
        "plugin",
        "set VLLM_PLUGINS=meshplan where vLLM starts",
        f"one variable, {_COST}; passes of torch.compile that fuse all-reduces bypass it",
    ),
    "sglang": ProgramFix(
        "SGLang",
        "plugin",
        "register SGLang's plugin of docs/howto/rl-parity.md, and start SGLang with "
        "--enable-deterministic-inference",
        f"a module of ten lines, {_COST}; fused all-reduces bypass it",
    ),
    "horovod": ProgramFix("Horovod"),
    "serving": ProgramFix("an inference engine"),
    "unknown": ProgramFix(
        "an unknown program",
        "backend",
        f"if torch.distributed issues these reductions: call {_BACKEND} in the training script",
        f"one word, {_COST}; not for vLLM, SGLang or Horovod, which bypass it",
    ),
}
"""By program; by framework (``dtensor``, ``fsdp2``, ``ddp``) where the program is torch."""

_MODULES: tuple[Program, ...] = (
    "megatron",
    "nemo",
    "vllm",
    "sglang",
    "deepspeed",
    "colossalai",
    "horovod",
)
_WORD = re.compile(
    r"(?<![a-z0-9_])(megatron|vllm|sglang|deepspeed|horovodrun)(?![a-z0-9])",
    re.I,
)


def is_reached(program: Program) -> bool:
    """Whether `meshplan.install` may run the reductions of a program: DTensor, or it is unknown."""
    return program in ("unknown", "torch", "torchtitan")


def find_fix(program: Program, framework: str = "dtensor") -> ProgramFix:
    """The row of a program, or of its framework if the program is torch."""
    return FIXES[framework if program == "torch" else program]


_CODE = re.compile(r"\S+ = \S+|\S*[(=]\S+|--\S+|\w+Strategy")


def format_fix_list() -> str:
    """The table in Markdown, for rule pages: programs with one action share a line."""
    names: dict[str, list[str]] = {}
    for fix in FIXES.values():
        untried = ", not yet run with these" if "not yet run" in fix.cost else ""
        action = _CODE.sub(r"`\g<0>`", fix.action or "only other sizes or another launch")
        action = re.sub(r"docs/\S+md", r"[\g<0>](../../../\g<0>)", action)
        names.setdefault(f"{action}{untried}", []).append(fix.name)
    return "\n".join(f"    * {', '.join(of)}: {action}" for action, of in names.items())


def find_program_of_modules(modules: Set[str], *, torch_reduces: bool) -> Program:
    """The program of Python that imports these top-level modules. It is unknown if torch reduces
    and another library is imported: either may reduce along a mesh.
    """
    others = [program for program in _MODULES if program in modules]
    if torch_reduces:
        return "unknown" if others else "torch"
    return others[0] if others else "unknown"


def find_program_of_text(text: str) -> Program:
    """The program that a script or a list of arguments starts, by its name."""
    found = _WORD.search(text)
    if found is None:
        return "unknown"
    word = found[1].lower()
    return next(one for one in _MODULES if word.startswith(one))
