from __future__ import annotations

import json
import threading

from expecttest import TestCase

from meshplan.collectives._provenance import Event, _Log


def event(number: int = 0, **more: object) -> Event:
    fields: dict[str, object] = {
        "asked": f"(P(sum), R) -> (R, R) on (a=2, b={number})",
        "planned": "all_reduce sum over (a)",
        "ran": "exchange",
        "sends": ("all_to_all_single", "all_gather_into_tensor"),
        "group": "axis group 1 of 2 ranks: 0, 3",
        "dtype": "float32",
        "why": "one axis",
    }
    return Event(**(fields | more))  # type: ignore[arg-type]


class TestText(TestCase):
    def test_report(self) -> None:
        log = _Log(10)
        self.assertExpectedInline(str(log.snapshot()), """meshplan has not seen a redistribution""")
        log.add(event(), 100, 0.25)
        log.add(event(), 50, 0.25)
        log.add(event(ran="native", sends=("all_reduce",), dtype="bool", fallback=True), 3, 0.0)
        log.add(event(ran="torch", sends=(), group="", dtype="", why="no reduction"), 0, 0.0)
        self.assertExpectedInline(
            str(log.snapshot()),
            """\
2 x (P(sum), R) -> (R, R) on (a=2, b=0) float32
    planned: all_reduce sum over (a)
    ran: exchange (all_to_all_single + all_gather_into_tensor): one axis
    on: axis group 1 of 2 ranks: 0, 3; 150 elements, 0.500 s
1 x (P(sum), R) -> (R, R) on (a=2, b=0) bool
    planned: all_reduce sum over (a)
    FALLBACK ran: native (all_reduce): one axis
    on: axis group 1 of 2 ranks: 0, 3; 3 elements, 0.000 s
1 x (P(sum), R) -> (R, R) on (a=2, b=0)
    planned: all_reduce sum over (a)
    left to torch: no reduction""",
        )
        assert len(log.snapshot().fallbacks) == 1


def test_bounded_and_says_what_it_dropped() -> None:
    log = _Log(3)
    for number in range(5):
        log.add(event(number), 1, 0.0)
    found = log.snapshot()
    assert len(found.entries) == 3
    assert found.dropped == 2
    assert "2 older kinds of events were dropped" in str(found)
    log.clear()
    assert log.snapshot().entries == ()
    assert log.snapshot().dropped == 0


def test_json() -> None:
    log = _Log(3)
    log.add(event(), 4, 0.5)
    found = json.loads(json.dumps(log.snapshot().to_json()))
    assert found["dropped"] == 0
    assert found["entries"][0]["count"] == 1
    assert found["entries"][0]["sends"] == ["all_to_all_single", "all_gather_into_tensor"]


def test_threads_count_together() -> None:
    log = _Log(3)
    threads = [
        threading.Thread(target=lambda: [log.add(event(), 1, 0.0) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert log.snapshot().entries[0]["count"] == 2000
