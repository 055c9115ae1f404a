"""The topology of the job where none was given: gathered once for each default group.

It is gathered only where all ranks meet anyway (docs/adr/0007): in ``prepare`` of a mesh that holds
all ranks, or in the first redistribution that reduces over all of them. Until then it is unknown.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes

from meshplan.dtensor._config import Config
from meshplan.flatten import default_timeout, discover, this_rank
from meshplan.layout import Layout
from meshplan.topology._cluster import Cluster

__all__ = ["discovered", "gathered", "reduces_over_all", "resolved"]

_LOG = logging.getLogger("meshplan")


@dataclass(slots=True)
class _Found:
    """What was gathered, and configurations with it, by the key of those without."""

    cluster: Cluster
    configs: dict[str, Config] = field(default_factory=dict)


# Owned by this module; an entry goes with its default group.
_FOUND: weakref.WeakKeyDictionary[ProcessGroup, _Found] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def discovered() -> Cluster | None:
    """Where the ranks of the default group sit, if that was gathered."""
    found = _found()
    return None if found is None else found.cluster


def resolved(config: Config) -> Config:
    """``config`` with the topology that was gathered, if it has none of its own."""
    if config.topology is not None:
        return config
    found = _found()
    if found is None:
        return config
    known = found.configs.get(config.key)
    if known is None:
        known = replace(config, topology=found.cluster.topology)
        found.configs[config.key] = known
    return known


def gathered(
    config: Config, what: str = "the first reduction", timeout: float | None = None
) -> Config:
    """``resolved``, after all ranks have met to say where they sit, if they have not yet.

    Every rank of the default group calls it.

    Args:
        config: as installed.
        what: what they meet for, in the words of an error.
        timeout: seconds to wait for the others; as installed if not given.

    Raises:
        GroupAgreementError: ranks that did not come.
        TopologyInputError: what some rank published cannot be understood.
    """
    if config.topology is None and _found() is None and _are_processes():
        world = c10d._get_default_group()
        with _LOCK:
            if _FOUND.get(world) is None:
                wait = config.timeout if timeout is None else timeout
                wait = default_timeout(world._device_types[0].type) if wait is None else wait
                store = c10d._get_default_store()
                # Torch may be tracing, and this must be computed for real.
                with _disable_current_modes():
                    cluster = discover(store, this_rank(), world.size(), wait, what=what)
                _tell(cluster)
                _FOUND[world] = _Found(cluster)
    return resolved(config)


def reduces_over_all(layout: Layout, src: Sequence[Placement], dst: Sequence[Placement]) -> bool:
    """Whether a redistribution makes every rank of the job wait for every other."""
    sizes = [
        size
        for size, before, after in zip(layout.sizes, src, dst, strict=True)
        if before.is_partial() and not after.is_partial()
    ]
    return math.prod(sizes) == dist.get_world_size()


def _found() -> _Found | None:
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _FOUND.get(world)


def _are_processes() -> bool:
    """Whether the ranks are there: not simulated by one process."""
    return local_tensor_mode() is None and dist.get_backend() != "fake"


def _tell(cluster: Cluster) -> None:
    if this_rank() == 0:
        _LOG.info("%s; %s", cluster.origin, cluster.topology)
        for one in cluster.notes:
            _LOG.log(logging.WARNING if one.note.code else logging.INFO, "%s", one.note)
