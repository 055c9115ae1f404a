"""The error without torch: which call needs it, and how to install it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from meshplan.errors import TorchMissingError

INSTALL_TORCH = "pip install 'torch>=2.11', or choose the extra [torch]"


def import_with_torch(module: str, what: str) -> ModuleType:
    """Import a module of meshplan that may need torch. ``what`` is the user's word for what needs
    it, such as ``meshplan.install``. Raises TorchMissingError if torch is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        if error.name != "torch" and not isinstance(error, TorchMissingError):
            raise
        raise torch_missing(what) from error


def torch_missing(what: str) -> TorchMissingError:
    return TorchMissingError(
        f"{what} needs torch, which is not installed; {INSTALL_TORCH}. The verbs lint, topo, rule, "
        "plan and simulate run without it"
    )
