from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.execute import Purpose, StepGroups, run_reduction
from meshplan.execute._provenance import Event, _Events
from tests.processes import run_in_threads, run_ranks
from tests.steps import make_step

P, R = Partial(), Replicate()


def event(number: int = 0, **more: object) -> Event:
    fields: dict[str, object] = {
        "asked": f"(P(sum), R) -> (R, R) on (a=2, b={number})",
        "planned": "all_reduce sum over (a), groups of 2: one axis",
        "ran": "exchange",
        "sends": ("all_to_all_single", "all_gather_into_tensor"),
        "group": "axis group 1 of 2 ranks: 0, 3",
        "dtype": "float32",
        "why": "one axis",
        "path": "auto",
        "contract": "v1/tree/wide/once",
        "ranks": 2,
    }
    return Event(**(fields | more))  # type: ignore[arg-type]


NATIVE = {"ran": "native", "sends": ("all_reduce",), "dtype": "bool", "contract": None}
LEFT = {"ran": "torch", "sends": (), "group": "", "dtype": "", "contract": None, "ranks": 0}
KEPT = "the cuts of a dim are turned: torch's moves stay"


class TestText(TestCase):
    def test_report_is_printed(self) -> None:
        log = _Events(10)
        self.assertExpectedInline(str(log.snapshot()), """meshplan has not seen a redistribution""")
        log.add(event(), 100, 400, 0.25)
        log.add(event(), 50, 200, 0.25, audited=True)
        log.add(event(**NATIVE, fallback=True, why="bool is outside"), 3, 3, 0.0)
        log.add(event(why="one axis; not through shared memory: 2 hosts"), 1 << 22, 1 << 24, 0.0)
        log.add(event(traced=True), None, 0, 0.0)
        log.add(event(kind="collective", asked="all_reduce of 2 ranks", sends=()), 0, 0, 0.0)
        log.add(event(**LEFT, why="no reduction"))
        log.add(event(**LEFT, why="it has arithmetic of its own", fallback=True))
        log.add(event(**LEFT, why=KEPT, planned=KEPT))
        self.assertExpectedInline(
            str(log.snapshot()),
            """\
2 x (P(sum), R) -> (R, R) on (a=2, b=0) float32
    planned: all_reduce sum over (a), groups of 2: one axis
    ran: exchange (all_to_all_single + all_gather_into_tensor), contract v1/tree/wide/once
    on: axis group 1 of 2 ranks: 0, 3
    50 to 100 elements each, 600 B in all, 0.500 s until it returned, 1 audited
1 x (P(sum), R) -> (R, R) on (a=2, b=0) bool
    planned: all_reduce sum over (a), groups of 2: one axis
    FALLBACK ran: native (all_reduce), in the backend's own order: bool is outside
    on: axis group 1 of 2 ranks: 0, 3
    3 elements each, 3 B in all, 0.000 s until it returned
1 x (P(sum), R) -> (R, R) on (a=2, b=0) float32
    planned: all_reduce sum over (a), groups of 2: one axis
    ran: exchange (all_to_all_single + all_gather_into_tensor), contract v1/tree/wide/once: not through shared memory: 2 hosts
    on: axis group 1 of 2 ranks: 0, 3
    4194304 elements each, 16 MiB in all, 0.000 s until it returned
1 x (P(sum), R) -> (R, R) on (a=2, b=0) float32
    planned: all_reduce sum over (a), groups of 2: one axis
    traced: exchange (all_to_all_single + all_gather_into_tensor), contract v1/tree/wide/once
    on: axis group 1 of 2 ranks: 0, 3
    what a graph does later is not counted
1 x collective all_reduce of 2 ranks float32
    planned: all_reduce sum over (a), groups of 2: one axis
    ran: exchange (nothing sent), contract v1/tree/wide/once
    on: axis group 1 of 2 ranks: 0, 3
    0 elements each, 0 B in all, 0.000 s until it returned
1 x (P(sum), R) -> (R, R) on (a=2, b=0)
    planned: all_reduce sum over (a), groups of 2: one axis
    fell through to PyTorch: no reduction
1 x (P(sum), R) -> (R, R) on (a=2, b=0)
    planned: all_reduce sum over (a), groups of 2: one axis
    FALLBACK fell through to PyTorch: it has arithmetic of its own
1 x (P(sum), R) -> (R, R) on (a=2, b=0)
    fell through to PyTorch: the cuts of a dim are turned: torch's moves stay""",
        )
        assert len(log.snapshot().fallbacks) == 2

    def test_log_lines_are_printed(self) -> None:
        """The log has the path and the reason for it."""
        log = _Events(10)
        with self.assertLogs("meshplan", logging.DEBUG) as lines:
            log.add(event(), 100, 400, 0.25)
            log.add(event(), 100, 400, 0.25)
            log.add(event(traced=True))
            for _ in range(2):
                log.add(event(**NATIVE, fallback=True, why="bool is outside"), 3, 3, 0.0)
            log.add(event(**LEFT, why="no reduction"))
            log.add(event(**LEFT, why="it has arithmetic of its own", fallback=True))
            log.add(event(**LEFT, why=KEPT, planned=KEPT))
            # When it is forgotten it is new again.
            log.clear()
            log.add(event(), 100, 400, 0.25)
        self.assertExpectedInline(
            "\n".join(lines.output),
            """\
INFO:meshplan:[meshplan] (P(sum), R) -> (R, R) on (a=2, b=0) float32: all_reduce sum over (a), groups of 2; ran exchange (all_to_all_single + all_gather_into_tensor) on axis group 1 of 2 ranks: 0, 3: one axis
DEBUG:meshplan:[meshplan] (P(sum), R) -> (R, R) on (a=2, b=0) float32: all_reduce sum over (a), groups of 2; ran exchange (all_to_all_single + all_gather_into_tensor) on axis group 1 of 2 ranks: 0, 3: one axis
INFO:meshplan:[meshplan] (P(sum), R) -> (R, R) on (a=2, b=0) float32: all_reduce sum over (a), groups of 2; traced exchange (all_to_all_single + all_gather_into_tensor) on axis group 1 of 2 ranks: 0, 3: one axis
WARNING:meshplan:[meshplan] fallback: (P(sum), R) -> (R, R) on (a=2, b=0) bool: all_reduce sum over (a), groups of 2; ran native (all_reduce) on axis group 1 of 2 ranks: 0, 3: bool is outside
DEBUG:meshplan:[meshplan] fallback: (P(sum), R) -> (R, R) on (a=2, b=0) bool: all_reduce sum over (a), groups of 2; ran native (all_reduce) on axis group 1 of 2 ranks: 0, 3: bool is outside
INFO:meshplan:[meshplan] (P(sum), R) -> (R, R) on (a=2, b=0): all_reduce sum over (a), groups of 2, fell through to PyTorch: no reduction
WARNING:meshplan:[meshplan] fallback: (P(sum), R) -> (R, R) on (a=2, b=0): all_reduce sum over (a), groups of 2, fell through to PyTorch: it has arithmetic of its own
INFO:meshplan:[meshplan] (P(sum), R) -> (R, R) on (a=2, b=0): fell through to PyTorch: the cuts of a dim are turned: torch's moves stay
INFO:meshplan:[meshplan] (P(sum), R) -> (R, R) on (a=2, b=0) float32: all_reduce sum over (a), groups of 2; ran exchange (all_to_all_single + all_gather_into_tensor) on axis group 1 of 2 ranks: 0, 3: one axis""",
        )

    def test_json_follows_its_schema(self) -> None:
        """Keys may be added; one that goes away needs another version."""
        log = _Events(3)
        log.add(event(), 100, 400, 0.25)
        log.add(event(), 50, 200, 0.25, audited=True)
        log.add(event(traced=True))
        found = log.snapshot().to_json()
        assert json.loads(json.dumps(found)) == found
        eager = {
            "asked": "(P(sum), R) -> (R, R) on (a=2, b=0)",
            "planned": "all_reduce sum over (a), groups of 2: one axis",
            "ran": "exchange",
            "sends": ["all_to_all_single", "all_gather_into_tensor"],
            "group": "axis group 1 of 2 ranks: 0, 3",
            "dtype": "float32",
            "why": "one axis",
            "fallback": False,
            "kind": "redistribution",
            "path": "auto",
            "contract": "v1/tree/wide/once",
            "ranks": 2,
            "traced": False,
            "count": 2,
            "audited": 1,
            "elements": 150,
            "smallest_elements": 50,
            "largest_elements": 100,
            "bytes": 600,
            "smallest_bytes": 200,
            "largest_bytes": 400,
            "seconds": 0.5,
        }
        counted = {"count": 1, "audited": 0, "elements": 0, "bytes": 0, "seconds": 0.0}
        extremes = ("smallest_elements", "largest_elements", "smallest_bytes", "largest_bytes")
        traced = eager | {"traced": True} | counted | dict.fromkeys(extremes)
        assert found == {"version": 1, "entries": [eager, traced], "dropped": 0, "untouched": 0}


def test_report_is_bounded_and_counts_dropped_entries() -> None:
    log = _Events(3)
    for number in range(5):
        log.add(event(number), 1, 4, 0.0)
    found = log.snapshot()
    assert len(found.entries) == 3
    assert found.dropped == 2
    assert "2 older kinds of events were dropped" in str(found)
    log.clear()
    assert log.snapshot().entries == ()
    assert log.snapshot().dropped == 0


def test_threads_count_together() -> None:
    log = _Events(3)
    run_in_threads(*[lambda: [log.add(event(), 1, 4, 0.0) for _ in range(500)]] * 4, seconds=20)
    assert log.snapshot().entries[0]["count"] == 2000


@pytest.mark.processes
def test_report_shows_the_executed_path() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with meshplan.installed(path="reference"):
            for numel in (7, 3, 5):
                summand = torch.ones(numel, dtype=torch.bfloat16)
                DTensor.from_local(summand, mesh, (P, P), run_check=False).full_tensor()
        (entry,) = meshplan.report(json=True)["entries"]
        assert meshplan.report(json=True)["version"] == 1
        assert 0 < entry["seconds"] < 60
        assert entry["group"].startswith("default group 0 of 4 ranks: 0, 1, 2, 3")
        assert entry["why"] in entry["planned"]
        assert entry["asked"] == "(P(sum), P(sum)) -> (R, R) on (a=2, b=2)"
        assert (entry["path"], entry["ran"]) == ("reference", "reference")
        assert (entry["contract"], entry["sends"]) == ("v1/tree/wide/once", ["all_to_all_single"])
        assert (entry["ranks"], entry["dtype"], entry["fallback"]) == (4, "bfloat16", False)
        assert (entry["count"], entry["elements"], entry["bytes"]) == (3, 15, 30)

        # Of the policy's own choice nothing is promised, and nothing is short of it.
        meshplan.clear_report()
        with meshplan.installed(policy="fast"):
            DTensor.from_local(torch.ones(2), mesh, (P, P), run_check=False).full_tensor()
        (entry,) = meshplan.report(json=True)["entries"]
        assert (entry["ran"], entry["contract"], entry["fallback"]) == ("native", None, False)

        # A collective says that it is one.
        meshplan.clear_report()
        step = make_step((4,))
        purpose = Purpose("all_reduce", "planned", "world", kind="collective")
        run_reduction(torch.ones(2), step, StepGroups(dist.group.WORLD), purpose=purpose)
        (entry,) = meshplan.report(json=True)["entries"]
        assert (entry["kind"], entry["ranks"]) == ("collective", 4)

    run_ranks(ranks, 4)


@pytest.mark.processes
def test_traced_reductions_are_counted_once_without_size() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))

        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x, mesh, (P,), run_check=False).full_tensor() * 1.0

        with meshplan.installed():
            for _ in range(3):
                step(torch.ones(4))
        (entry,) = meshplan.report(json=True)["entries"]
        assert entry["traced"]
        assert (entry["elements"], entry["smallest_elements"]) == (0, None)
        assert "what a graph does later is not counted" in str(meshplan.report())

    run_ranks(ranks, 2)
