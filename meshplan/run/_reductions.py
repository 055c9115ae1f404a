"""The reductions of this process by call site and group."""

from __future__ import annotations

import threading
from itertools import chain, combinations
from typing import Any

import torch.distributed as dist

from meshplan._dtypes import itemsize
from meshplan.execute import report
from meshplan.replicas._coverage import MAX_ROWS, CoverageRow, CoverageStep
from meshplan.run._holders import ParameterTable, Ranks, find_layouts
from meshplan.run._ledger import format_ranks
from meshplan.run._signals import suppress


class ReductionTable(CoverageStep):
    """The one step of ``coverage``, which lasts as long as the job."""

    def __init__(self, parameters: ParameterTable) -> None:
        super().__init__(1)
        self._parameters = parameters
        self._guard = threading.RLock()
        self._found: dict[tuple[CoverageRow, Ranks], list[int]] = {}

    def add(self, row: CoverageRow, nbytes: int, seconds: float, source: Any = None) -> None:
        """Count one reduction, and remember whose memory it was."""
        ranks: Ranks = ()
        if source is not None:
            # Torch does not know the ranks of each group, and sparse tensors have no memory.
            with suppress(Exception):
                ranks = tuple(sorted(dist.get_process_group_ranks(source[0])))
                if row.reduction.startswith("all_reduce"):
                    self._parameters.note_reduction(source[1], ranks)
        with self._guard:
            if (row, ranks) in self._found or len(self._found) < MAX_ROWS:
                counts = self._found.setdefault((row, ranks), [0, 0])
                counts[0] += 1
                counts[1] += nbytes // itemsize(row.dtype)

    def describe(self, rank: int) -> list[dict[str, Any]]:
        """``reductions`` of the report: those whose result depends on an order."""
        with self._guard:
            found = list(self._found.items())
        labels = name_groups(rank)
        events = {(one["asked"], one["dtype"]): one for one in report(json=True)["entries"]}
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for (row, ranks), (calls, elements) in found:
            if row.kind == "any order":
                continue
            event = events.get((row.reduction, row.dtype), {"contract": None, "group": None})
            call, op, backend = row.reduction, None, None
            if row.kind != "contract":
                call, op, _, backend = row.reduction.split(" ", 3)
            facts = {
                "call": call,
                "op": op,
                "dtype": row.dtype,
                "group": (labels.get(ranks) or format_ranks(ranks)) if ranks else event["group"],
                "group_size": row.ranks,
                "backend": backend,
                "site": row.site,
                "kind": row.kind,
                "contract": event["contract"] if row.kind == "contract" else None,
            }
            # Groups of torch that have the same ranks are one row.
            shown = rows.setdefault(tuple(facts.values()), facts | {"calls": 0, "elements": 0})
            shown["calls"] += calls
            shown["elements"] += elements
        return list(rows.values())


def name_groups(rank: int) -> dict[Ranks, str]:
    """Labels of axes and of sets of axes, by the ranks of this rank's groups over them."""
    found: dict[Ranks, str] = {}
    for layout in find_layouts():
        wide = [axis for axis, size in enumerate(layout.sizes) if size > 1]
        sets = chain.from_iterable(combinations(wide, n + 1) for n in range(len(wide)))
        # A mesh without names has labels where they tell its axes apart.
        for axes in sets if layout.names or len(wide) > 1 else ():
            label = " x ".join(layout.axes[axis] for axis in axes)
            found.setdefault(tuple(sorted(layout.group_of(rank, axes) or ())), label)
    return found
