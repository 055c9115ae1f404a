"""Jobs of several ranks, observed: what the report names, and that the job stays as it is."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshplan
from meshplan.run._observation import Observation
from tests.processes import arrive, run_ranks, wait_for
from tests.run.observing import (
    STEPS,
    backward,
    make_model,
    observe_ranks,
    observed,
    run_script,
    take_step,
    train,
)

pytestmark = pytest.mark.processes


def reports(kind: str, fault: str = "", ranks: int = 3, settings: str = "gradients first=9") -> Any:
    return observe_ranks(lambda *_: train(kind, fault), ranks, settings)[1]


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 3), ("by hand", 2), ("hsdp", 6)])
def test_a_sound_job_is_compared_and_keeps_its_bits(kind: str, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def job(rank: int, _: Observation) -> bool:
        same = train(kind) == alone[rank]
        # As jobs end: the groups have gone when the report is made.
        dist.barrier()
        dist.destroy_process_group()
        return same

    alone = run_ranks(lambda _: train(kind), ranks)
    results, report = observe_ranks(job, ranks, f"report={path} gradients every=2 first=1")
    assert results == [True] * ranks
    assert json.loads(path.read_text(encoding="utf-8")) == report
    assert report["state"] == "ended"
    assert report["replicas"]["first_difference"] is None
    # Steps 1, 2, 4 and 6, of gradients, parameters and two states of each.
    shards = 2 if kind == "hsdp" else 1
    assert report["replicas"]["compared"] == 4 * 4 * 4 * shards
    assert (report["steps"]["compared"], report["steps"]["not_compared"]) == (4, STEPS - 4)
    assert report["steps"]["taken"] == {str(rank): STEPS for rank in range(ranks)}
    assert report["steps"]["unequal"] == []
    assert report["not_observed"] == []
    assert [len(found) for found in report["hosts"].values()] == [ranks]
    groups = {"ddp": ["ranks 0-2"], "by hand": ["ranks 0-1"], "hsdp": ["fsdp", "dp"]}[kind]
    assert [row["group"] for row in report["reductions"]] == groups
    assert {row["kind"] for row in report["reductions"]} == {"outside"}
    axes = [found["axes"] for found in report["meshes"]]
    assert axes == ([{"dp": 3, "fsdp": 2}, {"fsdp": 2}] if kind == "hsdp" else [])


@pytest.mark.parametrize(
    ("kind", "ranks", "fault"),
    [
        ("ddp", 3, "gradient"),
        ("ddp", 3, "parameter"),
        ("hsdp", 6, "optimizer state"),
    ],
)
def test_a_flipped_bit_is_named_with_step_tensor_and_rank(
    kind: str, ranks: int, fault: str
) -> None:
    first = reports(kind, fault, ranks)["replicas"]["first_difference"]
    # A bit of a state reaches the parameter in the same step.
    expected = "parameter" if fault == "optimizer state" else fault
    assert (first["step"], first["kind"], first["tensor"]) == (3, expected, "2.weight")
    assert first["ranks"]["agree"][-1] == [1]
    assert len(first["ranks"]["agree"][0]) == 2
    assert (first["elements"], first["cause"]) == (1, "one rank")


def test_a_skipped_step_is_found_and_waits_for_no_rank() -> None:
    report = reports("ddp", "skip", settings="first=9")
    assert report["steps"]["taken"] == {"0": STEPS, "1": STEPS - 1, "2": STEPS}
    (unequal,) = report["steps"]["unequal"]
    assert unequal["taken"] == {str(STEPS): [0, 2], str(STEPS - 1): [1]}
    assert report["replicas"]["first_difference"]["step"] == 3


@pytest.mark.parametrize("backend", ["gloo", "meshplan"])
def test_steps_without_a_sum_of_gradients_are_no_other_order(backend: str) -> None:
    def job(rank: int, _: Observation) -> None:
        torch.manual_seed(0)
        model, optimizer = make_model()
        ddp: Any = model
        torch.manual_seed(rank)
        for step in range(1, 5):
            with ddp.no_sync() if step > 2 else nullcontext():
                backward(model, torch.randn(8, 4))
            dist.all_reduce(torch.ones(()))  # as of a loss
            optimizer.step()
            optimizer.zero_grad()

    first = observe_ranks(job, backend=backend)[1]["replicas"]["first_difference"]
    assert (first["step"], first["cause"]) == (3, "not reduced")


def test_reductions_under_the_contract_have_its_id() -> None:
    report = observe_ranks(lambda *_: train("ddp"), 2, "first=1", backend="meshplan")[1]
    (row,) = report["reductions"]
    assert (row["kind"], row["group_size"], row["calls"]) == ("contract", 2, STEPS)
    assert row["contract"].startswith("v1/")


@pytest.mark.parametrize("backend", ["gloo", "meshplan"])
def test_reductions_name_the_axis_of_their_group(backend: str) -> None:
    def job(*_: Any) -> set[str]:
        # The mesh does not live until the report is made.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for axis in ("tp", "dp"):
            dist.all_reduce(torch.ones(4), group=mesh.get_group(axis))
            meshplan.deterministic_all_reduce(torch.ones(4), group=(mesh, axis))
        return {one["group"] for one in meshplan.report(json=True)["entries"]}

    groups, report = observe_ranks(job, 4, "first=1", backend=backend)
    # The report of meshplan itself names it too.
    assert groups == [{"group dp of 2 ranks", "group tp of 2 ranks"}] * 4
    rows = report["reductions"]
    under = backend == "meshplan"
    assert [(row["group"], row["kind"] == "contract") for row in rows] == [
        ("tp", under),
        ("tp", True),
        ("dp", under),
        ("dp", True),
    ]
    assert all((row["contract"] is not None) == (row["kind"] == "contract") for row in rows)


@pytest.mark.parametrize("job", ["experts", "fsdp1"])
def test_plain_parameters_are_compared_over_the_backend(job: str) -> None:
    """From the first step on, as over gloo."""
    reports = [
        observe_ranks(lambda *_: run_script(job), 4, "every=1", backend=backend)[1]
        for backend in ("gloo", "meshplan")
    ]
    counts = [report["replicas"]["compared"] for report in reports]
    assert 0 < counts[0] == counts[1]


def test_report_that_cannot_be_written_does_not_cost_the_verdict(tmp_path: Path) -> None:
    report = reports("ddp", ranks=2, settings=f"report={tmp_path}/nothing/run.json first=1")
    assert report["replicas"]["compared"]
    assert any(note.startswith("the report could not be") for note in report["not_observed"])


def test_fault_of_a_description_does_not_cost_the_verdict() -> None:
    def job(_: int, found: Observation) -> None:
        fault = AttributeError("no description")
        found._reductions.describe = mock.Mock(side_effect=fault)  # type: ignore[method-assign]
        train("ddp")

    report = observe_ranks(job, 2, "first=1")[1]
    assert report["replicas"]["compared"]
    assert {"AttributeError: no description"} <= set(report["not_observed"])


def read_taken(path: Path) -> Any:
    text = path.read_text(encoding="utf-8") if path.exists() else "{}"
    return json.loads(text).get("steps", {}).get("taken")


def wait_until_taken(path: Path, steps: dict[str, int]) -> None:
    deadline = time.monotonic() + 200
    while read_taken(path) != steps and time.monotonic() < deadline:
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(file: Path, text: str, encoding: str) -> None:
    """In the place of ``Path.write_text``: killed in the report of the second step."""
    is_second = sum(json.loads(text)["steps"]["taken"].values()) > 2
    file.write_bytes(text.encode(encoding)[: len(text) // 2 if is_second else None])
    if is_second:
        die()


@pytest.mark.parametrize(
    ("point", "taken"),
    [
        ("start", {"0": 0, "1": 0}),
        ("write", {"0": 1, "1": 1}),
        ("collective", {"0": 1, "1": 2}),
    ],
)
def test_a_job_killed_at_any_point_leaves_a_readable_report(
    point: str, taken: dict[str, int], tmp_path: Path
) -> None:
    """Before the first step, in the middle of a write, and while the main thread is blocked."""
    path = tmp_path / "run.json"

    def run_first() -> None:
        observed(f"report={path} first=9")
        if point == "start":
            wait_until_taken(path, taken)
            die()
        model, optimizer = make_model()
        take_step(model, optimizer)
        wait_until_taken(path, {"0": 1, "1": 1})
        if point == "write":
            with mock.patch.object(Path, "write_text", write_half):
                take_step(model, optimizer)
                time.sleep(200)
        threading.Thread(target=lambda: (wait_until_taken(path, taken), die())).start()
        arrive("blocked")
        dist.all_reduce(torch.ones(1))

    def run(rank: int) -> None:
        if rank == 0:
            run_first()
        observed(f"report={path} first=9")
        model, optimizer = make_model()
        take_step(model, optimizer)
        if point == "write":
            take_step(model, optimizer)
        else:
            wait_for("blocked", 1)
            optimizer.step()
        dist.recv(torch.ones(1), 0)  # until it has died

    with pytest.raises((AssertionError, EOFError)):
        run_ranks(run, 2)
    assert json.loads(path.read_text(encoding="utf-8"))["state"] == "running"
    assert read_taken(path) == taken
    assert point == "write" or list(tmp_path.iterdir()) == [path]
