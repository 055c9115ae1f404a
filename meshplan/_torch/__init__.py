"""The one room for torch's internals: every private name of torch that meshplan uses, once.

``from meshplan._torch import local_tensor_mode`` looks a name up when it is first imported; torch
itself is imported then, and not before. The tables of ``_names`` say where each name is, what for,
and how it is checked; ``Entry.gives`` is the result of an import. A name that this torch does not
have is a class that raises ``UnsupportedTorchError`` when it is used. ``install`` first checks all
of them, by name and form (``_entry``), some by effect (``effects``).

No other package knows a private name of torch (``tests/test_torch_names.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshplan._torch._entry import (
    TESTED_TORCH,
    find_moved,
    is_absent,
    refuse_moved,
    tested_range,
)
from meshplan._torch._names import NAMES, TESTING_NAMES

if TYPE_CHECKING:
    # What the names are to a type checker.
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor, device
    from torch._C import _len_torch_dispatch_stack as dispatch_modes
    from torch._C._autograd import _profiler_enabled as profiler_enabled
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
    from torch._C._distributed_c10d import (
        _DistributedBackendOptions as DistributedBackendOptions,
    )
    from torch._C._distributed_c10d import (
        _resolve_process_group as resolve_process_group,
    )
    from torch._C._distributed_c10d import _SymmetricMemory as SymmetricMemory
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed import ProcessGroup
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._functional_collectives import (
        _maybe_wrap_tensor as maybe_wrap_tensor,
    )
    from torch.distributed._local_tensor import LocalTensor, local_tensor_mode
    from torch.distributed._symmetric_memory import (
        rendezvous as symmetric_memory_rendezvous,
    )
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import default_pg_timeout
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import _redistribute as redistribute_module
    from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
    from torch.distributed.tensor._redistribute import (
        _FlattenedTransformInfo as FlattenedTransformInfo,
    )
    from torch.distributed.tensor._redistribute import _TransformInfo as TransformInfo
    from torch.distributed.tensor.placement_types import _MaskPartial as MaskPartial
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.utils._config_module import _UNSET_SENTINEL as UNSET_SENTINEL
    from torch.utils._python_dispatch import (
        _disable_current_modes as disable_current_modes,
    )
    from torch.utils._python_dispatch import (
        _get_current_dispatch_mode_stack as mode_stack,
    )
    from torch.utils._python_dispatch import _pop_mode as pop_mode
    from torch.utils._python_dispatch import _push_mode as push_mode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves, tree_map_only

    # Constructors and values that are not typed further.
    BackendOptionsBase: Any
    functional_operators: Any
    attribute_source: Callable[..., Any]
    install_guard: Callable[..., Any]
    foreach_mul_: Callable[[Sequence[Tensor], float | Tensor], None]
    new_process_group: Callable[..., tuple[ProcessGroup, Any]]
    is_in_bad_fork: Callable[[], bool]
    fp32_precision: Callable[..., str]
    set_fp32_precision: Callable[..., Any]
    tracing_state: Any
    fp16_reduced_precision: Callable[[], Any]
    bf16_reduced_precision: Callable[[], Any]

    FakeStore: type[Store]

    # Values of the moment.
    default_group: Callable[[], ProcessGroup]
    default_store: Callable[[], Store]
    merging_is_disabled: Callable[[], bool]
    compiler_settings: Callable[[], Mapping[str, Any]]
    guard_builder: Callable[[], Any]
    frame_translator: Callable[[], Any]
    frames_compiled: Callable[[], Any]
    comm_debug_mode: Callable[[], type[Any] | None]
    debug_mode: Callable[[], type[Any] | None]

    # Attributes and methods of objects.
    root_mesh_of: Callable[[DeviceMesh], DeviceMesh]
    flattened_meshes_of: Callable[[DeviceMesh], dict[str, DeviceMesh]]
    thread_of_mesh: Callable[[DeviceMesh], int | None]
    device_types_of: Callable[[ProcessGroup], list[device]]
    backend_of: Callable[[ProcessGroup, device], Any]
    timeout_of: Callable[[Any], timedelta | None]
    tensors_of_ranks: Callable[[Tensor], dict[int, Tensor]]
    local_tensor_of: Callable[[DTensor], Tensor]
    is_zerotensor: Callable[[Tensor], bool]
    version_of: Callable[[Tensor], int]
    collective_of: Callable[[Any], str | None]
    fsdp_state_of: Callable[[Any], Any]
    fsdp_group_of: Callable[[Any], Any]
    gather_bytes: Callable[[Any, Tensor, Tensor], Any]
    register_backend: Callable[..., None]
    set_default_backend: Callable[..., None]

    new_steps: Callable[[Any, Any, bool | None], list[Any]]
    cached_steps: Any
    forget_planners: Callable[[], None]
    cached_operators: Any
    forget_operators: Callable[[], None]
    shard_order_of: Callable[[Any], Any]

    # Names, for getattr and setattr.
    SEAM: str
    WORLD: str
    NAMES_OF_GROUPS: str
    EXECUTOR: str
    REDUCE_VALUE: str
    REDUCE_SHARD_VALUE: str
    REPLICATE_TO_SHARD: str
    TO_REPLICATE_TENSOR: str
    TO_NEW_SHARD_DIM: str
    IMPORT_SOURCE: str
    CACHE_KEY_TAG: str
    ALL_GATHER_SINGLE: str
    REDUCE_SCATTER_SINGLE: str

else:

    def __getattr__(name: str) -> Any:
        for names in (NAMES, TESTING_NAMES):
            if name in names:
                found = globals()[name] = names[name].given()
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
