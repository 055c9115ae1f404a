"""``meshplan diagnose`` on logs with known rings and trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from expecttest import TestCase

from meshplan.layout import Layout
from meshplan.planner import Siblings
from meshplan.topology import Topology
from tests.cli import meshplan
from tests.pages import ROOT
from tests.test_nccl_order_twice import NONE, Ranks

Change = Callable[[tuple[int, ...], int, Ranks], None]


def write_communicator(
    ranks: Sequence[int],
    host_size: int,
    *,
    heads: int = 2,
    hops: bool = False,
    prefix: bool = False,
    change: Change | None = None,
) -> list[str]:
    """The lines of the global ``ranks`` about one communicator, as NCCL 2.30 writes them."""
    hosts = [rank // host_size for rank in ranks]
    channels = []
    for channel in range(2 * heads):
        links = Ranks(hosts, channel % heads)
        links.connect_ring()
        links.connect_tree(second=channel >= heads)
        if change is not None:
            change(tuple(ranks), channel, links)
        channels.append(links)
    lines = []
    name = f"0x{ranks[0]:x}f{ranks[-1]:x}f{len(ranks):x}"
    for own, rank in enumerate(ranks):
        head = f"[rank{rank}]:" if prefix else ""
        head += f"h{hosts[own]}:{1000 + rank}:{2000 + rank} [{rank % host_size}] NCCL INFO "
        comm = f"comm 0x55{rank:04x}{len(ranks):02x} rank {own}"
        lines.append(
            f"{head}ncclCommInitRank {comm} nranks {len(ranks)} commId {name} - Init START"
        )
        lines.append(f"{head}{comm} nRanks {len(ranks)} nNodes {len(set(hosts))} MNNVL 0")
        for channel, links in enumerate(channels if own == 0 else ()):
            ring = [0]
            while len(ring) < len(ranks):
                ring.append(links.next[ring[-1]])
            text = f"Channel {channel:02d}/{2 * heads:02d} :" + "".join(f" {r:4d}" for r in ring)
            lines.append(head + (text if len(text) <= 128 else f"{text[:124]} ..."))
        trees = []
        for channel, links in enumerate(channels):
            down = [*links.down[own], NONE, NONE, NONE][:3]
            trees.append(f"[{channel}] {'/'.join(map(str, down))}->{own}->{links.up[own]}")
            if hops and channel < 4:
                before = links.next.index(own)
                lines.append(f"{head}Ring {channel:02d} : {before} -> {own} -> {links.next[own]}")
        lines.append(f"{head}Trees {' '.join(trees)}")
        lines.append(
            f"{head}ncclCommInitRank {comm} nranks {len(ranks)} commId {name} - Init COMPLETE"
        )
    return lines


def write_log(
    layout: Layout, host_size: int, axes: Sequence[str], *, world: bool = True, **options: object
) -> None:
    groups = [list(range(layout.world_size))] if world else []
    for axis in axes:
        groups += layout.siblings(axis).tolist()
    lines = [
        line
        for group in groups
        for line in write_communicator(group, host_size, **options)  # type: ignore[arg-type]
    ]
    Path("nccl.log").write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def diagnose(mesh: str, *words: str) -> tuple[int, str, str]:
    return meshplan("diagnose", "nccl.log", "--mesh", mesh, *words)


JAGGED = Layout.of(ddp=8, fsdp=5)


@pytest.mark.usefixtures("folder")
class TestText(TestCase):
    def test_jagged_mesh_is_described(self) -> None:
        write_log(JAGGED, 8, ["fsdp"])
        status, out, err = diagnose("ddp=8,fsdp=5")
        assert (status, err) == (1, "")
        self.assertExpectedInline(
            out,
            """\
8 groups of 5 ranks over fsdp
  ring: 5 different orders
    groups of ranks {0-4}, {10-14}, {25-29}, {35-39}
    groups of ranks {5-9}
    groups of ranks {15-19}
    groups of ranks {20-24}
    groups of ranks {30-34}
    channel 0: 0 1 2 3 4
    channel 0: 5 7 6 8 9
  tree: 5 different orders
    groups of ranks {0-4}, {10-14}, {25-29}, {35-39}
    groups of ranks {5-9}
    groups of ranks {15-19}
    groups of ranks {20-24}
    groups of ranks {30-34}
    channel 0: (0+(1+(2+(3+4))))
    channel 0: ((5+(6+7))+(8+9))
what to do:
  call torch.distributed.init_process_group('meshplan') on every rank: each reduction then adds in one order (docs/howto/backend.md)
  or use a mesh whose groups are placed identically: meshplan lint --mesh ddp=8,fsdp=5 --topology nccl.log proposes one
not in a log: the order of NVLS, CollNet and PAT, and the choice of algorithm
""",
        )

    def test_changed_ring_of_one_group_is_described(self) -> None:
        def swap(ranks: tuple[int, ...], channel: int, links: Ranks) -> None:
            if ranks[0] == 8 and channel == 1:
                links.next[:4] = [2, 3, 1, 0]

        write_log(Layout.of(dp=3, tp=4), 4, ["dp", "tp"], change=swap)
        status, out, err = diagnose("dp=3,tp=4")
        assert (status, err) == (1, "")
        self.assertExpectedInline(
            out,
            """\
4 groups of 3 ranks over dp
  ring: not shown to differ, one order in every channel
  tree: not shown to differ, one order in every channel
3 groups of 4 ranks over tp
  ring: 2 different orders
    groups of ranks {0-3}, {4-7}
    groups of ranks {8-11}
    channel 1: 0 1 2 3
    channel 1: 8 10 9 11
  tree: not shown to differ, one order in every channel
what to do:
  call torch.distributed.init_process_group('meshplan') on every rank: each reduction then adds in one order (docs/howto/backend.md)
  or use a mesh whose groups are placed identically: meshplan lint --mesh dp=3,tp=4 --topology nccl.log proposes one
not in a log: the order of NVLS, CollNet and PAT, and the choice of algorithm
""",
        )

    def test_unusable_logs_are_refused(self) -> None:
        said = []
        write_log(JAGGED, 8, ["fsdp"], world=False)
        said.append(diagnose("ddp=8,fsdp=5")[2])
        write_log(JAGGED, 8, [])
        said.append(diagnose("ddp=8,fsdp=5")[2])
        Path("nccl.log").write_text("nothing\n")
        said.append(diagnose("ddp=8,fsdp=5")[2])
        self.assertExpectedInline(
            "".join(said),
            """\
meshplan: MP212: the global rank of each process is unknown: no communicator of 40 ranks is complete in the log, and lines do not begin with [rank0]:; pass the logs of all ranks of a job that called torch.distributed.barrier() over all ranks, or of torchrun --tee 3
meshplan: MP212: the log has no two complete communicators of 3 or more ranks over the same axes of (ddp=8, fsdp=5); pass the logs of all ranks, and check --mesh
meshplan: MP212: no line with 'NCCL INFO' found; run the job with NCCL_DEBUG=INFO and pass its log
""",
        )


def test_directory_of_logs_is_read_as_one_log() -> None:
    write_log(JAGGED, 8, ["fsdp"])
    Path("logs").mkdir()
    of_processes: dict[str, list[str]] = {}
    for line in Path("nccl.log").read_text().splitlines(keepends=True):
        of_processes.setdefault(":".join(line.split(":")[:2]), []).append(line)
    for name, lines in of_processes.items():
        Path("logs", f"nccl.{name}.log").write_text("".join(lines))
    assert len(of_processes) == 40
    mesh = "ddp=8,fsdp=5"
    lint = f"meshplan lint --mesh {mesh} --topology"
    orders, _, advice = diagnose(mesh)[1].partition(lint)
    files = [str(path) for path in sorted(Path("logs").iterdir())]
    for words, command in ((["logs"], f"cat logs/* | {lint}"), (files, f"cat FILES | {lint}")):
        status, out, err = meshplan("diagnose", *words, "--mesh", mesh)
        assert (status, err) == (1, "")
        shown = orders + command + advice.replace(" nccl.log ", " - ")
        assert out == shown


def test_example_is_a_log_of_the_model() -> None:
    """That of docs/lint-a-cluster.md."""
    write_log(Layout.of(ddp=2, fsdp=3), 2, ["fsdp"], heads=1)
    assert Path("nccl.log").read_text() == (ROOT / "examples/data/nccl.log").read_text()


@pytest.mark.parametrize("axis", ["ddp", "fsdp"])
def test_orders_are_those_of_the_placement(axis: str) -> None:
    write_log(JAGGED, 8, [axis], heads=3)
    status, out, _ = diagnose("ddp=8,fsdp=5", "--output-format", "json")
    assert status == 1
    (found,) = json.loads(out)["siblings"]
    siblings = Siblings(
        JAGGED, (JAGGED.axis_index(axis),), Topology.uniform(40, node_size=8), sort_ranks=True
    )
    numbers = siblings.associations("ring", np.arange(len(siblings.members))).tolist()
    parts: dict[int, list[int]] = {}
    for group, number in enumerate(numbers):
        parts.setdefault(number, []).append(group)
    assert found["groups"] == siblings.members.tolist()
    assert sorted(found["orders"]["ring"]) == sorted(parts.values())
    assert sorted(found["orders"]["tree"]) == sorted(parts.values())
    assert found["differ"] == ["ring", "tree"]


def test_even_groups_are_not_shown_to_differ() -> None:
    write_log(Layout.of(ddp=5, fsdp=8), 8, ["ddp", "fsdp"], prefix=True, world=False)
    status, out, _ = diagnose("ddp=5,fsdp=8")
    assert status == 0
    assert out.count("not shown to differ, one order in every channel") == 4
    assert "what to do" not in out


def test_cut_rings_are_read_from_their_hops() -> None:
    layout = Layout.of(dp=2, fsdp=40)
    for hops, unread in ((False, [0, 1]), (True, [])):
        write_log(layout, 8, ["fsdp"], hops=hops)
        status, out, _ = diagnose("dp=2,fsdp=40", "--output-format", "json")
        assert status == 0
        (found,) = json.loads(out)["siblings"]
        assert found["unread"] == {"ring": unread, "tree": []}
    write_log(layout, 8, ["fsdp"])
    assert "ring: the log has no whole ring of 2 groups" in diagnose("dp=2,fsdp=40")[1]


def test_log_without_rings_and_trees_is_refused() -> None:
    write_log(JAGGED, 8, ["fsdp"])
    lines = Path("nccl.log").read_text().splitlines(keepends=True)
    kept = [line for line in lines if " Channel " not in line and " Trees " not in line]
    Path("nccl.log").write_text("".join(kept))
    status, _, err = diagnose("ddp=8,fsdp=5")
    assert status == 2
    assert "no whole ring or tree" in err
    # A ring of one group has nothing to be compared with.
    ring = next(i for i, line in enumerate(lines) if ":    0    1    2    3    4\n" in line)
    known = [line for i, line in enumerate(lines) if i == ring or line in kept]
    Path("nccl.log").write_text("".join(known))
    status, out, _ = diagnose("ddp=8,fsdp=5")
    assert status == 0
    assert "not shown to differ" not in out


def test_missing_groups_are_counted() -> None:
    write_log(JAGGED, 8, ["fsdp"])
    lines = Path("nccl.log").read_text().splitlines(keepends=True)
    # One rank of one group wrote nothing about it.
    Path("nccl.log").write_text("".join(line for line in lines if "comm 0x55002305" not in line))
    assert "7 groups of 5 ranks over fsdp, 1 of 8 not complete" in diagnose("ddp=8,fsdp=5")[1]
