"""The state of the process of another rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from meshplan.flatten import _missing
from meshplan.flatten._missing import note_process, process_state, roll_call_seconds

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_process_states_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert process_state(store, 0) == "unknown"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: child.pid)
            note_process(store, 0)
        assert process_state(store, 0) == "alive"
        child.send_signal(signal.SIGSTOP)
        while process_state(store, 0) != "stopped":
            time.sleep(0.01)
    finally:
        child.kill()
    # A process that its parent has not waited for has ended, too.
    while process_state(store, 0) != "ended":
        time.sleep(0.01)
    child.wait()
    assert process_state(store, 0) == "ended"


def test_reused_process_number_counts_as_ended() -> None:
    store = dist.HashStore()
    note_process(store, 0)
    where, number, started = json.loads(store.get("meshplan/process/0"))
    store.set("meshplan/process/0", json.dumps([where, number, str(int(started) - 1)]))
    assert process_state(store, 0) == "ended"


@pytest.mark.parametrize(
    ("timeout", "used", "seconds"),
    [(8.0, 7.2, 1.8), (8.0, 8.0, 1.0), (8.0, 20.0, 1.0), (8.0, 1.0, 8.0), (1800.0, 1620.0, 10.0)],
)
def test_roll_call_is_part_of_the_timeout(
    timeout: float, used: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0 + used)
    assert roll_call_seconds(timeout, 100.0) == pytest.approx(seconds)


def test_process_on_another_host_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    note_process(store, 0)
    monkeypatch.setattr(_missing, "host", lambda: "another")
    assert process_state(store, 0) == "unknown"
