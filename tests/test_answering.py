"""A store that does not answer is an error in bounded time, whatever torch's client waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from expecttest import TestCase
from torch._C._distributed_c10d import Store

from meshplan.errors import GroupStateError
from meshplan.flatten import _agree
from meshplan.flatten._agree import AnsweringStore, Members, open_round, vote
from meshplan.record import Record


class Stuck(dist.Store):
    """A store that does not answer until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.free.wait(20)
        return True


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    store = Stuck()
    yield store
    store.free.set()


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("meshplan store")}


def test_answers_match_the_store() -> None:
    plain = dist.HashStore()
    store = AnsweringStore(plain, 5)
    assert isinstance(store, Store)
    store.set("a", "1")
    assert plain.get("a") == b"1"
    assert store.get("a") == b"1"
    assert store.check(["a"])
    assert not store.check(["b"])
    assert store.add("n", 3) == 3
    assert store.add("n", 0) == 3
    assert store.compare_set("c", "", "new") == b"new"
    assert store.compare_set("c", "", "other") == b"new"
    assert store.multi_get(["a", "c"]) == [b"1", b"new"]
    assert store.delete_key("a")
    assert not plain.check(["a"])


def test_errors_of_the_store_are_passed_on() -> None:
    plain = dist.HashStore()
    plain.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(dist.DistStoreError):
        AnsweringStore(plain, 5).get("nobody sets it")


def test_votes_are_held_over_it() -> None:
    store = AnsweringStore(dist.HashStore(), 5)
    here = Members(store, (0,), 0, 1.0)
    prefix, refused = open_round(here, "group")
    assert refused is None
    assert vote(here, prefix, Record.of(vote="t")).unanimous


def test_thread_ends_with_the_wrapper() -> None:
    # Those of stores of other tests may be ending meanwhile.
    before = threads()
    store = AnsweringStore(dist.HashStore(), 5)
    store.set("a", "1")
    (mine,) = threads() - before
    del store
    mine.join(100)
    assert not mine.is_alive()


def test_requests_work_again_after_a_timeout(stuck: Stuck) -> None:
    with mock.patch.object(_agree, "_LEAST_SECONDS", 0.05):
        store = AnsweringStore(stuck, 0.05)
    for _ in range(2):
        with pytest.raises(GroupStateError):
            store.check(["a"])
    store._seconds = 100.0
    stuck.free.set()
    assert store.check(["a"])
    assert stuck.asked == 3


def test_short_rank_timeout_does_not_shorten_the_store_timeout(stuck: Stuck) -> None:
    store = AnsweringStore(stuck, 0.001)
    threading.Timer(0.3, stuck.free.set).start()
    assert store.check(["a"])


@pytest.mark.full
def test_unanswered_request_does_not_keep_a_process_alive() -> None:
    """The server is stopped, not ended: its kernel still accepts data."""
    serve = (
        "import signal, torch.distributed as dist; store = dist.TCPStore('127.0.0.1', 0, "
        "is_master=True, wait_for_workers=False); print(store.port, flush=True); signal.pause()"
    )
    ask = (
        "import sys, torch.distributed as dist\n"
        "from meshplan.flatten import _agree\n"
        "_agree._LEAST_SECONDS = 0.5\n"
        "from torch._C._distributed_c10d import PrefixStore\n"
        "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), wait_for_workers=False)\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "_agree.AnsweringStore(PrefixStore('p', store), 0.5).check(['a'])\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", serve], stdout=pipe, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            with subprocess.Popen(
                [sys.executable, "-c", ask, port], stdin=pipe, stdout=pipe, stderr=pipe, text=True
            ) as client:
                assert client.stdout is not None
                client.stdout.readline()
                server.send_signal(signal.SIGSTOP)
                # Its other threads may still answer until the parent is notified of the stop.
                os.waitid(os.P_PID, server.pid, os.WSTOPPED)
                _, printed = client.communicate("\n", timeout=300)
        finally:
            server.kill()
    assert client.returncode == 1
    assert f"MP503: the store of the default group at 127.0.0.1:{port} did not" in printed


class TestMessages(TestCase):
    def test_silent_store_is_reported(self) -> None:
        stuck = Stuck()
        with (
            mock.patch.object(_agree, "_LEAST_SECONDS", 0.05),
            pytest.raises(GroupStateError) as error,
        ):
            AnsweringStore(stuck, 0.05).check(["a"])
        stuck.free.set()
        self.assertExpectedInline(
            str(error.value),
            """MP503: the store of the default group did not answer this rank within 0.05 s; look at the network between this host and that one, and whether that one is alive""",
        )

    def test_closed_store_is_reported(self) -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        del server
        with pytest.raises(GroupStateError) as error:
            AnsweringStore(client, 5).check(["a"])
        text = str(error.value).replace(str(client.port), "PORT")
        start, rest = text.split(" was lost: ")
        self.assertExpectedInline(
            start, """MP503: the store of the default group at 127.0.0.1:PORT"""
        )
        self.assertExpectedInline(
            rest.split("; ", 1)[1],
            """look whether the process that holds it (torchrun's agent on the first host, or rank 0) has ended""",
        )
