"""A process that forks while it has groups: the fork is refused, and takes nothing from its parent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset

import meshplan
from meshplan.flatten import registry
from tests.faults.jobs import attempt, end, right_bits, run_to_end

pytestmark = pytest.mark.processes

PATHS = ("auto", "exchange")


def in_a_fork(function: Callable[[], str], seconds: float = 200.0) -> str:
    """What ``function`` returns in a fork of this process; ``hangs`` if it has no end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            text = function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    os.set_blocking(reader, False)
    deadline = time.monotonic() + seconds
    while not os.waitpid(process, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(process, 9)
            os.waitpid(process, 0)
            return "hangs"
        time.sleep(0.01)
    try:
        return os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)


class Squares(Dataset[torch.Tensor]):
    """Workers inherit meshplan's groups by a fork; each item says whether a reduction was refused."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        refused = attempt(lambda: right_bits(self.mesh))[0] == "GroupStateError"
        return torch.tensor([index**2, int(refused)])


class TestMessages(TestCase):
    def test_fork_is_refused_a_reduction(self) -> None:
        """By any path; whether its parent has reduced before, or only made the default group."""

        def ranks(rank: int) -> list[str]:
            mesh, turned = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
            mine = str(os.getpid())

            def refused(function: Callable[[], Any]) -> str:
                text = in_a_fork(lambda: attempt(function)[1])
                assert f"is a fork of process {mine}" in text, text
                return text

            for path in PATHS:
                with meshplan.installed(path=path, timeout=60.0):
                    for one in (mesh, turned):
                        refused(lambda m=one: right_bits(m))  # type: ignore[misc]
                        right_bits(one)
                        refused(lambda m=one: right_bits(m))  # type: ignore[misc]
                        right_bits(one, times=3)
                    found = refused(lambda: meshplan.prepare(mesh))
            end()
            words = found.replace(mine, "PARENT").split()
            words[2] = "CHILD"
            return [" ".join(words)]

        values = run_to_end(ranks, 2)
        self.assertExpectedInline(
            values[0][0],
            """MP503: process CHILD is a fork of process PARENT, which owns these process groups: peers would receive the messages of both, mixed; reduce in the parent, or start processes with 'spawn' and initialise torch.distributed in them""",
        )


@pytest.mark.parametrize("path", PATHS)
def test_exit_of_a_fork_leaves_its_parent_unharmed(path: str) -> None:
    """It shuts meshplan down, or asks what there is, or leaves at once."""

    def ranks(rank: int) -> list[str]:
        meshes = [init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])]
        found = []
        with meshplan.installed(path=path, timeout=60.0):
            for mesh in meshes:
                right_bits(mesh)
            for leave in (
                lambda: f"destroyed {meshplan.shutdown()}",
                lambda: f"forgot {len(registry()._table)}",
                lambda: "left",
            ):
                found.append(in_a_fork(leave))
                for mesh in meshes:
                    right_bits(mesh, times=3)
        destroyed = meshplan.shutdown()
        dist.destroy_process_group()
        return [*found, f"destroyed {destroyed}"]

    assert run_to_end(ranks, 2)[0] == ["destroyed 0", "forgot 2", "left", "destroyed 1"]


def test_data_loader_workers_are_refused_and_parents_go_on() -> None:
    def ranks(rank: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2,))
        rows: list[list[int]] = []
        with meshplan.installed(path="exchange", timeout=60.0):
            right_bits(mesh)
            loader = DataLoader(
                Squares(mesh),
                batch_size=2,
                num_workers=2,
                multiprocessing_context="fork",
                timeout=300,
            )
            for batch in loader:
                rows += batch.tolist()
                right_bits(mesh)
        end()
        return rows

    assert run_to_end(ranks, 2)[0] == [[n**2, 1] for n in range(8)]
