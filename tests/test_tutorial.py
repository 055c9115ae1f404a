"""The Python blocks of the tutorial run as they stand, in six processes, and print what it shows.

Its commands are run by ``tests/test_commands_shown.py``.
"""

from __future__ import annotations

import os

import pytest

# What pages import, once: ranks are forked with it.
import meshplan.dtensor
import meshplan.replicas
import meshplan.testing  # noqa: F401
from tests.pages import ROOT, run_python
from tests.processes import run_ranks
from tests.test_probe import free_port

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.timeout(240)
@pytest.mark.processes
def test_blocks_run() -> None:
    port = free_port()

    def ranks(rank: int) -> int:
        # As torchrun leaves it.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "6", "MASTER_PORT": str(port)}
        os.environ["MASTER_ADDR"] = "localhost"
        return run_python("docs/tutorial.md", PAGE, rank=rank)

    assert run_ranks(ranks, 6, init=False, timeout=220)[0] == 5
