"""meshplan in libraries that bypass DTensor redistribution: FSDP2, DDP and torchft.

Each module is imported at first use, such as ``meshplan.integrations.ddp.register(model)``, so you
need only the libraries that you use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan import _require_torch as _require_torch
from meshplan._lazy_imports import make_lazy

if TYPE_CHECKING:
    from meshplan.integrations import ddp as ddp
    from meshplan.integrations import fsdp as fsdp
    from meshplan.integrations import torchft as torchft

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
