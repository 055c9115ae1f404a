"""The command line: one verb each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from meshplan.cli._doctor import doctor

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``meshplan`` with ``arguments``, those of the process if not given; the exit status.

    0: all is well. 1: something was found. 2: the command cannot be understood.
    """
    parser = argparse.ArgumentParser(prog="meshplan", description="DTensor replicas that agree.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    verbs.add_parser(
        "doctor",
        help="which paths this machine has, and what to do for those that it lacks",
        description="Which paths this machine has, and what to do for those that it lacks.",
    )
    parser.parse_args(arguments)
    text, complete = doctor()
    sys.stdout.write(text + "\n")
    return 0 if complete else 1
