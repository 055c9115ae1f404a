"""The Python blocks of the pages under docs/howto run as they stand, in their order."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from pathlib import Path

import pytest

from tests.processes import run_ranks

FOLDER = Path(__file__).parents[1] / "docs" / "howto"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))


def settings() -> dict[str, str]:
    """What a page must leave as it was. Torch sets variables of its own."""
    return {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "MESHPLAN_"))}


@pytest.mark.timeout(120)
@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (FOLDER / page).read_text(), re.M | re.S)
    assert blocks

    def ranks(rank: int) -> bool:
        names: dict[str, object] = {"__name__": "__main__"}
        before = settings()
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            # There is a process group already, so the page's profile of NCCL comes late.
            warnings.filterwarnings("ignore", message="a process group exists already")
            for number, block in enumerate(blocks, start=1):
                exec(compile(block, f"{page}, block {number}", "exec"), names)
        return settings() == before

    assert run_ranks(ranks, 4, timeout=100) == [True] * 4
