"""``meshplan topo``: what was understood of files that describe a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from meshplan.cli._arguments import refused
from meshplan.cli._streams import say
from meshplan.errors import TopologyInputError
from meshplan.lint._reporters._words import one_line
from meshplan.topology import Reading
from meshplan.topology._files import read_file

__all__ = ["add", "run", "topo"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "topo",
        help="what files that describe a cluster say",
        description="What was understood of files that describe a cluster, whatever their format.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file, or - for standard input")
    parser.add_argument("--output-format", choices=("text", "json"), default="text")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print what was understood; the exit status."""
    try:
        text = topo(given.files, given.output_format)
    except TopologyInputError as error:
        return refused(error)
    say(text + "\n")
    return 0


def topo(files: Sequence[str], output_format: str) -> str:
    """The readings of ``files`` as ``text`` or ``json``; of one file, one JSON object.

    Raises:
        TopologyInputError: of the first file that cannot be understood.
    """
    readings = [(name, read_file(name)) for name in files]
    if output_format == "json":
        found = [reading.to_json() for _, reading in readings]
        if len(found) > 1:
            found = [{"file": name, **one} for (name, _), one in zip(readings, found, strict=True)]
        return json.dumps(found[0] if len(found) == 1 else found, indent=2)
    return "\n\n".join(_text(name, reading) for name, reading in readings)


def _text(name: str, reading: Reading) -> str:
    shown = "standard input" if name == "-" else name
    lines = [f"{shown}: {reading.kind}{'' if reading.complete else ', incomplete'}"]
    for what, groups in (("domains", reading.domains), ("nodes", reading.nodes)):
        text = "unknown from this input" if groups is None else " ".join(map(_ranges, groups))
        lines.append(f"  {what + ':':<9}{text or 'none'}")
    if reading.names:
        lines.append(f"  {'names:':<9}{' '.join(reading.names[:20])}")
        if len(reading.names) > 20:
            lines[-1] += f" ... ({len(reading.names)})"
    lines += [f"  {note}" for note in reading.notes]
    # Names are what the file says they are: nothing is left that a terminal obeys.
    return "\n".join(map(one_line, lines))


def _ranges(group: Sequence[int]) -> str:
    """``{0-3,7}``."""
    starts = [group[0], *(later for one, later in pairwise(group) if later != one + 1)]
    stops = [*(one for one, later in pairwise(group) if later != one + 1), group[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True)]
    return "{" + ",".join(parts) + "}"
