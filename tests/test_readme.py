"""The Python blocks of the README run as they stand."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.processes import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.timeout(60)
@pytest.mark.processes
def test_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 5

    def ranks(rank: int) -> tuple[list[float], str]:
        printed = io.StringIO()
        names: dict[str, object] = {}
        with contextlib.redirect_stdout(printed):
            for block in blocks:
                exec(block, names)
        return names["replica"].tolist(), printed.getvalue()  # type: ignore[attr-defined]

    found = run_ranks(ranks, 4)
    assert len({tuple(values) for values, _ in found}) == 1
    for _, printed in found:
        assert "all_reduce sum over (ddp, fsdp), groups of 4, exchange" in printed
        assert "exchange in blocks of 8" in printed
        assert "may differ under tree (5 orders)" in printed


def test_named_tests_exist() -> None:
    module = ""
    for name in re.findall(r"`(tests/\w+\.py(?:::\w+)?|::\w+)`", README):
        file, _, function = name.partition("::")
        module = file or module
        text = (ROOT / module).read_text()
        assert not function or f"def {function}(" in text, name
