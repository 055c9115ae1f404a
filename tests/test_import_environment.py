"""No import of a module reads or sets an environment variable, starts a thread or changes torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import capture

ROOT = Path(__file__).parent.parent

READS = """\
import importlib, os, sys, threading
import torch.distributed.tensor, spmd_types, networkx

class Watched(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
            frame = frame.f_back
        name = frame.f_globals.get("__name__", "") if frame else ""
        if name.split(".")[0] == "meshplan":
            read.append((name, key))
        return super().__getitem__(key)

from torch.distributed.tensor import _redistribute

read, before, seam = [], dict(os.environ), _redistribute._optimize_transform_infos
threads = threading.active_count()
os.environ.__class__ = Watched
for name in sys.argv[1:]:
    importlib.import_module(name)
print(read, dict(os.environ) == before, threading.active_count() == threads)
print(_redistribute._optimize_transform_infos is seam, torch.distributed.is_initialized())
print(torch.cuda.is_initialized(), "nccl_model" in torch.distributed.Backend.backend_list)
os.environ.get("HOME")
exec(compile("import os; os.environ.get('X')", "x", "exec"), {"__name__": "meshplan.x"})
print(read)
"""


@pytest.mark.full
def test_imports_read_and_set_nothing() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "meshplan").rglob("*.py"))
        if path.name not in ("__main__.py", "torchft.py", "vllm.py", "_vllm_communicator.py")
    ]
    if find_spec("torchft") is not None:
        modules.append("meshplan.integrations.torchft")
    command = [sys.executable, "-c", READS, *modules]
    done = capture(command, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shown = ["[] True True", "True False", "False False", "[('meshplan.x', 'X')]"]
    assert done.stdout.splitlines() == shown
