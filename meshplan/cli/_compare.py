"""``meshplan compare``: the first difference of two certificates, or two reports side by side."""

from __future__ import annotations

import argparse
from typing import Any

from meshplan._needs_torch import import_with_torch
from meshplan.cli._options import add_verb
from meshplan.cli._output import say


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    what = "compare the certificates, or the reports, of two runs"
    about = "Certificates: the first step and tensor that differ, and the conditions that do."
    about += " Reports: verdicts and time per step. 0: same. 1: different. 2: cannot be compared."
    argument = add_verb(verbs, "compare", run, what, description=about).add_argument
    argument("first", metavar="A", help="a file of meshplan run --certify or --report")
    argument("second", metavar="B", help="one of another run")


def run(given: argparse.Namespace) -> int:
    """Print what differs, and return the status."""
    compare = import_with_torch("meshplan.run._compare", "meshplan compare").compare_files
    text, status = compare(given.first, given.second)
    say(f"{text}\n")
    return int(status)
