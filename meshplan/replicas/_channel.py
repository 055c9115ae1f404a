"""Messages between the ranks of a mesh: words of all, records of one, bytes from one to another.

Every wait is bounded by the timeout of the group.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshplan._bits import bytes_of, flatten, tensor_of
from meshplan._torch import WORLD
from meshplan._torch import functional_operators as _ops
from meshplan.errors import GroupAgreementError, GroupStateError, SignatureMismatchError
from meshplan.flatten import registry, this_rank
from meshplan.kernel import DIGEST_VERSION
from meshplan.layout import Layout
from meshplan.record import Record

# Of one rank's list; the rest is not sent.
_CHARACTERS = 16 << 20
_SHOWN_LINES = 5
_SHOWN_RANKS = 16


class ReplicaChannel:
    """The ranks of a mesh, by position: row-major coordinates.

    Args:
        mesh: this rank is in it, and one other at least.
        layout: of ``mesh``.

    Raises:
        GroupAgreementError: at the first use of a mesh, a rank did not arrive in time, or arrived
            with another version.
        GroupCreationError: the backend failed on some rank.
        GroupStateError: there is no group, and none can be made.
    """

    def __init__(self, mesh: DeviceMesh, layout: Layout) -> None:
        axes = tuple(range(len(layout.sizes)))
        try:
            group = registry().get(mesh, layout, axes, token=Record.of(replicas=DIGEST_VERSION))
        except GroupAgreementError as error:
            raise GroupAgreementError(
                f"replicas could not be compared: {error.args[0]}",
                missing=error.missing,
                differing=error.differing,
            ) from error
        # It sends nothing, so every comparison would succeed.
        self.backend: str = getattr(c10d, WORLD).pg_map[group.pg][0]
        if self.backend == "fake":
            raise GroupStateError(
                "the mesh is on the 'fake' backend, which sends nothing, so there are no replicas "
                "to compare; initialise the process group with a real backend"
            )
        self._group: ProcessGroup = group.pg
        self.size = layout.world_size
        self.position = layout.ranks.index(this_rank())
        self._device = torch.device(mesh.device_type)
        # A mesh has only the type of its devices; this rank's is the current one.
        if self._device.type != "cpu":
            index = torch.accelerator.current_device_index()
            self._device = torch.device(mesh.device_type, index)

    def gather(self, words: Tensor) -> Tensor:
        """All ranks' int64 ``words``, of one shape: CPU tensor [ranks, ...]."""
        mine = flatten(words.to(self._device))
        found = mine.new_empty(self.size * mine.numel())
        # With an output, because of gloo: see GlooWire.all_gather.
        name = self._group.group_name
        _ops.wait_tensor(_ops.all_gather_into_tensor_out(mine, self.size, name, out=found))
        return found.cpu().view(self.size, *words.shape)

    def broadcast(self, record: Any, source: int) -> Any:
        """On all ranks, the JSON record of the rank at position ``source``."""
        data = json.dumps(record, ensure_ascii=False).encode(errors="replace")
        # The length first: the receivers must allocate. Bytes that ranks other than the source
        # brought are overwritten.
        size = torch.tensor([len(data)], device=self._device)
        dist.broadcast(size, group=self._group, group_src=source)
        text = tensor_of(data[: int(size)].ljust(int(size))).to(self._device)
        dist.broadcast(text, group=self._group, group_src=source)
        return json.loads(bytes_of(text))

    def send(self, data: Tensor, to: int) -> None:
        """Send a 1-D tensor to the rank at position ``to``, which calls ``receive``."""
        dist.send(data.to(self._device).contiguous(), group=self._group, group_dst=to)

    def receive(self, like: Tensor, source: int) -> Tensor:
        """The tensor that ``source`` sends: of the length, dtype and device of ``like``."""
        found = torch.empty_like(like, device=self._device, memory_format=torch.contiguous_format)
        dist.recv(found, group=self._group, group_src=source)
        return found.to(like.device)


def hash_lines(lines: Sequence[str]) -> tuple[int, int]:
    """128 bits of the sha256 of a list, as two int64."""
    found = hashlib.sha256("\n".join(lines).encode()).digest()
    first, second = (int.from_bytes(found[i : i + 8], "little", signed=True) for i in (0, 8))
    return first, second


def check_lists(
    channel: ReplicaChannel, layout: Layout, gathered: Tensor, lines: Sequence[str]
) -> None:
    """Raise, on all ranks, unless all brought the same list.

    Args:
        channel: the ranks of the mesh.
        layout: of the mesh.
        gathered: ``hash_lines`` of all ranks: [ranks, 2].
        lines: this rank's list.

    Raises:
        SignatureMismatchError: with the lines by which the first rank that differs does. The
            common list is that of most ranks, of equally many that of the lowest coordinate.
    """
    words = [tuple(row) for row in gathered.tolist()]
    # Every rank computes the following from the same words, so all take the same branches and join
    # the same broadcasts.
    counts = Counter(words)
    if len(counts) == 1:
        return
    common = max(counts, key=lambda one: (counts[one], -words.index(one)))
    odd = [position for position, one in enumerate(words) if one != common]
    text = channel.broadcast("\n".join(lines)[:_CHARACTERS], words.index(common))
    theirs = text.split("\n")
    mine, common_lines = set(lines), set(theirs)
    changes = [f"only there '{line}'" for line in lines if line not in common_lines]
    changes += [f"only on the others '{line}'" for line in theirs if line not in mine]
    shown = "; ".join(changes[:_SHOWN_LINES])
    if len(changes) > _SHOWN_LINES:
        shown += f"; and {len(changes) - _SHOWN_LINES} more"
    # The text of one rank, so that the error is the same on all.
    text = channel.broadcast(shown[:_CHARACTERS], odd[0])
    ranks = [layout.ranks[position] for position in odd]
    listed = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    listed += ", ..." if len(ranks) > _SHOWN_RANKS else ""
    raise SignatureMismatchError(
        f"rank{'s' if len(ranks) > 1 else ''} {listed} passed other tensors to the comparison of "
        f"replicas than the other ranks of mesh {layout}; on rank {ranks[0]}: {text}; pass the "
        "same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks "
        "that share them",
        rank=layout.ranks[words.index(common)] if channel.position in odd else ranks[0],
    )
