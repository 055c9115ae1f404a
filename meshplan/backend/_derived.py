"""Groups that are split off a group of the backend, or merged.

Torch 2.13 does both in C++ over gloo and NCCL: only members create anything, ranks keep the order
of the caller's list, and a merged group numbers its ranks in the order in which they come.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from meshplan._torch import (
    DistributedBackendOptions,
    PrefixStore,
    Store,
    default_pg_timeout,
    default_store,
)
from meshplan.backend._passing import PassingProcessGroup
from meshplan.errors import BackendError
from meshplan.flatten._create import this_rank


class DerivingProcessGroup(PassingProcessGroup):
    """A group that others can be derived from; its subclass creates them. ``backend`` is the inner
    one.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        timeout: timedelta,
        backend: str,
        across_jobs: bool,
    ) -> None:
        super().__init__(inner)
        self._across_jobs = across_jobs
        self._timeout = timeout
        self._backend = backend
        self._names: Counter[str] = Counter()
        self._kept: list[DerivingProcessGroup] = []

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _derive(
        self,
        made: Any,
        options: Any,
        timeout: timedelta | None,
        inner: str | None,
        across_jobs: bool,
    ) -> DerivingProcessGroup:
        """Create a derived group. ``made`` is what torch would know of it; ``timeout`` and
        ``inner`` replace those of this group.
        """
        raise NotImplementedError

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> DerivingProcessGroup | None:
        """A group of some ranks of this one, in the order of ``ranks``, equal on all its members;
        ``None`` on the other ranks. ``opts``, the timeout and the devices are those of this group
        where they are ``None``. Raises BackendError for invalid ranks, or devices that this group
        does not have.
        """
        ranks, all_ranks = list(ranks), range(self.size())
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(all_ranks):
            raise BackendError(
                f"split_group got ranks {ranks} of a group of {self.size()} ranks; pass one or "
                f"more different ranks from 0 to {self.size() - 1}"
            )
        inner = _keep_devices(self._backend, device_types)
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{ranks}"
        unique = self._unique(name)
        made = describe_group(
            unique,
            PrefixStore(f"split/{unique}", self.get_group_store()),
            ranks.index(self.rank()),
            [dist.get_global_rank(self.inner, one) for one in ranks],
            timeout or self._timeout,
        )
        desc = group_desc or f"{self.group_desc}:split"
        return _named(
            self._derive(made, opts, timeout, inner, self._across_jobs),
            name,
            desc,
        )

    def merge_remote_group(
        self,
        store: Any,
        size: int,
        timeout: timedelta = default_pg_timeout,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> DerivingProcessGroup:
        """A group of the ``size`` ranks that join through ``store``, which is for this merge alone,
        in the order in which they join. Ranks of several jobs also agree through it later.
        """
        name = group_name or f"{self.group_name}:merge"
        # Torch's own key: members are numbered as they join.
        rank = store.add("mergeGroupRank", 1) - 1
        identity, members = gather_members(store, rank, int(size))
        across_jobs = not members
        # Several jobs have names and counters of their own.
        unique = identity if across_jobs else self._unique(name)
        made = describe_group(unique, store, rank, members or list(range(int(size))), timeout)
        desc = group_desc or f"{self.group_desc}:merge"
        return _named(self._derive(made, None, timeout, None, across_jobs), name, desc)

    def splitGroup(self, *given: Any) -> DerivingProcessGroup | None:  # noqa: N802 - C++ calls it
        """``split_group`` for C++, which does not keep an object of Python alive."""
        found = self.split_group(*given)
        self._kept += [] if found is None else [found]
        return found

    def _unique(self, name: str) -> str:
        """A name that no other group has; the members of a group derive it in the same order."""
        self._names[name] += 1
        return f"{name}#{self._names[name]}"


def _named(group: DerivingProcessGroup, name: str, desc: str) -> DerivingProcessGroup:
    group._set_group_name(name)
    group._set_group_desc(desc)
    return group


def gather_members(store: Store, rank: int, size: int) -> tuple[str, list[int]]:
    """A name for the group of the ranks that join through ``store``, which is for this group alone,
    and their global ranks; none if they belong to several jobs. Raises RuntimeError, from the
    store, if members are missing.
    """
    # A rank of the same job as rank 0 finds the key in the default store.
    if rank == 0:
        job = f"meshplan/job/{uuid.uuid4().hex}"
        default_store().set(job, "")
        store.set("meshplan/job", job)
    job = store.get("meshplan/job").decode()
    store.set(
        f"meshplan/{rank}",
        json.dumps([this_rank(), default_store().check([job])]),
    )
    found = [json.loads(store.get(f"meshplan/{r}")) for r in range(size)]
    alone = all(same for _, same in found)
    return job, [one for one, _ in found] if alone else []


def describe_group(
    name: str, store: Store, rank: int, members: list[int], timeout: timedelta
) -> DistributedBackendOptions:
    made = DistributedBackendOptions()
    made.group_id, made.store, made.timeout = name, store, timeout
    made.group_rank, made.group_size, made.global_ranks_in_group = (
        rank,
        len(members),
        members,
    )
    return made


def _keep_devices(backend: str, devices: Sequence[torch.device] | None) -> str:
    """The inner backend of a group that keeps some devices of its parent. Raises BackendError: none
    of them is the parent's.
    """
    if devices is None:
        return backend
    kinds = sorted({device.type for device in devices})
    known = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
    kept = [f"{kind}:{one}" for kind, one in known.items() if kind in kinds]
    if not kept:
        raise BackendError(
            f"split_group got devices {kinds}, and the group has {sorted(known)}; pass one or more "
            "of these"
        )
    return ",".join(kept)
