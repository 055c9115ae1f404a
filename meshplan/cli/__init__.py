"""The command line: one verb each. What a verb needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``meshplan`` with ``arguments``, those of the process if not given; the exit status.

    0: all is well. 1: something was found. 2: the command or its input cannot be understood.
    """
    parser = argparse.ArgumentParser(prog="meshplan", description="DTensor replicas that agree.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    verbs.add_parser(
        "doctor",
        help="which paths this machine has, and what to do for those that it lacks",
        description="Which paths this machine has, and what to do for those that it lacks.",
    )
    topo = verbs.add_parser(
        "topo",
        help="what files that describe a cluster say",
        description="What was understood of files that describe a cluster, whatever their format.",
    )
    topo.add_argument("files", nargs="+", metavar="FILE", help="a file, or - for standard input")
    topo.add_argument("--output-format", choices=("text", "json"), default="text")
    given = parser.parse_args(arguments)
    return _doctor() if given.verb == "doctor" else _topo(given.files, given.output_format)


def _doctor() -> int:
    from meshplan.cli._doctor import doctor

    text, complete = doctor()
    sys.stdout.write(text + "\n")
    return 0 if complete else 1


def _topo(files: Sequence[str], output_format: str) -> int:
    from meshplan.cli._topo import topo
    from meshplan.errors import TopologyInputError

    try:
        sys.stdout.write(topo(files, output_format) + "\n")
    except TopologyInputError as error:
        sys.stderr.write(f"meshplan: {error}\n")
        return 2
    return 0
