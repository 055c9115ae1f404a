"""A group of SGLang reduces under the contract by the lines of its page, in a plugin of SGLang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshplan.definition import reduce_leaves
from meshplan.testing import order_sensitive

ROOT = Path(__file__).parents[2]
# It needs other versions than the trainers and vLLM: `make test-clients` makes it.
PYTHON = Path(sys.prefix) / "sglang" / "bin" / "python"
needs_sglang = pytest.mark.skipif(not PYTHON.exists(), reason="run make test-clients")


def install_plugin(folder: Path) -> None:
    """The module and the entry point of the page, as pip installs them."""
    page = (ROOT / "docs" / "howto" / "rl-parity.md").read_text(encoding="utf-8")
    section = page.partition("\n## SGLang\n")[2].partition("\n## ")[0]
    ((module,), (entry,)) = (
        re.findall(rf"^```{kind}\n(.*?)^```$", section, re.M | re.S) for kind in ("python", "ini")
    )
    group, names = entry.split("\n", 1)
    group = group.removeprefix('[project.entry-points."').removesuffix('"]')
    (folder / "sglang_meshplan.py").write_text(module)
    about = folder / "sglang_meshplan-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-meshplan\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{names.replace(chr(34), '')}")


@needs_sglang
@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "plugin"), [(2, True), (4, True), (4, False)])
def test_group_of_sglang_reduces_under_the_contract(
    tmp_path: Path, ranks: int, plugin: bool
) -> None:
    if plugin:
        install_plugin(tmp_path)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [str(PYTHON), *words, "tests/backend/sglang_group.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('[{"b')))
    leaves = [order_sensitive(257, rank=rank, world_size=ranks) for rank in range(ranks)]
    expected = reduce_leaves(leaves, "sum", (ranks,)).view(torch.int32).tolist()
    assert [one["bits"] == expected for one in found] == [plugin] * ranks
    for one in found:
        assert bool(one["report"]) == plugin
        assert all("deterministic_all_reduce" in json.dumps(entry) for entry in one["report"])
