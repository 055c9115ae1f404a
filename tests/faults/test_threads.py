"""Concurrent threads: exact on separate meshes, refused on one mesh."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.definition import reduce_leaves
from meshplan.execute import _run
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.faults.jobs import attempt, end, join_over_tcp, right_bits, run_to_end

pytestmark = pytest.mark.processes

PATHS = ("auto", "exchange")
NUMEL = 300


def all_at_once(functions: dict[str, Callable[[], None]]) -> list[str]:
    """Run each on a thread of that name; returns what went wrong."""
    wrong: list[str] = []

    def run(name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")

    threads = [
        threading.Thread(target=run, args=item, name=item[0], daemon=True)
        for item in functions.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        if thread.is_alive():
            wrong.append(f"{thread.name} hangs")
    return wrong


def work(mesh: DeviceMesh, seed: int, times: int, axes: int = 0) -> None:
    """Reduce values that differ between threads, so that mixed-up messages are wrong bits.
    ``axes``: over so many of the last axes; 0: over all.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    leaves = [order_sensitive(NUMEL, rank=r, world_size=world, seed=seed) for r in range(world)]
    sizes = tuple(mesh.mesh.shape)[-axes:]
    rows = mesh.mesh.reshape(-1, math.prod(sizes)).tolist()
    (order,) = [row for row in rows if rank in row]
    expected = reduce_leaves([leaves[r] for r in order], "sum", sizes)
    pause = random.Random(f"{seed} {rank}")
    time.sleep(1.0 * (axes > 0 and rank == 3))
    placements = [Replicate()] * (mesh.ndim - len(sizes)) + [Partial()] * len(sizes)
    d = DTensor.from_local(leaves[rank], mesh, placements, run_check=False)
    for _ in range(times):
        # Each rank in another order.
        time.sleep(pause.random() * 0.002)
        assert_bitwise_equal(d.full_tensor(), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("times", [15, pytest.param(300, marks=pytest.mark.dist)])
def test_threads_on_separate_meshes_are_exact(path: str, times: int) -> None:
    """Also while groups are created, concurrently with the main thread, and on one default group.

    All meshes hold all ranks, so that one group could serve them all, and mix up what they send.
    """

    def ranks(rank: int) -> list[str]:
        served = join_over_tcp(rank, 4)
        meshes = {
            "flat": init_device_mesh("cpu", (4,)),
            "square": init_device_mesh("cpu", (2, 2)),
            "turned": DeviceMesh("cpu", [3, 1, 0, 2]),
            # Not over all ranks: rank 3 knows the placement by then, other ranks do not yet.
            "halves": DeviceMesh("cpu", [[2, 0], [3, 1]]),
        }
        names = list(meshes)
        # Each rank starts them in another order.
        names = names[rank:] + names[:rank]
        with meshplan.installed(path=path, timeout=60.0):
            functions = {
                name: lambda n=name: work(  # type: ignore[misc]
                    meshes[n], list(meshes).index(n), times, axes=int(n == "halves")
                )
                for name in names
            }
            beside = threading.Thread(target=lambda: wrong.extend(all_at_once(functions)))
            wrong: list[str] = []
            beside.start()
            work(meshes["square"], 7, times)
            beside.join()
        # The rank that serves the store ends last.
        dist.barrier()
        end()
        assert len(served) == (rank == 0)
        return wrong

    assert run_to_end(ranks, 4, init=False) == [[]] * 4


class TestMessages(TestCase):
    def test_two_threads_on_one_mesh_are_refused(self) -> None:
        """While one is in a reduction; one after the other they may."""

        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (2,))
            messages: list[str] = []
            inside, go = threading.Event(), threading.Event()
            original = _run._reduced

            def slow(*arguments: object) -> object:
                inside.set()
                assert go.wait(60)
                return original(*arguments)  # type: ignore[arg-type]

            with meshplan.installed(timeout=60.0):
                assert all_at_once({"one": lambda: work(mesh, 0, 1)}) == []
                assert all_at_once({"two": lambda: work(mesh, 0, 1)}) == []
                _run._reduced = slow  # type: ignore[assignment]
                first = threading.Thread(target=lambda: right_bits(mesh), name="first")
                first.start()
                assert inside.wait(60)
                second = threading.Thread(
                    target=lambda: messages.append(attempt(lambda: right_bits(mesh))[1]),
                    name="second",
                )
                second.start()
                second.join(60)
                go.set()
                first.join(60)
                right_bits(mesh)
            end()
            return messages[0]

        values = run_to_end(ranks, 2)
        assert values[0] == values[1]
        self.assertExpectedInline(
            values[0],
            """MP503: thread 'second' called a reduction over created group meshplan:508097c67864f83d05a85c7bf7936f85089be1d0 of 2 ranks: 0, 1 (the thread's own: the main thread of every rank did not wait for its thread in join() without a timeout) while thread 'first' is in one: ranks pair their calls in order, and threads have no order in common; reduce over one mesh on one thread, or give each thread a mesh of its own""",
        )
