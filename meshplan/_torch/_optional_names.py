"""The private names of torch that only some jobs need: FSDP2, DDP, ``meshplan.testing``."""

from __future__ import annotations

from meshplan._torch._entry import Entry

_FSDP = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FSDP}._fsdp_param_group"
_COMMON = f"{_FSDP}._fsdp_common"


_WATCHES = "warns of reductions outside the contract"

WATCHED_FSDP_NAMES: dict[str, Entry] = {
    # Runs right before a reduction, once there are gradients.
    "WAIT_FOR_POST_BACKWARD": Entry(
        _GROUP,
        "FSDPParamGroup._wait_for_post_backward",
        _WATCHES,
        "text",
        parameters=("self", "..."),
        callers=((_GROUP, "FSDPParamGroup.post_backward"),),
    ),
    "training_state_of": Entry(_GROUP, "FSDPParamGroup._training_state", _WATCHES, "attribute"),
    "post_backward_state": Entry(_GROUP, "TrainingState.POST_BACKWARD", _WATCHES, "current"),
    "FSDPParamGroup": Entry(
        _GROUP, "FSDPParamGroup", _WATCHES, stores=("mesh_info", "all_reduce_grads")
    ),
    "FSDPMeshInfo": Entry(_COMMON, "FSDPMeshInfo", _WATCHES, stores=("shard_process_group",)),
    "DDPMeshInfo": Entry(_COMMON, "DDPMeshInfo", _WATCHES, stores=("replicate_process_group",)),
}
"""What the warning about FSDP2 uses, checked once FSDP2 is imported."""

_DDP = "torch.nn.parallel.distributed"

DDP_NAMES: dict[str, Entry] = {
    # Begins a step whose backward reduces.
    "PRE_FORWARD": Entry(
        _DDP,
        "DistributedDataParallel._pre_forward",
        _WATCHES,
        "text",
        parameters=("self", "..."),
    ),
    "hooks_of_ddp": Entry(_DDP, "DistributedDataParallel._comm_hooks", _WATCHES, "attribute"),
}
"""What is used of DDP, checked by ``install``: torch imports it always."""


_BATCHES = "splits batches of any structure"
_CONTROLS = "settings that reach the bits of gradients"
_GLOO = "a backend that models NCCL over gloo"

TESTING_NAMES: dict[str, Entry] = {
    # Its module registers the backend `fake`.
    "FakeStore": Entry(
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        "runs a script as one rank of many that do not exist",
    ),
    "tree_leaves": Entry("torch.utils._pytree", "tree_leaves", _BATCHES),
    "tree_map_only": Entry("torch.utils._pytree", "tree_map_only", _BATCHES),
    "BatchNorm": Entry("torch.nn.modules.batchnorm", "_BatchNorm", "refuses batch norms"),
    "is_in_bad_fork": Entry("torch.cuda", "_is_in_bad_fork", _CONTROLS),
    "fp32_precision": Entry("torch._C", "_get_fp32_precision_getter", _CONTROLS),
    "set_fp32_precision": Entry("torch._C", "_set_fp32_precision_setter", _CONTROLS),
    "fp16_reduced_precision": Entry(
        "torch._C", "_get_cublas_allow_fp16_reduced_precision_reduction", _CONTROLS
    ),
    "bf16_reduced_precision": Entry(
        "torch._C", "_get_cublas_allow_bf16_reduced_precision_reduction", _CONTROLS
    ),
    "DistributedBackendOptions": Entry(
        "torch._C._distributed_c10d",
        "_DistributedBackendOptions",
        _GLOO,
        stores=("store", "group_rank", "group_size", "timeout", "global_ranks_in_group"),
    ),
    "gather_bytes": Entry("torch.distributed", "ProcessGroupGloo._allgather_base", _GLOO, "method"),
    "register_backend": Entry(
        "torch.distributed", "ProcessGroup._register_backend", _GLOO, "method"
    ),
    "set_default_backend": Entry(
        "torch.distributed", "ProcessGroup._set_default_backend", _GLOO, "method"
    ),
    # What C++ calls on a process group written in Python; ``process_group`` binds them.
    "ALL_GATHER_SINGLE": Entry("torch.distributed", "ProcessGroup._allgather_base", _GLOO, "text"),
    "REDUCE_SCATTER_SINGLE": Entry(
        "torch.distributed", "ProcessGroup._reduce_scatter_base", _GLOO, "text"
    ),
}
