"""The program that issues the reductions of a job, and the one table of fixes by program.

The linter, rule pages, reports and ``meshplan run`` take their texts from `FIXES`. A fix is offered
only if it reaches the reductions of that program: tests run it (`tests/test_lint_programs.py` names
them), and the cost has a remark if the program itself was not run. For all programs another mesh or
launch is a fix too, which is judged before it is offered.
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


def _use_backend(name: str) -> ProgramFix:
    cost = f"one line, {_COST}; not yet run with {name}"
    return ProgramFix(name, "backend", f"call {_BACKEND} in the training script", cost)


FIXES: Mapping[str, ProgramFix] = {
    "dtensor": ProgramFix(
        "PyTorch, DTensor",
        "install()",
        "call meshplan.install() in the training script",
        f"two lines, {_COST}",
    ),
    **{
        key: ProgramFix(
            f"PyTorch, {key.upper()}",
            "backend",
            f"call {_BACKEND} in the training script",
            f"one word, {_COST}",
        )
        for key in ("fsdp2", "ddp")
    },
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
    """Whether `meshplan.install` may run the reductions of a program: DTensor, or it is unknown."""
    return program in ("unknown", "torch", "torchtitan")


def find_fix(program: Program, framework: str = "dtensor") -> ProgramFix:
    """The row for a program, which is that of its framework if the program is torch."""
    return FIXES[framework if program == "torch" else program]


def format_fix_list() -> str:
    """The table in Markdown, for rule pages: programs with one action share a line."""
    names: dict[str, list[str]] = {}
    for fix in FIXES.values():
        untried = ", not yet run with these" if "not yet run" in fix.cost else ""
        action = fix.action or "only other sizes or another launch"
        names.setdefault(f"{action}{untried}", []).append(fix.name)
    return "\n".join(f"    * {', '.join(of)}: {action}" for action, of in names.items())


def find_program_of_modules(modules: frozenset[str], *, torch_reduces: bool) -> Program:
    """The program that Python with imports of these top-level modules belongs to. If torch reduces,
    by DTensor, FSDP2 or DDP, an import of another library leaves open which of the two reduces
    along a mesh.
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
