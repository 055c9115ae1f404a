"""Whether some private names of torch do what meshplan needs, which their form does not show.

That a function has a name does not show that it is called. So torch's executor of redistributions
runs a plan made by hand, of placements that note the calls. It runs in a copy of its module, with
another planner. Nothing of torch is replaced, nothing is sent, and no process group is needed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
)

from meshplan._torch import SEAM, disable_current_modes
from meshplan._torch._entry import Entry, is_absent
from meshplan._torch._names import NAMES
from meshplan._torch.placements import PartialHooks, ShardHooks

_SHAPE = (4, 4)
_REDUCE, _REDUCE_SHARD, _SLICE, _GATHER, _MOVE = (
    NAMES[name].path
    for name in (
        "REDUCE_VALUE",
        "REDUCE_SHARD_VALUE",
        "REPLICATE_TO_SHARD",
        "TO_REPLICATE_TENSOR",
        "TO_NEW_SHARD_DIM",
    )
)


class Follow(Protocol):
    """A watch on whether the executor runs a plan that it was given."""

    def track_steps(self, steps: list[Any], carriers: list[Any], caller: FrameType) -> list[Any]:
        """The steps that the executor receives."""

    def note_reduction(self, carrier: object) -> None:
        """A planned reduction is about to return."""


class _Mesh:
    """As much of a mesh as the executor asks for: two ranks on each of three axes."""

    ndim = 3
    device_type = "cpu"

    def size(self, mesh_dim: int | None = None) -> int:
        return 2

    def get_coordinate(self) -> list[int]:
        return [0, 0, 0]

    def _sym_get_coordinate(self, index: int) -> int:
        return 0

    def _is_current_rank_part_of_mesh(self) -> bool:
        return True


class _Run:
    """The calls of the executor in one run, in order, and the faults found."""

    def __init__(self, follow: Follow) -> None:
        self.follow = follow
        self.calls: list[str] = []
        self.wrong: list[str] = []
        self.tensors = [torch.empty(0, device="cpu")]

    def watch(self, placement: Any, mesh: _Mesh) -> Any:
        """``placement``, of a step over ``mesh``, as one that notes its calls here."""
        # Torch's placements are frozen dataclasses.
        object.__setattr__(placement, "notes", (self, mesh))
        return placement

    def note(self, placement: Any, name: str, given: torch.Tensor, mesh: object) -> torch.Tensor:
        """Note a call; returns another tensor, which the next step must be given."""
        self.calls.append(name)
        if given is not self.tensors[-1]:
            self.wrong.append(f"{name} is not given the result of the step before")
        if mesh is not placement.notes[1]:
            self.wrong.append(f"{name} is given another mesh than that of its step")
        self.tensors.append(torch.empty(0, device="cpu"))
        if name == _REDUCE:
            self.follow.note_reduction(placement)
        return self.tensors[-1]


def _noted(name: str) -> Any:
    def call(self: Any, tensor: torch.Tensor, mesh: Any, mesh_dim: int, *rest: Any) -> Any:
        return self.notes[0].note(self, name, tensor, mesh)

    return call


class _NotedPartial(PartialHooks):
    """Called as ``PlannedPartial`` is."""

    asked = "a plan made by hand"

    # As many arguments as those of the carrier.
    def reduce_value(self, tensor: torch.Tensor, mesh: Any, mesh_dim: int) -> Any:
        return _noted(_REDUCE)(self, tensor, mesh, mesh_dim)

    def reduce_shard_value(
        self, tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard_spec: Placement
    ) -> Any:
        return _noted(_REDUCE_SHARD)(self, tensor, mesh, mesh_dim)


class _NotedShard(ShardHooks):
    """Called as DTensor's shards are."""

    replicate_to_shard = _noted(_SLICE)
    to_replicate_tensor = _noted(_GATHER)
    to_new_shard_dim = _noted(_MOVE)


# In the order of the plan below.
_EXPECTED = (_REDUCE, _SLICE, _MOVE, _GATHER, _REDUCE_SHARD)


def executor_differences(follow: Follow) -> Iterator[str]:
    """How torch's executor differs from what plans need, as texts. ``follow`` hands out the steps
    of the run, as it does those of a plan.
    """
    entry = NAMES["EXECUTOR"]
    module = NAMES["redistribute_module"].found()
    executor = inspect.unwrap(entry.found())
    needed = (NAMES[name].found() for name in ("SEAM", "TransformInfo", "FlattenedTransformInfo"))
    if is_absent(module, executor, *needed):
        return
    name = f"{entry} ({entry.use})"
    if not isinstance(executor, FunctionType):
        yield f"{name}: not a function"
        return
    # Twice: torch must not keep the plan for the next redistribution.
    for which in ("first", "second"):
        run = _Run(follow)
        try:
            with disable_current_modes():
                wrong = _one_run(module, executor, run, carries=which == "second")
        except Exception as error:
            lacking = [name for name in _EXPECTED if name not in run.calls]
            before = f" before it calls {lacking[0]}" if lacking else ""
            text = " ".join(str(error).split())[:200]
            wrong = [f"it fails{before}, with {type(error).__name__}: {text}"]
        if wrong:
            yield f"{name}: in a {which} run of a plan made by hand, {', and '.join(wrong)}"
            return


def _one_run(module: ModuleType, executor: FunctionType, run: _Run, *, carries: bool) -> list[str]:
    mesh, flat = _Mesh(), _Mesh()
    replicate, shard = Replicate(), Shard(1)
    step = NAMES["TransformInfo"].found()
    carrier = run.watch(_NotedPartial("sum"), flat)
    carried = NAMES["FlattenedTransformInfo"].found()(
        mesh_dim=0,
        src_dst_placements=(carrier, replicate),
        logical_shape=_SHAPE,
        mesh=flat,
        original_mesh_dims=(0, 1),
    )
    pairs: list[tuple[Placement, Placement]] = [
        (replicate, run.watch(_NotedShard(0), mesh)),
        (run.watch(_NotedShard(0), mesh), shard),
        (run.watch(_NotedShard(0), mesh), replicate),
        (run.watch(_NotedPartial("sum"), mesh), shard),
    ]
    plan = [carried] + [
        step(mesh_dim=1, src_dst_placements=pair, logical_shape=_SHAPE) for pair in pairs
    ]
    own, seen = [object()], []
    before, after = _spec(mesh, Partial()), _spec(mesh, replicate)

    def seam(
        transform_infos: Any, device_mesh: Any, src_placements: Any, dst_placements: Any
    ) -> list[Any]:
        seen.append((transform_infos, device_mesh, src_placements, dst_placements))
        return run.follow.track_steps(plan, [carrier] if carries else [], sys._getframe(1))

    # Who debugs has no use for it.
    replaced = {SEAM: seam, "get_active_debug_mode": lambda: None}
    for planner in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
        replaced[planner] = lambda *given, **options: own
    result = _copied(module, executor, replaced)(run.tensors[0], before, after)
    if not seen:
        return [f"{SEAM} is not looked up in its module"]
    if seen != [(own, mesh, before.placements, after.placements)]:
        return [f"{SEAM} is given other values"]
    lacking = [name for name in _EXPECTED if name not in run.calls]
    if lacking:
        run.wrong.insert(0, f"it does not call {', '.join(lacking)} of a subclass")
    elif run.calls != list(_EXPECTED):
        run.wrong.insert(0, f"it calls {', '.join(run.calls)}")
    if not run.wrong and result is not run.tensors[-1]:
        run.wrong.append("it does not return the result of the last step")
    return run.wrong


def _spec(mesh: _Mesh, placement: Placement) -> Any:
    return SimpleNamespace(
        mesh=mesh,
        placements=(placement,) * 3,
        shard_order=(),
        use_strided_shard_as_shard_order=False,
        tensor_meta=None,
    )


def _copied(
    module: ModuleType, executor: FunctionType, replaced: Mapping[str, Any]
) -> Callable[..., torch.Tensor]:
    """The executor in a copy of its module, with some globals replaced."""
    found = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            found[name] = _over(value, found)
    found |= {name: value for name, value in replaced.items() if name in found}
    return _over(executor, found)


def _over(function: FunctionType, found: dict[str, Any]) -> FunctionType:
    copy = FunctionType(
        function.__code__,
        found,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_KINDS = (
    (Partial(), Replicate(), "all_reduce"),
    (Partial(), Shard(0), "reduce_scatter"),
    (Shard(0), Replicate(), "all_gather"),
    (Shard(0), Shard(1), "all_to_all"),
    (Replicate(), Shard(0), None),
)
# The attributes of a setting of torch's compiler that are read.
_SETTING = ("env_value_force", "user_override", "env_value_default", "default")


def effect_differences(follow: Follow) -> Iterator[str]:
    """What torch does otherwise than meshplan needs it; a name that is not there is left out."""
    for name, differences in _EFFECTS.items():
        yield from differences(NAMES[name])
    yield from executor_differences(follow)


def _collectives(entry: Entry) -> Iterator[str]:
    """Whether torch names the collectives that it may merge as it did."""
    step = NAMES["TransformInfo"].found()
    if is_absent(step, entry.found()):
        return
    said = f"{entry} ({entry.use})"
    for src, dst, wanted in _KINDS:
        try:
            found = entry.given()(step(0, (src, dst), (4, 4)))
        except Exception as error:
            yield f"{said}: {type(error).__name__}: {error}"
            return
        if found != wanted:
            yield f"{said}: {found!r} for {src} -> {dst} instead of {wanted!r}"


def _creation(entry: Entry) -> Iterator[str]:
    """Whether a process group can be created as ``flatten`` does it."""
    function = entry.found()
    if is_absent(function):
        return
    try:
        named = dict.fromkeys(("group_name", "backend_options", "timeout", "pg_tag", "group_desc"))
        inspect.signature(function).bind(*range(5), **named)
    except TypeError as error:
        yield f"{entry} ({entry.use}): {error}"


def _setting(entry: Entry) -> Iterator[str]:
    """Whether the tag of compiled graphs can be set as ``dtensor`` does it."""
    settings = NAMES["compiler_settings"].found()
    if is_absent(settings, entry.found()):
        return
    setting = settings.get(entry.name)
    for one in _SETTING:
        if not hasattr(setting, one):
            yield f"{entry}.{one} ({entry.use}): not found"


_EFFECTS: dict[str, Callable[[Entry], Iterator[str]]] = {
    "collective_of": _collectives,
    "new_process_group": _creation,
    "CACHE_KEY_TAG": _setting,
}
