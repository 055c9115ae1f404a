"""Put meshplan into DTensor and take it out again, exactly.

One attribute of torch is replaced: ``torch.distributed.tensor._redistribute`` looks
``_optimize_transform_infos`` up as a module global on every redistribution.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.placement_types import Placement

from meshplan.collectives import count_untouched
from meshplan.contract import Contract
from meshplan.dtensor._config import Config
from meshplan.dtensor._seam import Optimize, planned_steps
from meshplan.errors import InstallError, UnsupportedTorchError
from meshplan.planner import ContractPath, Policy

__all__ = ["current_config", "install", "installed", "uninstall"]

TESTED_TORCH = ((2, 11), (2, 15))

_ATTRIBUTE = "_optimize_transform_infos"
_PARAMETERS = ("transform_infos", "device_mesh", "src_placements", "dst_placements")

_lock = threading.RLock()
# What is installed and torch's own function: one value, so that a redistribution on another thread
# sees both or none.
_active: tuple[Config, Optimize] | None = None


def install(
    *,
    policy: Policy = "deterministic",
    contract: Contract | None = None,
    path: ContractPath = "exchange",
    strict: bool = False,
    timeout: float | None = None,
    allow_untested_torch: bool = False,
) -> None:
    """Plan every redistribution of this process that starts from ``Partial``.

    Needs no process group yet. Calling it again replaces the arguments. Every rank must give the
    same ones; the first reduction over each group checks that.

    Args:
        policy: ``deterministic``: every such reduction runs under the contract, as one collective.
            ``consistent``: only those on which other groups must agree and may not; the rest as
            with ``fast``, so that replicas agree but runs may differ.
            ``fast``: two or more ``P -> R`` axes become one all-reduce of the backend.
        contract: ``Contract()`` if not given.
        path: how contract reductions move their data, ``exchange`` or ``reference``; same bits.
        strict: raise ``FallbackRefusedError`` rather than reduce outside the contract.
        timeout: seconds to wait for the other members before the first reduction of a group; the
            default group's own timeout if not given.
        allow_untested_torch: go on with a torch version outside the tested range.

    Raises:
        PolicyError, ContractError: an argument that does not exist.
        UnsupportedTorchError: an untested torch version, or one whose seam has moved.
    """
    global _active
    config = Config(
        policy=policy,
        contract=Contract() if contract is None else contract,
        path=path,
        strict=strict,
        timeout=timeout,
    )
    _check_torch(torch.__version__, allow_untested_torch)
    with _lock:
        if _active is not None:
            _active = (config, _active[1])
            return
        original = getattr(_redistribute, _ATTRIBUTE, None)
        _check_seam(original)
        assert original is not None
        _active = (config, original)
        setattr(_redistribute, _ATTRIBUTE, _planned_transform_infos)


def uninstall() -> None:
    """Give torch its own function back, the very object. Nothing happens if not installed.

    Groups stay until ``shutdown``.

    Raises:
        InstallError: somebody else has replaced the function after meshplan did.
    """
    global _active
    with _lock:
        if _active is None:
            return
        if getattr(_redistribute, _ATTRIBUTE) is not _planned_transform_infos:
            raise InstallError(
                f"{_redistribute.__name__}.{_ATTRIBUTE} was replaced after meshplan.install by "
                f"{getattr(_redistribute, _ATTRIBUTE)!r}; undo that first, then uninstall"
            )
        setattr(_redistribute, _ATTRIBUTE, _active[1])
        _active = None


@contextmanager
def installed(**arguments: Any) -> Iterator[None]:
    """``install(**arguments)`` for a ``with`` block; then what was installed before it, if any.

    For the whole process, not for one thread.
    """
    global _active
    with _lock:
        before = _active
        install(**arguments)
    try:
        yield
    finally:
        with _lock:
            if before is None:
                uninstall()
            else:
                _active = before


def current_config() -> Config | None:
    """What is installed, or ``None``."""
    active = _active
    return None if active is None else active[0]


def _planned_transform_infos(
    transform_infos: list[Any],
    device_mesh: DeviceMesh,
    src_placements: tuple[Placement, ...],
    dst_placements: tuple[Placement, ...],
) -> list[Any]:
    active = _active
    if active is None:
        # Another thread has uninstalled since torch looked this function up.
        function: Optimize = getattr(_redistribute, _ATTRIBUTE)
        return function(transform_infos, device_mesh, src_placements, dst_placements)
    config, original = active
    if len(transform_infos) < 2 and (
        config.policy == "fast"
        or not transform_infos
        or not transform_infos[0].src_dst_placements[0].is_partial()
    ):
        # Nothing to plan and nothing to merge, in the time that there is for saying so.
        count_untouched()
        return transform_infos
    return planned_steps(
        config, original, transform_infos, device_mesh, src_placements, dst_placements
    )


def _check_torch(version: str, allow_untested: bool) -> None:
    low, high = TESTED_TORCH
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not low <= found <= high and not allow_untested:
        raise UnsupportedTorchError(
            f"torch {version} is not tested with meshplan, which knows "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]}; install one of these, or write "
            "meshplan.install(allow_untested_torch=True) and compare replicas yourself"
        )


def _check_seam(function: Any) -> None:
    found = tuple(inspect.signature(function).parameters) if callable(function) else ()
    if found != _PARAMETERS:
        raise UnsupportedTorchError(
            f"{_redistribute.__name__}.{_ATTRIBUTE} takes {list(found)} in torch "
            f"{torch.__version__}, meshplan needs {list(_PARAMETERS)}; use a tested torch version"
        )
