"""Who calls a reduction: the first frame outside torch, meshplan and Python's own library."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from meshplan._observing import OBSERVING

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MESHPLAN = str(Path(__file__).parents[1]) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Decorators of torch's functions.
_WRAPPERS = ("typing_extensions.py",)

# By the parts of torch that a reduction comes through.
_PARTS = {
    "autograd/graph.py": "backward",
    "distributed/fsdp/": "FSDP2",
    "distributed/tensor/": "DTensor",
    "distributed/optim/": "optimizer",
    "distributed/algorithms/ddp_comm_hooks/": "DDP hook",
    "nn/utils/clip_grad.py": "clip_grad_norm_",
    "_inductor/": "compiled",
    "_functorch/": "compiled",
}


class CallSite(NamedTuple):
    """``text``: file, line, function and the parts of torch in between, outermost first.

    ``left_to_torch``: whether meshplan's policy has left the reduction to torch.
    """

    text: str
    left_to_torch: bool


def find_call_site() -> CallSite:
    """The caller of this thread's reduction. Threads of C++ have no frame outside of torch."""
    frame: FrameType | None = sys._getframe(1)
    parts: list[str] = []
    inner: str | None = None
    left = False
    while frame is not None:
        part = _part_of(frame.f_code.co_filename)
        if part is None:
            break
        # DDP's reducer calls an operator from C++, which the engine of autograd has called.
        if inner is None and part != _OWN:
            inner = part
            if part == "backward":
                parts.append("C++, such as DDP's reducer")
        if part == "DTensor" and not left:
            left = OBSERVING.is_left_to_torch is not None and OBSERVING.is_left_to_torch(frame)
        if part and part != _OWN and part not in parts:
            parts.append(part)
        frame = frame.f_back
    through = f" ({', '.join(reversed(parts))})" if parts else ""
    if frame is None:
        return CallSite(f"thread {threading.current_thread().name}{through}", left)
    code = frame.f_code
    path = "/".join(Path(code.co_filename).parts[-2:])
    # Of a function that torch.compile has divided.
    name = re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", code.co_name)
    return CallSite(f"{path}:{frame.f_lineno} {name}{through}", left)


_OWN = "meshplan"


@functools.lru_cache(maxsize=4096)
def _part_of(filename: str) -> str | None:
    """The part of torch or another library that is no caller; ``None`` for callers."""
    if filename.startswith(_MESHPLAN):
        return _OWN
    if filename.startswith(_TORCH):
        rest = filename.removeprefix(_TORCH)
        return next((part for place, part in _PARTS.items() if rest.startswith(place)), "")
    # Code that torch generates has no file, or one in the cache of its compiler.
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torchinductor_"
    if "<eval_with_key>" in filename or generated in filename:
        return "compiled"
    if os.path.basename(filename) in _WRAPPERS or filename.startswith("<frozen"):
        return ""
    standard = filename.startswith(_STANDARD) and not any(one in filename for one in _INSTALLED)
    return "" if standard else None
