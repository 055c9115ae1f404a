"""Run the blocks of ``docs/howto/coverage.md`` with the SDK of OpenTelemetry, for ``test_monitor``.

    torchrun --nproc-per-node 4 -m tests.monitored_job

Each rank writes what the monitor has exported to ``RANK.json``: with replicas that agree, and with
a rank that has another parameter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshplan.errors import ReplicaDivergenceError
from tests.pages import ROOT, blocks


def read_exports(exporter: InMemorySpanExporter, names: dict[str, Any]) -> dict[str, Any]:
    spans = [
        {
            "name": one.name,
            "start": one.start_time,
            "end": one.end_time,
            "attributes": dict(one.attributes),
        }
        for one in exporter.get_finished_spans()
    ]
    exporter.clear()
    text = Path(f"meshplan-{dist.get_rank()}.prom").read_text()
    return {"spans": spans, "text": text, "scalars": names["monitor"].to_scalars()}


def main() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    page = ROOT / "docs" / "howto" / "coverage.md"
    names: dict[str, Any] = {}
    script = [block.text for block in blocks(page.read_text(encoding="utf-8"), "python")]
    (monitored,) = (number for number, text in enumerate(script) if "StepMonitor(" in text)
    for text in script[: monitored + 1]:
        exec(text, names)
    found = {"agreeing": read_exports(exporter, names)}
    if dist.get_rank() == 2:
        with torch.no_grad():
            next(names["model"].parameters())[0, 0] += 1
    try:
        exec(script[monitored], names)
    except ReplicaDivergenceError:
        found["differing"] = read_exports(exporter, names)
    Path(f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
