"""The command line: one verb each. What a verb needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from meshplan import __version__
from meshplan._message_text import suggest
from meshplan.cli._options import refuse, say
from meshplan.errors import MeshplanError

# The module of each verb, which has a function `add_VERB`.
_VERBS = {
    "compare": "_run",
    "diagnose": "_diagnose",
    "doctor": "_doctor",
    "links": "_plan",
    "lint": "_lint",
    "plan": "_plan",
    "rule": "_lint",
    "run": "_run",
    "simulate": "_plan",
    "topo": "_diagnose",
}
DASHES = "\0--"
"""Stands for ``--`` among the words of a script: argparse would remove it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``meshplan`` with ``arguments``, by default those of the process; the exit status.

    0: no problem. 1: a verb found a problem. 2: the command or its input is invalid.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    runs_script = words[:1] == ["run"]
    if arguments is None and not runs_script:
        # The process is the command line alone, which never uses numpy's BLAS. It would start a
        # thread for each core.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # argparse would read the words after -- as names of files. Those of a script are its own.
    at = words.index("--") if "--" in words and not runs_script else len(words)
    own, others = words[:at], words[at + 1 :]
    if runs_script:
        own = [DASHES if word == "--" else word for word in own]
    # Building the parsers of the other verbs takes a third of the time of a short command.
    command = make_parser(own[:1] if own[:1] and own[0] in _VERBS else [*_VERBS])
    given, unknown = command.parse_known_args(own, argparse.Namespace(arguments=others))
    if unknown:
        given.parser.refuse_option(unknown[0].partition("=")[0])
    if others and given.verb != "lint":
        command.error(f"only meshplan lint takes arguments after --, got {others[0]!r}")
    if runs_script:  # an error of the script, also one of meshplan, ends the process as without it
        return int(given.run(given))
    try:
        result: str | int = given.run(given)
        if isinstance(result, int):
            return result
        say(result)
    except MeshplanError as error:
        return refuse(error)
    return 0


def make_parser(verbs: Sequence[str] = tuple(_VERBS)) -> argparse.ArgumentParser:
    """The parser of the command line, with some of its verbs."""
    command = _Parser(
        prog="meshplan",
        description="DTensor replicas that agree.",
        allow_abbrev=False,
    )
    command.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = command.add_subparsers(dest="verb", required=True, metavar="verb")
    for name in verbs:
        getattr(import_module(f"meshplan.cli.{_VERBS[name]}"), f"add_{name}")(parsers)
    return command


class _Parser(argparse.ArgumentParser):
    """Reports an invalid command in one line."""

    def refuse_option(self, option: str) -> NoReturn:
        """End the process because of an option or a word that the verb does not have."""
        known = re.findall(r"--[a-z-]+", self.format_usage())
        self.error(f"unknown argument {option[:60]!a}{suggest(option, known)}")

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: verb"):
            *verbs, last = _VERBS
            message = f"pass a verb: {', '.join(verbs)} or {last}"
        # The choices have quotes or none by the version of Python.
        if found := re.fullmatch(
            r"(argument .*): invalid choice: (.*) \(choose from (.*)\)",
            message,
        ):
            known = re.findall(r"[\w.-]+", found[3])
            hint = suggest(found[2].strip("'"), known)
            use = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
            message = f"{found[1]}: use {use}, got {found[2]}{hint}"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
