"""The entry point that torch calls while it is imported: it makes the backend known by its name.

Torch imports this module in every process of an environment where meshplan is installed. So it
imports nothing of torch's or of meshplan's, and the backend is loaded when a group asks for it.
Registered earlier, it would change other groups: torch 2.13 sets no default backend for
``"cpu:gloo,cuda:gloo"`` if any backend is registered.
"""

from __future__ import annotations

import os
import sys

_NAME = "meshplan"


class _BackendNames(list[str]):
    """Torch's list of backends; ``in`` loads the backend if it asks for ``meshplan``."""

    def __contains__(self, name: object) -> bool:
        # Also as a part of "cpu:meshplan,cuda:meshplan".
        if isinstance(name, str) and _NAME in name.lower() and not super().__contains__(_NAME):
            import meshplan.backend  # noqa: F401 - registers the backend
        return super().__contains__(name)


def autoload() -> None:
    """Let ``init_process_group("meshplan")`` find the backend; it never raises.

    ``MESHPLAN_BACKEND_AUTOLOAD=0`` turns it off, and so does torch's own
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
    """
    if os.environ.get("MESHPLAN_BACKEND_AUTOLOAD") == "0":
        return
    # Absent in a torch without distributed.
    distributed = sys.modules.get("torch.distributed")
    backend = getattr(distributed, "Backend", None)
    names = getattr(backend, "backend_list", None)
    if backend is not None and type(names) is list:
        backend.backend_list = _BackendNames(names)


def select_vllm_platform() -> str | None:
    """The platform for vLLM, which calls this in every process, if ``VLLM_PLUGINS`` names meshplan.

    vLLM itself loads all plugins that are installed if the variable is unset.
    """
    if _NAME in os.environ.get("VLLM_PLUGINS", "").split(","):
        return "meshplan.integrations.vllm.Platform"
    return None
