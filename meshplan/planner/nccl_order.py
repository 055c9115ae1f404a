"""The order in which NCCL adds the contributions of a group, as a model without NCCL.

The model can show that two groups may disagree. It cannot certify that they agree. It covers NCCL
2.30.7, the Simple protocol, hosts whose GPUs are joined by NVSwitch and have a network card each,
and the Ring and Tree algorithms. NVLS, CollNet and PAT have no order here. Sources are its files.

NCCL splits a message over channels. Each *head* of a node, which is the rank that talks to other
nodes, has a ring and two trees. With ``n`` heads, channel ``c`` has the head ``c % n``, and the
second tree if ``c >= n``. A rank is always a *group rank* (0..n-1, ascending by group order). A
group is given by ``node_of_member``: for every group rank, any integer that names its NCCL node (a
host or an MNNVL clique). IEEE addition commutes but does not associate, so an association tree
determines the bits of a sum, except the payload of a NaN.

Trees may be as deep as a group is long. Every function here is iterative; only Python's own ``==``,
``hash`` and ``repr`` on nested tuples recurse, so compare with `same_bits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, cast

from meshplan.errors import LayoutError
from meshplan.topology._reading import group_values

Tree: TypeAlias = int | tuple["Tree", "Tree"]
"""An association of additions: a leaf is a group rank, a pair is ``left + right``."""

_T = TypeVar("_T")

_RING_CHUNK_BYTES = 2 * 1024 * 1024
_ALIGN_BYTES = 16
_MOST_CHANNELS = 64


def nodes_of_group(
    node_of_member: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Group ranks of every node: nodes by their first group rank, ranks in a node ascending.
    ``LayoutError`` without members. Source: NCCL's src/init.cc (node numbering).
    """
    if len(node_of_member) == 0:
        raise LayoutError("node_of_member is empty; give one node number per group rank")
    nodes = group_values((node, rank) for rank, node in enumerate(node_of_member))
    return tuple(map(tuple, nodes.values()))


def count_heads(ranks_per_node: Sequence[int]) -> int:
    """Heads of a group: the most ranks that one of its nodes has; 1 on a single node.

    Source: NCCL's src/graph/search.cc: the search starts a channel at each network card. A
    communicator has at most 64 channels, of which half are for second trees.
    """
    return min(max(ranks_per_node), _MOST_CHANNELS // 2) if len(ranks_per_node) > 1 else 1


def ring_order(node_of_member: Sequence[int], head: int = 0) -> tuple[int, ...]:
    """Group ranks in ring order, starting at group rank 0: of several nodes each contributes the
    rank at position ``head`` and then the others descending, cyclically; a single one ascends.

    Source: NCCL's src/graph/search.cc (order tried first on NVSwitch hosts) and src/graph/rings.cc.
    The rings of heads 0 and 1 stand in a log of three H100 hosts.
    """
    return join_rings(nodes_of_group(node_of_member), head)


def join_rings(nodes: Sequence[Sequence[int]], head: int) -> tuple[int, ...]:
    """`ring_order` of the group ranks of every node, as of `nodes_of_group`."""
    if len(nodes) == 1:
        return tuple(nodes[0])
    ring: list[int] = []
    for ranks in nodes:
        first = head % len(ranks)
        ring += ranks[first::-1]
        ring += ranks[:first:-1]
    start = ring.index(0)
    return (*ring[start:], *ring[:start])


def ring_sequence(ring: Sequence[int], chunk: int) -> list[int]:
    """The order in which ring chunk ``chunk`` adds: from the position after ``chunk`` round to it,
    each rank its own value on the left of the partial sum that arrives. ``LayoutError`` if there is
    no such chunk. Source: NCCL's src/device/all_reduce.h, runRing.
    """
    if not 0 <= chunk < len(ring):
        raise LayoutError(
            f"ring chunk {chunk} does not exist in a ring of {len(ring)} ranks; use "
            f"0..{len(ring) - 1}"
        )
    return [*ring[chunk + 1 :], *ring[: chunk + 1]]


def ring_tree(ring: Sequence[int], chunk: int) -> Tree:
    """Association of ring chunk ``chunk``, by `ring_sequence`."""
    first, *others = ring_sequence(ring, chunk)
    acc: Tree = first
    for rank in others:
        acc = (rank, acc)
    return acc


def root_tree(ring: Sequence[int], rank: int) -> Tree:
    """Association of a block that must end at group rank ``rank``, once round the ring: its block
    in a reduce-scatter, or a reduce to it. ``LayoutError`` if it is not on the ring.

    Source: NCCL's src/device/reduce_scatter.h and src/device/reduce.h, runRing.
    """
    if rank not in ring:
        raise LayoutError(f"group rank {rank} is not on the ring {tuple(ring)}")
    return ring_tree(ring, list(ring).index(rank))


def ring_chunks(numel: int, group_size: int, itemsize: int) -> list[tuple[int, int, int]]:
    """The ring chunk of every element of an all-reduce message: ascending ``(start, stop, chunk)``
    that cover ``[0, numel)``. ``LayoutError`` for a number that is negative, or 0 but for
    ``numel``.

    Source: NCCL's src/device/all_reduce.h, runRing; 2 MiB is half of the default 4 MiB buffer of
    the Simple protocol.
    """
    if numel < 0 or group_size <= 0 or itemsize <= 0:
        raise LayoutError(
            "ring_chunks needs numel >= 0, group_size >= 1 and itemsize >= 1; got "
            f"numel={numel}, group_size={group_size}, itemsize={itemsize}"
        )
    # Full loops move one buffer per chunk. The last loop splits the rest evenly, in multiples of
    # 16 bytes.
    width = max(_RING_CHUNK_BYTES // itemsize, 1)
    align = max(_ALIGN_BYTES // itemsize, 1)
    pieces: list[tuple[int, int, int]] = []
    offset = 0
    while offset < numel:
        remaining = numel - offset
        if remaining < width * group_size:
            width = -(-remaining // (group_size * align)) * align
        end = min(offset + width * group_size, numel)
        for chunk, start in enumerate(range(offset, end, width)):
            pieces.append((start, min(start + width, end), chunk))
        offset = end
    return pieces


def btree_children(num_nodes: int, node: int) -> tuple[int | None, int | None]:
    """Children ``(child0, child1)`` of ``node`` in the first of NCCL's two node trees;
    ``LayoutError`` if there is no such node. Source: NCCL's src/graph/trees.cc, ncclGetBtree.
    """
    if not 0 <= node < num_nodes:
        raise LayoutError(f"node {node} does not exist among {num_nodes} nodes")
    if node == 0:
        return None, 1 << ((num_nodes - 1).bit_length() - 1) if num_nodes > 1 else None
    # The lowest set bit of a node is its height: children are half that distance to each side. A
    # right child beyond the last node moves closer until it exists.
    step = (node & -node) >> 1
    if step == 0:
        return None, None
    child0 = node - step
    while step and node + step >= num_nodes:
        step >>= 1
    return child0, node + step if step else None


def second_tree_node(num_nodes: int, node: int) -> int:
    """The node at the place that ``node`` has in the first tree; its root is that of node 0.
    Mirrored if the number of nodes is even, else shifted by one (ncclGetDtree of the same file).
    """
    return (node + 1) % num_nodes if num_nodes % 2 else num_nodes - 1 - node


def tree_tree(
    node_of_member: Sequence[int],
    head: int = 0,
    *,
    second: bool = False,
) -> Tree:
    """Association of the Tree algorithm in one channel, the same for every element of it.

    Inside a node the ranks form a chain, which starts at position ``head`` and wraps round. Nodes
    form the tree of `btree_children`, or with ``second`` that tree of `second_tree_node`. A rank
    computes ``((own + down0) + down1) + down2``: first the chain, then child nodes. The first rank
    of a chain receives from child 1, the second (the first if it is alone) from child 0.

    Source: NCCL's src/graph/connect.cc (balanced tree) and src/device/all_reduce.h.
    """
    return node_tree(nodes_of_group(node_of_member), head, second=second)


def node_tree(nodes: Sequence[Sequence[int]], head: int, *, second: bool) -> Tree:
    """`tree_tree` of the group ranks of every node, as of `nodes_of_group`."""
    return fold_nodes(nodes, head, second, int, _join)


def _join(left: Tree, right: Tree) -> Tree:
    return left, right


def fold_nodes(
    nodes: Sequence[Sequence[int]],
    head: int,
    second: bool,
    leaf: Callable[[int], _T],
    join: Callable[[_T, _T], _T],
) -> _T:
    """`fold` of the `tree_tree` of the group ranks of every node, as of `nodes_of_group`."""
    count = len(nodes)
    heads: list[_T | None] = [None] * count  # by place in the first tree
    # A parent precedes its children, so the reversed list has all children before their parent.
    parents_first = [0]
    for place in parents_first:
        children = btree_children(count, place)
        parents_first.extend(child for child in children if child is not None)
    for place in reversed(parents_first):
        ranks = nodes[second_tree_node(count, place) if second else place]
        # Without a network there is one chain. It starts at the first rank.
        start = head % len(ranks) if count > 1 else 0
        chain = (*ranks[start:], *ranks[:start])
        # Each rank adds the sum of the rest of the chain, then the sums that it receives.
        child0, child1 = btree_children(count, place)
        total = leaf(chain[-1])
        for rank in chain[-2:0:-1]:
            total = join(leaf(rank), total)
        if child0 is not None:
            total = join(total, cast(_T, heads[child0]))
        if len(chain) > 1:
            total = join(leaf(chain[0]), total)
        if child1 is not None:
            total = join(total, cast(_T, heads[child1]))
        heads[place] = total
    root = heads[0]
    assert root is not None
    return root


def fold(
    tree: Tree,
    leaf: Callable[[int], _T],
    join: Callable[[_T, _T], _T],
) -> _T:
    """Evaluate ``tree``: ``leaf`` on every rank, ``join(left, right)`` on every pair.

    Children come before their pair, left before right. No recursion.
    """
    # A stack: None marks that both children of a pair are done.
    pending: list[Tree | None] = [tree]
    values: list[_T] = []
    while pending:
        item = pending.pop()
        if item is None:
            right = values.pop()
            values.append(join(values.pop(), right))
        elif isinstance(item, int):
            values.append(leaf(item))
        else:
            left_child, right_child = item
            pending += [None, right_child, left_child]
    return values[0]


def relabel(tree: Tree, leaf: Callable[[int], int]) -> Tree:
    """The same association over other ranks."""
    renamed: Tree = fold(tree, leaf, _join)
    return renamed


def draw(tree: Tree) -> str:
    """The tree as text, e.g. ``(0+(1+2))``. Different trees have different texts."""
    parts: list[str] = []
    pending: list[Tree | str] = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple):
            pending += [")", item[1], "+", item[0], "("]
        else:
            parts.append(str(item))
    return "".join(parts)


def canonical(tree: Tree) -> Tree:
    """The tree with the two children of every pair sorted by their smallest group rank;
    ``LayoutError`` if a rank occurs twice. Two trees over the same ranks have the same canonical
    form if and only if one becomes the other by commuting additions, hence the same IEEE result for
    all finite data.
    """
    seen: set[int] = set()

    def leaf(rank: int) -> tuple[int, Tree]:
        if rank in seen:
            raise LayoutError(f"group rank {rank} occurs twice in a tree; each rank adds once")
        seen.add(rank)
        return rank, rank

    def join(left: tuple[int, Tree], right: tuple[int, Tree]) -> tuple[int, Tree]:
        low, high = (left, right) if left[0] < right[0] else (right, left)
        return low[0], (low[1], high[1])

    return fold(tree, leaf, join)[1]


def same_bits(first: Tree, second: Tree) -> bool:
    """Whether trees over the same ranks, up to commuting, are equal: equal bits on finite data."""
    return draw(canonical(first)) == draw(canonical(second))
