"""What ``--require bitwise`` stops, on which ranks and with which text, and what it lets through."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshplan
from meshplan.errors import BitwiseRequirementError
from meshplan.run import RunSettings
from meshplan.run._job import ObservedJob
from meshplan.run._observation import Observation
from meshplan.run._require import Requirement
from meshplan.run._verdict import format_verdict
from tests.processes import arrive, run_ranks, wait_for
from tests.run.observing import make_model, observe_ranks, observed, take_step
from tests.test_uncovered import without_lines

REQUIRE = "require=bitwise first=1"


def stopped(call: Callable[[], object], *, strip: bool = True) -> str:
    """The error; with ``strip``, whichever of several ranks has been the first."""
    with pytest.raises(BitwiseRequirementError) as caught:
        call()
    text = without_lines(caught.value)
    return re.sub(r"rank \d stopped: ", "", text) if strip else text


@pytest.mark.processes
class StopTest(TestCase):
    maxDiff = None

    def test_reduction_outside_the_contract(self) -> None:
        def job(*_: Any) -> list[str]:
            model, optimizer = make_model()
            texts = [stopped(lambda: take_step(model, optimizer)) for _ in range(2)]
            # A script that catches the error gets it again, whatever it calls next.
            counts = torch.ones(2, dtype=torch.int64)
            for call in (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(counts)):
                texts.append(stopped(call))
            texts.append(stopped(optimizer.step))
            return texts

        texts, report = observe_ranks(job, settings=REQUIRE)
        assert len({text for found in texts for text in found}) == 1
        self.assertExpectedInline(
            texts[0][0],
            """MP707: --require bitwise: run/observing.py backward (backward, C++, such as DDP's reducer): all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; pass --backend meshplan, or call torch.distributed.init_process_group('meshplan') in the training script""",
        )
        # It was not issued.
        assert report["reductions"] == []
        self.assertExpectedInline(
            "\n".join(
                # The line is cut by its length, which the number of a line changes.
                without_lines(line).replace("rank 1", "rank 0").replace("contrac...", "contract...")
                for line in format_verdict(report).splitlines()
                if "stopped" in line or "fix" in line
            ),
            """\
  stopped by --require bitwise, first on rank 0: run/observing.py backward (backward, C++, such as DDP's reducer): all_reduce sum over gloo, 2 ranks, of float32 is outside the contract...
  fix: pass --backend meshplan, or call torch.distributed.init_process_group('meshplan') in the training script""",
        )

    def test_reduction_of_a_dtype_outside_the_contract(self) -> None:
        def job(*_: Any) -> list[str]:
            sparse = torch.ones(2).to_sparse()
            return [stopped(lambda: dist.all_reduce(sparse)) for _ in range(2)]

        texts, _ = observe_ranks(job, settings=REQUIRE, backend="meshplan")
        assert len({text for found in texts for text in found}) == 1
        self.assertExpectedInline(
            texts[0][0],
            """MP707: --require bitwise: run/test_require.py <lambda>: all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; convert the tensor to a dtype and layout of the contract""",
        )

    def test_reduction_that_is_requested_so(self) -> None:
        def job(*_: Any) -> str:
            ones = torch.ones(2)
            return stopped(lambda: meshplan.deterministic_all_reduce(ones, path="native"))

        texts, _ = observe_ranks(job, settings=REQUIRE)
        assert len(set(texts)) == 1
        self.assertExpectedInline(
            texts[0],
            """MP707: --require bitwise: run/test_require.py <lambda>: all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; remove the policy or path that requests this order""",
        )

    def test_setting_that_varies_bits(self) -> None:
        def job(*_: Any) -> list[str]:
            model, optimizer = make_model()
            take_step(model, optimizer)
            dist.barrier()  # the other rank's step does not end by this one's error
            torch.use_deterministic_algorithms(True, warn_only=True)
            texts = [stopped(optimizer.step)]
            torch.use_deterministic_algorithms(True)
            return [*texts, stopped(lambda: dist.all_reduce(torch.ones(2)))]

        texts, report = observe_ranks(job, settings=REQUIRE, backend="meshplan")
        assert len({text for found in texts for text in found}) == 1
        assert report["steps"]["taken"] == {"0": 1, "1": 1}
        self.assertExpectedInline(
            texts[0][0],
            """MP707: --require bitwise: deterministic_algorithms is 'warn only', which varies bits; keep torch.use_deterministic_algorithms(True), without warn_only""",
        )

    def test_operator_that_a_trainer_hides(self) -> None:
        def job(rank: int) -> Any:
            found = observed(REQUIRE)
            try:
                try:
                    torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
                except RuntimeError:
                    raise ValueError("fit failed") from None
            except ValueError as error:
                with mock.patch.object(sys, "stderr"):
                    sys.excepthook(type(error), error, error.__traceback__)
                return error.__notes__, found.finish(error)

        notes, report = run_ranks(job, 2)[0]
        self.assertExpectedInline(
            "\n".join(notes),
            """MP707: --require bitwise: put_ does not have a deterministic implementation; use an operator that the documentation of torch.use_deterministic_algorithms(True) does not list""",
        )
        assert report["error"].startswith("ValueError: fit failed, raised from RuntimeError: put_ ")
        assert report["refused"]["fix"] in format_verdict(report)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["reduction", "step"])
def test_rank_that_does_not_come_to_the_call_stops_at_its_next_one(kind: str) -> None:
    def job(rank: int, found: Observation) -> str:
        if rank == 1:
            return stopped(lambda: dist.all_reduce(torch.ones(2)), strip=False)
        assert found.requirement is not None
        wait_until_refused(found.requirement)
        # Of integers, which alone stops no job.
        counts = torch.ones(2, dtype=torch.int64)
        optimizer = make_model(ddp=False)[1]
        call = optimizer.step if kind == "step" else lambda: dist.all_reduce(counts)
        texts = {stopped(call, strip=False) for _ in range(2)}
        assert len(texts) == 1
        return texts.pop()

    (other, first), report = observe_ranks(job, settings=REQUIRE)
    assert other == first.replace("bitwise: ", "bitwise: rank 1 stopped: ")
    assert report["refused"]["rank"] == 1


def wait_until_refused(requirement: Requirement) -> None:
    assert requirement.exchange is not None
    deadline = time.monotonic() + 200
    while requirement.exchange.ledger.refused is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.processes
def test_rank_that_comes_late_to_the_exchange_stops_too() -> None:
    def run(rank: int) -> str:
        if rank == 0:
            found = observed(REQUIRE)
            text = stopped(lambda: dist.all_reduce(torch.ones(2)), strip=False)
            assert found.requirement is not None
            wait_until_refused(found.requirement)
            arrive("refused")
        else:
            wait_for("refused", 1)
            found = observed(REQUIRE)
            assert found.requirement is not None
            wait_until_refused(found.requirement)
            text = stopped(make_model(ddp=False)[1].step, strip=False)
        found.finish(None)
        return text

    first, other = run_ranks(run, 2)
    assert other == first.replace("bitwise: ", "bitwise: rank 0 stopped: ")


def sharded_step() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    take_step(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.processes
def test_calls_that_change_no_bits_pass() -> None:
    def job(rank: int, _: Observation) -> None:
        counts = torch.tensor([rank])
        dist.all_reduce(counts)
        assert counts.item() == 1
        dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(2), 0)
        dist.all_gather_object([None, None], rank)
        dist.barrier()
        # In the same order, though over gloo.
        meshplan.deterministic_all_reduce(torch.ones(3))
        take_step(*make_model(ddp=False))

    report = observe_ranks(job, settings=REQUIRE)[1]
    assert (report["refused"], report["error"]) == (None, None)
    assert [row["kind"] for row in report["reductions"]] == ["contract"]


@pytest.mark.processes
def test_job_under_the_backend_passes() -> None:
    def job(*_: Any) -> None:
        model, optimizer = make_model()
        for _ in range(3):
            take_step(model, optimizer)
        sharded_step()

    report = observe_ranks(job, settings=f"{REQUIRE} gradients", backend="meshplan")[1]
    assert (report["refused"], report["steps"]["taken"]) == (None, {"0": 3, "1": 3})


SETTINGS: dict[str, Callable[[], None]] = {
    "matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "convolution_precision": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
    "rnn_precision": lambda: setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32"),
    "cudnn_benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", SETTINGS)
def test_setting_of_gpus_stops_jobs_on_gpus(name: str) -> None:
    def run(_: int) -> str:
        requirement = Requirement(None)
        torch.backends.cudnn.allow_tf32 = False
        on_gpu = mock.patch.object(torch.cuda, "is_initialized", return_value=True)
        with on_gpu:
            requirement._check()
        SETTINGS[name]()
        requirement._check()
        with on_gpu:
            return stopped(requirement._check)

    (text,) = run_ranks(run, 1, init=False)
    assert text.startswith(f"MP707: --require bitwise: {name} is ")
    assert "; set torch.backends.cud" in text


@pytest.mark.processes
def test_forked_child_of_a_job_is_not_stopped() -> None:
    def job(*_: Any) -> tuple[str, int]:
        torch.use_deterministic_algorithms(False)
        _, optimizer = make_model(ddp=False)
        found = stopped(optimizer.step)
        child = os.fork()
        if not child:
            status = 1
            try:
                optimizer.step()
                status = 0
            finally:
                os._exit(status)
        return found, os.waitpid(child, 0)[1]

    for text, status in observe_ranks(job, settings=REQUIRE)[0]:
        assert "deterministic_algorithms is False" in text
        assert status == 0


@pytest.mark.parametrize(("error", "status"), [(None, 3), (ValueError(), 0)])
def test_script_that_goes_on_after_the_error_fails(error: Any, status: int) -> None:
    with mock.patch("meshplan.run._job.observe") as observe:
        job = ObservedJob(RunSettings(require="bitwise"))
    found = observe.return_value
    found.finish.return_value, found.rank = None, 1
    assert job.finish(error) == status
    found.requirement.refusal = None
    assert job.finish(error) == 0
