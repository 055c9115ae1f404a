"""The blocks of the pages under docs/explanation run as they stand and print what is shown.

A page is one script: what a block prints stands in the block without a language behind it.
Commands are run as the command line would. All in one process, without a process group.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from meshplan.cli import main

FOLDER = Path(__file__).parents[1] / "docs" / "explanation"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def printed(code: str, names: dict[str, object], where: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, where, "exec"), names)
    return out.getvalue()


def commanded(command: str) -> str:
    program, *words = shlex.split(command)
    assert program == "meshplan"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(words)
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_print_the_shown_output(page: str) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    out = ""
    for number, (language, text) in enumerate(BLOCK.findall((FOLDER / page).read_text()), start=1):
        where = f"{page}, block {number}"
        if language == "python":
            assert out == "", f"{where}: what was printed before is not shown"
            out = printed(text, names, where)
        elif language == "console":
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M):
                assert commanded(command) == shown, where
        elif language == "":
            assert out == text, where
            out = ""
    assert out == "", f"{page}: what was printed last is not shown"
