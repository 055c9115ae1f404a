"""The roles of axes, and the names that frameworks use for each.

The use of an axis decides its role (`_readers/_uses.py`); its name decides only if no use is known.
An axis with neither has the role ``unknown``, and its mesh is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

Role = Literal["replicate", "shard", "model", "experts", "apart", "unknown"]
"""The use of an axis.

* replicate: parameters are replicated, gradients are summed.
* shard: parameters are sharded, gradients are summed (FSDP, ZeRO).
* model: ranks hold different parts of a layer and replicas of its small parameters.
* experts: ranks hold different experts, and exchange tokens in every layer.
* apart: ranks hold entirely different parameters (pipeline stages).
* unknown: neither the use nor the name of the axis determines it.
"""
ROLES: tuple[Role, ...] = ("replicate", "shard", "model", "experts", "apart")
"""The roles that a user can state."""

Framework = Literal["dtensor", "fsdp2", "ddp"]
"""The reduction of gradients.

* dtensor: `Partial` to `Replicate`, axis by axis, whatever the names of the axes.
* fsdp2: reduce-scatter along shard axes, then all-reduce along replicate axes.
* ddp: one all-reduce over all data axes.
"""

# Along these, FSDP2 shards and DDP replicates.
_DATA = ("dp", "ddp", "data", "batch", "hsdp", "dp_cp", "loss")
# Ranks hold different parts of a sequence, and the data axes beside them one model.
_CONTEXT = ("cp", "context", "sp", "sequence", "ulysses", "ring")
AXIS_NAMES: Mapping[Role, tuple[str, ...]] = {
    "replicate": (
        *_DATA,
        *(
            "replicate",
            "replica",
            "dp_replicate",
            "ddp_replicate",
            "data_replicate",
        ),  # torchtitan
        *("dp_outer", "inter_dp", "dp_inter"),  # Megatron-FSDP
        *("inter", "inter_node", "internode", "outer", "node", "host"),  # by hand
    ),
    "shard": (
        *(
            "fsdp",
            "shard",
            "sharding",
            "sharded",
            "zero",
            "dp_shard",
            "data_shard",
            "efsdp",
        ),
        *(
            "dp_shard_cp",
            "dp_shard_mod_ep",
            "dp_shard_in_ep",
            "edp_shard",
        ),  # torchtitan
        "ep_shard",  # NeMo Automodel
        *(
            "dp_inner",
            "intra_dp",
            "dp_intra",
            "expt_dp",
        ),  # Megatron-FSDP, Megatron-LM
        *("intra", "intra_node", "intranode", "inner", "gpu", "local"),  # by hand
        *_CONTEXT,
    ),
    "model": (
        *(
            "tp",
            "tensor",
            "model",
            "mp",
            "tensor_model",
            "etp",
            "expt_tp",
            "expert_tensor",
            "moe_tp",
        ),
        *("infer_tp", "rollout_tp", "gen_tp"),  # verl
    ),
    "experts": ("ep", "expert", "experts", "expert_model", "moe"),
    "apart": ("pp", "pipe", "pipeline", "stage", "pipeline_model", "infer_pp"),
}
"""The names of each role: in lower case, without a plural, ``_parallel`` or digits at the end."""

ROLE_OF: Mapping[str, Role] = {name: role for role, names in AXIS_NAMES.items() for name in names}
_ENDING = re.compile(r"(?:_?(?:parallel(?:ism)?|axis|dim|mesh|group|size|degree|\d))+$")
# No framework has longer names; a file may have names of any length.
_MAX_NAME = 64


def _normalize(axis: str) -> str:
    """``data`` for ``Data-Parallel``: the spelling of `AXIS_NAMES`."""
    if len(axis) > _MAX_NAME:
        return axis
    name = axis.lower().replace("-", "_").replace(".", "_")
    name = _ENDING.sub("", name).rstrip("_") or name
    return name if name in ROLE_OF else name.removesuffix("s")


def find_role(axis: str) -> Role:
    """The usual role of an axis of this name; ``unknown`` for a name of no framework."""
    return ROLE_OF.get(_normalize(axis), "unknown")


def resolve_roles(
    axes: Sequence[str], given: Sequence[Role], framework: Framework
) -> tuple[Role, ...]:
    """The roles of a mesh: those that are given, and those of the names for axes of which no use is
    known.
    """
    names = [_normalize(axis) for axis in axes]
    roles = [
        ROLE_OF.get(name, "unknown") if role == "unknown" else role
        for name, role in zip(names, given, strict=True)
    ]
    if framework != "fsdp2":
        return tuple(roles)
    # FSDP2 takes (replicate, shard): the last data axis is sharded, whatever its name is.
    shards = [role for name, role in zip(names, roles, strict=True) if name not in _CONTEXT]
    data = [i for i, name in enumerate(names) if name in _DATA and given[i] == "unknown"]
    if data and "shard" not in shards and "shard" not in given:
        roles[data[-1]] = "shard"
    return tuple(roles)


def assume_roles(
    axes: Sequence[str], given: Sequence[Role], framework: Framework
) -> tuple[Role, ...]:
    """`resolve_roles`, if ``framework`` is known to reduce along all axes without a role."""
    roles = resolve_roles(axes, given, framework)
    data = [i for i, role in enumerate(roles) if role in ("replicate", "shard", "unknown")]
    last: list[int] = []
    if framework == "fsdp2":
        if len(data) > 2:  # a mesh of FSDP2 has at most two axes
            return roles
        last = data[-1:] if "shard" not in roles else []
    return tuple(
        ("shard" if i in last else "replicate") if role == "unknown" else role
        for i, role in enumerate(roles)
    )
