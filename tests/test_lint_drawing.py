"""Pictures of meshes: their content, without overlaps and truncation, and the omitted parts."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import AxisNameError, TopologyError
from meshplan.layout import Layout
from meshplan.lint._drawing._text import BOLD, measure
from meshplan.planner import Hazard, Problem, hazards
from meshplan.topology import Topology
from tests.pictures import Box, Panel, Picture, draw_html, draw_svg, read_picture

ROOT = Path(__file__).parent.parent
MILLION = 2**20


def find_hazards(layout: Layout, topology: Topology, *order: str) -> tuple[Hazard, ...]:
    """The hazards of reducing axis by axis, the innermost first unless an order is given."""
    job = Problem.of(layout, ["P"] * len(layout.sizes), ["R"] * len(layout.sizes))
    steps = [[axis] for axis in order or reversed(layout.axes)]
    return hazards(job, topology, steps=steps)


def nodes_of(count: int, size: int, domain: int | None = None) -> Topology:
    return Topology.uniform(count, node_size=size, domain_size=domain)


def shuffled(count: int, seed: int = 0) -> list[int]:
    ranks = list(range(count))
    random.Random(seed).shuffle(ranks)
    return ranks


ISSUE, HOSTS = Layout.of(ddp=8, fsdp=5), nodes_of(40, 8, 8)

CASES: dict[str, tuple[Layout, Topology, bool]] = {
    "8x5": (ISSUE, HOSTS, True),
    "5x8": (Layout.of(ddp=5, fsdp=8), HOSTS, True),
    "9x64 on racks": (Layout.of(ddp=9, fsdp=64), nodes_of(576, 72, 72), True),
    "64 hosts": (Layout.of(dp=64, tp=8), nodes_of(512, 8, 8), True),
    "64 hosts, three axes": (Layout.of(dp=32, fsdp=3, tp=5), nodes_of(480, 8, 8), True),
    "64 racks": (Layout.of(dp=72, fsdp=64), nodes_of(4608, 72, 72), True),
    "permuted": (Layout((8, 5), ("a", "b"), tuple(shuffled(40))), HOSTS, True),
    "permuted nodes": (ISSUE, Topology.of([r // 8 for r in shuffled(40)]), True),
    "domains of 4": (Layout.of(ddp=8, fsdp=6), nodes_of(48, 8, 4), True),
    "domains of 6 in 12": (Layout.of(a=4, b=6), nodes_of(24, 12, 6), False),
    "domains of 3 in 100": (Layout.of(a=25, b=8), nodes_of(200, 100, 3), False),
    "domains of 1": (Layout.of(a=4, b=4), nodes_of(16, 8, 1), False),
    "unknown": (ISSUE, Topology.unknown(40), True),
    "one rank": (Layout.of(dp=1), nodes_of(1, 8), False),
    "unnamed": (Layout((3, 1, 4)), nodes_of(12, 4), True),
    "uneven": (Layout.of(a=6, b=4), Topology.of([0] * 8 + [1] * 7 + [2] * 8 + [3]), True),
    "a host for each rank": (Layout.of(a=80, b=8), nodes_of(640, 1), False),
    "prime": (Layout.of(a=37, b=3), nodes_of(111, 37, 37), True),
}


def picture(name: str) -> Picture:
    layout, topology, judged = CASES[name]
    return read_picture(
        draw_svg(
            layout,
            topology,
            axes=layout.axes,
            hazards=find_hazards(layout, topology) if judged else (),
            hosts=[f"gpu-host-{rank // 8:04}.cluster.internal" for rank in layout.ranks],
        )
    )


def check(drawn: Picture) -> None:
    """Every box is inside its parent, nothing overlaps, and neighbours differ."""
    for panel in drawn.panels:
        check_apart(panel.nodes)
        check_apart(panel.wells)
        check_apart([cell.box for cell in panel.cells])
        for well in panel.wells:
            assert sum(node.contains(well) for node in panel.nodes) == 1
        for cell in panel.cells:
            check_inside(cell.box, panel.nodes)
            if panel.wells:
                check_inside(cell.box, panel.wells)
        for node in panel.nodes:
            assert drawn.page.contains(node)
        fills = {cell.group: cell.fill for cell in panel.cells}
        assert all(cell.fill == fills[cell.group] for cell in panel.cells)
        for one, other in find_neighbours(panel):
            if one.group != other.group and "out" not in (one.fill, other.fill):
                assert one.fill[1:] != other.fill[1:], (one, other)
    for text in drawn.texts:
        assert drawn.page.contains(measure_extent(text)), text
    numbers = [measure_extent(text) for text in drawn.texts if text.anchor == "middle"]
    for panel in drawn.panels:
        for cell in panel.cells:
            if cell.number:
                assert any(cell.box.contains(number) for number in numbers)


def measure_extent(text) -> Box:
    long = measure(text.text, text.size * (BOLD if text.bold else 1))
    left = text.x - {"start": 0.0, "middle": long / 2, "end": long}[text.anchor]
    return Box(left, text.y - 0.8 * text.size, long, text.size)


def said(name: str) -> str:
    """All text of a picture but for numbers of ranks and names of nodes and hosts; in ASCII."""
    texts = [text.text.replace("…", "...") for text in picture(name).texts]
    return "\n".join(t for t in texts if not t.isdigit() and not t.startswith(("node ", "gpu-")))


def check_apart(boxes: list[Box]) -> None:
    # Sorted by x, so that only boxes in one column are compared.
    ordered = sorted(boxes, key=lambda box: box.x)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.x >= one.x + one.width:
                break
            assert not one.overlaps(other), (one, other)


def check_inside(box: Box, outer: list[Box]) -> None:
    assert any(one.contains(box) for one in outer), box


def find_neighbours(panel: Panel):
    for line, along in (("x", "y"), ("y", "x")):
        ordered = sorted(
            panel.cells, key=lambda cell: (getattr(cell.box, line), getattr(cell.box, along))
        )
        for one, other in pairwise(ordered):
            if getattr(one.box, line) == getattr(other.box, line):
                yield one, other


@pytest.mark.parametrize("name", CASES)
def test_nothing_overlaps_and_every_rank_is_drawn(name: str) -> None:
    layout, topology, _ = CASES[name]
    drawn = picture(name)
    check(drawn)
    sized = [size for size in layout.sizes if size > 1]
    assert len(drawn.panels) == max(1, len(sized))
    nodes = topology.nodes_of(layout.grid.flatten())
    for panel, size in zip(drawn.panels, sized or [1], strict=True):
        assert len(panel.cells) == layout.world_size
        assert len({cell.group for cell in panel.cells}) == layout.world_size // size
        assert len(panel.nodes) == (1 if nodes is None else len(set(nodes.tolist())))
        assert bool(panel.wells) == (topology.domain_map is not None)
    assert "drawn" not in drawn.text


def ranks(panel: Panel) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cell in panel.cells:
        if cell.fill != "out":
            groups.setdefault(cell.group, set()).add(int(cell.number))
    return groups


@pytest.mark.parametrize("name", ["8x5", "permuted", "64 hosts, three axes", "unknown", "unnamed"])
def test_cells_are_grouped_as_in_the_mesh(name: str) -> None:
    layout = CASES[name][0]
    axes = [axis for axis, size in zip(layout.axes, layout.sizes, strict=True) if size > 1]
    for axis, panel in zip(axes, picture(name).panels, strict=True):
        expected = {frozenset(group) for group in layout.siblings(axis).tolist()}
        assert {frozenset(group) for group in ranks(panel).values()} == expected


def test_ranks_are_drawn_in_their_nodes_and_domains() -> None:
    drawn = picture("domains of 4").panels[0]
    for boxes, size in ((drawn.nodes, 8), (drawn.wells, 4)):
        for i, box in enumerate(boxes):
            held = [int(cell.number) for cell in drawn.cells if box.contains(cell.box)]
            assert sorted(held) == list(range(i * size, (i + 1) * size))


def test_jagged_groups_are_marked() -> None:
    both = (*find_hazards(ISSUE, HOSTS, "ddp", "fsdp"), *find_hazards(ISSUE, HOSTS, "fsdp", "ddp"))
    drawn = read_picture(draw_svg(ISSUE, HOSTS, axes=("fsdp", "ddp"), hazards=both))
    fsdp, ddp = drawn.panels
    assert fsdp.bad
    assert ddp.bad
    # (5) is what most groups are: ranks 0 to 4, 10 to 14, 25 to 29 and 35 to 39 are on one node.
    plain = {str(r) for start in (0, 10, 25, 35) for r in range(start, start + 5)}
    assert fsdp.marked() == {str(r) for r in range(40)} - plain
    # All differ: the first counts as the usual one.
    assert ddp.marked() == {str(r) for r in range(40) if r % 5}
    assert "8 groups of 5 ranks; 4 of 8 differ from (5)" in drawn.text
    assert "differs from its siblings: may add in another order" in drawn.text


def test_uncommon_signatures_are_marked_without_hazards() -> None:
    fsdp, ddp = read_picture(draw_svg(ISSUE, HOSTS, axes=("fsdp", "ddp"))).panels
    assert not fsdp.bad
    assert not ddp.bad
    assert len(fsdp.marked()) == 20
    clean = read_picture(draw_svg(Layout.of(ddp=5, fsdp=8), HOSTS, axes=("fsdp", "ddp")))
    assert not any(panel.marked() for panel in clean.panels)
    assert "differ" not in clean.text


def test_hazards_and_flattened_axes_have_panels() -> None:
    layout = Layout.of(a=2, b=2, c=4)
    topology = nodes_of(16, 6)
    job = Problem.of(layout, ["P", "P", "R"], ["R", "R", "R"])
    (hazard,) = hazards(job, topology)
    drawn = read_picture(draw_svg(layout, topology, axes=(), hazards=[hazard]))
    assert [panel.bad for panel in drawn.panels] == [True]
    assert "groups of (a, b)" in drawn.text
    drawn = read_picture(draw_svg(layout, topology, axes=(("b", "a"), "c"), hazards=[hazard]))
    assert [panel.bad for panel in drawn.panels] == [True, False]
    assert len(read_picture(draw_svg(layout, topology, axes=())).panels) == 3


def test_axes_of_size_1_are_left_out() -> None:
    layout = Layout.of(a=4, tp=1)
    assert len(read_picture(draw_svg(layout, nodes_of(4, 4), axes=layout.axes)).panels) == 1
    (alone,) = read_picture(draw_svg(layout, nodes_of(4, 4), axes=("tp",))).panels
    assert len(ranks(alone)) == 4


def test_ranks_outside_the_mesh_are_drawn_dashed() -> None:
    inside_of_racks = [rack * 72 + gpu for rack in range(3) for gpu in range(64)]
    layout = Layout.of(inside_of_racks, dp=3, fsdp=64)
    drawn = read_picture(draw_svg(layout, nodes_of(288, 72, 72), axes=layout.axes))
    check(drawn)
    for panel in drawn.panels:
        assert len(panel.nodes) == 3  # the fourth rack has no part in the mesh
        outside = {cell.number for cell in panel.cells if cell.fill == "out"}
        assert outside == {str(rack * 72 + gpu) for rack in range(3) for gpu in range(64, 72)}
    assert "rank not in the mesh" in drawn.text
    # Also where only the last node has such ranks.
    drawn = read_picture(draw_svg(Layout.of(a=3, b=2), nodes_of(8, 4), axes=("b",)))
    assert {cell.number for cell in drawn.panels[0].cells if cell.fill == "out"} == {"6", "7"}
    assert "rank not in the mesh" in drawn.text
    assert "rank not in the mesh" not in picture("8x5").text


def test_long_host_names_stay_distinct() -> None:
    name = "ip-10-20-{}.us-west-2.compute.internal-and-much-longer-than-any-box"
    hosts = [name.format(rank // 8) for rank in range(40)]
    drawn = read_picture(draw_svg(ISSUE, HOSTS, axes=("fsdp",), hosts=hosts))
    check(drawn)
    assert [text.text for text in drawn.texts if text.text.startswith("ip-")] == [
        f"ip-10-20-{i}" for i in range(5)
    ]
    assert hosts[0] in drawn.panels[0].cells[0].title


MANY: dict[str, Callable[[], tuple[Layout, Topology, str]]] = {
    "jagged racks": lambda: (
        Layout.of(dp=MILLION // 64, fsdp=64),
        nodes_of(MILLION, 72, 72),
        "48 of 14564 nodes drawn: those that hold the first jagged groups",
    ),
    "clean": lambda: (
        Layout.of(dp=MILLION // 8, fsdp=8),
        nodes_of(MILLION, 8, 8),
        "48 of 131072 nodes drawn: the first",
    ),
    "a host for each of the first ranks": lambda: (
        Layout.of(dp=MILLION // 8, fsdp=8),
        Topology.of([rank if rank < 8000 else rank // 8 + 8000 for rank in range(MILLION)]),
        "48 of 138072 nodes drawn: those that hold the first jagged groups",
    ),
    "one node": lambda: (
        Layout.of(a=1024, b=1024),
        nodes_of(MILLION, MILLION),
        f"5000 of {MILLION} ranks drawn: the first",
    ),
    "unknown": lambda: (
        Layout.of(a=1024, b=1024),
        Topology.unknown(MILLION),
        f"5000 of {MILLION} ranks drawn: the first",
    ),
    "two nodes": lambda: (
        Layout.of(a=1024, b=1024),
        nodes_of(MILLION, MILLION // 2, 1),
        "2 of 2 nodes drawn: the first, and of each at most 1250 ranks",
    ),
    "20 axes": lambda: (
        Layout.of(**{f"x{i}": 2 for i in range(20)}),
        nodes_of(MILLION, 72, 4),
        "18 of 14564 nodes drawn: those of the first group, and the first of the others",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MANY)
def test_a_million_ranks_are_sampled(name: str) -> None:
    layout, topology, said = MANY[name]()
    start = time.process_time()
    svg = draw_svg(layout, topology, axes=layout.axes)
    # One or two seconds; several times that if other tests run concurrently.
    assert time.process_time() - start < 60
    assert len(svg) < 2_000_000
    drawn = read_picture(svg)
    assert said in drawn.text
    check(drawn)


def test_many_permuted_ranks_are_sampled() -> None:
    count = 2**18
    layout = Layout((count // 8, 8), ("a", "b"), tuple(shuffled(count)))
    svg = draw_svg(layout, nodes_of(count, 8), axes=layout.axes)
    assert len(svg) < 2_000_000
    check(read_picture(svg))


def test_sample_has_the_jagged_groups() -> None:
    # Ranks 600000 to 600007 are on two nodes, all others of a group on one.
    node_of_rank = [rank // 8 for rank in range(MILLION)]
    node_of_rank[600_003] = MILLION
    layout = Layout.of(dp=MILLION // 8, fsdp=8)
    drawn = read_picture(draw_svg(layout, Topology.of(node_of_rank), axes=("fsdp",)))
    (panel,) = drawn.panels
    assert panel.marked() == {str(rank) for rank in range(600_000, 600_008)}
    assert f"1 of {MILLION // 8} differs from (8)" in drawn.text
    assert "those that hold the first jagged groups, and the first of the others" in drawn.text


def test_many_axes_are_not_all_drawn() -> None:
    layout = Layout.of(**{f"x{i}": 2 for i in range(8)})
    drawn = read_picture(draw_svg(layout, nodes_of(256, 8), axes=layout.axes))
    assert len(drawn.panels) == 6
    assert "not drawn, to keep the picture small: groups of x6, x7" in drawn.text


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Layout, Topology]:
    # Larger ones take seconds each.
    few = st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 200)
    sizes = draw(few)
    names = [f"a{i}" for i in range(len(sizes))]
    layout = Layout.of(**dict(zip(names, sizes, strict=True)))
    count = layout.world_size
    if draw(st.booleans()):
        layout = Layout.of(
            draw(st.permutations(range(count))), **dict(zip(names, sizes, strict=True))
        )
    kind = draw(st.sampled_from(["uniform", "given", "unknown"]))
    world = count + draw(st.integers(0, 9))
    if kind == "unknown":
        return layout, Topology.unknown(world)
    if kind == "uniform":
        size = draw(st.integers(1, 20))
        return layout, nodes_of(world, size, draw(st.none() | st.integers(1, size)))
    nodes = draw(st.lists(st.integers(0, 4), min_size=world, max_size=world))
    domains = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    return layout, Topology.of(nodes, draw(st.sampled_from([None, domains])))


@given(meshes(), st.booleans())
def test_any_mesh_is_drawn_without_overlap(mesh: tuple[Layout, Topology], judged: bool) -> None:
    layout, topology = mesh
    reported = find_hazards(layout, topology) if judged else ()
    svg = draw_svg(layout, topology, axes=layout.axes, hazards=reported)
    drawn = read_picture(svg)
    check(drawn)
    assert svg == draw_svg(layout, topology, axes=layout.axes, hazards=reported)
    harmful = {hazard.axes for hazard in reported if hazard.verdict == "may differ"}
    assert sum(panel.bad for panel in drawn.panels) == len(harmful)
    for panel in drawn.panels:
        if panel.bad:
            assert panel.marked()
        cells = sum(cell.fill != "out" for cell in panel.cells)
        # Of many nodes some are drawn, which is said.
        some = re.search(r"\d of \d+ (nodes|ranks) drawn: ", "".join(drawn.text))
        assert 0 < cells < layout.world_size if some else cells == layout.world_size


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_names_are_drawn(axis: str, host: str) -> None:
    layout = Layout((2, 3), (axis, axis + "'"))
    hosts = [host, f"{host}&amp;<b>", "x"]
    reported = find_hazards(layout, nodes_of(6, 2))
    drawn = draw_svg(layout, nodes_of(6, 2), axes=(), hazards=reported, hosts=hosts)
    check(read_picture(drawn))


def test_huge_names_make_no_huge_picture() -> None:
    layout = Layout((2, 3), ("a" * 100_000, "b\0\u202e<&>\"'" * 9999))
    topology = nodes_of(6, 4)
    hosts = [f"{'h' * 100_000}{rank}" for rank in range(6)]
    reported = find_hazards(layout, topology)
    for draw in (draw_svg, draw_html):
        text = draw(layout, topology, axes=layout.axes, hazards=reported, hosts=hosts)
        assert len(text) < 100_000


class TestCaptions(TestCase):
    def test_document_of_a_small_mesh(self) -> None:
        layout, topology = Layout.of(dp=2, tp=4), nodes_of(8, 6, 6)
        svg = draw_svg(
            layout,
            topology,
            axes=("tp",),
            hazards=find_hazards(layout, topology, "dp", "tp"),
            hosts=["one"] * 6 + ["two"] * 2,
        )
        self.assertExpectedInline(
            svg,
            """\
<svg xmlns="http://www.w3.org/2000/svg" class="mp" width="480" height="457" viewBox="0 0 480 457" font-family='system-ui,"Segoe UI","DejaVu Sans",sans-serif' font-size="12" aria-label="(dp=2, tp=4) on 2 nodes of 6, the last of 2, domains of 6">
<style>
.mp .page{fill:#fff}
.mp text{fill:#1b1f24}
.mp .soft{fill:#57606a}
.mp .node{fill:#fff;stroke:#8c959f}
.mp .well{fill:#e6eaef}
.mp .out{fill:none;stroke:#8c959f;stroke-dasharray:2 2}
.mp .edge{fill:none;stroke:#57606a;stroke-linecap:square}
.mp .bad .edge{stroke:#b3001b;stroke-width:2.5}
.mp .rule{stroke:#d0d7de}
.mp .grey{fill:#d0d7de}
.mp .chip-bad{fill:#b3001b}
.mp .chip-odd{fill:#7a5200}
.mp .chip-good{fill:#0b6b43}
.mp text.chip{fill:#fff}
.mp .cells text{fill:#14171a;stroke:none;text-anchor:middle;font-size:11px;pointer-events:none}
.mp .cells text.off{fill:#57606a}
.mp .cells:hover g{opacity:.25}
.mp .cells:hover g:hover{opacity:1}
.mp .k0{fill:#77aadd}
.mp .j0{fill:url(#mp-j0)}
.mp .k1{fill:#eedd88}
.mp .j1{fill:url(#mp-j1)}
@media (prefers-color-scheme:dark){
.mp .page{fill:#0f1318}
.mp text{fill:#e6edf3}
.mp .soft{fill:#9da7b3}
.mp .node{fill:#161b22;stroke:#6e7681}
.mp .well{fill:#2a313a}
.mp .out{stroke:#6e7681}
.mp .edge{stroke:#b1bac4}
.mp .bad .edge{stroke:#ff5c5c}
.mp .rule{stroke:#30363d}
.mp .cells text{fill:#14171a}
.mp .cells text.off{fill:#9da7b3}
}
</style>
<defs>
<pattern id="mp-j" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#d0d7de"/><path d="M-1 1l2-2M0 6l6-6M5 7l2-2" stroke="#14171a" stroke-width="1.1" stroke-opacity=".3"/></pattern>
<pattern id="mp-j0" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#77aadd"/><path d="M-1 1l2-2M0 6l6-6M5 7l2-2" stroke="#14171a" stroke-width="1.1" stroke-opacity=".3"/></pattern>
<pattern id="mp-j1" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#eedd88"/><path d="M-1 1l2-2M0 6l6-6M5 7l2-2" stroke="#14171a" stroke-width="1.1" stroke-opacity=".3"/></pattern>
</defs>
<rect class="page" width="100%" height="100%"/>
<text x="20" y="40" font-size="18" font-weight="bold">(dp=2, tp=4) on 2 nodes of 6, the last</text>
<text x="20" y="64" font-size="18" font-weight="bold">of 2, domains of 6</text>
<g transform="translate(20,86)" class="bad">
<text y="15" font-size="15" font-weight="bold">groups of tp</text>
<rect class="chip-bad" x="124" width="128" height="20" rx="10"/><text class="chip" x="188" y="14" font-size="11" text-anchor="middle">siblings may differ</text>
<text y="36">2 groups of 4 ranks; 1 of 2 differs from (4)</text>
<text y="54">ranks per node:</text>
<rect x="105" y="44" width="12" height="12" class="grey"/><text x="123" y="54">1 x (4)</text>
<rect x="179" y="44" width="12" height="12" fill="url(#mp-j)"/><text x="197" y="54">1 x (2, 2)</text>
<text class="soft" y="71">2 siblings along dp must agree; orders: 2 by ring, 2 by tree</text>
<text class="soft" y="88">tree, ranks 0 to 3: (0+(1+(2+3)))</text>
<text class="soft" y="105">tree, ranks 4 to 7: ((4+5)+(6+7))</text>
<g transform="translate(0,119)">
<rect class="node" x="0" y="0" width="347" height="64" rx="5"/><text x="7" y="15" font-size="11">node 0</text><text x="340" y="15" class="soft" font-size="11" text-anchor="end"><title>one</title>one</text><rect class="well" x="6" y="22" width="335" height="36" rx="3"/>
<rect class="node" x="0" y="74" width="347" height="64" rx="5"/><text x="7" y="89" font-size="11">node 1</text><text x="340" y="89" class="soft" font-size="11" text-anchor="end"><title>two</title>two</text><rect class="well" x="6" y="96" width="115" height="36" rx="3"/>
<g class="cells">
<g class="k0"><rect x="10" y="26" width="52" height="28"><title>rank 0: dp=0, tp=0
node 0, domain 0, host one
dp=0: ranks 0 to 3, on nodes (4)</title></rect><text x="36" y="44">0</text><rect x="65" y="26" width="52" height="28"><title>rank 1: dp=0, tp=1
node 0, domain 0, host one
dp=0: ranks 0 to 3, on nodes (4)</title></rect><text x="91" y="44">1</text><rect x="120" y="26" width="52" height="28"><title>rank 2: dp=0, tp=2
node 0, domain 0, host one
dp=0: ranks 0 to 3, on nodes (4)</title></rect><text x="146" y="44">2</text><rect x="175" y="26" width="52" height="28"><title>rank 3: dp=0, tp=3
node 0, domain 0, host one
dp=0: ranks 0 to 3, on nodes (4)</title></rect><text x="201" y="44">3</text></g>
<g class="j1"><rect x="230" y="26" width="52" height="28"><title>rank 4: dp=1, tp=0
node 0, domain 0, host one
dp=1: ranks 4 to 7, on nodes (2, 2), differs from most siblings</title></rect><text x="256" y="44">4</text><rect x="285" y="26" width="52" height="28"><title>rank 5: dp=1, tp=1
node 0, domain 0, host one
dp=1: ranks 4 to 7, on nodes (2, 2), differs from most siblings</title></rect><text x="311" y="44">5</text><rect x="10" y="100" width="52" height="28"><title>rank 6: dp=1, tp=2
node 1, domain 0, host two
dp=1: ranks 4 to 7, on nodes (2, 2), differs from most siblings</title></rect><text x="36" y="118">6</text><rect x="65" y="100" width="52" height="28"><title>rank 7: dp=1, tp=3
node 1, domain 0, host two
dp=1: ranks 4 to 7, on nodes (2, 2), differs from most siblings</title></rect><text x="91" y="118">7</text><path class="edge" d="M8.5 98.5h110M8.5 129.5h110M228.5 24.5h110M228.5 55.5h110M8.5 98.5v31M118.5 98.5v31M228.5 24.5v31M338.5 24.5v31"/></g>
</g>
</g>
</g>
<g transform="translate(20,361)">
<path class="rule" d="M0 0.5h440"/>
<g transform="translate(0,14)"><rect class="node" x="1" y="1" width="20" height="12" rx="3"/><text x="30" y="11">node</text></g>
<g transform="translate(83,14)"><rect class="well" width="22" height="14" rx="2"/><text x="30" y="11">domain (NVLink, xGMI)</text></g>
<g transform="translate(0,36)"><rect x="0" width="7" height="14" fill="#77aadd"/><rect x="8" width="7" height="14" fill="#eedd88"/><rect x="16" width="7" height="14" fill="#99ddff"/><text x="30" y="11">one colour: ranks of one group</text></g>
<g transform="translate(0,58)"><rect x="1" y="1" width="20" height="12" fill="url(#mp-j)"/><g class="bad"><path class="edge" d="M1 1h20v12h-20z"/></g><text x="30" y="11">differs from its siblings: may add in another order</text></g>
</g>
</svg>
""",
        )

    def test_captions_of_unknown_nodes(self) -> None:
        self.assertExpectedInline(
            said("unknown"),
            """\
(ddp=8, fsdp=5), nodes unknown
groups of ddp
unknown: may differ
5 groups of 8 ranks; node placement unknown
5 siblings along fsdp must agree; order unknown
nodes unknown
5 hosts
groups of fsdp
8 groups of 5 ranks; node placement unknown
nodes unknown
5 hosts
one colour: ranks of one group""",
        )

    def test_captions_of_three_axes(self) -> None:
        self.assertExpectedInline(
            said("64 hosts, three axes"),
            """\
(dp=32, fsdp=3, tp=5) on 60 nodes of 8, domains of 8
groups of dp
siblings identical in the model
15 groups of 32 ranks; all placed identically on nodes
ranks per node:
15 x (1, 1, 1, 1, 1, 1, ... 32 nodes)
15 siblings along fsdp, tp must agree; the order of ring and tree is the same in all
groups of fsdp
siblings may differ
160 groups of 3 ranks; 72 of 160 differ from most of their siblings
ranks per node:
44 x (2, 1)
44 x (1, 2)
40 x (1, 1, 1)
16 x (1, 2)
16 x (2, 1)
5 siblings along tp must agree; orders: 2 by ring, 3 by tree
tree, ranks 0, 5, 10: ((0+5)+10)
tree, ranks 3, 8, 13: (3+(8+13))
groups of tp
96 groups of 5 ranks; 48 of 96 differ from (5)
ranks per node:
48 x (5)
12 x (3, 2)
12 x (1, 4)
12 x (4, 1)
12 x (2, 3)
node
domain (NVLink, xGMI)
one colour: ranks of one group, colours repeat
differs from its siblings: may add in another order
placed differently from most groups""",
        )

    def test_captions_of_racks(self) -> None:
        self.assertExpectedInline(
            said("9x64 on racks"),
            """\
(ddp=9, fsdp=64) on 8 nodes of 72, domains of 72
groups of ddp
siblings may differ
64 groups of 9 ranks; 56 of 64 differ from (2, 1, 1, 1, 1, 1, 1, 1)
ranks per node:
8 x (2, 1, 1, 1, 1, 1, 1, 1)
8 x (1, 2, 1, 1, 1, 1, 1, 1)
8 x (1, 1, 2, 1, 1, 1, 1, 1)
8 x (1, 1, 1, 2, 1, 1, 1, 1)
8 x (1, 1, 1, 1, 2, 1, 1, 1)
8 x (1, 1, 1, 1, 1, 2, 1, 1)
8 x (1, 1, 1, 1, 1, 1, 2, 1)
8 x (1, 1, 1, 1, 1, 1, 1, 2)
64 siblings along fsdp must agree; orders: 8 by ring, 8 by tree
tree, ranks 0, 64, 128, ...: ((0+64)+((320+((192+128)+256))+((448+384)+512)))
tree, ranks 8, 72, 136, ...: (8+((328+((200+(72+136))+264))+((456+392)+520)))
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
groups of fsdp
9 groups of 64 ranks; 7 of 9 differ from (64)
ranks per node:
2 x (64)
1 x (8, 56)
1 x (16, 48)
1 x (24, 40)
1 x (32, 32)
1 x (40, 24)
1 x (48, 16)
1 x (56, 8)
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
9 hosts
node
domain (NVLink, xGMI)
one colour: ranks of one group, colours repeat
differs from its siblings: may add in another order
placed differently from most groups""",
        )

    def test_caption_of_a_rank(self) -> None:
        cells = picture("8x5").panels[1].cells
        self.assertExpectedInline(
            cells[5].title,
            """\
rank 5: ddp=1, fsdp=0
node 0, domain 0, host gpu-host-0000.cluster.internal
ddp=1: ranks 5 to 9, on nodes (3, 2), differs from most siblings""",
        )

    def test_caption_of_a_group(self) -> None:
        cells = picture("64 racks").panels[1].cells
        self.assertExpectedInline(
            cells[64].title,
            """dp=1: ranks 64 to 127, on nodes (8, 56), differs from most siblings""",
        )

    def test_unknown_axis_and_short_topology_are_refused(self) -> None:
        with pytest.raises(AxisNameError) as unknown:
            draw_svg(ISSUE, HOSTS, axes=("fsp",))
        with pytest.raises(TopologyError) as short:
            draw_svg(ISSUE, nodes_of(39, 8), axes=("fsdp",))
        self.assertExpectedInline(
            f"{unknown.value}\n{short.value}",
            """\
MP112: no axis 'fsp' in the mesh, it has ddp, fsdp (did you mean 'fsdp'?)
MP211: the topology describes 39 ranks, the mesh (ddp=8, fsdp=5) has rank 39; pass a topology of 40 or more ranks""",
        )


def test_picture_in_the_docs_is_up_to_date() -> None:
    # In another process: the text does not depend on the seed of hashes either.
    done = subprocess.run(
        [sys.executable, "tools/draw_jagged_mesh.py", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = read_picture((ROOT / "docs" / "images" / "jagged-mesh.svg").read_text(encoding="utf-8"))
    assert all(panel.bad for panel in drawn.panels)


def test_panels_do_not_overlap() -> None:
    for name in ("8x5", "64 hosts, three axes"):
        extents = [
            Box(
                min(n.x for n in panel.nodes),
                min(n.y for n in panel.nodes),
                max(n.x + n.width for n in panel.nodes) - min(n.x for n in panel.nodes),
                max(n.y + n.height for n in panel.nodes) - min(n.y for n in panel.nodes),
            )
            for panel in picture(name).panels
        ]
        assert not any(one.overlaps(other) for one, other in combinations(extents, 2))
