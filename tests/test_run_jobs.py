"""Scripts of `tests/jobs` print, compute and exit as they do alone, and each gets its verdict."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshplan.run._compare import compare_files
from tests.pages import blocks
from tests.programs import capture

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "tests" / "jobs"
pytestmark = [pytest.mark.full, pytest.mark.processes]

AGREED = "not shown to be affected: replicas agreed in {} of tensors"
# Ranks, and the first line of the verdict.
CASES = {
    "fsdp2": (2, "not shown to be affected: no replicas were compared"),
    "hsdp_tp": (4, AGREED),
    "ddp_unused": (2, AGREED),
    "fsdp1": (4, AGREED),
    "experts": (4, AGREED),
    "pipeline": (4, AGREED),
    "gan": (2, AGREED),
    "skip_on_nan": (3, "affected: replicas differ, first seen at step 3: parameter weight"),
}


class Run(NamedTuple):
    status: int
    printed: list[str]  # in order, since ranks end in any
    errors: str
    verdict: list[str]
    report: dict[str, Any]


def torchrun(folder: Path, job: str, ranks: int, *options: str, **environment: str) -> Run:
    """The job alone without ``options``, or observed with them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks)]
    file = folder / "run.json"
    file.unlink(missing_ok=True)
    observing = ["-m", "meshplan", "run", "--report", str(file), *options] if options else []
    done = capture(
        [*command, *observing, job if job.endswith(".py") else str(JOBS / f"{job}.py")],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | environment,
        timeout=600,
    )
    lines = done.stderr.splitlines()
    first = next((n for n, line in enumerate(lines) if "affected: " in line), len(lines))
    verdict = [line.removeprefix("[meshplan] ") for line in lines[first:]]
    end = next((n for n, line in enumerate(verdict) if n and not line.startswith("  ")), None)
    report = json.loads(file.read_text()) if file.exists() else {}
    return Run(
        done.returncode, sorted(done.stdout.splitlines()), done.stderr, verdict[:end], report
    )


def agrees(run: Run) -> str:
    return AGREED.format(f"{run.report['replicas']['compared']} comparisons")


@pytest.mark.parametrize("job", CASES)
def test_observed_job_is_unchanged(tmp_path: Path, job: str) -> None:
    ranks, head = CASES[job]
    alone = torchrun(tmp_path, job, ranks)
    if "terminate called without an active exception" in alone.errors:
        # Plain torch has aborted when it ended, as it rarely does on a busy machine.
        alone = torchrun(tmp_path, job, ranks)
    observed = torchrun(tmp_path, job, ranks, "--every", "2", "--probe")
    assert alone.status == 0, alone.errors
    assert len(alone.printed) == ranks
    assert (observed.status, observed.printed) == (alone.status, alone.printed), observed.errors
    assert observed.verdict[0] == (agrees(observed) if head == AGREED else head)
    # No other rank has written one.
    assert observed.errors.count("affected: ") == 1
    assert observed.report["state"] == "ended"


def test_rank_that_skips_a_step_is_named(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "skip_on_nan", 3, "--strict")
    # torchrun's own status, if any rank fails.
    assert run.status == 1
    assert "exitcode  : 3" in run.errors
    assert run.verdict[2].startswith("  ranks 0, 2 against rank 1; ")
    assert run.verdict[3:5] == [
        "  cause: ranks that hold the same parameters took different numbers of optimizer steps",
        "  steps: 6 on ranks 0, 2, 5 on rank 1, though these hold the same parameters; 4 compared, 2 not (pass --every 1 to compare more)",
    ]


def test_failing_job_fails_as_it_does_alone(tmp_path: Path) -> None:
    def traceback(run: Run) -> list[str]:
        return [line for line in run.errors.splitlines() if line.startswith("[rank0]: ")]

    alone = torchrun(tmp_path, "failing", 2)
    observed = torchrun(tmp_path, "failing", 2, "--every", "1")
    assert alone.status == observed.status == 1
    assert traceback(observed) == traceback(alone)
    assert traceback(alone)[-1] == "[rank0]: ValueError: shard 2 of the data is broken"
    assert "  the job failed: ValueError: shard 2 of the data is broken" in observed.verdict
    assert observed.report["state"] == "failed"


@pytest.mark.parametrize(("job", "ranks"), [("fsdp2", 2), ("hsdp_tp", 4), ("ddp_unused", 2)])
def test_required_job_under_the_backend_is_unchanged(tmp_path: Path, job: str, ranks: int) -> None:
    plain = torchrun(tmp_path, job, ranks, "--backend", "meshplan")
    required = torchrun(tmp_path, job, ranks, "--backend", "meshplan", "--require", "bitwise")
    assert (plain.status, len(plain.printed)) == (0, ranks), plain.errors
    assert (required.status, required.printed) == (0, plain.printed), required.errors
    assert required.verdict[0] == plain.verdict[0]


@pytest.mark.parametrize("door", ["command", "variable"])
def test_required_job_stops_at_its_first_reduction(tmp_path: Path, door: str) -> None:
    if door == "command":
        run = torchrun(tmp_path, "ddp_unused", 2, "--require", "bitwise")
    else:
        settings = f"require=bitwise report={tmp_path / 'run.json'}"
        run = torchrun(tmp_path, "ddp_unused", 2, MESHPLAN_RUN=settings)
    assert (run.status, run.printed) == (1, [])
    last = [line for line in run.errors.splitlines() if line.startswith("[rank0]: meshplan")]
    assert last[0].startswith("[rank0]: meshplan.errors.BitwiseRequirementError: MP707: ")
    assert last[0].endswith("; " + run.report["refused"]["fix"])
    assert run.verdict[2].startswith("  stopped by --require bitwise, first on rank ")
    assert f"  fix: {run.report['refused']['fix']}" in run.verdict
    assert run.report["steps"]["taken"] == {"0": 0, "1": 0}


# Of ranks that are blocked in a collective, and of an operator that torch refuses.
UNEVEN = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0 and sys.argv[0] == "barrier.py":
    dist.barrier()
    print("went on")
elif sys.argv[0] == "barrier.py":
    dist.all_reduce(torch.ones(2))
else:
    torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
"""


def test_rank_that_is_blocked_ends_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "barrier.py").write_text(UNEVEN)
    run = torchrun(tmp_path, "barrier.py", 2, "--require", "bitwise")
    assert (run.status, run.printed) == (1, [])
    assert "[rank1]: meshplan.errors.BitwiseRequirementError: MP707: " in run.errors
    assert "[rank0]: meshplan.errors" not in run.errors


def test_operator_of_torch_s_list_names_code_and_fix(tmp_path: Path) -> None:
    (tmp_path / "put.py").write_text(UNEVEN)
    run = torchrun(tmp_path, "put.py", 2, "--require", "bitwise")
    assert run.status == 1
    for rank in (0, 1):
        found = [line for line in run.errors.splitlines() if line.startswith(f"[rank{rank}]: ")]
        assert any("RuntimeError: put_ does not have a deterministic" in line for line in found)
        assert found[-1].startswith(f"[rank{rank}]: MP707: --require bitwise: put_ does not have")


def normalize(text: str) -> str:
    """Without what depends on the machine's products of matrices, and on its torch."""
    return re.sub(r"parameter \d|\d+ of 256|\d+ ulps?|torch \S+", "...", text)


def test_modelled_nccl_is_affected_and_the_backend_is_not(tmp_path: Path) -> None:
    def digests(run: Run) -> set[str]:
        return {line.partition(": ")[2] for line in run.printed}

    (tmp_path / "job").mkdir()
    shutil.copy2(JOBS / "digests.py", tmp_path / "job")
    shutil.copy2(JOBS / "jagged.py", tmp_path / "job" / "train.py")
    page = tmp_path / "run.html"
    certify = ("--every", "1", "--certify")
    more = ("--probe", "--html", str(page))
    plain = torchrun(tmp_path, "job/train.py", 6, *certify, "plain.cert", *more)
    assert page.exists(), plain.errors
    assert "(ddp=2, fsdp=3) on 3 nodes of 2" in page.read_text(encoding="utf-8")
    assert len(digests(plain)) > 1
    assert plain.report["replicas"]["first_difference"]["cause"] == "order"
    shown, compared, probed = blocks((ROOT / "docs" / "run.md").read_text(encoding="utf-8"), "")
    apart = "  certificate: ", "  probe: "
    lines = [line for line in plain.verdict if not line.startswith(apart)]
    assert len(lines) == len(plain.verdict) - 2
    assert probed.text.rstrip() in plain.verdict
    printed = "\n".join(lines).replace(f"{tmp_path}/", "")
    assert normalize(f"[meshplan] {printed}\n") == normalize(shown.text)
    for page in ("README.md", "docs/index.md"):
        excerpt, *_ = blocks((ROOT / page).read_text(encoding="utf-8"), "")
        assert set(excerpt.text.splitlines()) < set(shown.text.splitlines())
    under = torchrun(tmp_path, "job/train.py", 6, *certify, "fixed.cert", "--backend", "meshplan")
    assert len(digests(under)) == 1
    assert under.verdict[0] == agrees(under)
    assert "  every reduction of floating-point numbers ran under the contract" in under.verdict
    text, status = compare_files(str(tmp_path / "plain.cert"), str(tmp_path / "fixed.cert"))
    assert status == 1
    assert hide_bits(f"{text}\n".replace(f"{tmp_path}/", "")) == hide_bits(compared.text)
    # Both verdicts, one above the other.
    reports = [tmp_path / "plain.json", tmp_path / "fixed.json"]
    for path, run in zip(reports, (plain, under), strict=True):
        path.write_text(json.dumps(run.report), encoding="utf-8")
    text, status = compare_files(*map(str, reports))
    assert status == 1
    shown_verdicts = [line for line in text.splitlines() if "affected: " in line]
    assert shown_verdicts == [
        f"{path}: {run.verdict[0]}" for path, run in zip(reports, (plain, under), strict=True)
    ]


def hide_bits(text: str) -> str:
    """Without links, and without tensors, which differ by the machine's products of matrices."""
    return re.sub(r"the last \w{32}|parameter \d.*", "...", text)


def test_variable_observes_the_same_job(tmp_path: Path) -> None:
    settings = f"report={tmp_path / 'run.json'} every=2"
    alone = torchrun(tmp_path, "ddp_unused", 2)
    observed = torchrun(tmp_path, "ddp_unused", 2, MESHPLAN_RUN=settings)
    assert (observed.status, observed.printed) == (alone.status, alone.printed)
    assert observed.verdict[0] == agrees(observed)
    assert len(re.findall("affected: ", observed.errors)) == 1
