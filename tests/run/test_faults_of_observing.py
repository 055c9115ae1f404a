"""Faults that observing must not have, each without ranks."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.run import RunSettings
from meshplan.run._certificate import Certifier
from meshplan.run._chain import Chain
from meshplan.run._compare import CertificateFile, compare_files
from meshplan.run._exchange import Exchange
from meshplan.run._holders import ParameterTable
from meshplan.run._observation import Observation

REPORT: dict[str, Any] = {
    "world_size": 1,
    "backend": "gloo",
    "torch": "2",
    "meshplan": "1",
    "hosts": {},
    "meshes": [],
    "reductions": [],
    "settings": {},
    "settings_that_differ": {},
    "state": "running",
}
WORDS = "AAAAAAAAAAAAAAAAAAAAAA=="


def link(step: int, unit: int = 0, **changes: Any) -> dict[str, Any]:
    """What a rank posts for a step of one empty tensor, which only rank 0 holds."""
    own = {"declared": {"a b": [0, ["parameter w float32[0]"]]}, "words": {"a b": WORDS}}
    return {"unit": unit, "step": step, "last": True, "idle": False, "left": {}} | own | changes


def test_signal_handler_may_reduce_while_a_reduction_is_noted() -> None:
    """Handlers of preemption all-reduce a flag, wherever the main thread is."""
    table = ParameterTable()

    def interrupted() -> Iterator[Tensor]:
        table.note_reduction([torch.ones(1)], (0, 1))
        yield torch.ones(2)

    thread = threading.Thread(
        target=lambda: table.note_reduction(interrupted(), (0, 1)),  # type: ignore[arg-type]
        daemon=True,
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_certificate_has_what_could_not_be_written_at_first(tmp_path: Path) -> None:
    """A disk that is full for a while cuts a line and loses no link."""
    path = tmp_path / "a"
    file = CertificateFile(str(path))
    lines = [{"optimizer": 0, "step": 1, "certified": ["w"], "not_certified": {}}]
    lines += [{"optimizer": 0, "step": n, "words": "1", "link": "2"} for n in range(1, 40)]
    file.append(lines[:20], REPORT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.append(lines[20:30], REPORT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.append(lines[30:], REPORT)
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert written[1:] == lines


def test_chain_that_has_ended_says_so_in_its_file_and_keeps_nothing(tmp_path: Path) -> None:
    chain, paths = Chain(2), [str(tmp_path / name) for name in ("a", "b")]
    for rank in (0, 1):
        chain.add(rank, link(1), set())
    for step in range(2, 9):
        chain.add(0, link(step), {1})
    assert [*chain._units[0].pending, *chain._units[0].posted] == []
    records = chain.take_records()
    for path in paths:
        CertificateFile(path).append(records, REPORT)
    text, status = compare_files(*paths)
    assert "steps of optimizer 0 (no step 2 on ranks 1)" in text
    assert status == 0


def test_optimizer_of_some_ranks_has_a_chain() -> None:
    chain = Chain(2)
    for rank in (0, 1):
        chain.add(rank, link(1), set())
    for step in (1, 2):
        chain.add(0, link(step, unit=1), set())
    chain.advance({1})
    found = chain.describe()
    assert (found["links"], found["ended"]) == (3, [])


def test_tensors_that_the_first_replica_lacks_are_listed() -> None:
    """As states of ZeroRedundancyOptimizer: each rank has some, and the first posts for all."""
    chain = Chain(2)
    chain.add(0, link(1), set())
    chain.add(1, link(1, declared={"c d": [0, []]}, words={}), set())
    found = chain.describe()
    assert found["links"] == 1
    assert list(found["not_certified"].values()) == ["the first rank of their replicas lacks them"]


def test_values_without_a_step_are_bounded() -> None:
    certifier = Certifier(ParameterTable(), 0)
    for number in range(5000):
        certifier.add_value("loss", torch.tensor(number))
    assert len(certifier.pop_values()) <= 1000
    assert certifier._left


def test_value_of_a_number_is_on_the_cpu() -> None:
    found = Observation(RunSettings(certify="a"))
    found._certifier = Certifier(ParameterTable(), 0)
    with torch.device("meta"):
        found.add_value("loss", 1.0)
    ((_, value),) = found._certifier.pop_values()
    assert value.device.type == "cpu"


def test_late_report_does_not_replace_the_last_one(tmp_path: Path) -> None:
    """Rank 0's thread may still describe the running job when the process ends."""
    path = tmp_path / "run.json"
    found = Observation(RunSettings(report=str(path)))
    found._exchange = mock.MagicMock()
    found._save(REPORT | {"state": "ended"})
    found._save(REPORT)
    assert json.loads(path.read_text())["state"] == "ended"


def test_descriptors_stay_in_the_process() -> None:
    exchange = Exchange(0, 1, dist.HashStore(), lambda q: q, lambda: None, lambda text: None)
    assert not os.get_inheritable(exchange._bell)
