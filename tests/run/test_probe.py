"""What ``--probe`` finds, and what it leaves alone: the job's results, and the order of its calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.run import RunSettings
from meshplan.run import _observation as observation
from meshplan.run._ledger import Ledger
from meshplan.run._observation import Observation, observe
from meshplan.run._probe import DTYPES, REPEATS, Probe, describe, make_leaf
from meshplan.run._verdict import format_verdict
from meshplan.testing import nccl_model
from tests.processes import run_ranks
from tests.run.observing import observe_ranks


def add(contracts: Sequence[Contract], members: int, last: Contract | None = None) -> list[Tensor]:
    """The sums of a group under a contract for each dtype; under ``last`` at the largest size."""
    sums = []
    for dtype, contract in zip(DTYPES, contracts, strict=True):
        leaves = [make_leaf(dtype, place, members) for place in range(members)]
        for repeats in REPEATS:
            used = last if last is not None and repeats == REPEATS[-1] else contract
            sums.append(reduce_leaves(leaves, "sum", (members,), used).repeat(repeats))
    return sums


NAMES = (
    "tree/wide/once tree/wide/node tree/float64/once rank/wide/once rank/wide/node exact/wide/once"
)


@pytest.mark.parametrize("name", [f"v1/{one}" for one in NAMES.split()])
def test_contract_is_told_from_the_others(name: str) -> None:
    contract = Contract.of_id(name)
    found = describe(0, "1", "gloo", tuple(range(5)), add([contract] * 2, 5))["probe"]
    # To round each sum of float64 to float32 is to add in float32.
    assert found["contracts"] in ([name], [name, name.replace("wide", "float64")])
    assert not found["size_changes_bits"]


def test_one_contract_matches_all_sizes_and_dtypes() -> None:
    tree, rank = Contract(), Contract("rank")
    sizes = describe(0, "1", "gloo", tuple(range(5)), add([tree, tree], 5, last=rank))["probe"]
    dtypes = describe(0, "1", "gloo", tuple(range(5)), add([tree, rank], 5))["probe"]
    assert (sizes["size_changes_bits"], dtypes["size_changes_bits"]) == (True, False)
    assert sizes["contracts"] == dtypes["contracts"] == []


def post(ledger: Ledger, ranks: tuple[int, ...], contract: str, label: str = "fsdp") -> None:
    sums = add([Contract(contract)] * 2, len(ranks))
    for place, rank in enumerate(ranks):
        message = describe(place, "1", "nccl", ranks, sums)
        message["probe"]["group"] = label
        ledger.add(rank, message)


def test_siblings_are_compared_by_their_label() -> None:
    ledger = Ledger(12)
    post(ledger, (0, 1, 2, 3), "tree")
    post(ledger, (4, 5, 6, 7), "tree")
    post(ledger, (0, 4, 8), "tree", "ddp")
    (fsdp, ddp) = ledger.describe_probes()
    assert (fsdp["groups"], fsdp["siblings_agree"]) == (2, True)
    assert fsdp["contracts"] == ["v1/tree/wide/once"]
    assert (ddp["group"], ddp["groups"], ddp["group_size"]) == ("ddp", 1, 3)
    post(ledger, (8, 9, 10, 11), "rank")
    found = ledger.describe_probes()[0]
    assert (found["groups"], found["siblings_agree"], found["contracts"]) == (3, False, [])
    assert found["members_agree"]


def test_group_is_reported_once_all_members_have_posted() -> None:
    ledger, ranks = Ledger(4), (0, 1, 2, 3)
    sums = [add([Contract(order)] * 2, 4) for order in ("tree", "tree", "tree", "rank")]
    for place in ranks[:3]:
        ledger.add(place, describe(place, "1", "nccl", ranks, sums[place]))
    assert ledger.describe_probes() == []
    ledger.add(3, describe(3, "1", "nccl", ranks, sums[3]))
    (found,) = ledger.describe_probes()
    assert not found["members_agree"]


def reduce_on_mesh(rank: int, backend: str, algorithm: Any) -> Any:
    """Reduce over each group of a mesh of 2 x 3 ranks on modelled hosts of two."""
    nccl_model.register()
    nccl_model.configure(domain_size=2, algorithm=algorithm)
    found = observe(RunSettings(probe=True))
    store = dist.FileStore(os.environ["STORE"], 6)
    dist.init_process_group(backend, store=store, rank=rank, world_size=6)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("ddp", "fsdp"))
    for _ in range(2):
        for axis in ("fsdp", "ddp"):
            dist.all_reduce(torch.ones(3), group=mesh.get_group(axis))
    dist.barrier()
    return found.finish(None)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "algorithm", "line"),
    [
        # A ring begins at another rank in each chunk of a message.
        (
            "nccl_model",
            "ring",
            "  probe: fsdp (2 groups of 3 ranks): no contract, size changes bits, siblings agree; "
            "ddp (3 groups of 2 ranks): v1/tree/wide/once and 9 more, siblings agree",
        ),
        (
            "nccl_model",
            "tree",
            "  probe: fsdp (2 groups of 3 ranks): no contract, siblings differ; "
            "ddp (3 groups of 2 ranks): v1/tree/wide/once and 9 more, siblings agree",
        ),
        (
            "meshplan",
            "tree",
            "  probe: fsdp (2 groups of 3 ranks): v1/tree/wide/once and 1 more, siblings agree; "
            "ddp (3 groups of 2 ranks): v1/tree/wide/once and 9 more, siblings agree",
        ),
    ],
)
def test_verdict_names_the_contract_of_each_group(
    backend: str, algorithm: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    report = run_ranks(lambda rank: reduce_on_mesh(rank, backend, algorithm), 6, init=False)[0]
    (found,) = [one for one in format_verdict(report).splitlines() if " probe: " in one]
    assert found == line
    # The sums of the probe are not the job's.
    assert {row["elements"] // row["calls"] for row in report["reductions"]} == {3}


@pytest.mark.processes
def test_groups_may_begin_in_another_order_on_each_rank() -> None:
    """Who waited for the sums of one group would not come to those of the other."""

    def job(rank: int, _: Observation) -> tuple[list[float], bool]:
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        before = torch.get_rng_state()
        works, sums = [], [torch.full((3,), rank + 0.1) for _ in groups]
        for number in (0, 1, 2) if rank == 0 else (2, 1, 0):
            works.append(dist.all_reduce(sums[number], group=groups[number], async_op=True))
        for work in works:
            work.wait()
        return [float(one[0]) for one in sums], torch.equal(before, torch.get_rng_state())

    results, report = observe_ranks(job, 2, "probe", collective_timeout=10)
    assert results == [([float(torch.tensor(0.1) + torch.tensor(1.1))] * 3, True)] * 2
    assert [(row["group"], row["groups"]) for row in report["probes"]] == [("ranks 0-1", 3)]


@pytest.mark.processes
def test_a_rank_whose_observation_fails_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would add alone what they add before the job's own reduction."""

    def run(rank: int) -> Any:
        with mock.patch.object(
            observation, "locate_rank", side_effect=OSError("no host") if rank else None
        ):
            found = observe(RunSettings(probe=True))
            found.start() if rank == 0 else found.call(lambda _: None)
            total = torch.full((3,), float(rank))
            dist.all_reduce(total)
            report = found.finish(None)
            return total.tolist(), report and report["not_observed"]

    monkeypatch.setattr(observation, "_FINISH_SECONDS", 2.0)
    results = run_ranks(run, 2, collective_timeout=10, timeout=60)
    assert [total for total, _ in results] == [[1.0] * 3] * 2
    assert "rank 1: posted nothing" in results[0][1]


@pytest.mark.processes
def test_sums_that_begin_while_others_are_collected_are_posted_once() -> None:
    """Two threads step, and one of them has begun a group."""
    probe, posted = Probe(print), list[Any]()

    class Work:
        def is_completed(self) -> bool:
            probe.collect(posted.append)
            return True

        def wait(self) -> None: ...

    # A thread that appends has read the list before.
    begin: Any = probe._pending.append
    begin(((0, 1), [Work()], "first"))
    probe.collect(posted.append)
    begin(((0, 2), [Work()], "second"))
    probe.collect(posted.append)
    assert posted == ["first", "second"]


def test_integers_and_maxima_are_not_preceded_by_a_probe() -> None:
    def job(rank: int, found: Observation) -> int:
        dist.all_reduce(torch.ones(3, dtype=torch.int64))
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
        return len(found._probe._pending)

    results, report = observe_ranks(job, 2, "probe")
    assert results == [0, 0]
    assert report["probes"] == []
