"""The command line: one verb each. What a verb needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from meshplan import __version__
from meshplan.cli import _completion, _links, _lint, _plan, _probe, _rule, _simulate, _topo
from meshplan.cli._arguments import refused
from meshplan.cli._streams import say
from meshplan.errors import PolicyError

__all__ = ["main", "parser"]

_VERBS = (_links, _lint, _plan, _probe, _rule, _simulate, _topo, _completion)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``meshplan`` with ``arguments``, those of the process if not given; the exit status.

    0: all is well. 1: something was found. 2: the command or its input cannot be understood.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # argparse would take what follows for names of files.
    at = words.index("--") if "--" in words else len(words)
    own, others = words[:at], words[at + 1 :]
    command = parser()
    given = command.parse_args(own, argparse.Namespace(arguments=others))
    run: Callable[[argparse.Namespace], int] = given.run
    if others and given.verb != "lint":
        command.error(f"nothing is expected after --, found {others[0]!r}")
    try:
        return run(given)
    except PolicyError as error:
        # What was found cannot be printed.
        return refused(error)


def parser() -> argparse.ArgumentParser:
    """Of the whole command line, for what is made of it: completion and the manual page."""
    command = _Parser(prog="meshplan", description="DTensor replicas that agree.")
    command.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = command.add_subparsers(dest="verb", required=True, metavar="verb")
    doctor = "which paths this machine has, and what to do for those that it lacks"
    asked = verbs.add_parser("doctor", help=doctor, description=f"{doctor.capitalize()}.")
    asked.set_defaults(run=_run_doctor)
    for verb in _VERBS:
        verb.add(verbs)
    return command


def _run_doctor(_: argparse.Namespace) -> int:
    from meshplan.cli._doctor import doctor

    text, complete = doctor()
    say(text + "\n")
    return 0 if complete else 1


class _Parser(argparse.ArgumentParser):
    """One line for a command that cannot be understood."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
