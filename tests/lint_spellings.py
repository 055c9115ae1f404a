"""Random jobs, and Python programs that spell each of them in ten ways."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshplan.lint._roles import Framework, Role

IMPORTS = """\
import functools
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

"""
ODD = ("alpha", "q", "x7", "ring0", "left", "plane", "k", "grp_b", "west", "u")
USUAL: Mapping[Role, str] = {
    "apart": "pp",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "model": "tp",
}


@dataclass(frozen=True)
class Drawn:
    """A job: the sizes and the roles of its axes, outermost first."""

    sizes: tuple[int, ...]
    roles: tuple[Role, ...]
    framework: Framework
    node: int


def draw(chance: random.Random) -> Drawn:
    """A job with FSDP2 or DDP, and with pipeline stages or tensor parallelism or neither."""
    data: tuple[Role, ...] = chance.choice(
        [("replicate", "shard"), ("replicate", "shard"), ("shard",), ("replicate",)]
    )
    roles: tuple[Role, ...] = (
        *(("apart",) if chance.random() < 0.3 else ()),
        *data,
        *(("model",) if chance.random() < 0.5 else ()),
    )
    sizes = tuple(chance.choice((2, 2, 3, 4, 5, 6, 8)) for _ in roles)
    framework: Framework = "fsdp2" if "shard" in data else "ddp"
    return Drawn(sizes, roles, framework, chance.choice((4, 6, 8)))


def name_axes(job: Drawn, chance: random.Random) -> list[str]:
    """Names that say nothing."""
    return chance.sample(ODD, len(job.sizes))


def quote(names: Sequence[str]) -> str:
    """The tuple in Python."""
    return "(" + "".join(f'"{name}", ' for name in names) + ")"


def use(job: Drawn, part: Callable[[Role], str], group: Callable[[Role], str]) -> list[str]:
    """The calls of ``job`` that use the axes. ``part`` and ``group`` are the expressions of the
    mesh and of the process group of a role; the data axes are one mesh.
    """
    lines = []
    if "apart" in job.roles:
        lines.append(f"stage = PipelineStage(model, 0, 2, device, group={group('apart')})")
    if "model" in job.roles:
        lines.append(f"parallelize_module(model, {part('model')}, plan)")
    if job.framework == "fsdp2":
        lines += ["for layer in model.layers:", f"    fully_shard(layer, mesh={part('shard')})"]
        lines.append(f"fully_shard(model, mesh={part('shard')})")
    else:
        lines.append(f"model = DDP(model, process_group={group('replicate')})")
    return lines


def slice_of(job: Drawn, names: Sequence[str], role: Role, mesh: str = "mesh") -> str:
    """``mesh["a", "b"]`` for a role; the whole mesh if it has no other axes."""
    data = ("replicate", "shard") if job.framework == "fsdp2" else ("replicate",)
    wanted = data if role in data else (role,)
    found = [name for name, one in zip(names, job.roles, strict=True) if one in wanted]
    inside = ", ".join(f'"{name}"' for name in found)
    return f"{mesh}[{inside}]"


def spell_calls(
    job: Drawn, names: Sequence[str], mesh: str = "mesh", keyword: bool = False
) -> list[str]:
    """The uses with a slice in each call."""

    def group(role: Role) -> str:
        name = names[job.roles.index(role)]
        if keyword:
            return f'{mesh}.get_group(mesh_dim="{name}")'
        return f'{mesh}["{name}"].get_group()'

    return use(job, lambda role: slice_of(job, names, role, mesh), group)


def _usual_names(job: Drawn, chance: random.Random) -> list[str]:
    names = [USUAL[role] for role in job.roles]
    return [
        f"mesh = init_device_mesh('cuda', {job.sizes}, mesh_dim_names={quote(names)})",
        *spell_calls(job, names),
    ]


def _odd_names(job: Drawn, chance: random.Random) -> list[str]:
    names = name_axes(job, chance)
    return [
        f"mesh = init_device_mesh('cuda', {list(job.sizes)}, mesh_dim_names={list(names)})",
        *spell_calls(job, names, keyword=True),
    ]


def _no_names(job: Drawn, chance: random.Random) -> list[str]:
    if set(job.roles) <= {"replicate", "shard"}:
        return [
            f"mesh = init_device_mesh('cuda', {job.sizes})",
            *use(job, lambda role: "mesh", lambda role: f"mesh.get_group({job.roles.index(role)})"),
        ]
    # A mesh without names has no slices, so other jobs name the parts of one.
    world = 1
    for size in job.sizes:
        world *= size
    names = name_axes(job, chance)
    return [
        f"world = init_device_mesh('cuda', ({world},))",
        f"mesh = world._unflatten(0, {job.sizes}, {quote(names)})",
        *spell_calls(job, names),
    ]


def _slices(job: Drawn, chance: random.Random) -> list[str]:
    names = name_axes(job, chance)
    roles = [role for role in job.roles if role != "replicate" or job.framework == "ddp"]
    parts = {role: f"part_{i}" for i, role in enumerate(roles)}
    targets = ", ".join(parts.values())
    slices = ", ".join(slice_of(job, names, role) for role in roles)
    return [
        f"mesh = init_device_mesh('cuda', {job.sizes}, mesh_dim_names={quote(names)})",
        f"{targets} = {slices}",
        *use(job, parts.__getitem__, lambda role: f"{parts[role]}.get_group()"),
    ]


def _unflatten(job: Drawn, chance: random.Random) -> list[str]:
    names = name_axes(job, chance)
    world = 1
    for size in job.sizes:
        world *= size
    return [
        "def split(world, names, sizes):",
        "    return world._unflatten(0, sizes, names, backend_override={})",
        f"world = init_device_mesh('cuda', ({world},), mesh_dim_names=('world',))",
        f"mesh = split(world, {quote(names)}, {job.sizes})",
        *spell_calls(job, names),
    ]


def _flatten(job: Drawn, chance: random.Random) -> list[str]:
    """One name for the mesh that FSDP2 or DDP gets, of axes of size 1 and the real one."""
    names = name_axes(job, chance)
    role: Role = "shard" if job.framework == "fsdp2" else "replicate"
    at = job.roles.index(role)
    sizes = [*job.sizes[:at], 1, *job.sizes[at:]]
    names = [*names[:at], "extra", *names[at:]]
    named = dict(zip(job.roles, [*names[:at], *names[at + 1 :]], strict=True))
    lines = [
        f"mesh = init_device_mesh('cuda', {tuple(sizes)}, mesh_dim_names={quote(names)})",
        f'mesh["extra", "{named[role]}"]._flatten("flat")',
    ]
    named[role] = "flat"
    return [
        *lines,
        *spell_calls(job, [named[one] for one in job.roles]),
    ]


def _variables(job: Drawn, chance: random.Random) -> list[str]:
    names = name_axes(job, chance)
    return [
        *(f"SIZE_{i} = {size}" for i, size in enumerate(job.sizes)),
        f"SHAPE = ({''.join(f'SIZE_{i}, ' for i in range(len(job.sizes)))})",
        *(f'NAME_{i} = "{name}"' for i, name in enumerate(names)),
        f"NAMES = [{', '.join(f'NAME_{i}' for i in range(len(names)))}]",
        "mesh = init_device_mesh('cuda', SHAPE, mesh_dim_names=NAMES)",
        *(
            line.replace(f'"{name}"', f"NAME_{i}") if f'"{name}"' in line else line
            for line in spell_calls(job, names)
            for i, name in [_first_name(line, names)]
        ),
    ]


def _first_name(line: str, names: Sequence[str]) -> tuple[int, str]:
    return next(((i, name) for i, name in enumerate(names) if f'"{name}"' in line), (0, names[0]))


def _keywords(job: Drawn, chance: random.Random) -> list[str]:
    names = name_axes(job, chance)
    lines = [
        "mesh = init_device_mesh(",
        f"    mesh_dim_names={quote(names)}, device_type='cuda', mesh_shape={job.sizes}",
        ")",
        f"config = {{'mesh': {slice_of(job, names, 'shard')}, 'reshard_after_forward': True}}"
        if job.framework == "fsdp2"
        else f"config = dict(process_group=mesh.get_group('{names[job.roles.index('replicate')]}'))",
    ]
    for line in spell_calls(job, names):
        if "fully_shard(model" in line:
            line = "fully_shard(model, **config)"
        elif "fully_shard(layer" in line:
            line = "    functools.partial(fully_shard, **config)(layer)"
        elif "DDP(" in line:
            line = "model = DDP(module=model, **config)"
        elif "parallelize_module" in line:
            part = slice_of(job, names, "model")
            line = f"parallelize_module(parallelize_plan=plan, device_mesh={part}, module=model)"
        lines.append(line)
    return lines


def _helpers(job: Drawn, chance: random.Random) -> list[str]:
    names = name_axes(job, chance)
    body = use(job, lambda role: f"{role}_mesh", lambda role: f"{role}_mesh.get_group()")
    roles = [role for role in job.roles if role != "replicate" or job.framework == "ddp"]
    return [
        "def layout():",
        f"    return {job.sizes}",
        "def build(shape, names=None, device='cuda'):",
        "    return init_device_mesh(device, shape, mesh_dim_names=names)",
        f"def apply(model, {', '.join(f'{role}_mesh=None' for role in roles)}):",
        *(f"    {line}" for line in body),
        "    return model",
        "def main():",
        f"    mesh = build(layout(), {quote(names)})",
        f"    apply(model, {', '.join(f'{r}_mesh={slice_of(job, names, r)}' for r in roles)})",
        "if __name__ == '__main__':",
        "    main()",
    ]


def _dataclass(job: Drawn, chance: random.Random) -> list[str]:
    names = name_axes(job, chance)
    last = len(job.sizes) - 1
    return [
        "@dataclass",
        "class Config:",
        "    steps: int = 10",
        *(f"    size_{i}: int = {size if i < last else 1}" for i, size in enumerate(job.sizes)),
        "class Trainer:",
        "    def __init__(self, config):",
        "        self.config = config",
        f"        shape = ({''.join(f'config.size_{i}, ' for i in range(last))}"
        f"self.config.size_{last},)",
        f"        self.mesh = init_device_mesh('cuda', shape, mesh_dim_names={quote(names)})",
        "    def parallelize(self, model):",
        *(f"        {line}" for line in spell_calls(job, names, "self.mesh")),
        f"Trainer(Config(size_{last}={job.sizes[last]})).parallelize(model)",
    ]


SPELLINGS: Mapping[str, Callable[[Drawn, random.Random], list[str]]] = {
    "usual names": _usual_names,
    "odd names": _odd_names,
    "no names": _no_names,
    "slices": _slices,
    "unflatten": _unflatten,
    "flatten": _flatten,
    "variables": _variables,
    "keywords": _keywords,
    "helpers": _helpers,
    "dataclass": _dataclass,
}


def spell(job: Drawn, spelling: str, chance: random.Random) -> str:
    """A program that makes the mesh of a job and uses its axes."""
    return IMPORTS + "".join(f"{line}\n" for line in SPELLINGS[spelling](job, chance))
