"""Entries of the table of degree keys: Megatron-LM, and NVIDIA's programs around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshplan.lint._readers._tables import Framework, Mesh

# Megatron-LM, megatron/core/parallel_state.py, RankGenerator takes an order of axes, innermost
# first: tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp with --use-tp-pp-dp-mapping. The dense layers have no ep
# axis. Experts have one, no cp axis, and the remaining data-parallel ranks. In older releases an
# encoder with sizes of its own has other ranks than the decoder (encoder_world_size there).
# FlagScale's hetero_process_meshes are several meshes.
_MEGATRON_KEYS: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "num_distributed_optimizer_instances": "dp_replicate",
}
MEGATRON_MESH = Mesh(
    keys=_MEGATRON_KEYS,
    order=("pp", "dp_replicate", "dp", "cp", "tp"),
    section=r"(?P<part>.*)",
    rest="dp",
    shown=frozenset({"dp", "edp", "ep"}),
    orders={"use_tp_pp_dp_mapping": "tp-cp-ep-pp-dp", "order": ""},
    experts=("pp", "edp", "ep", "etp"),
    expert_tp=True,
    sharded=r"(?:.*\.)?use_(?:distributed_optimizer|torch_fsdp2|megatron_fsdp|custom_fsdp)=true"
    r"|(?:.*\.)?zero1=true|.*optim\.name=(?:distributed_fused_adam|mcore_distributed_optim)",
    unsharded=r"(?:.*\.)?data_parallel_sharding_strategy=no_shard",
    is_sharded=False,
    flattened=("dp", "dp_shard", "cp"),
    needs=frozenset({"tp", "pp", "ep", "dp_replicate"}),
    refused={
        r"(?:.*\.)?encoder_(?:tensor|pipeline)_model_parallel_size=(?!0$|none|null).*": (
            "encoder and decoder have ranks of their own"
        ),
        r"(?:.*\.)?hetero_process_meshes[.=].*": "each of the hetero_process_meshes has its ranks",
    },
)
MEGATRON = Framework(
    program="megatron",
    mark=r"(?:.*\.)?(?:(?:tensor|pipeline|expert)_model_parallel_size"
    r"|num_distributed_optimizer_instances)",
    meshes=(
        replace(
            MEGATRON_MESH,
            refused={
                **MEGATRON_MESH.refused,
                r"(?:tensor|pipeline)_parallel_size=(?!1$).*": (
                    "tensor_parallel_size and pipeline_parallel_size are not Megatron-LM's"
                ),
            },
        ),
    ),
    kinds=frozenset({"command"}),
)
# NeMo Automodel, nemo_automodel/components/distributed/mesh_utils.py, _create_fsdp2_device_mesh:
# (pp, dp_replicate, dp_shard, cp, tp), and _create_moe_mesh: (ep_shard, ep) over all of them in a
# stage. NeMo RL's DTensor workers call it: nemo_rl/models/automodel/setup.py, setup_distributed.
# dp_size is dp_replicate times dp_shard, and follows from the ranks.
_AUTOMODEL_MESH = Mesh(
    keys={
        "pp_size": "pp",
        "dp_replicate_size": "dp_replicate",
        "cp_size": "cp",
        "tp_size": "tp",
        "ep_size": "ep",
    },
    order=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    section=r"(?P<part>)distributed",
    rest="dp_shard",
    shown=frozenset({"dp_shard", "ep_shard", "ep"}),
    experts=("pp", "ep_shard", "ep"),
    flattened=("dp_shard", "cp"),
    needs=frozenset({"pp", "dp_replicate", "cp", "tp", "ep"}),
    unless=r"distributed\.(?:strategy=ddp|_target_=.*ddpmanager)",
    refused={
        r"distributed\.(?:strategy=.*megatron.*|_target_=.*(?:megatronfsdp|nvfsdp).*)": (
            "the mesh of Megatron-FSDP is not read"
        ),
        r"separate_meshes=true": "teacher and student have meshes on ranks of their own",
    },
)
AUTOMODEL = Framework(
    program="nemo",
    mark=r"distributed\.(?:strategy|_target_|[a-z_]+_size)",
    meshes=(_AUTOMODEL_MESH,),
    kinds=frozenset({"document"}),
    word=r"nemo_automodel|recipe",
)

# NeMo 1 and 2, NeMo RL and Megatron Bridge start Megatron-LM with its default order: NeMo,
# nemo/lightning/megatron_init.py, initialize_model_parallel_for_nemo; Megatron Bridge,
# src/megatron/bridge/training/initialize.py, _create_pg_collection. Ranks: trainer.devices of
# Lightning, cluster.gpus_per_node of NeMo RL.
_NEMO_REFUSED = {
    **MEGATRON_MESH.refused,
    # NeMo RL, ROLL and RLinf, which start Megatron-LM on a part of the cluster.
    r".*generation\.colocated\.enabled=false": "training and generation have ranks of their own",
    r".*\.device_mapping=.*": "each device_mapping has ranks of its own",
    r"cluster\.component_placement\..*=(?!all$).*": "component_placement separates the ranks",
}
NEMO = Framework(
    program="nemo",
    mark=MEGATRON.mark + r"|(?:.*\.)?dtensor_cfg\..*_parallel_size",
    meshes=(
        replace(
            _AUTOMODEL_MESH,
            keys={
                "tensor_parallel_size": "tp",
                "context_parallel_size": "cp",
                "expert_parallel_size": "ep",
            },
            section=r"(?P<part>.*\.dtensor_cfg)",
            needs=frozenset({"tp", "cp"}),
            refused=_NEMO_REFUSED,
        ),
        replace(
            MEGATRON_MESH,
            section=r"(?P<part>(?!.*(?:vllm|sglang|generation)).*)",
            refused=_NEMO_REFUSED,
        ),
    ),
    launch={
        "trainer.num_nodes": "hosts",
        "trainer.devices": "ranks per host",
        "cluster.num_nodes": "hosts",
        "cluster.gpus_per_node": "ranks per host",
        "num_nodes": "hosts",
        "num_gpus_per_node": "ranks per host",
        "devices": "ranks per host",
    },
    kinds=frozenset({"document"}),
)
# The recipes of both in Python shard the optimizer's state.
NEMO_RECIPES = replace(
    NEMO,
    mark=MEGATRON.mark,
    meshes=(replace(MEGATRON_MESH, is_sharded=True),),
    kinds=frozenset({"python"}),
    classes=frozenset({"MegatronStrategy", "initialize_model_parallel", "ModelParallelConfig"}),
)
