"""Torch with internals that have moved: what meshplan does with it, in a process for each.

``python -m tests.moved_internals`` imports torch once and forks for each of ``MOVES``: torch is
changed first, then meshplan is imported and installed and a sum over four ranks reduced. Prints a
JSON object of what came of it.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import inspect
import json
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._local_tensor as local
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dispatch
from torch.distributed.tensor import _redistribute as rd
from torch.distributed.tensor import placement_types as pt
from torch.testing._internal.distributed.fake_pg import FakeStore

MOVES: dict[str, Callable[[], None]] = {}
_SIMULATED = local.LocalTensor, local.LocalTensorMode


def move(function: Callable[[], None]) -> Callable[[], None]:
    MOVES[function.__name__] = function
    return function


def rewrite(function: Any, *pairs: tuple[str, str]) -> None:
    """Make a function of torch's again from changed source."""
    source = inspect.getsource(function)
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    exec(source, vars(sys.modules[function.__module__]))
    for module in (_dispatch, sys.modules["torch.distributed.tensor._api"]):
        if hasattr(module, function.__name__):
            setattr(module, function.__name__, getattr(rd, function.__name__))


@move
def nothing() -> None: ...


@move
def flattened_step_with_another_field() -> None:
    @dataclasses.dataclass(frozen=True)
    class Step(rd._FlattenedTransformInfo):
        group_hint: object = dataclasses.field(kw_only=True)

    rd._FlattenedTransformInfo = Step  # type: ignore[misc]


@move
def mask_partial_renamed() -> None:
    del pt._MaskPartial


@move
def kinds_renamed() -> None:
    own = rd._TransformInfo._comm_type_key
    rd._TransformInfo._comm_type_key = lambda self: {"all_reduce": "ar"}.get(own(self), own(self))  # type: ignore[method-assign, arg-type]


_REDUCE = "partial_spec._reduce_value(\n                        local_tensor, mesh_to_use, i\n"
_GATHER = (
    "current_placement._to_replicate_tensor(\n                        local_tensor, mesh_to_use, i,"
)
_SEAM = """_optimize_transform_infos(
        transform_infos,
        device_mesh,
        current_spec.placements,
        target_spec.placements,
    )"""


@move
def executor_reduces_by_itself() -> None:
    rd._reduce = lambda p, t, m, i: funcol.all_reduce(t, reduceOp=p.reduce_op, group=(m, i))  # type: ignore[attr-defined]
    new = "_reduce(\n                        partial_spec, local_tensor, mesh_to_use, i\n"
    rewrite(rd.redistribute_local_tensor, (_REDUCE, new))


@move
def executor_reduces_over_whatever_mesh() -> None:
    """No error depends on the mesh: only the recorded calls show that it is wrong."""
    rd._reduce = lambda p, t, m, i: t.clone()  # type: ignore[attr-defined]
    new = "_reduce(\n                        partial_spec, local_tensor, mesh_to_use, i\n"
    rewrite(rd.redistribute_local_tensor, (_REDUCE, new))


@move
def executor_gathers_by_itself() -> None:
    """Shards along a descending axis would be gathered in the wrong order, unseen."""
    rd._gather = lambda p, *given: Shard._to_replicate_tensor(p, *given)  # type: ignore[attr-defined]
    new = "_gather(\n                        current_placement, local_tensor, mesh_to_use, i,"
    rewrite(rd.redistribute_local_tensor, (_GATHER, new))


@move
def executor_has_the_planner_by_another_name() -> None:
    rd._planner = rd._optimize_transform_infos  # type: ignore[attr-defined]
    rewrite(rd.redistribute_local_tensor, ("= _optimize_transform_infos(", "= _planner("))


_KEPT = """
def _kept(*given, plans={}):
    if str(given[2:]) not in plans:
        plans[str(given[2:])] = _optimize_transform_infos(*given)
    return plans[str(given[2:])]
"""


@move
def executor_keeps_plans() -> None:
    exec(_KEPT, vars(rd))
    rewrite(rd.redistribute_local_tensor, ("= _optimize_transform_infos(", "= _kept("))


@move
def executor_plans_by_keyword() -> None:
    """That changes nothing."""
    new = """_optimize_transform_infos(
        dst_placements=target_spec.placements,
        transform_infos=transform_infos,
        device_mesh=device_mesh,
        src_placements=current_spec.placements,
    )"""
    rewrite(rd.redistribute_local_tensor, (_SEAM, new))


@move
def executor_plans_by_other_keywords() -> None:
    own = rd._optimize_transform_infos
    rd._optimize_transform_infos = lambda infos, mesh, src, dst: own(infos, mesh, src, dst)  # type: ignore[assignment]
    new = "_optimize_transform_infos(infos=transform_infos, mesh=device_mesh, "
    new += "src=current_spec.placements, dst=target_spec.placements)"
    rewrite(rd.redistribute_local_tensor, (_SEAM, new))


@move
def executor_takes_steps_by_index() -> None:
    """That changes nothing."""
    old = "for transform_info in optimized_transform_infos:"
    new = """for at in range(len(optimized_transform_infos)):
            transform_info = optimized_transform_infos[at]"""
    rewrite(rd.redistribute_local_tensor, (old, new))


@move
def executor_passes_more_to_a_reduction() -> None:
    own = Partial._reduce_value

    def reduce_value(
        self: Partial, tensor: Any, mesh: Any, mesh_dim: int, async_op: bool = False
    ) -> Any:
        return own(self, tensor, mesh, mesh_dim)

    Partial._reduce_value = reduce_value  # type: ignore[method-assign]
    rewrite(rd.redistribute_local_tensor, (_REDUCE, _REDUCE.replace("i\n", "i, async_op\n")))


@move
def dispatcher_has_an_executor_of_its_own() -> None:
    own = rd.redistribute_local_tensor
    _dispatch.redistribute_local_tensor = types.FunctionType(  # type: ignore[attr-defined]
        own.__code__, vars(rd) | {}, own.__name__, own.__defaults__
    )


@move
def redistribute_module_renamed() -> None:
    module = sys.modules.pop("torch.distributed.tensor._redistribute")
    sys.modules["torch.distributed.tensor._redistribution"] = module
    del sys.modules["torch.distributed.tensor"]._redistribute  # type: ignore[attr-defined]
    own = importlib.machinery.PathFinder.find_spec

    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.endswith(".tensor._redistribute") else own(name, path, target)

    importlib.machinery.PathFinder.find_spec = find_spec  # type: ignore[method-assign, assignment]


def outcome() -> dict[str, Any]:
    """What importing and installing meshplan, and then reducing 1 + 2 + 3 + 4, comes to."""
    try:
        import meshplan
        import meshplan.dtensor

        meshplan.install()
    except BaseException as error:
        return {"refused": type(error).__name__, "message": str(error)}
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    found = []
    tensor, mode = _SIMULATED
    replicate = [Replicate(), Replicate()]
    for _ in range(2):
        with mode(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            given = tensor({r: torch.ones(4) * (r + 1) for r in range(4)})  # type: ignore[no-untyped-call]
            d = DTensor.from_local(given, mesh, [Partial(), Partial()], run_check=False)
            reduced: Any = d.redistribute(mesh, replicate).to_local()
            found += [t.tolist() for t in reduced._local_tensors.values()]
    return {"values": sorted({value for row in found for value in row})}


def main() -> None:
    warnings.simplefilter("ignore")
    outcomes = {}
    for name, change in MOVES.items():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                change()
                found = outcome()
            except BaseException:
                found = {"error": traceback.format_exc()}
            os.write(write, json.dumps(found).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            outcomes[name] = json.loads(pipe.read())
        os.waitpid(child, 0)
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
