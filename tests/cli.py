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
