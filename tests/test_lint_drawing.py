"""The page of the linter: every input, meshes with findings and no others, safe and readable."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from meshplan.layout import Layout
from meshplan.lint._drawing import draw_meshes, write_report
from meshplan.lint._facts import JobFacts, check_facts, sort_findings
from meshplan.lint._finding import Finding, LintInput, LintReport, Source
from meshplan.lint._job import Job
from meshplan.topology import Cluster, Topology

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"
NODES = Topology.uniform(40, node_size=8, domain_size=8)


def make_facts(layout: Layout, topology: Topology, file: str = "job.toml") -> JobFacts:
    return JobFacts(Job(layout, Source(file)), Cluster(topology, hosts=("gpu<1>",) * 8))


def find_problems(*facts: JobFacts) -> tuple[Finding, ...]:
    return sort_findings(tuple(check_facts(facts)))


def draw(*facts: JobFacts) -> ET.Element:
    return ET.fromstring(draw_meshes(facts, find_problems(*facts)))


def read_cells(root: ET.Element) -> list[dict[int, ET.Element]]:
    """The cells of each panel, by rank."""
    panels = root.findall(f"{SVG}g[@class='panel']")
    return [
        {int(cell.findtext(f"{SVG}text") or ""): cell for cell in panel.findall(f"{SVG}g")}
        for panel in panels
    ]


def read_box(rect: ET.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def find_rect(cell: ET.Element) -> ET.Element:
    rect = cell.find(f"{SVG}rect")
    assert rect is not None
    return rect


def test_outlined_ranks_are_those_of_groups_unlike_most() -> None:
    root = draw(make_facts(Layout.of(ddp=8, fsdp=5), NODES))
    fsdp, ddp = read_cells(root)
    assert [*fsdp] == [*ddp] == [*range(40)]
    outlined = {rank for rank, cell in fsdp.items() if "differs" in cell.attrib["class"]}
    assert outlined == {rank for rank in range(40) if rank // 5 in (1, 3, 4, 6)}
    assert fsdp[13][0].text == "rank 13: ddp=2, fsdp=3; node 1"
    assert fsdp[5][0].text == "rank 5: ddp=1, fsdp=0; node 0, host gpu<1>"
    fills = defaultdict(set)
    for rank, cell in fsdp.items():
        fills[find_rect(cell).attrib["fill"]].add(rank // 5)
    assert sorted(fills.values(), key=min) == [{group} for group in range(8)]


@pytest.mark.parametrize(
    ("layout", "topology"),
    [
        (Layout.of(ddp=8, fsdp=5), NODES),
        (Layout.of(dp=9, fsdp=64), Topology.uniform(576, node_size=72, domain_size=72)),
        (Layout.of(ddp=8, fsdp=6), Topology.uniform(48, node_size=8, domain_size=4)),
        (Layout.of(dp=25, fsdp=8), Topology.uniform(200, node_size=100, domain_size=3)),
        (Layout.of(dp=8000, fsdp=3), Topology.uniform(24000, node_size=8, domain_size=8)),
        (
            Layout((8, 5), ("ddp", "fsdp"), tuple(random.Random(0).sample(range(40), 40))),
            NODES,
        ),
    ],
)
def test_boxes_contain_cells_and_do_not_overlap(layout: Layout, topology: Topology) -> None:
    root = draw(make_facts(layout, topology))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [read_box(rect) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "node"]
    panels = read_cells(root)
    cells = [read_box(find_rect(cell)) for panel in panels for cell in panel.values()]
    assert panels
    assert all(2 <= len(panel) <= 600 for panel in panels)
    for some in (boxes, cells):
        for (a, b, c, d), (e, f, g, h) in combinations(some, 2):
            assert c <= e or g <= a or d <= f or h <= b
    for x, y, right, bottom in cells:
        assert sum(a <= x and b <= y and right <= c and bottom <= d for a, b, c, d in boxes) == 1
    assert all(a >= 0 <= b and c <= width and d <= height for a, b, c, d in boxes)


def test_all_meshes_with_findings_are_drawn_and_no_others() -> None:
    facts = [
        make_facts(Layout.of(ddp=8, fsdp=5), NODES, "first.toml"),
        make_facts(Layout.of(ddp=5, fsdp=8), NODES, "clean.toml"),
        make_facts(Layout.of(ddp=10, fsdp=2, tp=2), NODES, "clean too.toml"),
        make_facts(Layout.of(dp=40 // 5, cp=5), NODES, "<last>.toml"),
        make_facts(Layout.of(dp=8, cp=5), Topology.unknown(40), "unknown.toml"),
    ]
    root = draw(*facts)
    text = "\n".join(one.text or "" for one in root.findall(f"{SVG}text"))
    assert "first.toml" in text
    assert "<last>.toml" in text
    assert not re.search("clean|unknown", text)
    assert draw_meshes(facts[1:3], ()) == ""
    many = [make_facts(Layout.of(ddp=8, fsdp=5), NODES, f"{i}.toml") for i in range(14)]
    assert "not drawn: 2 more meshes with findings" in draw_meshes(many, find_problems(*many))


def test_sample_of_a_large_mesh_has_groups_that_differ() -> None:
    nodes = [rank // 8 for rank in range(4096)]
    nodes[4000], nodes[4088] = nodes[4088], nodes[4000]
    root = draw(make_facts(Layout.of(dp=512, fsdp=8), Topology.of(nodes, nodes)))
    cells = read_cells(root)[0]
    differing = {rank for rank, cell in cells.items() if "differs" in cell.attrib["class"]}
    assert {*range(8)} < {*cells} - differing
    assert differing == {*range(4000, 4008), *range(4088, 4096)}
    assert "24 of 512 nodes drawn" in [one.text for one in root.findall(f"{SVG}text")]


class Page(HTMLParser):
    """Elements of a page; elements that are not closed in order are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_summarizes_all_inputs_and_is_self_contained() -> None:
    evil = "</style><script>alert(1)</script>\x00\u202e"
    facts = [
        make_facts(Layout.of(ddp=8, fsdp=5), NODES, evil),
        make_facts(Layout((8, 5), (evil, "fsdp")), NODES, "b.toml"),
    ]
    inputs = (
        LintInput(evil, "file", "judged"),
        LintInput("b.toml", "file", "not judged", (evil, "no size")),
        LintInput("c.toml", "file", "no mesh"),
    )
    report = LintReport(find_problems(*facts), ("b.toml: on 5 nodes",), 0, inputs, files=3)
    text = write_report(report, facts)
    page = Page(text)
    assert page.tags.count("svg") == 1
    assert not {"script", "link", "img", "iframe", "object"} & {*page.tags}
    assert not {"src", "href", "onload", "onclick"} & page.attributes
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert text.count("prefers-color-scheme:dark") == 2
    assert "\x00" not in text
    assert "\u202e" not in text
    assert "<tr><td>b.toml</td><td>not judged</td>" in text
    assert "no mesh in c.toml" in text
    assert "<li>b.toml: on 5 nodes</li>" in text
    assert text.count("<h3>") == len(report.findings)
    # One list of fixes for both findings of a mesh.
    assert text.count("<ol>") == 1
    assert "<p>Fixes: those of the first MP101 of &lt;/style&gt;" in text


def test_page_without_findings_has_no_drawing() -> None:
    facts = make_facts(Layout.of(ddp=5, fsdp=8), NODES)
    text = write_report(LintReport((), ("job.toml: (ddp=5, fsdp=8)",), meshes=1), [facts])
    assert "no findings" in text
    assert "svg" not in Page(text).tags


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
