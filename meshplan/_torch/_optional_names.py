"""The private names of torch that only ``meshplan.testing`` needs."""

from __future__ import annotations

from meshplan._torch._entry import Entry

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
