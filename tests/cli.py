"""The command line, called in the tests' own process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from meshplan.cli import main


def meshplan(*words: str, given: str = "") -> tuple[int, str, str]:
    """The status, standard output and standard error of ``meshplan WORDS``, with that input."""
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8")
    with redirect_stdout(out), redirect_stderr(err), mock.patch("sys.stdin", stdin):
        try:
            status = main(list(words))
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, out.getvalue(), err.getvalue()


def printed(*words: str) -> str:
    """What a command that succeeds prints."""
    status, out, err = meshplan(*words)
    assert (status, err) == (0, ""), (words, err)
    return out


def refused(*words: str, given: str = "") -> str:
    """The one line of a command that is not carried out."""
    status, out, err = meshplan(*words, given=given)
    assert (status, out, err.count("\n")) == (2, "", 1), (words, out, err)
    return err
