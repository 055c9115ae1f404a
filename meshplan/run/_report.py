"""The report: a dict of version 1, and its file."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from meshplan.run._hazards import Judged, describe_hazards
from meshplan.run._holders import find_layouts, name_groups
from meshplan.run._ledger import Ledger, format_ranks, group_by_value

_VARIABLES = [
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_TUNER_PLUGIN",
    "OMP_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
]
_MOST_CAUSES = 8
_READER_SECONDS = 10
_MODES = (False, "warn only", True)
_IEEE = ("ieee", "none")
# Attributes of ``torch.backends`` by name in the report, and the values that keep bits in torch's
# deterministic mode. TF32 depends on the kind of GPU, cuDNN's benchmark on times.
BACKENDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "matmul_precision": ("cuda.matmul.fp32_precision", _IEEE),
    "convolution_precision": ("cudnn.conv.fp32_precision", _IEEE),
    "rnn_precision": ("cudnn.rnn.fp32_precision", _IEEE),
    "cudnn_benchmark": ("cudnn.benchmark", (False,)),
    "cudnn_deterministic": ("cudnn.deterministic", (True, False)),
}


def read_settings() -> dict[str, Any]:
    """The present settings that decide bits besides the order of reductions."""
    found = {"torch": torch.__version__} | {name: os.environ.get(name) for name in _VARIABLES}
    # Torch's older interface to TF32 refuses to answer if the newer one disagrees.
    return found | {
        "deterministic_algorithms": _MODES[torch.get_deterministic_debug_mode()],
        **{name: attrgetter(path)(torch.backends) for name, (path, _) in BACKENDS.items()},
        "threads": torch.get_num_threads(),
    }


def build(
    ledger: Ledger,
    own: dict[str, Any],
    state: str,
    error: BaseException | None,
) -> tuple[dict[str, Any], Judged]:
    """The report on what has been posted until now, and its findings; ``own`` is what rank 0 has
    observed itself.
    """
    from meshplan import __version__

    places = {rank: hello["location"] for rank, hello in ledger.hellos.items()}
    hosts = group_by_value({rank: one["name"] for rank, one in places.items()})
    notes = [*own["notes"], *ledger.find_unposted()]
    errors = [f"{type(one).__name__}: {one}" for one in list_causes(error)]
    # Siblings have one label: their rows are the same but for the counts.
    rows = {_key(row): row for row in own["rows"]}
    for rank, final in sorted(ledger.finals.items()):
        notes += [f"rank {rank}: {text}" for text in final["notes"] if text not in notes]
        for row in final["rows"]:
            rows.setdefault(_key(row), row)
    missing = {"posted nothing": set(range(ledger.world_size)) - ledger.hellos.keys()}
    missing["not heard to the end"] = ledger.hellos.keys() - ledger.finals.keys()
    groups = {label: ranks for ranks, label in name_groups(0).items()}
    layouts = find_layouts()
    ran, uses = list(rows.values()), own["uses"]
    hazards, unjudged, judged = describe_hazards(
        ran,
        groups,
        uses,
        layouts,
        places,
        ledger.world_size,
    )
    notes += unjudged
    if state != "running":
        notes += [f"{format_ranks(ranks)}: {what}" for what, ranks in missing.items() if ranks]
    meshes = [
        {
            "axes": dict(zip(one.axes, one.sizes, strict=True)),
            "ranks": list(one.ranks),
        }
        for one in layouts
    ]
    report = {
        "version": 1,
        "state": state,
        "error": ", raised from ".join(errors) or None,
        "refused": ledger.refused,
        "world_size": ledger.world_size,
        "torch": torch.__version__,
        "meshplan": __version__,
        "command": list(map(str, sys.argv)),
        "backend": own["backend"],
        "hosts": hosts,
        "not_observed": notes,
        "meshes": meshes,
        "reductions": ran,
        "probes": ledger.describe_probes(),
        "steps": ledger.describe_steps(),
        "replicas": {
            "compared": sum(one.tensors * one.compared for one in ledger.sets.values()),
            "first_difference": ledger.first,
        },
        "hazards": hazards,
        "settings": read_settings(),
        "settings_that_differ": _find_differing(ledger.hellos),
        "seconds_per_step": own["seconds_per_step"],
    }
    return report, judged


def write_file(path: str, text: str, *, is_last: bool = True) -> None:
    """Replace a file at once: no reader sees a part of it. A link remains, and so does a device or
    pipe, which gets the last text only.
    """
    if os.path.dirname(path) == "/dev" or (os.path.exists(path) and not os.path.isfile(path)):
        if is_last:
            # The job's own descriptor may wait.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
            with open(descriptor, "wb", buffering=0) as file:
                _write_slowly(file, memoryview(text.encode()))
        return
    path = os.path.realpath(path)
    partial = Path(f"{path}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_slowly(file: Any, data: memoryview) -> None:
    """Write to a pipe or terminal as its reader reads."""
    ready, ends = select.poll(), time.monotonic() + _READER_SECONDS
    ready.register(file, select.POLLOUT)
    while data:
        left = ends - time.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            raise TimeoutError(f"{len(data)} bytes are left: the reader is slow")
        # None, if another process has filled it meanwhile.
        data = data[file.write(data) or 0 :]


def list_causes(error: BaseException | None) -> list[BaseException]:
    """An error, and those that it was raised from or in the handling of: trainers wrap errors."""
    found: list[BaseException] = []
    while error is not None and len(found) < _MOST_CAUSES:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _key(row: dict[str, Any]) -> str:
    return repr([value for name, value in row.items() if name not in ("calls", "elements")])


def _find_differing(
    hellos: Mapping[int, Any],
) -> dict[str, dict[str, list[int]]]:
    """Setting -> value -> ranks."""
    settings = {rank: hello["settings"] for rank, hello in hellos.items()}
    found = {
        name: group_by_value({rank: one[name] for rank, one in settings.items()})
        for name in (next(iter(settings.values())) if settings else ())
    }
    return {name: values for name, values in found.items() if len(values) > 1}
