"""The folds of the kernels over peers as functions on a CPU: any number of ranks, without processes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshplan.contract import Contract
from meshplan.kernel._device_code import kernel_name
from meshplan.kernel._device_peers import plan_of
from tests.devices import at_byte

ROOT = Path(__file__).parents[1]
WIDTHS = (1, 2, 4, 8, 16)
_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_LINE = 64


class FoldCase(ctypes.Structure):
    """As tests/native/peer_fold.cpp has it."""

    _fields_ = (
        ("out", _POINTER),
        ("own", _POINTER),
        ("region", ctypes.POINTER(_POINTER)),
        ("plan", ctypes.c_char_p),
        ("stride", ctypes.c_ulonglong),
        ("divisor", ctypes.c_ulonglong),
        ("numel", _INT64),
        ("rank", _INT),
        ("leaves", _INT),
        ("chain", _INT),
        ("unused", _INT),
    )


class PeerFolds:
    """The folds, compiled in ``folder``."""

    def __init__(self, folder: Path) -> None:
        library = folder / "peer_fold.so"
        command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
        command += ["-shared", "-fPIC", "-DMP_EMULATED"]
        command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'native'}"]
        source = ROOT / "tests" / "native" / "peer_fold.cpp"
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.emulated_accesses.restype = ctypes.c_ulonglong
        self.accesses: dict[int, int] = {}
        """Of the last fold: how many loads and stores there were, by their bytes."""

    def __call__(
        self,
        leaves: Sequence[Tensor],
        op: str,
        shape: Sequence[int],
        contract: Contract,
        *,
        rank: int = 0,
        offset: int = 0,
    ) -> list[Tensor]:
        """The result of ``rank``, whose leaf is in a tensor while the others are in tiles, and the
        copies that it stores at its peers. The leaf and the result start ``offset`` bytes after a
        multiple of 16. Others: as for ``meshplan.definition.reduce_leaves``.
        """
        first = leaves[0]
        plan = plan_of(contract.order, tuple(shape))
        assert plan is not None
        stride = -(-max(first.nbytes, 1) // _LINE) * _LINE
        tiles = [_aligned(stride * len(leaves)) for _ in leaves]
        for index, leaf in enumerate(leaves):
            mine = tiles[rank][index * stride :][: leaf.nbytes]
            # Of its own piece there is no copy.
            mine.copy_(leaf.view(torch.uint8)) if index != rank else mine.fill_(0xFF)
        own, out = at_byte(leaves[rank], offset), at_byte(torch.zeros_like(first), offset)
        call = FoldCase(
            out=out.data_ptr(),
            own=own.data_ptr(),
            region=(_POINTER * len(tiles))(*[tile.data_ptr() for tile in tiles]),
            plan=plan.batches + b"\0",
            stride=stride,
            divisor=len(leaves) if op == "avg" else 0,
            numel=first.numel(),
            rank=rank,
            leaves=len(leaves),
            chain=plan.chain,
        )
        for width in WIDTHS:
            self._library.emulated_accesses(width)
        getattr(self._library, kernel_name(first.dtype, op, contract))(ctypes.byref(call))
        self.accesses = {width: self._library.emulated_accesses(width) for width in WIDTHS}
        copies = [
            tile[: first.nbytes].view(first.dtype) for r, tile in enumerate(tiles) if r != rank
        ]
        return [out, *copies]


def _aligned(nbytes: int) -> Tensor:
    room = torch.empty(nbytes + _LINE, dtype=torch.uint8)
    return room[-room.data_ptr() % _LINE :][:nbytes]
