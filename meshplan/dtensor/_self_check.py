"""Whether torch is still what meshplan builds on: signatures, fields, and the one call site.

Versions say what was tested; this says what is there. A torch in which something has moved is
refused by ``install``, before anything is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import CodeType
from typing import Any

import torch
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.placement_types import Partial, Shard

from meshplan.errors import UnsupportedTorchError

__all__ = ["SEAM", "TESTED_TORCH", "check_seam", "check_version"]

TESTED_TORCH = ((2, 11), (2, 15))

# What torch looks up as a global of ``_redistribute``, and who calls it.
SEAM = "_optimize_transform_infos"
_CALLER = "redistribute_local_tensor"
_PARAMETERS = ("transform_infos", "device_mesh", "src_placements", "dst_placements")
_STEP = "_TransformInfo"
_STEP_FIELDS = ("mesh_dim", "src_dst_placements", "logical_shape")
# Methods of placements that are overridden: torch calls them with these.
_METHODS = (
    (Partial, "_reduce_value", ("self", "tensor", "mesh", "mesh_dim")),
    (Partial, "_reduce_shard_value", ("self", "tensor", "mesh", "mesh_dim", "shard_spec")),
    (Shard, "_replicate_to_shard", ("self", "local_tensor", "mesh", "mesh_dim", "shard_index")),
)


def check_version(version: str, allow_untested: bool) -> None:
    """Whether this version of torch was tested.

    Args:
        version: of torch.
        allow_untested: it need not be.

    Raises:
        UnsupportedTorchError: it was not.
    """
    low, high = TESTED_TORCH
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not low <= found <= high and not allow_untested:
        raise UnsupportedTorchError(
            f"torch {version} is not tested with meshplan, which knows "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]}; install one of these, or write "
            "meshplan.install(allow_untested_torch=True) and compare replicas yourself"
        )


def check_seam() -> None:
    """Compare torch with what meshplan was written for.

    Raises:
        UnsupportedTorchError: something has moved, or was replaced by others; says all of it.
    """
    moved = list(_moved())
    if moved:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} is not what meshplan was written for: {'; '.join(moved)}; "
            "use a tested torch version, and undo what other packages have replaced in it"
        )


def _moved() -> Iterator[str]:
    where = _redistribute.__name__
    seam, caller = getattr(_redistribute, SEAM, None), getattr(_redistribute, _CALLER, None)
    yield from _differs(f"{where}.{SEAM}", _parameters(seam), _PARAMETERS)
    calls = inspect.isfunction(caller) and any(SEAM in code.co_names for code in _codes(caller))
    if not calls:
        yield f"{where}.{_CALLER} does not call {SEAM}"
    step = getattr(_redistribute, _STEP, None)
    found = tuple(field.name for field in fields(step)) if is_dataclass(step) else None
    yield from _differs(f"{where}.{_STEP}", found, _STEP_FIELDS)
    for owner, method, wanted in _METHODS:
        name = f"{owner.__module__}.{owner.__name__}.{method}"
        yield from _differs(name, _parameters(getattr(owner, method, None)), wanted)


def _differs(name: str, found: tuple[str, ...] | None, wanted: tuple[str, ...]) -> Iterator[str]:
    if found is None:
        yield f"there is no {name}"
    elif found != wanted:
        yield f"{name} has {', '.join(found) or 'nothing'} instead of {', '.join(wanted)}"


def _parameters(function: Any) -> tuple[str, ...] | None:
    return tuple(inspect.signature(function).parameters) if callable(function) else None


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function and of those in it."""
    codes = [inspect.unwrap(function).__code__]
    while codes:
        code = codes.pop()
        yield code
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
