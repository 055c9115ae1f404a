"""The private names of torch that every job needs. ``install`` checks all of them."""

from __future__ import annotations

from meshplan._torch._entry import Entry

_C10D = "torch.distributed.distributed_c10d"
_BINDINGS = "torch._C._distributed_c10d"
_FUNCTIONAL = "torch.distributed._functional_collectives"
_GROUPS = "finds and creates process groups"
_STORES = "agrees with other ranks"

_PROCESS_GROUPS = {
    "PrefixStore": Entry("torch.distributed", "PrefixStore", _STORES),
    "Store": Entry("torch.distributed", "Store", _STORES),
    "TCPStore": Entry("torch.distributed", "TCPStore", _STORES),
    "SymmetricMemory": Entry(_BINDINGS, "_SymmetricMemory", "memory that GPUs share"),
    "symmetric_memory_rendezvous": Entry(
        "torch.distributed._symmetric_memory",
        "rendezvous",
        "memory that GPUs share",
    ),
    "resolve_process_group": Entry(
        _BINDINGS, "_resolve_process_group", "groups that a graph names"
    ),
    "default_pg_timeout": Entry(_C10D, "default_pg_timeout", _GROUPS),
    "c10d": Entry(_C10D, "", _GROUPS, parts=("get_backend_config",)),
    "default_group": Entry(_C10D, "_get_default_group", _GROUPS, "call"),
    "default_store": Entry(_C10D, "_get_default_store", _GROUPS, "call"),
    "new_process_group": Entry(_C10D, "_new_process_group_helper", _GROUPS, "call"),
    "NAMES_OF_GROUPS": Entry(_C10D, "_pg_names", _GROUPS, "text"),
    "WORLD": Entry(
        _C10D,
        "_world",
        _GROUPS,
        "text",
        parts=("pg_group_ranks", "pg_map", "pg_names"),
    ),
    "device_types_of": Entry(
        "torch.distributed", "ProcessGroup._device_types", _GROUPS, "attribute"
    ),
    "backend_of": Entry("torch.distributed", "ProcessGroup._get_backend", _GROUPS, "method"),
    "ProcessGroup": Entry("torch.distributed", "ProcessGroup", _GROUPS, parts=("bound_device_id",)),
    "BackendOptionsBase": Entry(_BINDINGS, "Backend.Options", "options of the backend"),
    "timeout_of": Entry(
        _BINDINGS,
        "Backend.Options._timeout",
        "waits as long as the backend does",
        "attribute",
        lenient=True,
    ),
}

_WIRE = "moves the data of reductions"
_COLLECTIVES = {
    "functional_operators": Entry(
        "torch",
        "ops._c10d_functional",
        _WIRE,
        parts=(
            "all_gather_into_tensor",
            "all_gather_into_tensor_out",
            "all_reduce",
            "all_to_all_single",
            "reduce_scatter_tensor",
            "wait_tensor",
        ),
    ),
    "AsyncCollectiveTensor": Entry(_FUNCTIONAL, "AsyncCollectiveTensor", "results under way"),
    "maybe_wrap_tensor": Entry(_FUNCTIONAL, "_maybe_wrap_tensor", "results under way"),
}

_MESHES = {
    "root_mesh_of": Entry(
        "torch.distributed.device_mesh",
        "DeviceMesh._get_root_mesh",
        "flattened meshes",
        "method",
    ),
    "flattened_meshes_of": Entry(
        "torch.distributed.device_mesh",
        "DeviceMesh._flatten_mapping",
        "flattened meshes",
        "attribute",
    ),
    "thread_of_mesh": Entry(
        "torch.distributed.device_mesh",
        "DeviceMesh._thread_id",
        "distinguishes meshes of threads that simulate ranks",
        "attribute",
        optional=True,
    ),
}

_LOCAL = "torch.distributed._local_tensor"
_MODES = "torch.utils._python_dispatch"
_COUNTED = "shows a reduction to torch's counters of collectives"
_TENSORS = {
    "FakeTensor": Entry("torch._subclasses.fake_tensor", "FakeTensor", "tensors without data"),
    "LocalTensor": Entry(_LOCAL, "LocalTensor", "simulated ranks"),
    "local_tensor_mode": Entry(_LOCAL, "local_tensor_mode", "simulated ranks"),
    "tensors_of_ranks": Entry(_LOCAL, "LocalTensor._local_tensors", "simulated ranks", "attribute"),
    "local_tensor_of": Entry(
        "torch.distributed.tensor",
        "DTensor._local_tensor",
        "compares replicas",
        "attribute",
    ),
    "version_of": Entry(
        "torch",
        "Tensor._version",
        "sees whether a tensor was written to",
        "attribute",
    ),
    "foreach_mul_": Entry("torch", "_foreach_mul_", "scales gradients"),
    "is_zerotensor": Entry("torch", "Tensor._is_zerotensor", "reads the bits of tensors", "method"),
    "is_traceable_wrapper_subclass": Entry(
        _MODES,
        "is_traceable_wrapper_subclass",
        "compares the parts of tensor subclasses",
    ),
    "disable_current_modes": Entry(
        _MODES, "_disable_current_modes", "computes numbers while torch traces"
    ),
    "dispatch_modes": Entry(
        "torch._C",
        "_len_torch_dispatch_stack",
        "leaves operators where torch's modes watch them",
    ),
    "mode_stack": Entry(_MODES, "_get_current_dispatch_mode_stack", _COUNTED),
    "pop_mode": Entry(_MODES, "_pop_mode", _COUNTED),
    "push_mode": Entry(_MODES, "_push_mode", _COUNTED),
    "comm_debug_mode": Entry(
        "torch.distributed.tensor.debug._comm_mode",
        "CommDebugMode",
        _COUNTED,
        "loaded",
        source=r"^class CommDebugMode\b",
    ),
    "debug_mode": Entry("torch.utils._debug_mode", "DebugMode", _COUNTED, "loaded"),
    "profiler_enabled": Entry(
        "torch._C._autograd",
        "_profiler_enabled",
        "names spans in torch's profiler",
    ),
}

_REDISTRIBUTE = "torch.distributed.tensor._redistribute"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_STEPS = "hands a planned reduction to torch's executor"
_REDUCES = "reductions and shards of a plan"
_OTHER_RANK = "makes steps again that torch has cached for another rank"
_MOVED = ("self", "local_tensor", "mesh", "mesh_dim", "current_logical_shape")
_REDISTRIBUTION = {
    "redistribute_module": Entry(_REDISTRIBUTE, "", _STEPS),
    # Looked up in its module on every redistribution: what ``install`` replaces.
    "SEAM": Entry(
        _REDISTRIBUTE,
        "_optimize_transform_infos",
        "the seam",
        "text",
        parameters=(
            "transform_infos",
            "device_mesh",
            "src_placements",
            "dst_placements",
        ),
    ),
    "merging_is_disabled": Entry(
        _REDISTRIBUTE,
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        "whether torch merges its own steps",
        "current",
    ),
    # Runs a plan. A redistribution through another function would not be seen.
    "EXECUTOR": Entry(
        _REDISTRIBUTE,
        "redistribute_local_tensor",
        "runs the plan",
        "text",
        parameters=("local_tensor", "current_spec", "target_spec", "..."),
        same_in=(
            "torch.distributed.tensor._dispatch",
            "torch.distributed.tensor._api",
        ),
        callers=(
            (_REDISTRIBUTE, "Redistribute.forward"),
            (
                "torch.distributed.tensor._dispatch",
                "OpDispatcher.redistribute_local_args",
            ),
        ),
    ),
    "TransformInfo": Entry(
        _REDISTRIBUTE,
        "_TransformInfo",
        "steps of a plan",
        parameters=("mesh_dim", "src_dst_placements", "logical_shape"),
    ),
    "FlattenedTransformInfo": Entry(_REDISTRIBUTE, "_FlattenedTransformInfo", _STEPS),
    "new_steps": Entry(
        _REDISTRIBUTE,
        "_gen_transform_infos_non_cached",
        _OTHER_RANK,
        parameters=("src_spec", "dst_spec", "use_graph_based_transform"),
    ),
    "cached_steps": Entry(
        _REDISTRIBUTE,
        "_gen_transform_infos",
        _OTHER_RANK,
        parts=("cache_clear",),
    ),
    "forget_planners": Entry(_REDISTRIBUTE, "clear_redistribute_planner_cache", _OTHER_RANK),
    "cached_operators": Entry(
        "torch.distributed.tensor",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
        _OTHER_RANK,
        parts=("cache_clear",),
    ),
    "forget_operators": Entry("torch._C", "_clear_DTensor_sharding_propagator_cache", _OTHER_RANK),
    "shard_order_of": Entry(
        "torch.distributed.tensor._dtensor_spec",
        "DTensorSpec.shard_order",
        "compares the lengths of shards that are moved",
        "attribute",
    ),
    "collective_of": Entry(
        _REDISTRIBUTE,
        "_TransformInfo._comm_type_key",
        "identifies the steps that torch merges",
        "method",
    ),
    "MaskPartial": Entry(_PLACEMENTS, "_MaskPartial", "embeddings with sharded rows"),
    "NormPartial": Entry(
        "torch.distributed.tensor._ops._math_ops",
        "_NormPartial",
        "gradient norms",
    ),
    # What torch calls on a placement. ``placements`` has classes that take them over.
    "REDUCE_VALUE": Entry(
        _PLACEMENTS,
        "Partial._reduce_value",
        _REDUCES,
        "text",
        parameters=("self", "tensor", "mesh", "mesh_dim"),
    ),
    "REDUCE_SHARD_VALUE": Entry(
        _PLACEMENTS,
        "Partial._reduce_shard_value",
        _REDUCES,
        "text",
        parameters=("self", "tensor", "mesh", "mesh_dim", "shard_spec"),
    ),
    "REPLICATE_TO_SHARD": Entry(
        _PLACEMENTS,
        "Shard._replicate_to_shard",
        _REDUCES,
        "text",
        parameters=("self", "local_tensor", "mesh", "mesh_dim", "shard_index"),
    ),
    "TO_REPLICATE_TENSOR": Entry(
        _PLACEMENTS,
        "Shard._to_replicate_tensor",
        _REDUCES,
        "text",
        parameters=_MOVED,
    ),
    "TO_NEW_SHARD_DIM": Entry(
        _PLACEMENTS,
        "Shard._to_new_shard_dim",
        _REDUCES,
        "text",
        parameters=(*_MOVED, "new_shard_dim"),
    ),
}

_FRAMES = "torch._C._dynamo.eval_frame"
_SKIPPING = "keeps torch.compile out of meshplan's own functions"
_GRAPHS = "graphs under construction"
_TIED = "ties compiled graphs to the plan"
# Dynamo takes seconds to import, and most jobs never do: it is looked for in its source.
_COMPILING = {
    "FrameAction": Entry(_FRAMES, "_FrameAction", _SKIPPING),
    "FrameExecStrategy": Entry(_FRAMES, "_FrameExecStrategy", _SKIPPING),
    "set_code_exec_strategy": Entry(_FRAMES, "set_code_exec_strategy", _SKIPPING),
    "TracingContext": Entry("torch._guards", "TracingContext", _GRAPHS, parts=("try_get",)),
    "tracing": Entry("torch._guards", "tracing", _GRAPHS, "call"),
    # Where ``try_get`` reads the context. In a torch without it, ``try_get`` is called.
    "tracing_state": Entry("torch._guards", "_TLS", _GRAPHS, optional=True),
    "get_proxy_mode": Entry("torch.fx.experimental.proxy_tensor", "get_proxy_mode", _GRAPHS),
    "UNSET_SENTINEL": Entry("torch.utils._config_module", "_UNSET_SENTINEL", "the cache key tag"),
    "CACHE_KEY_TAG": Entry(
        "torch.compiler.config",
        "cache_key_tag",
        "separates compiled graphs on disk, so that this job loads none of another job",
        "text",
    ),
    "compiler_settings": Entry(
        "torch.compiler.config",
        "_config",
        "the cache key tag",
        "current",
        parts=("get",),
    ),
    "install_guard": Entry(
        "torch._dynamo.guards",
        "install_guard",
        _TIED,
        "call",
        source=r"^def install_guard\b",
    ),
    "guard_builder": Entry(
        "torch._dynamo.guards",
        "GuardBuilder",
        _TIED,
        "current",
        source=r"^    def EQUALS_MATCH\b",
    ),
    "attribute_source": Entry(
        "torch._dynamo.source",
        "AttrSource",
        _TIED,
        "call",
        source=r"^class AttrSource\b",
    ),
    "frame_translator": Entry(
        "torch._dynamo.symbolic_convert",
        "InstructionTranslator",
        _TIED,
        "loaded",
        source=r"^    def current_tx\b",
    ),
    "IMPORT_SOURCE": Entry(
        "torch._dynamo.symbolic_convert",
        "InstructionTranslatorBase.import_source",
        _TIED,
        "text",
        source=r"^    def import_source\b",
    ),
    "frames_compiled": Entry(
        "torch._dynamo.convert_frame",
        "FRAME_COMPILE_COUNTER",
        _TIED,
        "loaded",
        source=r"^FRAME_COMPILE_COUNTER\b",
    ),
}

NAMES: dict[str, Entry] = {
    **_PROCESS_GROUPS,
    **_COLLECTIVES,
    **_MESHES,
    **_TENSORS,
    **_REDISTRIBUTION,
    **_COMPILING,
}
"""By the name under which ``meshplan._torch`` has it."""

# The names that only ``meshplan.testing`` needs.

_BATCHES = "splits batches of any structure"
_CALLS = "the order of gathers"
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
    "fsdp_state_of": Entry(
        "torch.distributed.fsdp", "FSDPModule._get_fsdp_state", _CALLS, "method"
    ),
    "fsdp_group_of": Entry(
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "FSDPState._fsdp_param_group",
        _CALLS,
        "attribute",
    ),
    "is_in_bad_fork": Entry("torch.cuda", "_is_in_bad_fork", _CONTROLS),
    "fp32_precision": Entry("torch._C", "_get_fp32_precision_getter", _CONTROLS),
    "set_fp32_precision": Entry("torch._C", "_set_fp32_precision_setter", _CONTROLS),
    "fp16_reduced_precision": Entry(
        "torch._C",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        _CONTROLS,
    ),
    "bf16_reduced_precision": Entry(
        "torch._C",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        _CONTROLS,
    ),
    "DistributedBackendOptions": Entry(
        "torch._C._distributed_c10d",
        "_DistributedBackendOptions",
        _GLOO,
        stores=(
            "store",
            "group_rank",
            "group_size",
            "timeout",
            "global_ranks_in_group",
        ),
    ),
    "gather_bytes": Entry("torch.distributed", "ProcessGroupGloo._allgather_base", _GLOO, "method"),
    "register_backend": Entry(
        "torch.distributed", "ProcessGroup._register_backend", _GLOO, "method"
    ),
    "set_default_backend": Entry(
        "torch.distributed",
        "ProcessGroup._set_default_backend",
        _GLOO,
        "method",
    ),
    # What C++ calls on a process group written in Python; ``process_group`` binds them.
    "ALL_GATHER_SINGLE": Entry("torch.distributed", "ProcessGroup._allgather_base", _GLOO, "text"),
    "REDUCE_SCATTER_SINGLE": Entry(
        "torch.distributed", "ProcessGroup._reduce_scatter_base", _GLOO, "text"
    ),
}
