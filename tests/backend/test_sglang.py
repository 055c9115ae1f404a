"""A group of SGLang reduces under the contract by the lines of its page, in a plugin of SGLang."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from meshplan.definition import reduce_leaves
from tests.inputs import draw_leaves
from tests.programs import capture

ROOT = Path(__file__).parents[2]
# It needs other versions than the trainers and vLLM: `make test-clients` makes it.
PYTHON = Path(sys.prefix) / "sglang" / "bin" / "python"
needs_sglang = pytest.mark.skipif(not PYTHON.exists(), reason="run make test-clients")
PAGE = (ROOT / "docs" / "howto" / "rl-parity.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## SGLang\n")[2].partition("\n## ")[0]


def install_plugin(folder: Path) -> None:
    """The module and the entry point of the page, as pip installs them."""
    ((module,), (entry,)) = (
        re.findall(rf"^```{kind}\n(.*?)^```$", SECTION, re.M | re.S) for kind in ("python", "ini")
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
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize(("ranks", "plugin"), [(2, True), (4, True), (4, False)])
def test_group_of_sglang_reduces_under_the_contract(
    tmp_path: Path, ranks: int, plugin: bool, observed: bool
) -> None:
    path = tmp_path / "report.json"
    if plugin:
        install_plugin(tmp_path)
    (variable,) = re.findall(r"`(SGLANG_\w+)=1`", SECTION)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = capture(
        [str(PYTHON), *words, "tests/backend/sglang_group.py", variable],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",  # its reduce-scatter on CPUs
            "MESHPLAN_RUN": f"report={path}" * observed,
        },
        timeout=None,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('[{"b')))
    leaves = draw_leaves(ranks, 64 * ranks)
    total = reduce_leaves(leaves, "sum", (ranks,)).view(torch.int32)
    for one, part in zip(found, total.chunk(ranks), strict=True):
        # An all-reduce and a reduce-scatter with the variable, and the same without it.
        in_order = [one["bits"][0] == total.tolist(), one["bits"][1] == part.tolist()]
        assert in_order == [plugin] * 2
        assert (one["bits"][2] == total.tolist()) == plugin
        counts = [
            [step[f"meshplan/{kind}/count"] for kind in ("contract", "native", "outside")]
            for step in one["counted"]
        ]
        assert counts == ([[2, 0, 0], [1, 0, 1]] if plugin else [[0, 0, 2]] * 2)
    if observed:
        reductions = json.loads(path.read_bytes())["reductions"]
        assert {one["contract"] is not None for one in reductions} == {plugin, False}
