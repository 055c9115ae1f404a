"""A picture of a mesh as an SVG document, and as one HTML page without network or script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshplan.lint._drawing._grid import (
    PALETTE,
    PANEL_WIDTH,
    SMALL,
    DrawnGrid,
    draw_grid,
    format_colour,
)
from meshplan.lint._drawing._picture import Panel, Picture, SignatureClass
from meshplan.lint._drawing._text import (
    BOLD,
    clean,
    describe_hazard,
    describe_members,
    escape,
    format_signature,
    format_title,
    measure,
    name_group,
    quote,
    rate_panel,
    shorten,
    summarize_groups,
    wrap,
)
from meshplan.lint._finding import Finding, Fix
from meshplan.planner import Hazard

_FONT = 'system-ui,"Segoe UI","DejaVu Sans",sans-serif'
_LIGHT = """\
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
"""

_DARK = """\
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
"""
_PAGE = f"""\
:root{{color-scheme:light dark}}
body{{margin:2rem auto;padding:0 1.5rem;max-width:100rem;font:15px/1.5 {_FONT};\
color:#1b1f24;background:#fff}}
h1{{font-size:1.5rem}} h2{{font-size:1.15rem;margin-top:2rem}}
figure{{margin:1.5rem 0;overflow-x:auto;border:1px solid #d0d7de;border-radius:6px}}
figure svg{{display:block}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere;padding:.8rem 1rem;background:#f3f5f7;\
border-left:4px solid #8c959f}}
pre.bad{{border-color:#b3001b}}
table{{border-collapse:collapse;margin:.5rem 0 1.5rem}}
h3{{font-size:1rem;margin-bottom:.3rem}}
th,td{{text-align:left;padding:.25rem 1.2rem .25rem 0;border-bottom:1px solid #d0d7de;\
vertical-align:top}}
td.number{{text-align:right;font-variant-numeric:tabular-nums}}
tr.bad td:first-child{{border-left:4px solid #b3001b;padding-left:.5rem}}
@media (prefers-color-scheme:dark){{
body{{color:#e6edf3;background:#0f1318}}
figure,th,td{{border-color:#30363d}}
pre{{background:#161b22}}
pre.bad,tr.bad td:first-child{{border-left-color:#ff5c5c}}
}}
"""
# Diagonal strokes of a tile of 6 pixels, with the ends that reach in from its neighbours.
_HATCH = "M-1 1l2-2M0 6l6-6M5 7l2-2"
_MARGIN = 20
_PANEL_GAP = 36
_WIDEST = 1500
# Sizes of text, in pixels: of the headline, of a panel's title, and of lines.
_HEADLINE, _TITLE, _TEXT = 18, 15, 12
_LINE = 18
_SWATCH = 12
# Placements that a panel and a table list, and characters of a line about a hazard.
_MAX_SHOWN, _MAX_ROWS, _MAX_LINE = 8, 40, 2000


class _PanelSvg(NamedTuple):
    header: str
    header_height: int
    grid: DrawnGrid
    width: int
    harmful: bool


def write_svg(picture: Picture, *, heading: bool = True) -> str:
    """The ranks of a mesh on their nodes and domains, coloured by group, as one SVG document.

    Groups that touch never have one colour. Groups that differ from most of their siblings are
    hatched and outlined. The same picture returns the same text.

    Args:
        picture: the contents.
        heading: with the mesh above the panels, unless the page around it has that.
    """
    panels = [_draw_panel(panel, numbers=picture.numbers) for panel in picture.panels]
    rows: list[list[_PanelSvg]] = [[]]
    room = _WIDEST
    for panel in panels:
        if rows[-1] and panel.width > room:
            rows.append([])
            room = _WIDEST
        rows[-1].append(panel)
        room -= panel.width + _PANEL_GAP
    width = max(sum(panel.width + _PANEL_GAP for panel in row) - _PANEL_GAP for row in rows)
    text, y = _draw_heading(picture, width, heading)
    parts = [text]
    for row in rows:
        x = _MARGIN
        below = max(panel.header_height for panel in row)
        for panel in row:
            bad = ' class="bad"' if panel.harmful else ""
            parts.append(
                f'<g transform="translate({x},{y})"{bad}>\n{panel.header}'
                f'<g transform="translate(0,{below})">\n{panel.grid.svg}</g>\n</g>\n'
            )
            x += panel.width + _PANEL_GAP
        y += below + max(panel.grid.height for panel in row) + _PANEL_GAP
    legend, height = _draw_legend(picture.panels, width)
    y -= _PANEL_GAP // 2
    parts.append(f'<g transform="translate({_MARGIN},{y})">\n{legend}</g>\n')
    y += height + _MARGIN
    width += 2 * _MARGIN
    colours = sorted(set().union(*(panel.grid.colours for panel in panels)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mp" width="{width}" height="{y}" '
        f'viewBox="0 0 {width} {y}" font-family=\'{_FONT}\' font-size="{_TEXT}" '
        f"aria-label={quote(picture.subject)}>\n"
        f"<style>\n{write_css(colours)}</style>\n<defs>\n{write_patterns(colours)}</defs>\n"
        f'<rect class="page" width="100%" height="100%"/>\n{"".join(parts)}</svg>\n'
    )


def _draw_heading(picture: Picture, width: int, shown: bool) -> tuple[str, int]:
    """The mesh if ``shown``, the omitted panels, and the height at which panels begin."""
    bold = 'font-size="18" font-weight="bold"'
    lines = wrap(picture.subject, BOLD * _HEADLINE, width, 3) if shown else []
    styled = [(line, bold, _HEADLINE + 6) for line in lines]
    if picture.left_out:
        note = f"not drawn, to keep the picture small: groups of {', '.join(picture.left_out)}"
        styled += [(line, 'class="soft"', _TEXT + 9) for line in wrap(note, _TEXT, width, 3)]
    y = _MARGIN
    text = ""
    for line, style, step in styled:
        y += step
        text += f'<text x="{_MARGIN}" y="{y - 4}" {style}>{escape(line)}</text>\n'
    return text, y + (18 if text else 0)


def _draw_legend(panels: Sequence[Panel], room: int) -> tuple[str, int]:
    """The meaning of boxes, colours and hatchings as SVG, and its height."""
    entries = []
    if panels[0].nodes[0].number is not None:
        entries.append(('<rect class="node" x="1" y="1" width="20" height="12" rx="3"/>', "node"))
    if panels[0].domains_known:
        well = '<rect class="well" width="22" height="14" rx="2"/>'
        entries.append((well, "domain (NVLink, xGMI)"))
    fills = "".join(
        f'<rect x="{8 * i}" width="7" height="14" fill="{colour}"/>'
        for i, colour in enumerate(PALETTE[:3])
    )
    repeat = any(len(panel.groups.members) > len(PALETTE) for panel in panels)
    more = ", colours repeat" if repeat else ""
    entries.append((fills, f"one colour: ranks of one group{more}"))
    hatched = '<rect x="1" y="1" width="20" height="12" fill="url(#mp-j)"/>'
    edge = '<path class="edge" d="M1 1h20v12h-20z"/>'
    marked = [panel for panel in panels if panel.groups.marked.any()]
    if marked and any(panel.harmful for panel in panels):
        mark = f'{hatched}<g class="bad">{edge}</g>'
        entries.append((mark, "differs from its siblings: may add in another order"))
    if any(not panel.harmful for panel in marked):
        entries.append((hatched + edge, "placed differently from most groups"))
    if any(len(panel.coordinates) < sum(len(n.ranks) for n in panel.nodes) for panel in panels):
        out = '<rect class="out" x="1" y="1" width="20" height="12"/>'
        entries.append((out, "rank not in the mesh"))
    parts = [f'<path class="rule" d="M0 0.5h{room}"/>\n']
    widths = [30 + round(measure(label, _TEXT)) for _, label in entries]
    y = 0
    for (mark, label), (x, y) in zip(
        entries, _place_in_lines(widths, 0, 14, room, 22, 22), strict=True
    ):
        parts.append(
            f'<g transform="translate({x},{y})">{mark}<text x="30" y="11">{label}</text></g>\n'
        )
    return "".join(parts), y + 18


def _place_in_lines(
    widths: Iterable[int], x: int, y: int, room: int, gap: int, line: int
) -> Iterator[tuple[int, int]]:
    """Positions of things side by side, in lines of width ``room``."""
    for width in widths:
        if x and x + width > room:
            x, y = 0, y + line
        yield x, y
        x += width + gap


def _draw_panel(panel: Panel, *, numbers: bool) -> _PanelSvg:
    grid = draw_grid(panel, numbers=numbers)
    width = max(PANEL_WIDTH, grid.width)
    header, height = _draw_header(panel, width)
    return _PanelSvg(header, height, grid, width, panel.harmful)


def _draw_header(panel: Panel, room: int) -> tuple[str, int]:
    """Title, verdict and signatures of a panel as SVG, and their height."""
    rating = rate_panel(panel)
    chip = round(measure(rating[1], SMALL)) + 16 if rating else 0
    title = shorten(format_title(panel), BOLD * _TITLE, room - chip - 12)
    parts = [f'<text y="15" font-size="{_TITLE}" font-weight="bold">{escape(title)}</text>\n']
    if rating:
        x = round(measure(title, BOLD * _TITLE)) + 12
        parts.append(
            f'<rect class="chip-{rating[0]}" x="{x}" width="{chip}" height="20" rx="10"/>'
            f'<text class="chip" x="{x + chip / 2:g}" y="14" font-size="{SMALL}" '
            f'text-anchor="middle">{rating[1]}</text>\n'
        )
    y = 20
    for line in wrap(summarize_groups(panel), _TEXT, room, 2):
        y += _LINE
        parts.append(f'<text y="{y - 2}">{escape(line)}</text>\n')
    classes = panel.groups.classes
    if classes:
        y += _LINE
        label = "ranks per node:"
        parts.append(f'<text y="{y - 2}">{label}</text>\n')
        texts = [f"{one.groups} x {format_signature(one.signature)}" for one in classes]
        if len(classes) > _MAX_SHOWN:
            rest = classes[_MAX_SHOWN - 1 :]
            texts[_MAX_SHOWN - 1 :] = [
                f"{sum(one.groups for one in rest)} in {len(rest)} other placements"
            ]
        texts = [shorten(text, _TEXT, room - _SWATCH - 6) for text in texts]
        widths = [_SWATCH + 6 + round(measure(text, _TEXT)) for text in texts]
        start = round(measure(label, _TEXT)) + 4
        places = _place_in_lines(widths, start, y, room, 14, _LINE)
        for one, text, (x, y) in zip(classes, texts, places, strict=False):
            fill = ' fill="url(#mp-j)"' if one.marked else ' class="grey"'
            parts.append(
                f'<rect x="{x}" y="{y - 12}" width="{_SWATCH}" height="{_SWATCH}"{fill}/>'
                f'<text x="{x + _SWATCH + 6}" y="{y - 2}">{escape(text)}</text>\n'
            )
    notes = [line for hazard in panel.hazards for line in describe_hazard(hazard)]
    for note in [*dict.fromkeys(notes), panel.left_out]:
        for line in wrap(clean(note), _TEXT, room, 2) if note else ():
            y += _LINE - 1
            parts.append(f'<text class="soft" y="{y - 2}">{escape(line)}</text>\n')
    return "".join(parts), y + 12


def write_css(colours: Iterable[int]) -> str:
    """The style sheet of a picture that uses these colours, on light and on dark ground."""
    rules = [
        f".mp .k{n}{{fill:{format_colour(n)}}}\n.mp .j{n}{{fill:url(#mp-j{n})}}\n" for n in colours
    ]
    return _LIGHT + "".join(rules) + _DARK


def write_patterns(colours: Iterable[int]) -> str:
    """The hatched fills in these colours, and the grey one of legends."""
    tiles = [("mp-j", "#d0d7de"), *((f"mp-j{n}", format_colour(n)) for n in colours)]
    return "".join(
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{fill}"/>'
        f'<path d="{_HATCH}" stroke="#14171a" stroke-width="1.1" stroke-opacity=".3"/>'
        "</pattern>\n"
        for name, fill in tiles
    )


def write_html(picture: Picture, findings: Sequence[Finding] = ()) -> str:
    """The SVG with the text of the hazards, the findings and tables, as one HTML page.

    Pointing at a rank shows its placement and highlights its group.

    Args:
        picture: the contents.
        findings: of this mesh and others, with their fixes.
    """
    texts = "".join(map(_write_hazard, picture.hazards))
    name = escape(picture.subject)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{name}</title>\n<style>\n{_PAGE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        f"<figure>\n{write_svg(picture, heading=False)}</figure>\n"
        + (f"<h2>Hazards</h2>\n{texts}" if texts else "")
        + ("<h2>Findings and fixes</h2>\n" if findings else "")
        + "".join(_write_findings(findings))
        + "<h2>Node placement of groups</h2>\n"
        + "".join(map(_write_table, picture.panels))
        + "</body>\n</html>\n"
    )


def _write_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Messages, and each list of fixes once: two findings often have the same one."""
    seen: dict[tuple[Fix, ...], str] = {}
    for one in findings:
        place = f"{one.source}: {one.subject}" if one.subject else str(one.source)
        yield f"<h3>{one.severity} {escape(one.code)}: {escape(one.message)}</h3>\n"
        yield f"<p>{escape(place)}</p>\n"
        if not one.fixes:
            continue
        if one.fixes in seen:
            yield f"<p>Fixes: those of {seen[one.fixes]}.</p>\n"
            continue
        seen[one.fixes] = f"the first {escape(one.code)} of {escape(str(one.source))}"
        yield "<ol>\n"
        for fix in one.fixes:
            lines = "\n".join(map(escape, fix.diff.split("\n")))
            diff = f"<pre>{lines}</pre>" if fix.diff else ""
            cost = f" ({escape(fix.cost)})" if fix.cost else ""
            yield f"<li>{escape(fix.title)}{cost}{diff}</li>\n"
        yield "</ol>\n"


def _write_hazard(hazard: Hazard) -> str:
    mood = " class=bad" if hazard.verdict == "may differ" else ""
    # Each line is escaped by itself; of one with a very long name the beginning is enough.
    lines = str(hazard).split("\n")
    cut = [line[:_MAX_LINE] + ("…" if len(line) > _MAX_LINE else "") for line in lines]
    joined = "\n".join(map(escape, cut))
    return f"<pre{mood}>{joined}</pre>\n"


def _write_table(panel: Panel) -> str:
    """The signatures of a panel's groups."""
    classes = panel.groups.classes
    rating = rate_panel(panel)
    caption = f"{format_title(panel)}: {summarize_groups(panel)}"
    caption = escape(caption + (f"; {rating[1]}" if rating else ""))
    if not classes:
        return f"<p>{caption}</p>\n"
    rows = "".join(_write_row(panel, one) for one in classes[:_MAX_ROWS])
    if rest := classes[_MAX_ROWS:]:
        groups = sum(one.groups for one in rest)
        rows += f'<tr><td colspan="5">and {len(rest)} more placements, {groups} groups</td></tr>\n'
    return (
        f"<h3>{caption}</h3>\n<table>\n"
        "<thead><tr><th>ranks per node</th><th>groups</th><th>siblings</th>"
        "<th>first group</th><th>its ranks</th></tr></thead>\n"
        f"<tbody>\n{rows}</tbody>\n</table>\n"
    )


def _write_row(panel: Panel, one: SignatureClass) -> str:
    mood = " class=bad" if one.marked and panel.harmful else ""
    return (
        f"<tr{mood}><td>{escape(format_signature(one.signature))}</td>"
        f'<td class="number">{one.groups}</td>'
        f"<td>{'differs from most' if one.marked else 'usual'}</td>"
        f"<td>{escape(name_group(panel, one.first))}</td>"
        f"<td>{escape(describe_members(panel, one.first))}</td></tr>\n"
    )
