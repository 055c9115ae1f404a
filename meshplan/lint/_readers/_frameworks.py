"""The table of degree keys: for each framework its keys, its meshes and where they come from.

A new framework is one `Framework` here. Keys are written as in a file, with underscores; hyphens
mean the same, and dots stand between the levels. A key that is not in the table is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from meshplan.lint._programs import Program
from meshplan.lint._roles import Framework as Reduction
from meshplan.lint._roles import Role

Kind = Literal["document", "command", "python"]
"""The place of keys: TOML, YAML, JSON; a script or arguments; calls and assignments in Python."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """A mesh that a framework makes of its keys.

    Regular expressions match a whole text in lower case, with underscores for hyphens: a dotted
    path, ``model.tp``, or a setting, ``model.tp=2``.
    """

    # The axis of each key; of several keys for an axis, the first is today's. A key for ``""`` only
    # marks the framework.
    keys: Mapping[str, str]
    order: tuple[str, ...]  # the axes, outermost first
    # Regular expression of the dotted path before the keys. Each value of its group ``part`` is a
    # mesh of its own.
    section: str = ""
    rest: str = ""  # the axis of the ranks that the others leave, if it is absent or -1
    fill: str = ""  # the same for the ranks that remain if ``rest`` has a size
    # Axes of which one has a key in the file; empty if the mark is enough
    needs: tuple[str, ...] = ()
    unless: str = ""  # regular expression of a setting with which the mesh does not exist
    when: str = ""  # the same of one that decides, with which it exists in spite of ``unless``
    # The same of a setting without which it is not judged, by regular expressions of its keys
    only: Mapping[str, str] = field(default_factory=dict)
    # Why the mesh is not judged, by regular expressions of settings
    refused: Mapping[str, str] = field(default_factory=dict)
    # Other orders of axes, innermost first, joined by hyphens, by key; empty for the value of the
    # key
    orders: Mapping[str, str] = field(default_factory=dict)
    per_host: str = ""  # regular expression of a setting with which ``rest`` is the ranks of a host
    # Axes of the experts' mesh over the same ranks. The one that is in no key has the ranks that
    # the others leave.
    experts: tuple[str, ...] = ()
    expert_tp: bool = False  # whether ``etp`` is ``tp`` by default; else it is 1
    roles: Mapping[str, Role] = field(default_factory=dict)
    # Regular expression of a setting with which ``dp`` and ``cp`` are sharded; empty if the names
    # of the axes say it
    sharded: str = ""
    unsharded: str = ""  # the same for replicated
    is_sharded: bool = True  # the default of both
    reduction: Reduction = "fsdp2"  # of gradients, if they are sharded
    # Axes that gradients are reduced over as one
    flattened: tuple[str, ...] = ("dp", "dp_shard", "cp")
    sequence_parallel: bool = False  # the default of the key ``sequence_parallel``
    zero_is_one: bool = False  # whether a size of 0 means that there is no such axis
    is_part: bool = False  # whether the job may have ranks besides those of its sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Framework:
    """A program, and the meshes of its jobs."""

    program: Program
    mark: str  # regular expression of a dotted key that this program has
    meshes: tuple[Mesh, ...]  # in the order of the report
    without: str = ""  # regular expression of a dotted key that this program does not have
    # Regular expression of a text that the file has too; empty if the mark is enough
    word: str = ""
    # ``hosts``, ``ranks_per_host`` or ``world_size`` of dotted keys
    launch: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ("document",)  # where its keys stand
    # Python's classes and functions that take the keys as arguments
    classes: tuple[str, ...] = ()
    # Regular expression of the configurations that have the defaults of ``meshes``. Any other one
    # that a file builds on may have replaced them.
    bases: str = ""


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
_MEGATRON_MESH = Mesh(
    keys=_MEGATRON_KEYS,
    order=("pp", "dp_replicate", "dp", "cp", "tp"),
    section=r"(?P<part>.*)",
    rest="dp",
    orders={"use_tp_pp_dp_mapping": "tp-cp-ep-pp-dp", "order": ""},
    experts=("pp", "edp", "ep", "etp"),
    expert_tp=True,
    sharded=r"(?:.*\.)?use_(?:distributed_optimizer|torch_fsdp2|megatron_fsdp|custom_fsdp)=true"
    r"|(?:.*\.)?zero1=true|.*optim\.name=(?:distributed_fused_adam|mcore_distributed_optim)",
    unsharded=r"(?:.*\.)?data_parallel_sharding_strategy=no_shard",
    is_sharded=False,
    needs=("tp", "pp", "ep", "dp_replicate"),
    refused={
        r"(?:.*\.)?encoder_(?:tensor|pipeline)_model_parallel_size=(?!0$|none|null).*": (
            "encoder and decoder have ranks of their own"
        ),
        r"(?:.*\.)?hetero_process_meshes[.=].*": "each of the hetero_process_meshes has its ranks",
    },
)
_LIGHTNING_LAUNCH: Mapping[str, str] = {
    f"{section}{key}": what
    for section in ("", "trainer.")
    for key, what in (("num_nodes", "hosts"), ("devices", "ranks_per_host"))
}
_NEMO_LAUNCH: Mapping[str, str] = {
    **_LIGHTNING_LAUNCH,
    "cluster.num_nodes": "hosts",
    "cluster.gpus_per_node": "ranks_per_host",
    "experiment.runner.nnodes": "hosts",  # of FlagScale
    "experiment.runner.nproc_per_node": "ranks_per_host",
}
_MEGATRON = Framework(
    program="megatron",
    mark=r"(?:.*\.)?(?:(?:tensor|pipeline|expert)_model_parallel_size"
    r"|num_distributed_optimizer_instances)",
    meshes=(_MEGATRON_MESH,),
    launch=_NEMO_LAUNCH,  # of Hydra's overrides
    kinds=("command",),
)
# ms-swift, swift/megatron/arguments/megatron_args.py: whole experts and a sharded optimizer by
# default. Its jobs of Ray have a section for each part.
_SWIFT = replace(
    _MEGATRON,
    meshes=(
        replace(
            _MEGATRON_MESH,
            section=r"(?P<part>(?!rollout).*)",
            expert_tp=False,
            is_sharded=True,
        ),
    ),
    # Those of NeMo, which has a train_type too.
    without=r"(?:trainer|cluster)\..*",
    launch={"train.gpus": "world_size"},
    kinds=("document", "command"),
    word=r"\bmegatron[ \t]+(?:sft|pt|rlhf|export)\b|\b(?:tuner|train)_type\b|split_dataset_ratio",
)
_DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# NeMo Automodel, nemo_automodel/components/distributed/mesh_utils.py, _create_fsdp2_device_mesh:
# (pp, dp_replicate, dp_shard, cp, tp), and _create_moe_mesh: (ep_shard, ep) over all of them in a
# stage. NeMo RL's DTensor workers call it: nemo_rl/models/automodel/setup.py, setup_distributed.
# dp_size is dp_replicate times dp_shard.
_AUTOMODEL_MESH = Mesh(
    keys={f"{axis}_size": axis for axis in ("pp", "dp_replicate", "dp", "cp", "tp", "ep")},
    order=_DENSE,
    section=r"(?P<part>)distributed",
    rest="dp_shard",
    experts=("pp", "ep_shard", "ep"),
    needs=("pp", "dp_replicate", "cp", "tp", "ep"),
    unless=r"distributed\.(?:strategy=ddp|_target_=.*ddpmanager)",
    refused={
        r"distributed\.(?:strategy=.*megatron.*|_target_=.*(?:megatronfsdp|nvfsdp).*)": (
            "the mesh of Megatron-FSDP is not read"
        ),
        r"separate_meshes=true": "teacher and student have meshes on ranks of their own",
    },
)
_AUTOMODEL = Framework(
    program="nemo",
    mark=r"distributed\.(?:strategy|_target_|[a-z_]+_size)",
    meshes=(_AUTOMODEL_MESH,),
    word=r"nemo_automodel|recipe",
)

# NeMo 1 and 2, NeMo RL and Megatron Bridge start Megatron-LM with its default order: NeMo,
# nemo/lightning/megatron_init.py, initialize_model_parallel_for_nemo; Megatron Bridge,
# src/megatron/bridge/training/initialize.py, _create_pg_collection. Ranks: trainer.devices of
# Lightning, cluster.gpus_per_node of NeMo RL.
_NEMO_REFUSED = {
    **_MEGATRON_MESH.refused,
    # NeMo RL, ROLL and RLinf, which start Megatron-LM on a part of the cluster.
    r".*generation\.colocated\.enabled=false": "training and generation have ranks of their own",
    r".*\.device_mapping(?:=|\.).*": "each device_mapping has ranks of its own",
    r"cluster\.component_placement\..*=(?!all$).*": "component_placement separates the ranks",
}
_NEMO = Framework(
    program="nemo",
    mark=_MEGATRON.mark + r"|(?:.*\.)?dtensor_cfg\..*_parallel_size",
    meshes=(
        replace(
            _AUTOMODEL_MESH,
            keys={
                "tensor_parallel_size": "tp",
                "context_parallel_size": "cp",
                "expert_parallel_size": "ep",
            },
            section=r"(?P<part>.*\.dtensor_cfg)",
            needs=("tp", "cp"),
            refused=_NEMO_REFUSED,
        ),
        replace(
            _MEGATRON_MESH,
            section=r"(?P<part>(?!.*(?:vllm|sglang|generation|rollout)).*)",
            refused=_NEMO_REFUSED,
        ),
    ),
    launch=_NEMO_LAUNCH,
)
# The recipes of both in Python shard the optimizer's state.
_NEMO_RECIPES = replace(
    _NEMO,
    mark=_MEGATRON.mark,
    meshes=(replace(_MEGATRON_MESH, is_sharded=True),),
    kinds=("python",),
    classes=("MegatronStrategy", "initialize_model_parallel", "ModelParallelConfig"),
)

# torchtitan, torchtitan/distributed/parallel_dims.py, ParallelDims.build_mesh: the dense mesh is
# (pp, dp_replicate, dp_shard, cp, tp), the sparse one (pp, dp_replicate, efsdp, ep) of 2026 and
# (pp, dp_replicate, efsdp, ep, etp) of 2025, with efsdp * ep * etp = dp_shard * cp * tp. Parameters
# are sharded along dp_shard and cp together. "data_parallel_degree" is of 2024, when degrees
# were in [training] and [experimental]. Options: torchtitan/config/configs.py, ParallelismConfig.
_TITAN = Mesh(
    keys={
        "pipeline_parallel_degree": "pp",
        "data_parallel_replicate_degree": "dp_replicate",
        "data_parallel_shard_degree": "dp_shard",
        "data_parallel_degree": "dp_shard",
        "context_parallel_degree": "cp",
        "tensor_parallel_degree": "tp",
        "expert_parallel_degree": "ep",
        "expert_tensor_parallel_degree": "etp",
        # Arguments of ParallelDims.
        **{axis: axis for axis in (*_DENSE, "ep", "etp")},
    },
    order=_DENSE,
    section=r"(?:(?P<part>.*)\.)?(?:parallelism|training|experimental)|",
    rest="dp_shard",
    experts=("pp", "dp_replicate", "efsdp", "ep", "etp"),
    sequence_parallel=True,
)
_TORCHTITAN = Framework(
    program="torchtitan",
    mark=r"(?:.*\.)?(?:(?:pipeline|data|context|tensor|expert)(?:_tensor)?_parallel"
    r"(?:_replicate|_shard)?_degree|parallelism)",
    # A Job of Kubernetes has its number of pods, Hydra's defaults name files, Cosmos-RL has sizes.
    without=r"api_version|defaults\..*|.*parallelism\.(?:dp_[a-z]+|[a-z]{2})_size",
    meshes=(_TITAN,),
    kinds=("document", "command", "python"),
    classes=("ParallelismConfig", "ParallelDims"),
)

# verl, verl/workers/fsdp_workers.py: create_device_mesh makes (fsdp), or (ddp, fsdp) if fsdp_size
# is smaller than the number of ranks; ActorRolloutRefWorker._build_rollout makes (dp, infer_tp,
# infer_pp). verl/workers/megatron_workers.py starts Megatron-LM with its default order, and
# verl/trainer/config/engine/megatron.yaml shards the optimizer's state. Ulysses exchanges
# activations inside of the mesh of FSDP and has no gradients of its own. EasyR1 has worker and fsdp
# in place of actor_rollout_ref and fsdp_config.
_STRATEGY = "its strategy has a mesh that is not read"
_VERL_REFUSED = {
    r"(?:config_name|defaults\..*)=.*megatron.*": "its configuration is of Megatron",
}
_VERL_FSDP = Mesh(
    keys={"fsdp_size": "fsdp"},
    order=("ddp", "fsdp"),
    section=r"(?P<part>actor_rollout_ref\.actor|worker\.actor)(?:\.fsdp(?:_config)?)?",
    rest="fsdp",
    fill="ddp",
    # verl's own configuration of Megatron has no axis beside dp; another one may have.
    unless=r"actor_rollout_ref\.actor\.(?:megatron\..*|strategy=megatron)"
    r"|(?:config_name|defaults\..*)=ppo_megatron_trainer.*",
    # ``strategy`` chooses the workers, and keys of others have no effect.
    when=r"actor_rollout_ref\.actor\.strategy=(?!megatron$).*",
    # Most estimators have no critic.
    only={r"(?:worker\.)?critic\..*": r"algorithm\.adv_estimator=gae|critic\.enable=true"},
    refused={
        r"actor_rollout_ref\.actor\.strategy=(?!fsdp|megatron$).*": _STRATEGY,
        **_VERL_REFUSED,
        r"(?:critic|reward_model)\.megatron\..*": "another part is of Megatron",
    },
)
_VERL_CRITIC = replace(
    _VERL_FSDP,
    section=r"(?P<part>critic(?:\.model)?|worker\.critic)(?:\.fsdp(?:_config)?)?",
    needs=("fsdp",),
    unless=r"critic\.(?:megatron\..*|strategy=megatron)",
    when=r"critic\.strategy=(?!megatron$).*",
    refused={r"critic\.strategy=(?!fsdp|megatron$).*": _STRATEGY, **_VERL_REFUSED},
)
_VERL = Framework(
    program="verl",
    mark=r"actor_rollout_ref\..*|worker\.(?:actor\.(?:fsdp|model)\..*|rollout\.tensor_parallel_size)",
    meshes=(
        _VERL_FSDP,
        _VERL_CRITIC,
        *(
            replace(
                _MEGATRON_MESH,
                section=rf"(?P<part>{part})\.megatron",
                is_sharded=True,
                unless=fsdp.when,
                only=fsdp.only,
            )
            for part, fsdp in ((r"actor_rollout_ref\.actor", _VERL_FSDP), ("critic", _VERL_CRITIC))
        ),
        Mesh(
            keys={
                "tensor_model_parallel_size": "tp",
                "tensor_parallel_size": "tp",
                "pipeline_model_parallel_size": "infer_pp",
                "data_parallel_size": "rollout_dp",
            },
            order=("dp", "tp", "infer_pp"),
            section=r"(?P<part>actor_rollout_ref|worker)\.rollout",
            rest="dp",
            roles={"dp": "apart"},
            needs=("tp",),
            refused={
                r"actor_rollout_ref\.hybrid_engine=false|rollout\.nnodes=[1-9].*": (
                    "training and generation have ranks of their own"
                ),
            },
        ),
    ),
    launch={"trainer.nnodes": "hosts", "trainer.n_gpus_per_node": "ranks_per_host"},
    defaults={"hosts": 1, "ranks_per_host": 8},
    bases=r"(?:\./)?(?:examples/)?(?:config|ppo_trainer|ppo_megatron_trainer)(?:\.yaml)?",
    kinds=("document", "command"),
)
# verl/trainer/fsdp_sft_trainer.py, under torchrun.
_VERL_SFT = Framework(
    program="verl",
    mark=r"(?:(?:engine|model|model\.fsdp_config)\.)?"
    r"(?:ulysses_sequence_parallel_size|fsdp_size)",
    meshes=(
        replace(
            _VERL_FSDP,
            section=r"(?:engine|model|model\.fsdp_config)?",
            unless=r"engine=meg.*",
        ),
    ),
    kinds=("document", "command"),
)

# prime-rl, src/prime_rl/trainer/parallel_dims.py, ParallelDims.build_mesh: (pp, dp_replicate,
# dp_shard, cp), and (pp, dp_replicate, dp_shard_mod_ep, dp_shard_in_ep, cp) with parallel experts,
# whose ep is dp_shard_in_ep * cp. A tp axis inside was of 2025. Ranks:
# packages/prime-rl-configs/src/prime_rl/configs/rl.py and sft.py, deployment.
_PRIME_MESH = Mesh(
    keys={axis: axis for axis in ("pp", "dp_replicate", "cp", "tp", "ep")},
    order=_DENSE,
    section=r"(?P<part>)(?:trainer\.)?(?:model|parallel)",
    rest="dp_shard",
    experts=("pp", "dp_replicate", "efsdp", "ep"),
)
_PRIME = Framework(
    program="prime-rl",
    mark=r"(?:trainer\.)?model\.(?:dp_replicate|cp|tp|ep|ac|fsdp_cpu_offload|reshard_after_forward)"
    r"|trainer\.(?:model|optim|data)\..*|deployment\.num_(?:train|infer)_(?:nodes|gpus)"
    r"|trainer_gpu_ids",
    meshes=(_PRIME_MESH,),
    launch={
        "deployment.num_train_nodes": "hosts",
        "deployment.gpus_per_node": "ranks_per_host",
        "deployment.num_train_gpus": "world_size",
    },
    defaults={"ranks_per_host": 8},
)

# accelerate, src/accelerate/parallelism_config.py, ParallelismConfig._get_mesh: (dp_replicate,
# dp_shard, cp, sp, tp). HF's TrainingArguments take the same class. Ranks: num_processes of
# `accelerate launch`; the product of all sizes must be the number of ranks.
_ACCELERATE_SIZES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_ACCELERATE_MESH = Mesh(
    keys={
        **{f"parallelism_config_{axis}_size": axis for axis in _ACCELERATE_SIZES},
        **{f"{axis}_size": axis for axis in _ACCELERATE_SIZES},
    },
    order=_ACCELERATE_SIZES,
    section=r"(?:(?P<part>.*)\.)?parallelism_config|",
    # DeepSpeed's Ulysses: sp exchanges activations, and gradients are reduced along all ranks.
    roles={"sp": "shard"},
    needs=_ACCELERATE_SIZES,
)
_ACCELERATE = Framework(
    program="accelerate",
    mark=r"(?:.*\.)?(?:parallelism_config_\w+_size|parallelism_config\.\w+_size"
    r"|dp_(?:replicate|shard)_size)",
    meshes=(_ACCELERATE_MESH,),
    launch={"num_machines": "hosts", "num_processes": "world_size"},
    kinds=("document", "command", "python"),
    classes=("ParallelismConfig",),
)
# accelerate's FSDP without degrees: torch's FSDP shards along all ranks, or along those of a host.
_ACCELERATE_FSDP = Framework(
    program="accelerate",
    mark=r"fsdp_config\.fsdp_(?:sharding_strategy|version|reshard_after_forward|auto_wrap_policy)",
    meshes=(
        Mesh(
            keys={},
            order=("dp_replicate", "dp_shard"),
            rest="dp_shard",
            fill="dp_replicate",
            unless=r"distributed_type=(?!fsdp).*|num_processes=1",
            per_host=r"fsdp_config\.fsdp_sharding_strategy=(?:hybrid.*|4|5)",
        ),
    ),
    launch=_ACCELERATE.launch,
)

# axolotl, src/axolotl/utils/distributed.py, _get_parallel_config_kwargs, which fills in sizes and
# hands them to accelerate's ParallelismConfig.
_AXOLOTL = Framework(
    program="axolotl",
    mark=r"(?:dp_shard|dp_replicate|context_parallel|tensor_parallel|expert_parallel)_size"
    r"|sequence_parallel_degree",
    meshes=(
        Mesh(
            keys={
                "dp_replicate_size": "dp_replicate",
                "dp_shard_size": "dp_shard",
                "context_parallel_size": "cp",
                "sequence_parallel_degree": "cp",
                "tensor_parallel_size": "tp",
            },
            order=("dp_replicate", "dp_shard", "cp", "tp"),
            rest="dp_shard",
            fill="dp_replicate",
            needs=("dp_replicate", "dp_shard", "cp", "tp"),
        ),
    ),
    word=r"base_model|datasets|sequence_len",
)

# DeepSpeed, deepspeed/utils/groups.py, _init_tp_mesh_device, for AutoTP: (data_parallel,
# tensor_parallel). deepspeed/runtime/zero/mics_utils.py, create_mics_comm_groups, shards along
# mics_shard_size neighbours and all-reduces across. hpZ (groups.py,
# _create_zero_param_parallel_group) keeps a second copy of parameters on neighbours; gradients are
# reduced along all ranks.
_DEEPSPEED = Framework(
    program="deepspeed",
    mark=r"(?:zero_optimization\.)?(?:mics_shard_size|zero_hpz_partition_size)"
    r"|(?:tensor_parallel\.)?autotp_size|tensor_parallel\.tp_size",
    meshes=(
        Mesh(
            keys={
                "mics_shard_size": "dp_shard",
                "zero_hpz_partition_size": "",
                "autotp_size": "tp",
                "tp_size": "tp",
            },
            order=("dp_replicate", "dp_shard", "tp"),
            section=r"(?:(?P<part>.*)\.)?(?:zero_optimization|tensor_parallel)|",
            rest="dp_shard",
            fill="dp_replicate",
        ),
    ),
    kinds=("document", "command"),
)

# GPT-NeoX, megatron/initialize.py, _initialize_distributed, and Megatron-DeepSpeed take DeepSpeed's
# (pipe, data, model): deepspeed/runtime/pipe/topology.py, PipeModelDataParallelTopology.
_NEOX = Framework(
    program="deepspeed",
    mark=r"pipe_parallel_size",
    meshes=(
        Mesh(
            keys={"pipe_parallel_size": "pp", "model_parallel_size": "tp"},
            order=("pp", "dp", "tp"),
            rest="dp",
            sharded=r"zero_optimization\.stage=[123]",
            is_sharded=False,
            zero_is_one=True,
            refused={
                r"moe_num_experts=(?![01]$|none|null).*": "GPT-NeoX's mesh of experts is not read",
            },
        ),
    ),
    launch={"global_num_gpus": "world_size"},
)

# nanotron, src/nanotron/parallel/context.py, ParallelContext._init_parallel_groups: (ep, pp, dp,
# cp, tp). Gradients are reduced along dp and cp together, and ZeRO-1 shards the optimizer's state.
_NANOTRON = Framework(
    program="nanotron",
    mark=r"parallelism\.(?:dp|pp|tp)",
    meshes=(
        Mesh(
            keys={"pp": "pp", "dp": "dp", "context_parallel_size": "cp", "tp": "tp"},
            order=("pp", "dp", "cp", "tp"),
            section="parallelism",
            sharded=r"optimizer\.zero_stage=1",
            is_sharded=False,
            needs=("dp", "pp", "tp"),
        ),
    ),
    word=r"(?:pp_engine|tp_mode|nanotron|tp_linear_async_communication)",
)
_NANOTRON_CLASS = replace(
    _NANOTRON,
    mark=r"dp|pp|tp",
    meshes=(replace(_NANOTRON.meshes[0], section=""),),
    kinds=("python",),
    classes=("ParallelismArgs",),
)

# torchtune, torchtune/training/_distributed.py, ParallelDims.build_mesh: (dp_replicate, dp_shard,
# cp, tp). Keys: recipes/full_finetune_distributed.py, __init__.
_TORCHTUNE = Framework(
    program="torch",
    mark=r"(?:tensor|context)_parallel_dim|data_parallel_(?:shard|replicate)_dim",
    meshes=(
        Mesh(
            keys={
                "data_parallel_replicate_dim": "dp_replicate",
                "data_parallel_shard_dim": "dp_shard",
                "context_parallel_dim": "cp",
                "tensor_parallel_dim": "tp",
            },
            order=("dp_replicate", "dp_shard", "cp", "tp"),
            rest="dp_shard",
        ),
    ),
    bases=r"\w+/\w+",  # of torchtune's own
    kinds=("document", "command"),
)

# Lightning, src/lightning/fabric/strategies/model_parallel.py, _setup_device_mesh:
# (data_parallel, tensor_parallel); "auto" is one data-parallel rank on each host. fsdp.py takes
# device_mesh=(replicate, shard).
_LIGHTNING = Framework(
    program="lightning",
    mark=r".*strategy\.init_args\.(?:data|tensor)_parallel_size",
    meshes=(
        Mesh(
            keys={"data_parallel_size": "data_parallel", "tensor_parallel_size": "tensor_parallel"},
            order=("data_parallel", "tensor_parallel"),
            section=r"(?P<part>.*)strategy\.init_args|",
            rest="data_parallel",
            roles={"data_parallel": "shard", "tensor_parallel": "model"},
            needs=("data_parallel", "tensor_parallel"),
        ),
    ),
    launch=_LIGHTNING_LAUNCH,
    kinds=("document", "python"),
    classes=("ModelParallelStrategy",),
)

# vLLM, vllm/distributed/parallel_state.py, initialize_model_parallel: (dp, pp, pcp, tp). Data
# parallel ranks serve different requests and reduce nothing. SGLang, python/sglang/srt/
# distributed/parallel_state.py, initialize_model_parallel: (pp, tp) on world_size = pp * tp ranks,
# and python/sglang/srt/managers/data_parallel_controller.py, launch_dp_schedulers: as many for each
# data-parallel replica. With --enable-dp-attention attention has its own groups inside of tp.
# Sections: a file of engines has a list; vLLM's production stack has vllmConfig in Helm's values;
# each of the llm_configs of Ray Serve has engine_kwargs.
_SECTION = (
    r"(?:(?P<part>.*(?=engine_args|vllm_config|engine_kwargs))?"
    r"(?:engine_args|engine_kwargs|extra_kwargs|server_args|vllm|parallel|vllm_config))?"
)
_SERVING_MESH = Mesh(
    # An engine starts its own workers, on as many GPUs of an allocation as it needs.
    is_part=True,
    keys={
        "data_parallel_size": "dp",
        "pipeline_parallel_size": "pp",
        "prefill_context_parallel_size": "cp",
        "context_parallel_size": "cp",
        "tensor_parallel_size": "tp",
        "tensor_parallel": "tp",  # argparse takes the beginning of an option
        **{f"{axis}{unit}": axis for axis in ("dp", "pp", "cp", "tp") for unit in ("", "_size")},
    },
    order=("dp", "pp", "cp", "tp"),
    section=_SECTION,
    roles={"dp": "apart"},
    reduction="dtensor",
    flattened=(),
    needs=("dp", "pp", "tp"),
    refused={
        r"enable_dp_attention=true": "--enable-dp-attention has two meshes on the same ranks",
        r".*args\.\d+=--(?:tensor|pipeline|data)[_-]parallel[_-]size.*": (
            "an argument of the engine has another degree"
        ),
    },
)
_VLLM = Framework(
    program="vllm",
    mark=r"(?:.*(?:engine_args|vllm_config|engine_kwargs)\.)?"
    r"(?:data|pipeline|tensor|prefill_context)_parallel_size"
    r"|tensor_parallel|tp|dp|pp|tp_size|dp_size|pp_size",
    meshes=(_SERVING_MESH,),
    kinds=("document", "command", "python"),
    # VLLM is LangChain's, and vLLM distilabel's.
    classes=("LLM", "VLLM", "vLLM", "EngineArgs", "AsyncEngineArgs"),
    without=r"(?:fsdp|ddp|dp_shard|dp_replicate)(?:_size|_degree)?",
    word=r"\bvllm\b|\bmax[-_]model[-_]len\b|^tensor-parallel-size:|\bengine_(?:kw)?args\b",
)
# Inside of tp: (ep, moe_tp).
_SGLANG = replace(
    _VLLM,
    program="sglang",
    meshes=(
        replace(
            _SERVING_MESH,
            keys={
                **_SERVING_MESH.keys,
                **dict.fromkeys(("ep", "ep_size", "expert_parallel_size"), "ep"),
            },
            experts=("dp", "pp", "ep", "moe_tp"),
        ),
    ),
    classes=("Engine", "ServerArgs"),
    # Its YAML has the options as keys.
    word=r"\b(?:sglang|sgl)\b|^model-path:|mem[-_]fraction[-_]static",
)
# TensorRT-LLM, tensorrt_llm/mapping.py: (pp, cp, tp), and inside of tp (moe_tp, moe_ep). Options of
# trtllm-serve and trtllm-bench; YAML of both, which has two parts for a disaggregated server.
_TRTLLM = replace(
    _VLLM,
    program="serving",
    meshes=(
        replace(
            _SERVING_MESH,
            keys={
                **_SERVING_MESH.keys,
                **dict.fromkeys(("ep", "ep_size", "moe_expert_parallel_size"), "ep"),
                "moe_tensor_parallel_size": "moe_tp",
            },
            order=("pp", "cp", "tp"),
            section=r"(?P<part>context_servers|generation_servers)?",
            experts=("pp", "cp", "moe_tp", "ep"),
            refused={r".*enable_attention_dp=true": "attention has other groups"},
        ),
    ),
    kinds=("document", "command"),
    classes=(),
    mark=r"(?:(?:context|generation)_servers\.)?(?:tensor|pipeline)_parallel_size"
    r"|tp|pp|tp_size|pp_size",
    word=r"\btrtllm|tensorrt[-_]llm|moe_expert_parallel_size",
)
_SERVING = replace(
    _VLLM,
    program="serving",
    mark=r"(?:vllm_)?(?:data|pipeline|tensor|prefill_context)_parallel_size",
    # The other spelling is that of ms-swift and TRL.
    meshes=(
        replace(
            _SERVING_MESH,
            keys={
                **_SERVING_MESH.keys,
                **{f"vllm_{key}": axis for key, axis in _SERVING_MESH.keys.items()},
            },
        ),
    ),
    kinds=("command",),
    classes=(),
    word="",
)

# OpenRLHF, openrlhf/utils/deepspeed/deepspeed.py, DeepspeedStrategy.setup_distributed: (dp, sp,
# tp), and ms-swift, swift/sequence_parallel/sequence_parallel.py, _init_device_mesh: (data,
# sequence). Gradients are reduced along both. Engines have the trainer's ranks if all parts are
# colocated, in GRPO of ms-swift unless vllm_mode is server.
_SEQUENCE_MESH = Mesh(
    keys={
        "sequence_parallel_size": "sp",
        "ring_attn_size": "sp",
        "tensor_parallel_size": "tp",
        "ds_tensor_parallel_size": "tp",
    },
    order=("dp", "sp", "tp"),
    section=r"(?P<part>)(?:ds)?",
    rest="dp",
    roles={"dp": "shard", "sp": "shard"},
    flattened=("dp", "sp"),
    needs=("sp", "tp"),
)
_SEQUENCE = Framework(
    program="unknown",
    mark=r"sequence_parallel_size|(?:ds\.)?ring_attn_size|(?:ds|vllm)[._]tensor_parallel_size",
    meshes=(
        _SEQUENCE_MESH,
        Mesh(
            keys={"tensor_parallel_size": "tp", "vllm_tensor_parallel_size": "tp"},
            order=("dp", "tp"),
            section=r"(?P<part>)(?:vllm)?",
            rest="dp",
            roles={"dp": "apart"},
            needs=("tp",),
            unless=r"vllm_mode=server",
        ),
    ),
    launch={"actor.num_nodes": "hosts", "actor.num_gpus_per_node": "ranks_per_host"},
    kinds=("command",),
    word=r"\bswift[ \t]+(?:sft|pt|rlhf)\b"
    r"|(?:^|\n)[^#\n]*\bcolocate_all(?!\w*[ \t=]+[fF]alse)",
)
# OpenRLHF with engines on ranks of their own.
_OPENRLHF = replace(
    _SEQUENCE,
    meshes=(
        _SEQUENCE_MESH,
        replace(
            _SERVING_MESH,
            keys=_SEQUENCE.meshes[1].keys,
            section=r"(?P<part>)(?:vllm)?",
        ),
    ),
    word=r"\bopenrlhf\b",
)

# AReaL, areal/engine/fsdp_utils/parallel.py, ParallelHelper.build_mesh: (dp, sp, tp), and another
# mesh with parallel experts. areal/engine/megatron_engine.py starts Megatron-LM with its default
# order. Each engine has ranks of its own, or shares them with another.
_AREAL = Framework(
    program="unknown",
    # Names that `split_allocations` makes.
    mark=r".*\.\d+\.(?:fsdp|archon|megatron|sglang|vllm)_engine\.[dptce]",
    meshes=(
        replace(
            _SEQUENCE_MESH,
            keys={"d": "dp", "c": "sp", "t": "tp"},
            is_part=True,
            section=r"(?P<part>.*)\.(?:fsdp|archon)_engine",
            needs=("dp",),
            refused={
                r".*\.(?:fsdp|archon)_engine\.[pe]=(?!1$).*": (
                    "its mesh with stages or experts is not read"
                ),
            },
        ),
        replace(
            _MEGATRON_MESH,
            keys={"d": "dp", "p": "pp", "t": "tp", "c": "cp", "e": "ep", "et": "etp"},
            is_part=True,
            section=r"(?P<part>.*)\.megatron_engine",
            needs=("dp", "pp"),
            expert_tp=False,
            is_sharded=True,
        ),
        replace(
            _SERVING_MESH,
            keys={"d": "dp", "p": "pp", "t": "tp"},
            section=r"(?P<part>.*)\.(?:sglang|vllm)_engine",
        ),
    ),
    launch={"cluster.n_gpus_per_node": "ranks_per_host"},
    bases=r".*",  # an allocation is whole
    kinds=("document", "command"),
)

# SkyRL, skyrl/backends/skyrl_train/distributed/fsdp_utils.py, create_device_mesh, has the meshes of
# verl, and megatron_strategy.py starts Megatron-LM with its default order. Each engine has its
# ranks, and the critic may have others than the policy.
_SKYRL_REFUSED = {
    r"trainer\.critic\.(?:fsdp|megatron)_config\..*_size=(?!-1$|none$|null$).*": (
        "the critic has a mesh of its own"
    ),
    r"generator\.inference_engine_\w+_parallel_size=.*": "older keys of engines are not read",
}
_SKYRL = Framework(
    program="unknown",
    mark=r"trainer\.placement\..*|generator\.inference_engine\..*",
    meshes=(
        replace(
            _VERL_FSDP,
            keys={"fsdp_size": "fsdp", "sequence_parallel_size": ""},
            section=r"(?P<part>trainer\.policy)(?:\.fsdp_config)?",
            unless=r"trainer\.strategy=megatron|trainer\.policy\.megatron_config\..*",
            when=r"trainer\.strategy=(?!megatron$).*",
            refused={r"trainer\.strategy=(?!fsdp|megatron$).*": _STRATEGY, **_SKYRL_REFUSED},
        ),
        replace(
            _MEGATRON_MESH,
            section=r"(?P<part>trainer\.policy)\.megatron_config",
            is_sharded=True,
            unless=r"trainer\.strategy=(?!megatron$).*",
            only={".*": r"trainer\.strategy=megatron"},
            refused=_SKYRL_REFUSED,
        ),
        replace(
            _SERVING_MESH,
            section=r"(?P<part>generator)\.inference_engine",
        ),
    ),
    launch={
        "trainer.placement.policy_num_nodes": "hosts",
        "trainer.placement.policy_num_gpus_per_node": "ranks_per_host",
    },
    defaults={"hosts": 1},
    kinds=("document", "command"),
)

# VeOmni, veomni/distributed/parallel_state.py, init_parallel_state: (pp, dp_replicate, dp_shard,
# ulysses, cp, tp), and for experts (ep_replicate, ep_fsdp, ep). Parameters are sharded along
# dp_shard, ulysses and cp together. With fsdp_mode ddp, torch_parallelize.py hands DDP the group of
# both data axes. Its commands name a file that may set other sizes.
_VEOMNI_AXES = ("pp", "dp_replicate", "dp_shard", "ulysses", "cp", "tp")
_VEOMNI_MESH = Mesh(
    keys={f"{axis}_size": axis for axis in (*_VEOMNI_AXES, "ep")},
    order=_VEOMNI_AXES,
    section=r"(?P<part>train)\.accelerator",
    rest="dp_shard",
    fill="dp_replicate",
    unless=r"train\.accelerator\.fsdp_config\.fsdp_mode=ddp",
    refused={
        r".*\.ep_outside=(?!false$|none$).*|.*\.extra_parallel_sizes"
        r"(?:\.|=(?!nested|none$)).*": "its mesh of experts is not read",
        r"train\.accelerator\.fsdp_config\.fsdp_mode=(?!fsdp|ddp$).*": _STRATEGY,
    },
    experts=("pp", "dp_replicate", "efsdp", "ep"),
    flattened=("dp_shard", "ulysses", "cp"),
    needs=(*_VEOMNI_AXES, "ep"),
)
_VEOMNI = Framework(
    program="torch",
    mark=r"train\.accelerator\..*",
    meshes=(
        _VEOMNI_MESH,
        replace(
            _VEOMNI_MESH,
            unless=".*",
            when=_VEOMNI_MESH.unless,
            reduction="ddp",
            refused={
                r"train\.accelerator\.(?:pp|ulysses|cp|tp|ep)_size=(?!1$|none$).*": (
                    "DDP reduces along the data axes only"
                )
            },
        ),
    ),
)

# Plain options: the order of options does not specify the order of ranks, which is torchtitan's.
_PLAIN_AXES = ("pp", "dp_replicate", "dp", "ddp", "dp_shard", "fsdp", "cp", "sp", "tp")
PLAIN = Framework(
    program="unknown",
    mark=r"(?:" + "|".join(_PLAIN_AXES) + r")(?:_size|_degree)?",
    meshes=(
        Mesh(
            keys={
                f"{axis}{unit}": axis for axis in _PLAIN_AXES for unit in ("", "_size", "_degree")
            },
            order=_PLAIN_AXES,
            reduction="dtensor",
            flattened=(),
        ),
    ),
    kinds=("command",),
    # FastVideo's data axes, which shard parameters along the ranks of sp.
    without=r"hsdp_(?:replicate|shard)_dim",
)

FRAMEWORKS: tuple[Framework, ...] = (
    _AREAL,
    _SKYRL,
    _VEOMNI,
    _TORCHTITAN,
    _TORCHTUNE,
    _NANOTRON,
    _NANOTRON_CLASS,
    _NEOX,
    _VERL,
    _VERL_SFT,
    _AUTOMODEL,
    _SWIFT,
    _NEMO,
    _NEMO_RECIPES,
    _MEGATRON,
    _AXOLOTL,
    _ACCELERATE,
    _ACCELERATE_FSDP,
    _DEEPSPEED,
    _SEQUENCE,
    _OPENRLHF,
    _PRIME,
    _LIGHTNING,
    _TRTLLM,
    _VLLM,
    _SGLANG,
    _SERVING,
    PLAIN,
)
"""The first of them whose mark is among the keys of a file reads it."""
