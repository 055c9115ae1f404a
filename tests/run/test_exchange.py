"""What rank 0's thread costs, and what strangers who connect to it can do."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from meshplan.run import _exchange, _holders
from meshplan.run._exchange import Exchange
from meshplan.run._holders import ParameterTable


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def start(store: dist.Store, changed: Callable[[], None]) -> Exchange:
    found = Exchange(0, 1, store, lambda question: question, changed, lambda text: None)
    found.start()
    return found


def post(exchange: Exchange, step: int) -> None:
    exchange.post(lambda: {"taken": {"": step}})
    wait_until(lambda: exchange.ledger.taken.get(0) == {"": step})


def test_report_changes_at_most_once_a_second() -> None:
    calls: list[None] = []
    began = time.monotonic()
    exchange = start(dist.HashStore(), lambda: calls.append(None))
    for step in range(50):
        post(exchange, step)
    exchange.stop()
    assert 1 <= len(calls) <= 2 + time.monotonic() - began


def test_stranger_ends_no_exchange() -> None:
    """Half a message, and one that is no text."""
    store = dist.HashStore()
    with mock.patch.object(_exchange, "_RECEIVE_TIME", struct.pack("ll", 1, 0)):
        exchange = start(store, lambda: None)
        wait_until(lambda: store.check([_exchange._KEY]))
        _, port, _ = json.loads(store.get(_exchange._KEY))
        strangers = [socket.create_connection(("localhost", port)) for _ in range(2)]
        for one, data in zip(strangers, (b"\0\0", b"\0\0\0\2\xff\xfe"), strict=True):
            one.sendall(data)
            assert one.recv(1) == b""
        post(exchange, 1)
        exchange.stop()
    for one in strangers:
        one.close()


def test_reductions_of_live_memory_are_not_read_again_at_each_call() -> None:
    table, given = ParameterTable(), [torch.ones(1) for _ in range(6)]
    with mock.patch.object(_holders, "_REDUCED", 2):
        table._most_reduced = 2
        for one in given:
            table.note_reduction([one], (0, 1))
        before = table._reduced
        table.note_reduction(given[:1], (0, 1))
    assert table._reduced is before
