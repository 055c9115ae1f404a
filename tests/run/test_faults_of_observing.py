"""What observing leaves alone, keeps and writes, and strangers who connect; without ranks."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshplan.run import RunSettings, _exchange, _holders, _report
from meshplan.run._chain import CertificateFile, Chain
from meshplan.run._compare import compare_files
from meshplan.run._exchange import Exchange
from meshplan.run._holders import ParameterTable
from meshplan.run._observation import Observation
from meshplan.run._report import write_file
from meshplan.run._shares import Shares
from meshplan.run._signals import is_of_handler
from tests.processes import arrive, run_ranks, wait_for
from tests.test_run_verdict import report

REPORT = report(meshplan="1", settings={}, state="running", reductions=[])


def share(name: str, count: int | None = 0, **about: Any) -> dict[str, Any]:
    return {"name": name, "count": count, "words": [[0, 0]]} | about


def link(step: int, unit: int = 0, idle: bool = False, shares: Any = None) -> dict[str, Any]:
    """What a rank posts for a step of one empty tensor, which only rank 0 holds."""
    shares = [share("a b", keys=["parameter w float32[0]"])] if shares is None else shares
    head = {"unit": unit, "link": step, "idle": idle, "left": {}}
    return head | {"shares": shares}


def test_value_that_a_thread_adds_while_a_step_takes_them_is_kept() -> None:
    shares = Shares(ParameterTable(), print)
    # The thread has read the list before.
    add: Any = shares._values.append
    shares.pop_values()
    add("late")
    assert shares.pop_values() == ["late"]


def test_optimizers_that_two_threads_step_first_have_numbers_of_their_own() -> None:
    observation: Any = Observation(RunSettings())
    numbers, others = dict[str, int](), list[threading.Thread]()

    def number(name: str) -> None:
        numbers[name] = observation._unit_of(name)

    class Table(dict[Any, int]):
        def setdefault(self, key: Any, default: int = 0) -> int:
            if not others:
                others.append(threading.Thread(target=number, args=("second",)))
                others[0].start()
                others[0].join(1.0)
            return super().setdefault(key, default)

    observation._by_optimizer = Table()
    number("first")
    others[0].join()
    assert sorted(numbers.values()) == [0, 1]


def test_signal_handler_may_reduce_while_a_reduction_is_noted() -> None:
    """Handlers of preemption all-reduce a flag, wherever the main thread is."""
    table = ParameterTable()

    def interrupted() -> Iterator[Tensor]:
        table.note_reduction([torch.ones(1)], (0, 1))
        yield torch.ones(2)

    reduce: Any = table.note_reduction
    thread = threading.Thread(target=reduce, args=(interrupted(), (0, 1)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_signal_handler_that_steps_starts_no_second_thread() -> None:
    module = "meshplan.run._observation"
    with (
        mock.patch(f"{module}.dist"),
        mock.patch(f"{module}.default_store"),
        mock.patch(f"{module}.Exchange") as exchange,
        mock.patch(f"{module}.locate_rank") as locate,
    ):
        found = Observation(RunSettings())
        found._coverage = mock.MagicMock()
        locate.side_effect = lambda _: (found.start(), mock.MagicMock())[1]
        found.start()
    exchange.assert_called_once()


def test_error_of_an_enumeration_is_of_no_handler() -> None:
    """Python keeps the default handlers of signals in one, which can be called."""
    with pytest.raises(ValueError, match="7 is not") as caught:
        IntEnum("Number", "one")(7)
    assert not is_of_handler(caught.value)


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


@pytest.mark.processes
def test_a_certificate_that_another_job_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("of an earlier job" * 999, encoding="utf-8")

    def run(rank: int) -> str:
        file, errors = CertificateFile(str(path)), ""
        if rank == 0:
            file.append([], REPORT)
            arrive("written")
            wait_for("refused", 1)
            return ""
        wait_for("written", 1)
        written = path.read_bytes()
        assert b"earlier" not in written
        for _ in range(2):
            with pytest.raises(OSError, match="another") as caught:
                file.append([{"other": 1}], REPORT)
            errors = str(caught.value)
        assert path.read_bytes() == written
        arrive("refused")
        return errors

    errors = run_ranks(run, 2, init=False)[1]
    assert errors == f"another job is writing {path}; pass each job a file of its own"
    CertificateFile(str(path)).append([{"later": 1}], REPORT)
    assert "later" in path.read_text(encoding="utf-8")


def test_file_that_cannot_be_replaced_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_file(str(tmp_path / "run.json"), "text")
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_pipes_and_links_are_written_and_never_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):  # nothing reads
        write_file(str(pipe), "text")
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as reader:
        write_file(str(pipe), "text", is_last=False)
        write_file(str(pipe), "last text")
        assert reader.read() == "last text"
    link.symlink_to(tmp_path / "run.json")
    write_file(str(link), "text")
    assert link.is_symlink()
    assert (tmp_path / "run.json").read_text(encoding="utf-8") == "text"
    assert pipe.is_fifo()
    assert len([*tmp_path.iterdir()]) == 3


def test_pipe_gets_the_whole_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text, found = "text " * 200_000, list[str]()
    ends = os.pipe()
    os.set_blocking(ends[1], True)
    with open(ends[0], encoding="utf-8") as reader:
        thread = threading.Thread(target=lambda: found.append(reader.read()))
        thread.start()
        write_file(f"/proc/self/fd/{ends[1]}", text)
        os.close(ends[1])
        thread.join()
    assert found == [text]
    monkeypatch.setattr(_report, "_READER_SECONDS", 0.5)
    # Whose reader has stopped; the job's own descriptor would wait.
    for reader, writer in (os.pipe(), os.openpty()):
        with pytest.raises(TimeoutError, match="the reader is slow"):
            write_file(f"/dev/fd/{writer}", text)
        os.close(reader)
        os.close(writer)


def test_chain_that_has_ended_says_so_in_its_file_and_keeps_nothing(tmp_path: Path) -> None:
    chain, paths = Chain(2), [str(tmp_path / name) for name in ("a", "b")]
    for rank in (0, 1):
        chain.add(rank, link(1), set())
    for step in range(2, 9):
        chain.add(0, link(step), {1})
    assert not chain._units[0].pending
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
    chain.add(1, link(1, shares=[share("c d", None, keys=[])]), set())
    found = chain.describe()
    assert found["links"] == 1
    assert list(found["not_certified"].values()) == [
        "not listed by the first rank of their replicas"
    ]


def test_later_steps_of_a_rank_change_no_earlier_link() -> None:
    chain = Chain(2)
    chain.add(0, link(1), set())
    chain.add(0, link(2, shares=[share("a b", 1), share("c d", None, keys=[])]), set())
    chain.add(1, link(1, shares=[]), set())
    found = chain.describe()
    assert (found["links"], found["not_certified"]) == (1, {})


def test_idle_rank_that_posts_again_ends_no_chain() -> None:
    chain = Chain(2)
    for step in (1, 3):
        chain.add(1, link(step, idle=step == 1, shares=[]), set())
    for step in (1, 2, 3):
        chain.add(0, link(step), set())
    assert chain.describe()["links"] == 3


def test_values_without_a_step_are_bounded() -> None:
    shares = Shares(ParameterTable(), print)
    for number in range(5000):
        shares.add_value("loss", torch.tensor(number))
    assert len(shares.pop_values()) <= 1000
    assert shares._left


def test_value_of_a_number_is_on_the_cpu() -> None:
    shares = Shares(ParameterTable(), print)
    with torch.device("meta"):
        shares.add_value("loss", 1.0)
    (value,) = shares.pop_values()
    assert value.tensor.device.type == "cpu"


def test_late_report_does_not_replace_the_last_one(tmp_path: Path) -> None:
    """Rank 0's thread may still describe the running job when the process ends."""
    path = tmp_path / "run.json"
    found = Observation(RunSettings(report=str(path)))
    found._exchange = mock.MagicMock()
    found._save(REPORT | {"state": "ended"})
    found._save(REPORT)
    assert json.loads(path.read_text())["state"] == "ended"


def test_descriptors_stay_in_the_process() -> None:
    assert not os.get_inheritable(make_exchange(0, 1)._bell)


def test_nothing_is_kept_for_a_thread_that_has_ended() -> None:
    """Such as that of a rank that found no rank 0."""
    exchange = make_exchange(1, 2)
    with mock.patch("meshplan.run._exchange._LOOKUP_SECONDS", -1.0):
        exchange.start()
        exchange.join(60)
    for _ in range(3):
        exchange.post(dict)
    assert exchange._queue.empty()


@pytest.mark.parametrize("fault", [RuntimeError("device-side assert"), None])
def test_device_that_fails_or_hangs_keeps_no_message_and_no_thread(fault: Any) -> None:
    exchange = make_exchange(0, 1)
    with mock.patch.object(_exchange.torch, "cuda") as cuda:
        stream = cuda.current_stream.return_value
        stream.record_event.side_effect = fault
        stream.record_event.return_value.query.return_value = False
        exchange.post(lambda: {"taken": {"": 1}})
    exchange.start()
    if fault is not None:
        wait_until(lambda: exchange.ledger.taken == {0: {"": 1}})
    exchange.stop()
    assert not exchange.is_alive()
    assert bool(exchange.ledger.taken) == (fault is not None)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def make_exchange(
    rank: int, ranks: int, store: Any = None, changed: Callable[[], None] = lambda: None
) -> Exchange:
    store = store or dist.HashStore()
    return Exchange(rank, ranks, store, lambda question: question, changed, lambda text: None)


def start(store: dist.Store, changed: Callable[[], None]) -> Exchange:
    found = make_exchange(0, 1, store, changed)
    found.start()
    return found


def post(exchange: Exchange, step: int) -> None:
    exchange.post(lambda: {"taken": {"": step}})
    wait_until(lambda: exchange.ledger.taken.get(0) == {"": step})


BUSY = """
import time, torch
from tests.run.test_faults_of_observing import make_exchange

def work():
    end, numbers = time.monotonic() + 3, torch.ones(1 << 22)
    while time.monotonic() < end:
        numbers.sum()
    return {}

exchange = make_exchange(0, 1)
exchange.start()
exchange.post(work)
time.sleep(0.5)
exchange.stop()
"""


def test_thread_that_is_busy_at_the_end_does_not_abort_the_process() -> None:
    """It would change the exit status, and launchers then end rank 0 before its verdict."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_buffer_of_two_modules_is_read_once() -> None:
    shared = nn.BatchNorm1d(2, affine=True)
    table, outer = ParameterTable(), [nn.ModuleList([shared]) for _ in range(2)]
    for one in outer:
        _holders._remember_module(one)
    table.refresh()
    assert len(list(table.buffers_beside([shared.weight]))) == 3


def test_counter_of_steps_on_a_mesh_is_not_read() -> None:
    """To read a DTensor may take a collective."""

    class Counter(Tensor):
        def item(self) -> Any:
            raise AssertionError

    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight]["step"] = torch.ones(()).as_subclass(Counter)
    found = Observation(RunSettings(certify="a"))
    assert found._find_offset(optimizer, found._unit_of(optimizer)) == 0
