"""Groups whose ranks belong to several jobs, each with a default group of its own.

Their members share no default store, and their global ranks repeat. So they agree through a store
of the group, and are numbered by their ranks in it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from meshplan._torch import Store, default_group, default_store

# An entry goes with its group, which is destroyed by whoever created it.
_STORES: WeakKeyDictionary[ProcessGroup, Store] = WeakKeyDictionary()


def keep_store(group: ProcessGroup, store: Store) -> None:
    """Let the members of ``group``, who belong to several jobs, agree through ``store``, which is
    for this group alone. In torch's tables, its global ranks are its group ranks.
    """
    _STORES[group] = store


def is_across_jobs(group: ProcessGroup) -> bool:
    """Whether the members of ``group`` belong to several jobs."""
    return group in _STORES


def store_of(group: ProcessGroup | None) -> Store:
    """The store that the members of ``group`` agree through; ``None``: of a group to be created."""
    found = None if group is None else _STORES.get(group)
    return default_store() if found is None else found


def rank_in(group: ProcessGroup) -> int:
    """This process's global rank; its rank in ``group`` if that is across jobs."""
    return int((group if group in _STORES else default_group()).rank())
