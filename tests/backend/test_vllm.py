"""vLLM under the contract by its entry point for platforms, and ``examples/rl_loop.py``."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from meshplan_autoload import select_vllm_platform
from tests.programs import capture

ROOT = Path(__file__).parents[2]
# vLLM and the trainers need different versions of Transformers: `make test-clients`
# creates this environment.
PYTHON = Path(sys.prefix) / "vllm" / "bin" / "python"
LOOP = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="run make test-clients")


def run(python: str, *words: str, plugins: str = "", status: int = 0, observed: str = "") -> str:
    environment = {
        **os.environ,
        "MESHPLAN_RUN": observed,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": plugins,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function to its workers
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = capture([python, *words], cwd=ROOT, env=environment, timeout=None)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def count_differences(output: str) -> list[int]:
    found = re.findall(r"^step \d: (\d+) of \d+ log-probabilities differ", output, re.M)
    assert len(found) == 3  # steps
    return [int(number) for number in found]


@pytest.mark.parametrize(
    ("plugins", "platform"),
    [
        (None, None),
        ("", None),
        ("other", None),
        ("meshplan", "meshplan.integrations.vllm.Platform"),
        ("other,meshplan", "meshplan.integrations.vllm.Platform"),
    ],
)
def test_only_the_variable_selects_the_platform(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, platform: str | None
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert select_vllm_platform() == platform


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("plain", [False, True])
def test_trainer_and_generator_have_equal_log_probabilities(plain: bool) -> None:
    words = [*LOOP, "8", "examples/rl_loop.py", *["--plain"] * plain]
    differences = count_differences(run(sys.executable, *words))
    assert (sum(differences) > 0) == plain


@needs_vllm
@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("plugins", ["meshplan", ""])
def test_trainer_agrees_with_the_group_of_vllm(plugins: str, tmp_path: Path) -> None:
    words = [*LOOP, "4", "examples/rl_loop.py", "--generator", "vllm"]
    # The loop ends with 1 if they differ without --plain.
    status = int(plugins == "")
    alone = run(str(PYTHON), *words, plugins=plugins, status=status)
    assert (sum(count_differences(alone)) > 0) == (plugins == "")
    path = tmp_path / "report.json"
    settings = f"every=1 gradients report={path}"
    observed = run(str(PYTHON), *words, plugins=plugins, status=status, observed=settings)
    assert re.findall(r"^step .*", observed, re.M) == re.findall(r"^step .*", alone, re.M)
    report = json.loads(path.read_bytes())
    assert report["steps"]["taken"] == dict.fromkeys("0123", 3)
    # Those of vLLM's group: the trainer reduces over the backend.
    assert any(not one["contract"] for one in report["reductions"]) == (plugins == "")


@needs_vllm
@pytest.mark.full
@pytest.mark.processes
def test_engine_of_vllm_reduces_under_the_contract(tmp_path: Path) -> None:
    words = ["-m", "tests.backend.vllm_engine", str(tmp_path)]
    path = tmp_path / "report.json"
    result, observed = (
        json.loads(next(line for line in printed.splitlines() if line.startswith('{"tokens"')))
        for printed in (
            run(str(PYTHON), *words, plugins="meshplan", observed=settings)
            for settings in ("", f"report={path}")
        )
    )
    assert observed["tokens"] == result["tokens"]
    assert [len(tokens) for tokens in result["tokens"]] == [4, 4]
    reductions = json.loads(path.read_bytes())["reductions"]
    assert reductions
    assert all(one["contract"] for one in reductions)
    total = [[3.0 * (4 * row + column) for column in range(4)] for row in range(3)]
    for worker in result["workers"]:
        rank = worker["rank"]
        # The embedding, and two in each of two layers, for each of four tokens at least.
        reductions = [one for one in worker["report"]["entries"] if one["count"] >= 20]
        assert reductions
        assert all("deterministic_all_reduce" in json.dumps(one) for one in reductions)
        assert worker["all_reduce"] == total
        assert worker["reduce_scatter"] == [row[2 * rank : 2 * rank + 2] for row in total]
        assert worker["reduce_scatterv"] == (total[1:] if rank else total[:1])
        assert worker["into_output"] == worker["reduce_scatterv"]
