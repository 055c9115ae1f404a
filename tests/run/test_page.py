"""The page of ``--html``: every part of a report, safe, and none of it from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from meshplan.layout import Layout
from meshplan.run._hazards import describe_hazards
from meshplan.run._verdict import format_verdict, write_verdict
from meshplan.topology._locate import RankLocation
from tests.test_run_verdict import DIFFERENCE, OUTSIDE, report

EVIL = "<script>alert(1)</script>&\x1b[31m"


class Tags(HTMLParser):
    """Names of elements, addresses, and whether each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.names.add(tag)
        self.links += [value for name, value in attributes if name in ("href", "src")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(folder: Path, difference: dict[str, Any] | None, **changes: Any) -> str:
    layout = Layout.of(ddp=2, fsdp=3)
    places = {rank: RankLocation(f"h{rank // 2}", "h").to_json() for rank in range(6)}
    groups = {axis: layout.group_of(0, axis) or () for axis in layout.axes}
    site = {"site": "train.py:3 main (DTensor)", "kind": "outside", "backend": "nccl"}
    rows = [OUTSIDE | site | {"group": axis} for axis in groups]
    uses = {ranks: {True} for ranks in groups.values()}
    hazards, _, judged = describe_hazards(rows, groups, uses, [layout], places, 6)
    settings = {"threads": 1, "NCCL_ALGO": None}
    found = report(difference, hazards=hazards, command=["train.py"], settings=settings)
    found = found | {"reductions": rows} | changes
    write_verdict(str(folder / "run.html"), found, format_verdict(found), *judged)
    return (folder / "run.html").read_text(encoding="utf-8")


def test_page_has_every_part(tmp_path: Path) -> None:
    differing = {"threads": {"1": [0, 1, 2], "2": [3]}}
    text = page(tmp_path, DIFFERENCE, settings_that_differ=differing)
    tags = Tags(text)
    assert tags.open == []
    assert tags.links == []
    assert "script" not in tags.names
    assert text.count('class="cell differs"') == 3
    for part in (
        "affected: replicas differ",
        "(ddp=2, fsdp=3) on 3 nodes of 2",
        "ranks 0, 2-3 against rank 1",
        'class="error">error MP101</span>',
        "<td>train.py:3 main (DTensor)</td><td>all_reduce sum</td>",
        "<td>threads</td><td>1</td><td>1 on ranks 0-2, 2 on rank 3</td>",
        "<td>NCCL_ALGO</td><td>not set</td>",
        "<li>NVLink domains: no GPU</li>",
    ):
        assert part in text, part


def test_texts_of_the_job_are_no_markup(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        DIFFERENCE | {"tensor": EVIL, "text": EVIL},
        command=[EVIL],
        not_observed=[EVIL],
        error=EVIL,
        settings={EVIL: EVIL},
        reductions=[OUTSIDE | {"site": EVIL, "kind": "outside"}],
    )
    assert "script" not in Tags(text).names
    assert "\x1b" not in text


def test_job_without_meshes_has_a_page(tmp_path: Path) -> None:
    found = report(command=[], settings={}, not_observed=[], reductions=[])
    write_verdict(str(tmp_path / "a.html"), found, format_verdict(found), (), ())
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert Tags(text).open == []
    assert "<svg" not in text
    assert "none in 60 comparisons of tensors" in text
