"""Write the manual page of the command line, from its parser.

python tools/make_man.py            write man/meshplan.1
python tools/make_man.py --check    exit with 1 if the file is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from meshplan import __version__
from meshplan.cli import make_parser

PAGE = Path(__file__).parents[1] / "man" / "meshplan.1"

STATUS = (
    ("0", "all is well"),
    ("1", "something was found, or does not work here"),
    ("2", "the command or its input cannot be understood"),
)
FILES = (
    ("meshplan.toml, pyproject.toml", "settings of meshplan lint, in this directory or above"),
    ("~/.cache/meshplan", "compiled device code; MESHPLAN_CACHE names another directory"),
)


def main() -> int:
    given = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    given.add_argument("--check", action="store_true")
    text = page(make_parser())
    if given.parse_args().check:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page(command: argparse.ArgumentParser) -> str:
    """The page in the macros of man(7)."""
    return "\n".join(_lines(command)) + "\n"


def _lines(command: argparse.ArgumentParser) -> Iterator[str]:
    verbs = next(one for one in command._actions if isinstance(one, argparse._SubParsersAction))
    yield '.\\" Made by tools/make_man.py from the parser of the command line.'
    yield f'.TH MESHPLAN 1 "" "meshplan {__version__}" "User Commands"'
    # Words stay whole and apart: options and codes are searched for and copied.
    yield from (".nh", ".ad l")
    yield from (".SH NAME", f"meshplan \\- {_plain((command.description or '').rstrip('.'))}")
    yield from (".SH SYNOPSIS", ".B meshplan", ".I verb", "[options] [arguments]")
    yield from (".SH OPTIONS", *_arguments(command))
    yield ".SH VERBS"
    for name, inner in verbs.choices.items():
        yield from (f".SS meshplan {name}", _plain(inner.description or ""))
        yield from _arguments(inner)
        if inner.epilog:
            yield ".PP"
            raw = inner.formatter_class is argparse.RawDescriptionHelpFormatter
            lines = map(_plain, inner.epilog.rstrip("\n").split("\n"))
            yield from (".EX", *lines, ".EE") if raw else lines
    yield ".SH EXIT STATUS"
    for status, what in STATUS:
        yield from (".TP", f".B {status}", _plain(what))
    yield ".SH FILES"
    for name, what in FILES:
        yield from (".TP", f".I {_plain(name)}", _plain(what))
    yield from (".SH SEE ALSO", "What a rule or an error code means:", ".B meshplan rule CODE")


def _arguments(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        chosen = "|".join(map(str, action.choices or ()))
        value = chosen or str(action.metavar or action.dest.upper())
        taken = "" if action.nargs == 0 else f"\\fI{_plain(value)}\\fR"
        if action.nargs in ("*", "+"):
            taken += "..."
        flags = ", ".join(f"\\fB{_plain(flag)}\\fR" for flag in action.option_strings)
        yield from (".TP", " ".join(filter(None, (flags, taken))))
        help_ = (action.help or "").replace("%(prog)s", command.prog)
        yield _plain(help_) if help_ else f"one of {_plain(chosen.replace('|', ', '))}"


def _plain(text: str) -> str:
    """Text that roff prints as it stands, on one line."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    sys.exit(main())
