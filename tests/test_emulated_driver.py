"""What the interface of a GPU's driver promises, on the emulated one that other tests rely on.

The same rules hold for CUDA's and HIP's drivers: their references, on streams, events and captures.
"""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
from torch import Tensor

from meshplan import kernel
from meshplan.kernel._communicator import Arithmetic, CallKey, prepare_call
from meshplan.kernel._device_peers import device_call, plan_of
from meshplan.kernel._driver import DriverError
from meshplan.kernel._library import Failures, Peers, library
from tests.devices import EMULATED, Emulated

pytestmark = EMULATED
# Seconds. The test looks before they are over.
LATER = 2.0


class Copier:
    """A group of one rank, whose reductions copy a tensor."""

    def __init__(self, kind: kernel.DriverKind) -> None:
        self.device = Emulated(kind)
        self.driver = self.device.driver
        self.region = self.driver.malloc(int(library().mp_peer_bytes(1, 1, 4096, 1)))
        self.failures = self.driver.host_malloc(ctypes.sizeof(Failures))
        how = Arithmetic("sum", (1,), "rank", "wide", "once", None)
        self.key = CallKey("one_shot", (100,), (), torch.float32, how)

    def copy(self, source: Tensor, target: Tensor, stream: int) -> None:
        peers = Peers(world=1, rank=0, blocks=1, tile=4096)
        peers.region[0] = self.region
        call, plan = prepare_call(self.key, 1, 5.0), plan_of("rank", (1,))
        assert plan is not None
        call.piece = peers.tile
        words = device_call(call, plan)
        pointers = [source.data_ptr(), target.data_ptr(), self.failures]
        given = [peers, words, *map(ctypes.c_void_p, pointers)]
        arguments = (ctypes.c_void_p * 5)(*map(ctypes.addressof, given))
        self.driver.launch(self.device.kernel("mp_float32_sum"), 1, 2, stream, arguments)
        # The driver has copied all of it.
        for one in given:
            ctypes.memset(ctypes.addressof(one), 0xFF, ctypes.sizeof(one))

    def late(self, stream: int) -> None:
        with self.device.on_stream(stream):
            self.device.delay(LATER)


@pytest.fixture(params=["cuda", "hip"])
def copier(request: pytest.FixtureRequest) -> Copier:
    return Copier(request.param)


def test_launches_return_before_they_run_and_copy_their_parameters(copier: Copier) -> None:
    source, target = torch.arange(100.0), torch.zeros(100)
    copier.late(7)
    copier.copy(source, target, 7)
    assert not target.any()
    copier.driver.synchronize()
    assert torch.equal(source, target)


def test_streams_are_ordered_internally_only(copier: Copier) -> None:
    source, first, second, other = torch.ones(100), *(torch.zeros(100) for _ in range(3))
    copier.late(7)
    copier.copy(source, first, 7)
    copier.copy(first, second, 7)
    copier.copy(source, other, 8)
    event = copier.driver.event()
    copier.driver.record(event, 8)
    while not copier.driver.is_done(event):
        time.sleep(0.001)
    assert other.all()
    assert not first.any()
    copier.driver.synchronize()
    assert second.all()


def test_event_covers_work_submitted_before_it(copier: Copier) -> None:
    driver = copier.driver
    event = driver.event()
    # Never recorded: there is nothing to wait for.
    assert driver.is_done(event)
    driver.wait(event, 7)
    driver.record(event, 7)
    copier.late(7)
    while not driver.is_done(event):
        time.sleep(0.001)
    driver.record(event, 7)
    assert not driver.is_done(event)
    source, target = torch.ones(100), torch.zeros(100)
    # A wait is for the record that there is now, not for the next one.
    driver.wait(event, 8)
    copier.late(9)
    driver.record(event, 9)
    copier.copy(source, target, 8)
    assert not target.any()
    driver.synchronize()
    assert target.all()
    driver.destroy_event(event)
    with pytest.raises(DriverError):
        driver.record(event, 7)


class TestCapture:
    def test_nothing_runs_until_it_is_replayed(self, copier: Copier) -> None:
        source, target = torch.ones(100), torch.zeros(100)
        with copier.device.capture(20) as graph:
            assert copier.driver.capture(20) is not None
            assert copier.driver.capture(21) is None
            copier.copy(source, target, 20)
        copier.driver.synchronize()
        assert not target.any()
        for turn in range(2):
            source.fill_(turn + 1)
            graph.replay(5)
            copier.driver.synchronize()
            assert torch.equal(source, target)

    def test_external_events_run_in_each_replay(self, copier: Copier) -> None:
        """Recorded and waited for by each replay; no part of any capture."""
        driver, event = copier.driver, copier.driver.event()
        for one in (driver.record_external, driver.wait_external):
            with pytest.raises(DriverError, match="invalid"):
                one(event, 7)
        source, target, after = torch.ones(100), torch.zeros(100), torch.zeros(100)
        with copier.device.capture(20) as graph:
            driver.wait_external(event, 20)
            copier.copy(source, target, 20)
            driver.record_external(event, 20)
        assert driver.is_done(event)
        copier.late(7)
        driver.record(event, 7)
        graph.replay(20)
        assert not driver.is_done(event)
        driver.wait(event, 8)
        # Not for this one: it comes after the graph was launched.
        copier.copy(target, after, 8)
        driver.record(event, 8)
        driver.synchronize()
        assert after.all()

    def test_nodes_without_an_order_run_at_once_and_in_any_order(self, copier: Copier) -> None:
        driver, fork, join = copier.driver, copier.driver.event(), copier.driver.event()
        orders = set()
        with copier.device.capture(20) as graph:
            events = [driver.event() for _ in range(2)]
            driver.record(fork, 20)
            driver.wait(fork, 21)
            driver.record_external(events[0], 20)
            driver.record_external(events[1], 21)
            driver.record(join, 21)
            driver.wait(join, 20)
        for _ in range(100):
            graph.replay(20)
            while not (found := [driver.is_done(event) for event in events]).count(True):
                time.sleep(0.001)
            orders.add(tuple(found))
            driver.synchronize()
            if len(orders) > 1:
                break
        assert len(orders) > 1
