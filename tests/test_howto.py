"""The Python blocks of the pages under docs/howto run as they stand, and print what is shown."""

from __future__ import annotations

import os

import pytest

# What pages import, once: ranks are forked with it.
import meshplan.dtensor
import meshplan.replicas
import meshplan.testing  # noqa: F401
from tests.pages import ROOT, blocks, run_python
from tests.processes import run_ranks

FOLDER = ROOT / "docs" / "howto"
PAGES = sorted(
    path.name for path in FOLDER.glob("*.md") if blocks(path.read_text(encoding="utf-8"), "python")
)


def settings() -> dict[str, str]:
    """What a page must leave as it was. Torch sets variables of its own."""
    return {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "MESHPLAN_"))}


@pytest.mark.timeout(240)
@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")

    def ranks(rank: int) -> bool:
        before = settings()
        run_python(f"docs/howto/{page}", text, rank=rank)
        return settings() == before

    # A page about what needs no job is run by one process.
    size = 4 if "init_process_group" in text else 1
    assert run_ranks(ranks, size, timeout=220) == [True] * size
