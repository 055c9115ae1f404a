"""``meshplan topo``: the readings of files that describe a cluster."""

from __future__ import annotations

import argparse
import json
from typing import Any

from meshplan._message_text import format_runs
from meshplan.cli._options import add_output, add_verb
from meshplan.lint._reporters.text import escape_line
from meshplan.topology import Reading
from meshplan.topology._files import read_file


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "topo",
        show_readings,
        "show the contents of files that describe a cluster",
        description="Show the domains and nodes of GPUs or ranks, read from supported files.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="file, or - for standard input",
    )
    add_output(parser)


def show_readings(given: argparse.Namespace) -> str:
    readings = [(name, read_file(name)) for name in given.files]
    if given.output_format == "json":
        found = [reading.to_json() for _, reading in readings]
        if len(found) > 1:
            found = [{"file": name, **one} for (name, _), one in zip(readings, found, strict=True)]
        return json.dumps(found[0] if len(found) == 1 else found, indent=2) + "\n"
    return "\n\n".join(_format_reading(name, reading) for name, reading in readings) + "\n"


def _format_reading(name: str, reading: Reading) -> str:
    shown = "standard input" if name == "-" else name
    lines = [f"{shown}: {reading.kind}{'' if reading.complete else ', incomplete'}"]
    for what, groups in (
        ("domains", reading.domains),
        ("nodes", reading.nodes),
    ):
        text = "unknown from this input"
        if groups is not None:
            text = " ".join(f"{{{','.join(format_runs(group))}}}" for group in groups) or "none"
        lines.append(f"  {what + ':':<9}{text}")
    if reading.names:
        lines.append(f"  {'names:':<9}{' '.join(reading.names[:20])}")
        if len(reading.names) > 20:
            lines[-1] += f" ... ({len(reading.names)})"
    lines += [f"  {note}" for note in reading.notes]
    # Names come from the file: control characters must not reach a terminal.
    return "\n".join(map(escape_line, lines))
