"""Digests of this rank's tensors after a step, and the answers to what rank 0 asks about them."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshplan._bits import bytes_of, flatten
from meshplan._dtypes import name_of
from meshplan._torch import disable_current_modes
from meshplan.kernel import digest_table, digest_words
from meshplan.replicas._tensors import NamedTensor
from meshplan.run._words import LANES, format_words

# Steps of a set that rank 0 may ask about, such as those before a late rank had connected, and
# bytes of all copies of their tensors.
KEPT = 32
COPIED_BYTES = 64 << 20
# Of a tensor whose elements are compared.
BLOCKS = 64
_LEAST_BYTES = 1024


@dataclass(slots=True)
class _Snapshot:
    """Tensors of a set; their digests, which a call waits for; and copies of small ones."""

    names: list[str]
    whats: list[str]
    read: Callable[[], Tensor]
    copies: list[Tensor]


class Snapshots:
    """The last snapshots of this rank, by set and step."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: dict[tuple[str, int], _Snapshot] = {}

    def take(self, name: str, step: int, tensors: Sequence[NamedTensor]) -> Callable[[], str]:
        """Digest tensors, and copy small ones, whose elements can be compared later; returns what
        waits for the digest of their digests.
        """
        local = [one.local.detach() for one in tensors]
        nbytes = sum(one.nbytes for one in local)
        with torch.no_grad(), disable_current_modes():
            # Whoever waits for the digests has waited for the copies.
            copies = [one.clone() for one in local] if nbytes <= COPIED_BYTES else []
            read = land([digest_words(one) for one in local])
        names, whats = [one.name for one in tensors], [str(one) for one in tensors]
        with self._lock:
            self._kept[name, step] = _Snapshot(names, whats, read, copies)
            for key in [key for key in self._kept if key[0] == name][:-KEPT]:
                del self._kept[key]
            copied = 0
            for one in reversed(self._kept.values()):
                copied += sum(copy.nbytes for copy in one.copies)
                one.copies = one.copies if copied <= COPIED_BYTES else []
        return lambda: _texts_of(digest_table([read()]))[0]

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question of rank 0."""
        what, head = question["what"], {"answer": question["ask"]}
        with self._lock:
            one = self._kept.get((question["set"], question["step"]))
            copies = one.copies if one is not None else []
        if one is not None and what == "tensors":
            return head | {
                "words": _texts_of(one.read()),
                "names": one.names,
                "whats": one.whats,
            }
        if not copies:
            return head | {"gone": True}
        tensor = copies[question["row"]]
        flat = flatten(tensor)
        size = max(math.ceil(flat.numel() / BLOCKS), _LEAST_BYTES // flat.element_size())
        pieces = torch.split(flat, size)
        head |= {
            "dtype": name_of(flat.dtype),
            "shape": list(tensor.shape),
            "numel": flat.numel(),
        }
        head["block_bytes"] = size * flat.element_size()
        if what == "blocks":
            return head | {"blocks": _texts_of(digest_table(pieces))}
        values = [bytes_of(pieces[number]) for number in question["blocks"]]
        return head | {"values": [base64.b64encode(one).decode() for one in values]}


def land(words: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Begin to copy words of tensors to the CPU, for which nothing waits here; returns what waits
    for it: int64 CPU tensor [tensors, 2].
    """
    rows: dict[torch.device, list[int]] = {}
    for row, one in enumerate(words):
        rows.setdefault(one.device, []).append(row)
    parts = [(some, _land(torch.stack([words[row] for row in some]))) for some in rows.values()]

    def read() -> Tensor:
        table = torch.empty((len(words), LANES), dtype=torch.int64, device="cpu")
        for some, wait in parts:
            table[some] = wait()
        return table

    return read


def _land(words: Tensor) -> Callable[[], Tensor]:
    if words.device.type != "cuda":
        words = words.cpu()
        return lambda: words
    landed = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True)
    landed.copy_(words, non_blocking=True)
    done = torch.cuda.current_stream(words.device).record_event()

    def read() -> Tensor:
        done.synchronize()
        return landed

    return read


def _texts_of(table: Tensor) -> list[str]:
    return [format_words(row) for row in table.tolist()]
