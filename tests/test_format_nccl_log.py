from __future__ import annotations

from collections.abc import Sequence

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology import Reading
from meshplan.topology.formats.nccl_log import read, recognises
from tests.refusals import refusal


def line(host: str, rank: int, text: str, prefix: str = "") -> str:
    return f"{prefix}{host}:{100 + rank}:{200 + rank} [{rank % 2}] NCCL INFO {text}\n"


def start(rank: int, size: int, comm: str, name: str) -> str:
    return (
        f"[Rank {rank}] ncclCommInitRankConfig comm {comm} rank {rank} nranks {size} cudaDev 0 "
        f"nvmlDev 0 busId 1000 commId {name} - Init START"
    )


def placed(
    rank: int, size: int, comm: str, nodes: int, local: Sequence[int], mnnvl: int = 0
) -> str:
    return (
        f"comm {comm} rank {rank} nRanks {size} nNodes {nodes} "
        f"localRanks {local[1]} localRank {local[0]} MNNVL {mnnvl}"
    )


def format_reading(found: Reading) -> str:
    notes = "".join(f"{note}\n" for note in found.notes)
    return f"{found.kind}: nodes {found.nodes} {found.names} complete {found.complete}\n{notes}"


# Two hosts with 3 and 1 ranks; every rank has its own address of the one communicator.
UNEVEN = "".join(
    line(host, rank, start(rank, 4, f"0xa{rank}", "0x77"))
    + line(host, rank, placed(rank, 4, f"0xa{rank}", 2, local))
    + line(host, rank, f"Trees [0] {rank + 1}/-1/-1->{rank}->{rank - 1}")
    + line(host, rank, "2 coll channels, 2 collnet channels, 0 nvls channels, 4 p2p channels")
    for rank, (host, local) in enumerate(
        [("red", (0, 3)), ("red", (1, 3)), ("blue", (0, 1)), ("red", (2, 3))]
    )
)


class TestReadings(TestCase):
    def test_uneven_hosts_are_read(self) -> None:
        text = UNEVEN + line("red", 0, "Channel 00/02 :    0   1   3   2")
        self.assertExpectedInline(
            format_reading(read(text)),
            """\
NCCL log: nodes ((0, 1, 3), (2,)) ('red', 'blue') complete True
line 1: communicator 0x77 of 4 ranks on 2 nodes, 2 channels
line 3: Trees [0] 1/-1/-1->0->-1
line 7: Trees [0] 2/-1/-1->1->0
line 11: Trees [0] 3/-1/-1->2->1
line 15: Trees [0] 4/-1/-1->3->2
line 17: Channel 00/02 : 0 1 3 2
""",
        )

    def test_old_logs_without_ids_are_read(self) -> None:
        text = "".join(
            line("n0", 0, f"Channel {ring:02}/06 :    0   1", "[1,0]<stdout>:") for ring in range(6)
        )
        text += line("n0", 0, "Trees [0] 1/-1/-1->0->-1|-1->0->1/-1/-1 [1] -1/-1/-1->0->1|1->0->-1")
        text += line("n1", 1, "Trees [0] 0->1->-1/-1/-1")
        text += line(
            "n0", 0, "comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1b0 - Init COMPLETE", "[rank0]: "
        )
        text += line(
            "n1", 1, "comm 0x1 rank 1 nranks 2 cudaDev 0 busId 1b0 - Init COMPLETE", "[rank1]: "
        )
        self.assertExpectedInline(
            format_reading(read(text)),
            """\
NCCL log: nodes ((0,), (1,)) ('n0', 'n1') complete True
line 1: communicator of 2 ranks
line 1: Channel 00/06 : 0 1
line 2: Channel 01/06 : 0 1
line 3: Channel 02/06 : 0 1
line 4: Channel 03/06 : 0 1
line 5: ... 2 more rings
line 7: Trees [0] 1/-1/-1->0->-1|-1->0->1/-1/-1 [1] -1/-1/-1->0->1|1->0->-1
line 8: Trees [0] 0->1->-1/-1/-1
""",
        )

    def test_graph_lines_are_read(self) -> None:
        text = "".join(
            line("n0", rank, f"Ring 00 : {1 - rank} -> {rank} -> {1 - rank}")
            + line("n0", rank, f"Tree 0 : {rank - 1} -> {rank} -> {-rank}/-1/-1")
            for rank in range(2)
        )
        self.assertExpectedInline(
            format_reading(read(text)),
            """\
NCCL log: nodes None () complete False
line 1: Ring 00 : 1 -> 0 -> 1
line 2: Tree 0 : -1 -> 0 -> 0/-1/-1
line 3: Ring 00 : 0 -> 1 -> 0
line 4: Tree 0 : 0 -> 1 -> -1/-1/-1
""",
        )

    def test_log_with_only_a_graph_is_read(self) -> None:
        text = line("n0", 0, "=== System : maxBw 10.0 totalBw 20.0 ===") + line(
            "n0", 0, "CPU/0-0 (1/2/-1)"
        )
        self.assertExpectedInline(
            format_reading(read(text)),
            """\
NCCL log (GRAPH): nodes None () complete False
no line has rings, trees or ranks; set NCCL_DEBUG_SUBSYS=INIT,GRAPH
line 1: the graph that NCCL searches is not read: pass NCCL_TOPO_DUMP_FILE instead
""",
        )


def test_format_is_recognised() -> None:
    assert recognises(UNEVEN)
    assert not recognises("GPU0 X NV4\n")
    with pytest.raises(TopologyInputError, match="NCCL_DEBUG=INFO"):
        read("nothing of NCCL\n")


def test_graph_with_rings_is_a_log() -> None:
    text = line("n0", 0, "=== System : maxBw 10.0 totalBw 20.0 ===") + line(
        "n0", 0, "Channel 00/01 : 0 1"
    )
    assert read(text).kind == "NCCL log"


def test_interleaved_communicators_are_separated() -> None:
    # World of 4 and two pairs; the same thread and the same addresses come again.
    text = ""
    for rank in range(4):
        text += line("n", rank, start(rank, 4, "0x1", "0xaaaa"))
    for rank in range(4):
        text += line("n", rank, placed(rank, 4, "0x1", 1, (rank, 4)))
        text += line("n", rank, "8 coll channels, 8 nvls channels")
    for rank in range(4):
        text += line("n", rank, start(rank // 2, 2, "0x2", f"0xb{rank % 2}"))
        text += line("n", rank, f"{4 if rank == 3 else 2} coll channels, 8 nvls channels")
    found = read(text)
    assert found.nodes == ((0, 1, 2, 3),)
    assert found.complete
    assert found.domains is None
    (note,) = [note for note in found.notes if note.code]
    assert str(note) == (
        "line 19: MP201: communicator 0xb1 of 2 ranks: channel counts differ: 2 (rank 0), 4 (rank 1)"
    )


def test_communicators_of_equal_size_are_separated() -> None:
    text = "".join(
        line("n", rank, start(rank // 2, 2, "0x2", f"0xb{rank % 2}"))
        + line("n", rank, f"{4 if rank % 2 else 2} coll channels, 8 nvls channels")
        for rank in range(4)
    )
    (note,) = [note for note in read(text).notes if note.code]
    assert note.message == (
        "communicators of 2 ranks: channel counts differ: 2 (rank 0 and 1 more), 4 (rank 0 and 1 more)"
    )
    # By the rings, because the log has no counts.
    text = "".join(
        line("n", rank, start(0, 2, "0x2", f"0xb{rank}"))
        + line("n", rank, f"Channel 00/{2 + rank:02} : 0 1")
        for rank in range(2)
    )
    assert [note.code for note in read(text).notes if note.code] == ["MP201"]


def test_split_communicators_have_no_id() -> None:
    text = "".join(
        line("n", rank, start(rank, 4, "0x1", "0xaaaa"))
        + line("n", rank, f"ncclCommSplit comm 0x2 rank {rank // 2} nranks 2 cudaDev 0 nvmlDev 0 busId 1 "
               f"parent 0x1 childCount 1 color {rank % 2} key 0 - Init START")
        for rank in range(4)
    )  # fmt: skip
    told = [note.message for note in read(text).notes]
    assert told == [
        "communicator 0xaaaa of 4 ranks",
        "communicator 0xaaaa/1/0 of 2 ranks",
        "communicator 0xaaaa/1/1 of 2 ranks",
    ]


def test_several_communicators_without_ids_are_ambiguous() -> None:
    text = "".join(
        line("n", rank, f"comm 0x1 rank {rank // 2} nranks 2 cudaDev 0 busId 1 - Init COMPLETE")
        for rank in range(4)
    )
    found = read(text)
    assert found.nodes is None
    assert "no id assigns" in found.notes[0].message


def test_missing_ranks_stay_unknown() -> None:
    text = line("n", 0, placed(0, 4, "0x1", 2, (0, 2))) + line(
        "n", 3, placed(3, 4, "0x1", 2, (1, 2))
    )
    found = read(text)
    assert (found.nodes, found.complete) == (None, False)
    assert "only 2 of 4 ranks" in found.notes[0].message


@pytest.mark.parametrize(
    ("locals_", "nodes", "expected"),
    [
        ([(0, 2), (1, 2), (0, 2), (1, 2)], 2, ((0, 1), (2, 3))),
        ([(0, 3), (0, 1), (1, 3), (2, 3)], 2, ((0, 2, 3), (1,))),
        # Ranks 2 and 3 could be on either node.
        ([(0, 2), (0, 2), (1, 2), (1, 2)], 2, None),
        # One rank of the second node does not exist, or the number of nodes is another.
        ([(0, 2), (1, 2), (0, 2)], 2, None),
        ([(0, 2), (1, 2), (0, 2), (1, 2)], 3, None),
    ],
)
def test_local_ranks_separate_unnamed_hosts(
    locals_: list[tuple[int, int]], nodes: int, expected: tuple[tuple[int, ...], ...] | None
) -> None:
    lines = [placed(rank, len(locals_), "0x1", nodes, local) for rank, local in enumerate(locals_)]
    # Lines without a host, and containers that are all called the same.
    for text in (
        "".join(f"{rank}> NCCL INFO {one}\n" for rank, one in enumerate(lines)),
        "".join(line("localhost", rank, one) for rank, one in enumerate(lines)),
    ):
        assert read(text).nodes == expected


def test_cliques_become_domains() -> None:
    def job(clique: Sequence[str], *, fabrics: Sequence[str] = (), size: int = 2) -> str:
        return "".join(
            line(f"tray{rank // 2}", rank, start(rank, len(clique), "0x1", "0xc"))
            + (line(f"tray{rank // 2}", rank, f"MNNVL busId 0x1 fabric UUID {fabrics[rank]} cliqueId 0x1 state 3") if fabrics else "")
            + line(f"tray{rank // 2}", rank, f"MNNVL 1 cliqueId {one} cliqueSize {size} cliqueRank {rank % size} nvlDomainSize 8")
            + line(f"tray{rank // 2}", rank, placed(rank, len(clique), "0x1", len(clique) // size, (rank % size, size), 1))
            for rank, one in enumerate(clique)
        )  # fmt: skip

    found = read(job("aaaabbbb", size=4))
    assert found.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.names == ("clique a", "clique b")
    # Two racks whose cliques have the same number, with and without the lines that name the racks.
    found = read(job("aaaaaaaa", size=4, fabrics=["1.2"] * 4 + ["3.4"] * 4))
    assert found.names == ("1.2 clique a", "3.4 clique a")
    assert read(job("aaaaaaaa", size=4)).nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    # No line of a clique: the local ranks count the ranks of a clique.
    without = "".join(
        one for one in job("aaaabbbb", size=4).splitlines(keepends=True) if "cliqueId" not in one
    )
    assert read(without).nodes == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("ring", ["0  1  2  3  4  5 ...", "0  1  2  3  4  5  6...", "0  1  2  3"])
def test_truncated_rings_are_reported(ring: str) -> None:
    text = "".join(line("n", rank, placed(rank, 8, "0x1", 1, (rank, 8))) for rank in range(8))
    assert read(text).complete
    found = read(text + line("n", 0, f"Channel 00/01 : {ring}"))
    assert not found.complete
    assert found.nodes == (tuple(range(8)),)
    assert found.notes[-1].message == f"Channel 00/01 : {' '.join(ring.split())} (the line is cut)"


def test_lines_of_transports_are_not_rings() -> None:
    text = line("n", 0, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM") + line(
        "n", 0, "Channel 00 : 0[a] -> 1[b] via NET"
    )
    assert [note.message for note in read(text).notes] == [
        "no line has rings, trees or ranks; set NCCL_DEBUG_SUBSYS=INIT,GRAPH"
    ]


def test_closing_lines_name_hosts() -> None:
    text = "".join(
        line(
            f"n{rank // 2}",
            rank,
            f"comm 0x1 rank {rank} nranks 4 cudaDev 0 busId 1 - Destroy COMPLETE",
        )
        for rank in range(4)
    )
    assert read(text).nodes == ((0, 1), (2, 3))


@given(st.permutations(range(4)))
def test_interleaved_threads_are_separated(order: list[int]) -> None:
    lines = UNEVEN.splitlines(keepends=True)
    text = "".join("".join(lines[4 * rank : 4 * rank + 4]) for rank in order)
    assert read(text).nodes == ((0, 1, 3), (2,))
    assert read(
        "".join(lines[i] for step in range(4) for i in [4 * r + step for r in order])
    ).nodes == ((0, 1, 3), (2,))


def test_number_of_notes_is_bounded() -> None:
    text = "".join(
        line("n", rank, start(rank, 2, f"0x{pair}", f"0xb{pair}"))
        + line("n", rank, f"{rank + 1} coll channels, 8 nvls channels")
        for pair in range(100)
        for rank in range(2)
    )
    notes = read(text).notes
    assert sum(note.code == "MP201" for note in notes) == 65
    assert "... 36 more channel counts that differ" in {note.message for note in notes}
    assert "... 96 more communicators" in {note.message for note in notes}


class TestTooMany(TestCase):
    def test_too_many_ranks_are_refused(self) -> None:
        text = "".join(
            line("n", 0, start(0, 2, f"0x{i:x}", f"0xb{i:x}") + "\n") for i in range(40_002)
        )
        self.assertExpectedInline(
            refusal(TopologyInputError, read, text),
            """MP212: line 80003: more than 40,000 ranks of communicators; pass the lines of one of them, as grep 'commId 0x...' finds them""",
        )


# For tests/test_formats.py.
SAMPLES = (
    UNEVEN,
    UNEVEN
    + line("n", 0, "MNNVL 1 cliqueId zz cliqueSize 3 cliqueRank 9")
    + line("n", 0, "Channel 00/01 : 0 9 9..."),
)
