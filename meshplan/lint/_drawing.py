"""Pages of ``--html``. That of the linter: all inputs, findings, one SVG of their meshes.

A page needs no network and no script, and follows the light or dark scheme of the reader.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import islice

import numpy as np

from meshplan.layout import Integers
from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import (
    Finding,
    Fix,
    LintReport,
    join_names,
)
from meshplan.lint._reporters.text import (
    escape_line,
    escape_text,
    format_checked,
    format_counts,
    format_fix,
    format_name,
    format_source,
)

# The light scheme of Paul Tol (SRON/EPS/TN/09-002), for cells with dark text on them, violet
# instead of olive, in the order with the largest differences between neighbours.
_PALETTE = ("7ad", "ed8", "9df", "e86", "98f", "fab", "bc3", "4b9")
_GOLDEN = (5**0.5 - 1) / 2
# Pixels: a cell, the space between boxes, a line of text, a character of the monospaced font.
_CELL, _ROW, _GAP, _LINE, _CHARACTER = 34, 22, 8, 20, 7.3
_WIDTH = 1152
# A picture of more is not read: the rest is counted in its captions.
_MAX_MESHES, _MAX_PANELS, _MAX_TEXT = 12, 3, 2000
# Nodes of a panel, its ranks, and those of one node.
_MAX_NODES, _MAX_CELLS, _MAX_RANKS = 24, 576, 144
_FONT = "ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace"
_SVG_STYLE = """\
.mp .page{fill:#fff}
.mp text{fill:#1b1f24}
.mp .soft{fill:#57606a}
.mp .node{fill:#f3f5f7;stroke:#8c959f}
.mp .cell text{fill:#14171a;text-anchor:middle;font-size:11px;pointer-events:none}
.mp .differs rect{stroke:#b3001b;stroke-width:2.5}
.mp .differs text{font-weight:bold;text-decoration:underline}
@media (prefers-color-scheme:dark){
.mp .page{fill:#0f1318}
.mp text{fill:#e6edf3}
.mp .soft{fill:#9da7b3}
.mp .node{fill:#21272f}
.mp .differs rect{stroke:#ff4d4d}
}
"""
_PAGE_STYLE = """\
:root{color-scheme:light dark}
body{margin:2rem auto;padding:0 1.5rem;max-width:76rem;font:15px/1.5 system-ui,sans-serif;\
color:#1b1f24;background:#fff}
h1{font-size:1.5rem} h2{font-size:1.15rem;margin-top:2rem} h3{font-size:1rem;margin-bottom:0}
figure{margin:1rem 0;overflow-x:auto}
pre{white-space:pre-wrap;overflow-wrap:anywhere;padding:.6rem 1rem;background:#f3f5f7}
table{border-collapse:collapse}
th,td{text-align:left;padding:.25rem 1.2rem .25rem 0;border-bottom:1px solid #8c959f;\
vertical-align:top}
.error{color:#b3001b} .warning{color:#7a5200}
@media (prefers-color-scheme:dark){
body{color:#e6edf3;background:#0f1318}
pre{background:#21272f}
.error{color:#ff6b6b} .warning{color:#e3b341}
}
"""


def write_page(title: str, body: str) -> str:
    """A page as one file."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{quote(title)}</title>\n<style>\n{_PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{quote(title)}</h1>\n{body}</body>\n</html>\n"
    )


def write_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself where the window is narrow."""
    head = "".join(f"<th>{quote(one)}</th>" for one in heads)
    lines = [f"<tr>{head}</tr>\n"] * bool(heads)
    lines += ["<tr>" + "".join(f"<td>{quote(one)}</td>" for one in row) + "</tr>\n" for row in rows]
    return f"<figure>\n<table>\n{''.join(lines)}</table>\n</figure>\n"


def write_report(report: LintReport, facts: Sequence[JobFacts]) -> str:
    """The page of one run of the linter; ``facts`` are of every mesh, and those with findings are
    drawn.
    """
    body = f"<p>{quote(format_counts(report))}</p>\n"
    if checked := format_checked(report):
        body += f"<p>{quote(checked)}</p>\n"
    body += "".join(_write_inputs(report))
    if picture := draw_meshes(facts, report.findings):
        body += f"<h2>Meshes with findings</h2>\n<figure>\n{picture}</figure>\n"
    if report.findings:
        body += "<h2>Findings and fixes</h2>\n" + "".join(write_findings(report.findings))
    return write_page("meshplan lint", body)


def _write_inputs(report: LintReport) -> Iterator[str]:
    """A row for each input that has a mesh or was not judged, then the meshes and placements."""
    counts = Counter(one.source.file or one.source.option for one in report.findings)
    rows = [
        (
            format_name(one),
            one.state,
            str(counts[one.name]),
            "; ".join(one.why),
        )
        for one in report.inputs
        if one.state != "no mesh" or one.kind != "file"
    ]
    if rows:
        yield write_table(("input", "result", "findings", "reason"), rows)
    if report.judged:
        yield ("<ul>\n" + "".join(f"<li>{quote(one)}</li>\n" for one in report.judged) + "</ul>\n")


def write_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Messages with details, and each list of fixes once: two findings often have the same one."""
    seen: dict[tuple[Fix, ...], str] = {}
    for one in findings:
        where = f"{format_source(one.source)}: {one.subject}" if one.subject else str(one.source)
        head = f'<span class="{one.severity}">{one.severity} {quote(one.code)}</span>'
        yield f"<h3>{head}: {quote(one.message)}</h3>\n<p>{quote(where)}</p>\n"
        if one.details:
            yield f"<pre>{chr(10).join(quote(line, lines=True) for line in one.details)}</pre>\n"
        if one.fixes in seen:
            yield f"<p>Fixes: those of {quote(seen[one.fixes])}.</p>\n"
        elif one.fixes:
            seen[one.fixes] = f"the first {one.code} of {format_source(one.source)}"
            yield "<ol>\n"
            for fix in one.fixes:
                diff = f"<pre>{escape(escape_text(fix.diff))}</pre>" if fix.diff else ""
                yield f"<li>{quote(format_fix(fix))}{diff}</li>\n"
            yield "</ol>\n"


def quote(text: str, *, lines: bool = False) -> str:
    """The beginning of a text, safe in HTML and XML."""
    cut = text[:_MAX_TEXT] + "…" * (len(text) > _MAX_TEXT)
    return escape(escape_text(cut) if lines else escape_line(cut))


def draw_meshes(
    facts: Sequence[JobFacts],
    findings: Sequence[Finding],
    *,
    every: bool = False,
) -> str:
    """The ranks of all meshes with findings on their nodes and domains, as one SVG document; empty
    if no such mesh has a known placement. ``every``: meshes without findings too. A rank has the
    colour of its group. Groups that are placed on nodes differently from most are outlined.
    """
    axes_of: dict[int, dict[tuple[int, ...], None]] = {}
    if every:
        axes_of = {i: {} for i, one in enumerate(facts) if one.topology.known}
    number = {(one.job.source, str(one.layout)): i for i, one in enumerate(facts)}
    for finding in findings:
        i = number.get((finding.source, finding.subject))
        if i is None or not facts[i].topology.known:
            continue
        sets = axes_of.setdefault(i, {})
        labels = finding.data.get("axes", ())
        # One reduction over several axes has one group; other rules list axes with groups each.
        joint = (labels,) if finding.code in ("MP101", "MP102") else ((axis,) for axis in labels)
        sets |= {facts[i].layout.axis_indices(one): None for one in joint}
    canvas = _Canvas()
    for i in islice(axes_of, _MAX_MESHES):
        one = facts[i]
        canvas.write(f"{one.layout} on {one.topology}", "", 15)
        canvas.write(format_source(one.job.source), "soft")
        sizes = one.layout.sizes
        innermost = max(
            (k for k, size in enumerate(sizes) if size > 1),
            default=len(sizes) - 1,
        )
        panels = list(axes_of[i]) or [(innermost,)]
        for axes in panels[:_MAX_PANELS]:
            _draw_panel(canvas, one, axes)
        if more := panels[_MAX_PANELS:]:
            names = "; ".join(join_names(one.name_axes(axes)) for axes in more)
            canvas.write(f"not drawn: groups of {names}", "soft")
    if (rest := len(axes_of) - _MAX_MESHES) > 0:
        canvas.write(
            f"not drawn: {rest} more mesh{'es' * (rest > 1)} with findings",
            "soft",
        )
    return canvas.finish() if axes_of else ""


class _Canvas:
    """A document that grows downward."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = self.y = _GAP

    def write(self, text: str, kind: str, size: int = 12) -> None:
        """One line, shortened to the width of the document."""
        most = int((_WIDTH - 2 * _GAP) * 12 / size / _CHARACTER)
        text = escape_line(text[:most])[:most] + "…" * (len(text) > most)
        self.widen(2 * _GAP + round(len(text) * _CHARACTER * size / 12))
        self.y += _LINE
        weight = ' font-weight="bold"' * (size > 12)
        self.parts.append(
            f'<text x="{_GAP}" y="{self.y - 5}" class="{kind}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>\n"
        )

    def widen(self, width: int) -> None:
        """Make room for something that ends ``width`` pixels from the left."""
        self.width = max(self.width, width)

    def finish(self) -> str:
        """The document."""
        width, height = self.width, self.y + _GAP
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mp" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" font-family="{_FONT}" role="img" '
            f'aria-label="meshes">\n<style>\n{_SVG_STYLE}</style>\n'
            f'<rect class="page" width="100%" height="100%"/>\n{"".join(self.parts)}</svg>\n'
        )


def _draw_panel(canvas: _Canvas, facts: JobFacts, axes: tuple[int, ...]) -> None:
    """The groups over some axes: a caption, and boxes of nodes from left to right."""
    layout = facts.layout
    islands = any(one.islands and one.hazard.axes == axes for one in facts.harmful)
    siblings = facts.find_placement(axes, islands=islands).siblings
    differs = siblings.pattern != np.bincount(siblings.pattern).argmax()
    group_of = np.full(layout.highest_rank + 1, -1)
    group_of[siblings.members] = np.arange(len(siblings.members))[:, None]
    nodes, number = _list_nodes(facts)
    most = min(_MAX_NODES, max(2, _MAX_CELLS // max(map(len, nodes))))
    chosen = _choose_nodes(
        siblings.members,
        differs,
        number,
        min(most, len(nodes)),
    )
    name, count = join_names(facts.name_axes(axes)), len(differs)
    where = "domains" if islands else "nodes"
    text = f"groups of {name}: {count} of {siblings.size} ranks"
    if marked := int(differs.sum()):
        text += f"; {marked} (outlined) {'are' if marked > 1 else 'is'} placed on {where} "
        text += "differently from most"
    canvas.y += _GAP
    canvas.write(text, "", 13)
    if len(chosen) < len(nodes):
        canvas.write(f"{len(chosen)} of {len(nodes)} nodes drawn", "soft")
    boxes = [_split_domains(facts, nodes[i]) for i in chosen]
    widest = max(len(domain) for box in boxes for domain in box)
    columns = widest if widest <= 9 else 8 if widest % 8 == 0 and widest <= 64 else 9
    rows = max(sum(-(-len(domain) // columns) for domain in box) for box in boxes)
    height = _LINE + rows * _ROW + max(map(len, boxes)) * _GAP
    width = max(2 * _GAP + columns * _CELL, 90)
    per_row = max(1, (_WIDTH - _GAP) // (width + _GAP))
    canvas.widen(_GAP + min(per_row, len(chosen)) * (width + _GAP))
    colours: dict[int, str] = {}
    top = canvas.y + _GAP
    canvas.parts.append('<g class="panel">\n')
    for place, (i, box) in enumerate(zip(chosen, boxes, strict=True)):
        x = _GAP + place % per_row * (width + _GAP)
        y = top + place // per_row * (height + _GAP)
        left_out = len(nodes[i]) - sum(map(len, box))
        canvas.parts.append(
            f'<rect class="node" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>\n'
            f'<text class="soft" x="{x + _GAP}" y="{y + 14}" font-size="11">node {i}'
            f"{f', {left_out} more' if left_out else ''}</text>\n"
        )
        y += _LINE
        for domain in box:
            for k, rank in enumerate(domain):
                group = int(group_of[rank])
                colour = colours.setdefault(group, _pick_colour(len(colours)))
                at = x + _GAP + k % columns * _CELL, y + k // columns * _ROW
                title = _describe_rank(facts, rank, i)
                canvas.parts.append(_draw_cell(at, colour, rank, title, bool(differs[group])))
            y += -(-len(domain) // columns) * _ROW + _GAP
    canvas.parts.append("</g>\n")
    canvas.y = top + -(-len(chosen) // per_row) * (height + _GAP)


def _list_nodes(facts: JobFacts) -> tuple[list[Integers], Integers]:
    """The ranks of each node of the mesh, by lowest rank, and the node of each global rank."""
    ranks = np.sort(facts.layout.grid, axis=None)
    found = facts.topology.nodes_of(ranks)
    assert found is not None
    _, first, inverse = np.unique(found, return_index=True, return_inverse=True)
    of_rank = np.argsort(np.argsort(first))[inverse]
    number = np.full(facts.layout.highest_rank + 1, -1)
    number[ranks] = of_rank
    by_node = np.argsort(of_rank, kind="stable")
    return np.split(ranks[by_node], np.cumsum(np.bincount(of_rank))[:-1]), number


def _choose_nodes(members: Integers, differs: Integers, number: Integers, most: int) -> list[int]:
    """Nodes of the first usual and of the first outlined groups, then the first, ``most`` in all.

    Of the usual group a third, so that there is room for groups that differ from it.
    """
    chosen: dict[int, None] = {}
    usual, marked = (~differs).nonzero()[0][:1], differs.nonzero()[0][:most]
    for groups, room in ((usual, most // 3 + 1), (marked, most)):
        for group in groups:
            chosen.update(dict.fromkeys(number[members[group][:_MAX_CELLS]].tolist()))
        chosen = dict.fromkeys(islice(chosen, room))
    chosen.update(dict.fromkeys(range(most)))
    return sorted(islice(chosen, most))


def _split_domains(facts: JobFacts, ranks: Integers) -> list[list[int]]:
    """The drawn ranks of a node, by domain if domains are known."""
    drawn = ranks[:_MAX_RANKS].tolist()
    of_rank = facts.topology.domains
    domains: dict[int, list[int]] = {}
    for rank in drawn:
        domains.setdefault(0 if of_rank is None else int(of_rank[rank]), []).append(rank)
    return list(domains.values())


def _pick_colour(number: int) -> str:
    """A colour that is light enough for dark text: of the palette, then around the hues."""
    if number < len(_PALETTE):
        return f"#{_PALETTE[number]}"
    rgb = colorsys.hls_to_rgb(number * _GOLDEN % 1, (0.84, 0.77, 0.71)[number % 3], 0.55)
    return "#" + "".join(f"{round(15 * part):x}" for part in rgb)


def _draw_cell(at: tuple[int, int], colour: str, rank: int, title: str, differs: bool) -> str:
    x, y = at
    # Seven digits fit into a cell of 34 pixels at a smaller size.
    size = f' style="font-size:{min(11, 50 // len(str(rank)))}px"' * (rank > 9999)
    return (
        f'<g class="cell{" differs" * differs}"><title>{escape(title)}</title>'
        f'<rect x="{x + 2}" y="{y + 2}" width="{_CELL - 4}" height="{_ROW - 4}" fill="{colour}"/>'
        f'<text x="{x + _CELL // 2}" y="{y + 15}"{size}>{rank}</text></g>\n'
    )


def _describe_rank(facts: JobFacts, rank: int, node: int) -> str:
    """``rank 13: ddp=2, fsdp=3; node 1, host gpu-1``."""
    where = facts.layout.coordinate(rank) or ()
    sized = zip(facts.layout.axes, where, facts.layout.sizes, strict=True)
    text = ", ".join(f"{axis}={index}" for axis, index, size in sized if size > 1)
    hosts = facts.cluster.hosts
    host = f", host {hosts[rank]}" if rank < len(hosts) and hosts[rank] else ""
    return escape_line(f"rank {rank}: {text[:200]}; node {node}{host[:200]}")
