"""The meshes of a script that is executed: the parent of ``meshplan.lint._record``.

The child has limits of time and memory, no GPU and no network by Python's sockets. This process
imports no torch.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshplan._needs_torch import torch_missing
from meshplan.errors import LayoutError
from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._job import Job, JobFile, Skipped
from meshplan.lint._roles import Role

# Mainly a limit of CPU time, because a busy machine may take long.
SECONDS, _CPU_SECONDS = 600, 120
_BYTES = 8 << 30
_MAX_EVENTS = 10_000
_ROLES: Mapping[str, Role] = {"ddp": "replicate", "model": "model"}
_KINDS = ("fsdp2", "fsdp1", "ddp", "dtensor", "model")


def run_script(
    script: str,
    arguments: Sequence[str],
    world_size: int,
    node_size: int,
    seconds: int = SECONDS,
) -> JobFile:
    """Execute a script as rank 0 up to its first optimizer step, and read its meshes. Raises
    TorchMissingError, LayoutError.
    """
    if find_spec("torch") is None:
        raise torch_missing("meshplan lint --run")
    if not os.path.isfile(script):
        raise LayoutError(f"{script}: no such file; --run needs a script of Python")
    environ = {key: value for key, value in os.environ.items() if key != "MESHPLAN_RUN"} | {
        **dict.fromkeys(
            ("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID"),
            "0",
        ),
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(node_size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        **{
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        },
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "events"
        command = [sys.executable, "-m", "meshplan.lint._record", str(output)]
        command += [str(world_size), str(node_size), script, *arguments]
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with subprocess.Popen(
            command, env=environ, start_new_session=True, preexec_fn=_limit, **quiet
        ) as child:
            try:
                why = f"its process ended with status {child.wait(seconds)}"
            except subprocess.TimeoutExpired:
                why = f"it did not end within {seconds} s"
            finally:
                with suppress(ProcessLookupError):  # with the processes that it has started
                    os.killpg(child.pid, signal.SIGKILL)
        text = output.read_text(encoding="utf-8") if output.exists() else ""
    events = [json.loads(line) for line in text.splitlines()[:_MAX_EVENTS] if line.endswith("}")]
    # This end counts only if the script has written none.
    events.append({"end": why, "line": None, "missing": ""})
    return JobFile(tuple(_read_jobs(script, events)), tuple(_list_skipped(script, events)))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _list_skipped(script: str, events: Sequence[Mapping[str, Any]]) -> Iterator[Skipped]:
    """Why the record may lack meshes."""
    end = next(one for one in events if "end" in one)
    why = f"the script stopped before its first optimizer step: {end['end'][:300]}"
    if end["missing"]:
        why = f"the package {end['missing']} is not installed here; install it"
    elif not end["end"]:
        why = "the script made no DeviceMesh before its first optimizer step"
    if end["end"] or not any("mesh" in one for one in events):
        yield Skipped(Source(script, end["line"]), why)


def _read_jobs(script: str, events: Sequence[Mapping[str, Any]]) -> Iterator[Job]:
    """One job for each mesh. The uses of its parts are the roles of its axes."""
    uses = [one for one in events if "use" in one]
    seen = set()
    for one in events:
        if "mesh" not in one:
            continue
        names = one["names"] and tuple(one["names"])
        layout = Layout(tuple(one["mesh"]), names, tuple(one["ranks"]))
        if layout in seen or layout.world_size == 1:
            continue
        seen.add(layout)
        roles: dict[int, Role] = {}
        flattened: dict[tuple[str, ...], None] = {}
        kinds = set()
        for use in uses:
            found = [find_axes(layout, ranks) for ranks in use["along"]]
            if None in found:
                continue  # a part of another mesh
            kinds.add(use["use"])
            is_sharded = use["use"] in ("fsdp2", "fsdp1")
            for place, axes in enumerate(found, 1):
                role = "replicate" if is_sharded else _ROLES.get(use["use"])
                role = "shard" if is_sharded and place == len(found) else role
                if role is not None:
                    roles = {**dict.fromkeys(axes or (), role), **roles}
                if axes and len(axes) > 1:
                    flattened[tuple(layout.axes[i] for i in axes)] = None
        kind = next((kind for kind in _KINDS if kind in kinds), "")
        yield Job(
            layout,
            Source(script, one["line"]),
            roles=tuple(roles.get(i, "unknown") for i in range(len(layout.sizes))),
            framework="fsdp2" if kind.startswith("fsdp") else "ddp" if kind == "ddp" else "dtensor",
            flattened=tuple(flattened),
            sequence_parallel="sequence" in kinds,
            program="fsdp1" if kind == "fsdp1" else "torch" if kind in _KINDS[:4] else "unknown",
        )


def find_axes(layout: Layout, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The axes over which these ranks are one group; ``None`` if no axes have that group."""
    if len(ranks) == 1:
        return ()
    wide = [i for i, size in enumerate(layout.sizes) if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            found = layout.group_of(ranks[0], axes)
            if found is not None and sorted(found) == sorted(ranks):
                return axes
    return None
