"""The Python blocks of the README run as they stand."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

# What pages import, once: ranks are forked with it.
import meshplan.dtensor
import meshplan.replicas
import meshplan.testing  # noqa: F401
from tests.pages import ROOT, blocks
from tests.processes import run_ranks

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.timeout(60)
@pytest.mark.processes
def test_blocks_run() -> None:
    found = blocks(README, "python")
    assert len(found) == 3

    def ranks(rank: int) -> tuple[list[float], str]:
        printed = io.StringIO()
        names: dict[str, object] = {}
        with contextlib.redirect_stdout(printed):
            for block in found:
                exec(block.text, names)
        return names["replica"].tolist(), printed.getvalue()  # type: ignore[attr-defined]

    results = run_ranks(ranks, 4)
    assert len({tuple(values) for values, _ in results}) == 1
    for _, printed in results:
        assert "all_reduce sum over (ddp, fsdp), groups of 4, exchange" in printed


def test_named_tests_exist() -> None:
    module = ""
    for name in re.findall(r"`(tests/\w+\.py(?:::\w+)?|::\w+)`", README):
        file, _, function = name.partition("::")
        module = file or module
        text = (ROOT / module).read_text()
        assert not function or f"def {function}(" in text, name
