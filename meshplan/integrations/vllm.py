"""vLLM with its reductions under the contract: ``VLLM_PLUGINS=meshplan vllm serve ...``.

vLLM imports `Platform` through its entry points for platforms, if ``VLLM_PLUGINS`` names meshplan.
"""

from __future__ import annotations

from vllm.platforms import builtin_platform_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

from meshplan import _require_torch as _require_torch
from meshplan.errors import BackendError

_found = [name for name in (find() for find in builtin_platform_plugins.values()) if name]
if len(_found) != 1:
    raise BackendError(f"vLLM finds {len(_found)} platforms here: {_found}; it needs one")


class Platform(resolve_obj_by_qualname(_found[0])):  # type: ignore[misc] # has no type hints
    """vLLM's own platform of this machine, with other communicators."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The class that each of vLLM's groups communicates with."""
        return "meshplan.integrations._vllm_communicator.Communicator"
