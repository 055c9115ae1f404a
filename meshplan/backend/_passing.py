"""Calls that the inner backend runs, in memory of the form that it expects.

Gloo reads and writes ``numel`` elements from the first address of most tensors, whatever their
strides. For a tensor with the lazy bit of a negation or a conjugation, torch's dispatcher passes a
copy and drops the results in it. So such tensors are staged: the backend gets a contiguous copy,
whose elements are written back once the call has finished.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshplan._torch import WORLD, backend_of
from meshplan._torch.process_group import WrappingProcessGroup
from meshplan.backend._work import Coalescing, PassedWork, writable
from meshplan.collectives._options import check_destination
from meshplan.errors import BackendError

# Torch refuses strided tensors in these calls, and does so here.
_REFUSE_STRIDES = (
    "send",
    "recv",
    "recv_anysource",
    "alltoall_base",
    "all_to_all_single",
)


class PassingProcessGroup(WrappingProcessGroup):
    """A group that stages tensors for ``inner``, and has blocks of coalesced calls."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        self._coalescing: Coalescing | None = None

    def pass_on(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of ``inner``, with staged tensors where the memory requires it."""
        return self._pass_staged(_Stage(method), method, *arguments, **options)

    def pass_bytes_on(self, method: str, *arguments: Any) -> Any:
        """``pass_on`` of integers as their bytes: bitwise operations of a dtype that gloo lacks."""
        return self._pass_staged(_Stage(method, as_bytes=True), method, *arguments)

    def _pass_staged(self, stage: _Stage, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "reduce" and arguments[-1].rootRank != self.rank():
            # Gloo writes partial results to the tensors of other ranks than the root.
            stage.always = True
        placed = [stage.place(one, i == 0) for i, one in enumerate(arguments)]
        # Keywords name what is written: tensors, output_tensors, output.
        named = {
            key: stage.place(one, key.startswith(("tensor", "out"))) for key, one in options.items()
        }
        found = getattr(self.inner, method)(*placed, **named)
        block = self._coalescing
        if stage.copies:
            works = [] if found is None else [found]
            found = PassedWork(works, stage.finish(), arguments[0] if arguments else [])
        if block is not None and isinstance(found, dist.Work):
            block.add(found)
        return found

    def start_block(self, device: torch.device) -> None:
        """Begin a block of calls; those on CUDA devices are launched together. Raises BackendError:
        the inner backend does not support it for this device.
        """
        lists = getattr(c10d, WORLD).pg_coalesce_state
        try:
            if device.type == "cpu":
                backend_of(self.inner, device)
                lists[self] = _CallsAtOnce(self, lists)
            self._coalescing = Coalescing(self.inner, device)
        except RuntimeError as error:
            # Torch has opened its list of the block's calls. It would add every later one to it.
            lists.pop(self, None)
            raise BackendError(
                f"the inner backend cannot coalesce calls on {device.type}: {error}; call the "
                "collectives without the block, or pass it no device"
            ) from error

    def end_block(self, _: torch.device) -> dist.Work | None:
        block, self._coalescing = self._coalescing, None
        return None if block is None else block.end()


class _CallsAtOnce(list[Any]):
    """Torch's list of a block's calls on CPUs, which stays open after an error: it runs them."""

    def __init__(self, group: PassingProcessGroup, lists: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._group, self._lists = group, lists

    def append(self, call: Any) -> None:
        given = [call.tensor] if call.dst_tensor is None else [call.dst_tensor, call.tensor]
        op = {} if call.redop is None else {"op": call.redop}
        del self._lists[self._group]
        try:
            call.op(*given, group=self._group, **op)
        finally:
            self._lists[self._group] = self


class _Stage:
    """The contiguous copies for a call of the inner group, and the tensors that they stand for."""

    def __init__(self, method: str, as_bytes: bool = False) -> None:
        self._refuses, self._is_sent = method in _REFUSE_STRIDES, method == "send"
        self._as_bytes = as_bytes
        self.always = False
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._lock = Lock()

    def place(self, value: Any, written: bool) -> Any:
        """``value``, or the same lists with a contiguous copy of each tensor that needs one."""
        if isinstance(value, (list, tuple)):
            return [self.place(one, written) for one in value]
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        lazy = value.is_neg() or value.is_conj()
        plain = not lazy and (self._refuses or value.is_contiguous())
        if plain and not self.always:
            return _bytes_of(value) if self._as_bytes else value
        copy = writable(value).resolve_conj().resolve_neg().contiguous()
        copy = copy.clone() if self.always else copy
        if written and not self._is_sent:
            self.copies.append((value, value if self.always else copy))
        return _bytes_of(copy) if self._as_bytes else copy

    def finish(self) -> Callable[[], None]:
        """Writes the results back, once, on whichever thread waits first."""
        inference = any(tensor.is_inference() for tensor, _ in self.copies)
        return partial(self._write_back, inference)

    def _write_back(self, inference: bool) -> None:
        with self._lock, torch.inference_mode(inference), torch.no_grad():
            copies, self.copies = self.copies, []
            # After the transfer: a rank that raised before it would be out of step with the others.
            for tensor, _ in copies:
                check_destination(writable(tensor))
            for tensor, copy in copies:
                if copy is not tensor:
                    writable(tensor).copy_(copy)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of contiguous memory, which results are written to."""
    # One element, or none, is contiguous with any stride.
    flat = writable(tensor).as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
