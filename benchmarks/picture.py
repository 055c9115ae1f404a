"""PNG pictures of cases: lines over the size of a message, or bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.record import Case

# Suites whose lines run over the size; each value of other parameters has a panel of its own.
_LINES = ("allreduce_cpu", "paths", "allreduce_gpu")
# Colours that are told apart without seeing red or green (Okabe and Ito).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
# Figures farther apart than that would not be seen beside each other.
_DECADES = 50


def draw(name: str, title: str, cases: Sequence[Case], folder: Path) -> list[Path]:
    """Draw the cases of a benchmark.

    Args:
        name: of the benchmark, and of the files.
        title: of the benchmark, above the picture.
        cases: any.
        folder: of the files.

    Returns:
        The PNG file, or nothing if there are no cases.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _panels(name, cases)
    if not panels:
        return []
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis, (panel, fill) in zip(flat, panels, strict=False):
        axis.set_title(panel, fontsize=10)
        fill(axis)
    for axis in flat[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle("\n".join(wrap(title, 60 * columns)), fontsize=12)
    file = folder / f"{name}.png"
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return [file]


_Panel = tuple[str, Callable[[Any], None]]


def _panels(name: str, cases: Sequence[Case]) -> list[_Panel]:
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        key: tuple[object, ...] = (case.unit, tuple(case.runs))
        if name in _LINES and "bytes" in case.parameters:
            key += tuple(item for item in case.parameters.items() if item[0] != "bytes")
        groups.setdefault(key, []).append(case)
    panels: list[_Panel] = []
    for key, group in groups.items():
        if name in _LINES and len(group) > 1:
            counts = {"world_size": "{} ranks", "hosts": "{} hosts", "rate": "{} Mb/s"}
            words = [counts.get(k, "{}").format(v) for k, v in key[2:]]  # type: ignore[misc]
            panels.append((", ".join(words), lambda axis, g=group: _lines(axis, g)))  # type: ignore[misc]
        else:
            panels.append(("", lambda axis, g=group: _bars(axis, g)))  # type: ignore[misc]
    return panels


def _lines(axis: Any, cases: Sequence[Case]) -> None:
    x = [int(case.parameters["bytes"]) for case in cases]
    for run, colour in zip(cases[0].runs, _COLOURS, strict=False):
        figures = [case.runs[run] for case in cases]
        axis.plot(x, [f.median for f in figures], "o-", color=colour, label=run, markersize=3)
        axis.fill_between(
            x,
            [f.median for f in figures],
            [f.p95 for f in figures],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    axis.set_xscale("log", base=2)
    step = 1 + (len(x) > 6)  # every second label, where there are many
    labels = [_format_bytes(size) if i % step == 0 else "" for i, size in enumerate(x)]
    axis.set_xticks(x, labels, fontsize=8)
    axis.minorticks_off()
    for bar in cases[0].bars:
        if bar.to is None and bar.of in cases[0].runs:
            axis.axhline(bar.limit, color="black", linestyle=":", linewidth=1)
            axis.annotate(f"bar: {bar.kind} {bar.limit:g}", (x[0], bar.limit), fontsize=7)
    every = [figures.median for case in cases for figures in case.runs.values()]
    if min(every) > 0 and max(every) > 10 * min(every):
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel("size")
    axis.set_ylabel(cases[0].unit)
    axis.grid(alpha=0.3)
    _legend(axis)


def _format_bytes(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def _bars(axis: Any, cases: Sequence[Case]) -> None:
    runs = list(cases[0].runs)
    height = 0.8 / len(runs)
    for number, (run, colour) in enumerate(zip(runs, _COLOURS, strict=False)):
        y = [place + number * height for place in range(len(cases))]
        medians = [case.runs[run].median for case in cases]
        bars = axis.barh(y, medians, height, color=colour, label=run)
        axis.bar_label(bars, [f"{value:.3g}" for value in medians], fontsize=7, padding=2)
    middle = height * (len(runs) - 1) / 2
    axis.set_yticks([place + middle for place in range(len(cases))])
    axis.set_yticklabels([_folded(case.name) for case in cases], fontsize=7)
    axis.invert_yaxis()
    every = [case.runs[run].median for case in cases for run in runs]
    if min(every) > 0 and max(every) > _DECADES * min(every):
        axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.set_xlabel(cases[0].unit)
    if len(runs) > 1:
        _legend(axis)


def _legend(axis: Any) -> None:
    """Below, where no figure is."""
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _folded(text: str, width: int = 34) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
