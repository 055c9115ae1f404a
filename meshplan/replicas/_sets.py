"""Whether all ranks came to compare the same tensors; and if not, what differs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from meshplan.errors import SignatureMismatchError
from meshplan.layout import Layout
from meshplan.replicas._talk import Talk

__all__ = ["check_sets", "set_words"]

# Of one rank's list, or of how another differs from it; the rest is cut off.
_BYTES = 16 << 20
_SHOWN_LINES = 5
_SHOWN_RANKS = 16


def set_words(lines: Sequence[str]) -> tuple[int, int]:
    """128 bits of the sha256 of a list, as two int64."""
    found = hashlib.sha256("\n".join(lines).encode()).digest()
    first, second = (int.from_bytes(found[i : i + 8], "little", signed=True) for i in (0, 8))
    return first, second


def check_sets(talk: Talk, layout: Layout, gathered: Tensor, lines: Sequence[str]) -> None:
    """Raise, on all ranks, unless all brought the same list.

    Args:
        talk: the ranks of the mesh.
        layout: of the mesh.
        gathered: ``set_words`` of all ranks: [ranks, 2].
        lines: this rank's list.

    Raises:
        SignatureMismatchError: with the lines by which the first rank that differs does. The
            common list is that of most ranks, of equally many that of the lowest coordinate.
    """
    words = [tuple(row) for row in gathered.tolist()]
    counts = Counter(words)
    if len(counts) == 1:
        return
    common = max(counts, key=lambda one: (counts[one], -words.index(one)))
    odd = [position for position, one in enumerate(words) if one != common]
    theirs = _tell(talk, "\n".join(lines), words.index(common)).split("\n")
    mine, common_lines = set(lines), set(theirs)
    changes = [f"only there '{line}'" for line in lines if line not in common_lines]
    changes += [f"only on the others '{line}'" for line in theirs if line not in mine]
    shown = "; ".join(changes[:_SHOWN_LINES])
    more = f"; and {len(changes) - _SHOWN_LINES} more" if len(changes) > _SHOWN_LINES else ""
    text = _tell(talk, shown + more, odd[0])
    ranks = [layout.ranks[position] for position in odd]
    listed = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (", ..." if len(ranks) > 16 else "")
    raise SignatureMismatchError(
        f"rank{'s' if len(ranks) > 1 else ''} {listed} came to the comparison of replicas with "
        f"other tensors than the others of mesh {layout}; on rank {ranks[0]}: {text}; give the "
        "same tensors at the same step on every rank of the mesh, or a mesh of only those ranks "
        "that share them",
        rank=layout.ranks[words.index(common)] if talk.position in odd else ranks[0],
    )


def _tell(talk: Talk, text: str, source: int) -> str:
    """A text of the rank at position ``source``, on all ranks."""
    data = text.encode()[:_BYTES]
    (size,) = talk.tell([len(data)], source)
    mine = data if talk.position == source else b""
    padded = mine.ljust(-(-size // 8) * 8, b"\0")
    words = [
        int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)
    ]
    told = talk.tell(words, source) if words else []
    found = b"".join(word.to_bytes(8, "little", signed=True) for word in told)[:size]
    return found.decode(errors="replace")
