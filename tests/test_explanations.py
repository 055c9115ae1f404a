"""The blocks of the pages under docs/explanation run as they stand and print what is shown.

A page is one script: what a block prints stands in the block without a language behind it.
Commands are run as the command line would. All in one process, without a process group.
"""

from __future__ import annotations

import contextlib
import io
import shlex

import pytest

from tests.cli import meshplan
from tests.pages import ROOT, blocks, commands

FOLDER = ROOT / "docs" / "explanation"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))


def printed(code: str, names: dict[str, object], where: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, where, "exec"), names)
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_print_the_shown_output(page: str) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    out = ""
    for number, block in enumerate(blocks((FOLDER / page).read_text()), start=1):
        where = f"{page}, block {number}"
        if block.language == "python":
            assert out == "", f"{where}: what was printed before is not shown"
            out = printed(block.text, names, where)
        elif block.language == "console":
            for command, shown in commands(block):
                assert meshplan(*shlex.split(command)[1:])[1] == shown, where
        elif block.language == "":
            assert out == block.text, where
            out = ""
    assert out == "", f"{page}: what was printed last is not shown"
