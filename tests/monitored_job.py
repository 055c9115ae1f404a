"""Run the blocks of ``docs/howto/coverage.md`` for ``test_monitor``.

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

from meshplan.errors import ReplicaDivergenceError
from tests.pages import ROOT, blocks


def read_exports(names: dict[str, Any]) -> dict[str, Any]:
    text = Path(f"meshplan-{dist.get_rank()}.prom").read_text()
    return {"text": text, "scalars": names["monitor"].to_scalars()}


def main() -> None:
    page = ROOT / "docs" / "howto" / "coverage.md"
    names: dict[str, Any] = {}
    script = [block.text for block in blocks(page.read_text(encoding="utf-8"), "python")]
    (monitored,) = (number for number, text in enumerate(script) if "StepMonitor(" in text)
    for text in script[: monitored + 1]:
        exec(text, names)
    found = {"agreeing": read_exports(names)}
    if dist.get_rank() == 2:
        with torch.no_grad():
            next(names["model"].parameters())[0, 0] += 1
    try:
        exec(script[monitored], names)
    except ReplicaDivergenceError:
        found["differing"] = read_exports(names)
    Path(f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
