"""Commands whose output is read, and scripts that are loaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]


def capture(
    command: Sequence[str | Path], *, timeout: float | None = 300.0, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``how``: as for ``subprocess.run``."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=check, **how
    )


def torchrun(
    ranks: int, *words: str | Path, timeout: float | None = 300.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a job on this host, in the folder of the repository; its options or its script first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return capture(
        [*command, "--nproc-per-node", str(ranks), *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        timeout=timeout,
    )


def load_script(path: Path) -> ModuleType:
    """The module of a script that is in no package."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
