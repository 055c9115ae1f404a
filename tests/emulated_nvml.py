"""NVIDIA's management library for tests: the real Python binding over an emulated library."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from meshplan.topology._locate import Fabric, Gpu, RankLocation
from tests.programs import capture

ROOT = Path(__file__).parents[1]
H100 = "NVIDIA_H100"
# State, remote type and remote bus of a link to a switch, as outside of virtual machines.
TO_SWITCH = "1 2 00000000:05:00.0"


@lru_cache(maxsize=1)
def emulated_nvml() -> str:
    """A folder with ``libnvidia-ml.so.1``, compiled; the caller's process keeps it while it lives."""
    folder = Path(tempfile.mkdtemp(prefix="meshplan-nvml-"))
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [str(Path(__file__).parent / "native" / "emulated_nvml.cpp")]
    command += ["-o", str(folder / "libnvidia-ml.so.1")]
    done = capture(command)
    assert done.returncode == 0, done.stderr
    return str(folder)


def bus_of(gpu: int) -> str:
    return f"00000000:{16 * gpu + 11:02X}:00.0"


def gpus(count: int, model: str = H100, mig: int = 0) -> list[str]:
    return [f"gpu GPU-{i:08x}-aaaa-bbbb {bus_of(i)} {model} {mig}" for i in range(count)]


def switched(count: int, links: int = 18) -> list[str]:
    """So many GPUs, each with so many links to a switch."""
    ends = [f"link {i} {k} 0 {TO_SWITCH}" for i in range(count) for k in range(links)]
    return gpus(count) + ends


def ask(
    lines: Iterable[str], environ: Mapping[str, str] | None = None, index: int = 0, uuid: str = ""
) -> Gpu | str:
    """``find_nvidia_gpu`` in a separate process, whose library shows the GPUs of ``lines``."""
    script = (
        "import sys, json; from dataclasses import asdict; "
        "from meshplan.topology._locate import find_nvidia_gpu; "
        "found = find_nvidia_gpu(*json.loads(sys.argv[1])); "
        "print(found if isinstance(found, str) else json.dumps(asdict(found)))"
    )
    text = json.dumps([dict(environ or {}), index, uuid])
    out = in_process(lines, [sys.executable, "-c", script, text])
    if not out.startswith("{"):
        return out.rstrip("\n")
    place = RankLocation.from_json({"host": "h", "name": "n", "gpu": json.loads(out)})
    assert isinstance(place.gpu, Gpu)
    assert place.gpu.fabric is None or isinstance(place.gpu.fabric, Fabric)
    return place.gpu


def in_process(
    lines: Iterable[str], command: list[str], environ: Mapping[str, str] | None = None
) -> str:
    """What a command writes, where the library shows what ``lines`` describe."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        done = capture(
            command,
            env={
                **os.environ,
                **(environ or {}),
                "LD_LIBRARY_PATH": emulated_nvml(),
                "EMULATED_NVML": file.name,
            },
            cwd=ROOT,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout
