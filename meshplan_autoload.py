"""The entry point that torch calls while it is imported: it makes the backend known by its name.

Torch imports this module in every process of an environment where meshplan is installed, and fails
with it. So it is outside the package, whose import may fail, and imports nothing of torch's or of
meshplan's. The backend is loaded when a group asks for it.
Registered earlier, it would change other groups: torch 2.13 sets no default backend for
``"cpu:gloo,cuda:gloo"`` if any backend is registered.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import wraps
from typing import Any

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

    If ``MESHPLAN_RUN`` is set, a process is observed once it creates a process group.
    ``MESHPLAN_BACKEND_AUTOLOAD=0`` turns it off, and so does torch's own
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
    """
    if os.environ.get("MESHPLAN_RUN"):
        with suppress(Exception):
            _observe_from_first_group(sys.modules["torch.distributed"])
    if os.environ.get("MESHPLAN_BACKEND_AUTOLOAD") == "0":
        return
    # In a torch without distributed, or of a later form, only the name stays unknown.
    with suppress(Exception):
        backend = sys.modules["torch.distributed"].Backend
        if type(backend.backend_list) is list:
            backend.backend_list = _BackendNames(backend.backend_list)


def _observe_from_first_group(dist: Any) -> None:
    """Import what observes when this process becomes a rank: launchers and workers never do."""
    plain, folder = dist.init_process_group, os.getcwd()
    if plain.__globals__ is globals():
        return  # two installations of meshplan on the path have an entry point each

    @wraps(plain)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # Others may have imported this function, and call it later too.
        if dist.init_process_group is init_process_group:
            dist.init_process_group = dist.distributed_c10d.init_process_group = plain
            if text := os.environ.get("MESHPLAN_RUN"):
                try:
                    from meshplan.run._job import observe_by_variable

                    observe_by_variable(text, folder)
                except Exception as error:
                    # Invalid settings end a job at once, and so does a backend that is not there:
                    # it never falls back to another. A requirement is never left out either. No
                    # other failure is the job's.
                    needed = "backend=" in text or "require=" in text
                    if getattr(error, "code", None) == "MP402" or needed:
                        raise
                    text = f"[meshplan] not observed: {type(error).__name__}: {error}\n"
                    with suppress(Exception):
                        sys.stderr.write(text)
        return dist.init_process_group(*args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def select_vllm_platform() -> str | None:
    """The platform for vLLM, which calls this in every process, if ``VLLM_PLUGINS`` names meshplan.

    vLLM itself loads all plugins that are installed if the variable is unset.
    """
    if _NAME in os.environ.get("VLLM_PLUGINS", "").split(","):
        return "meshplan.integrations.vllm.Platform"
    return None
