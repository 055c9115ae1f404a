"""What is sent, seen from one rank: the functional collectives that it calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """What this rank sends, in order, and how many bytes of it to ranks on other nodes.

    An all-to-all and an all-gather send each peer its own part directly.
    """

    def __init__(self, per_node: int = 1) -> None:
        super().__init__()
        self.per_node = per_node
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.elements: list[int] = []
        self.off_node = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if space == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.names.append(name)
            self.dtypes.append(args[0].dtype)
            self.elements.append(args[0].numel())
            peers = dist.get_process_group_ranks(_resolve_process_group(args[-1]))
            split = args[2] if name == "all_to_all_single" else [args[0].numel()] * len(peers)
            node = dist.get_rank() // self.per_node
            for peer, numel in zip(peers, split, strict=True):
                if peer // self.per_node != node:
                    self.off_node += numel * args[0].element_size()
        return func(*args, **(kwargs or {}))
