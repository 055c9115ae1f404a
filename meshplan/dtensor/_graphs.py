"""Ties compiled graphs to what is installed, in the process and in torch's caches on disk.

A graph holds the reductions that were planned when torch traced it, and torch does not know that.
So each graph has a guard on the configuration, graphs compiled before ``install`` are dropped, and
``torch.compiler.config.cache_key_tag`` keeps graphs on disk apart: AOTAutograd's key holds only
operations and placements. meshplan sets the tag where a forced environment variable would stand,
since a value set as users set it holds for one thread only. The user's own tag stays part of it.

Graphs also name process groups. Such a name is invalid once its group is destroyed, or means
another group under another default group: then an epoch starts.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from meshplan._torch import (
    CACHE_KEY_TAG,
    IMPORT_SOURCE,
    UNSET_SENTINEL,
    WORLD,
    TracingContext,
    attribute_source,
    compiler_settings,
    frame_translator,
    frames_compiled,
    guard_builder,
    install_guard,
    is_absent,
    tracing,
    tracing_state,
)

_LOG = logging.getLogger("meshplan")

_lock = threading.Lock()
_count = 0
_world: weakref.ref[ProcessGroup] | None = None


class _TracingState:
    """Reads torch's context through its method, where its thread-local object has moved."""

    @property
    def tracing_context(self) -> TracingContext | None:
        return TracingContext.try_get()


def _find_tracing_state() -> Any:
    if not is_absent(TracingContext, tracing_state):
        context = TracingContext(None)
        with tracing(context):
            if getattr(tracing_state, "tracing_context", None) is context:
                return tracing_state
    return _TracingState()


TRACING = _find_tracing_state()
"""Has this thread's ``tracing_context``, at half the cost of ``TracingContext.try_get``."""


def guard_on(module: str, *attributes: str) -> None:
    """Add a guard: the frame that dynamo compiles now is compiled again when a string changes.
    Nothing happens without such a frame (``torch.export`` without dynamo, ``make_fx``), whose
    results have no guards.
    """
    translator = frame_translator()
    try:
        tx = None if translator is None else translator.current_tx()
    except AttributeError:
        # Nothing was ever compiled on this thread.
        return
    if tx is None or TracingContext.try_get() is None:
        return
    source = getattr(tx, IMPORT_SOURCE)(module)
    for attribute in attributes:
        source = attribute_source(source, attribute)
    install_guard(source.make_guard(guard_builder().EQUALS_MATCH))


def forget_graphs() -> bool:
    if not frames_compiled():
        return False
    torch.compiler.reset()
    _LOG.warning(
        "[meshplan] functions were compiled before meshplan.install, with the backend's own "
        "reductions; they will be compiled again. Call meshplan.install before the first compiled "
        "call, and once"
    )
    return True


def begin_epoch() -> None:
    """Start an epoch, because groups are destroyed that graphs may name."""
    global _count
    with _lock:
        _count += 1


def epoch() -> int:
    """A number that changes in ``begin_epoch`` and with the default group."""
    global _count, _world
    world = dist.group.WORLD
    if world is not None and (_world is None or _world() is not world):
        with _lock:
            if _world is None or _world() is not world:
                _count += 1
                _world = weakref.ref(world)
    return _count


class _CacheTag(str):
    """The user's tag when read as text. A look-up pickles it, and then it has more parts."""

    _more: Callable[[], str]

    def __new__(cls, more: Callable[[], str]) -> _CacheTag:
        tag = super().__new__(cls, _users_tag())
        tag._more = more
        return tag

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("\n".join((_users_tag(), _sources(), self._more(), _groups())),)

    def __str__(self) -> str:
        return _users_tag()

    def __format__(self, spec: str) -> str:
        return format(_users_tag(), spec)

    def __bool__(self) -> bool:
        return bool(_users_tag())


def set_tag(more: Callable[[], str]) -> None:
    """Add ``more()`` and the process groups to the key by which graphs on disk are looked up."""
    _entry().env_value_force = _CacheTag(more)


def remove_tag() -> None:
    _entry().env_value_force = UNSET_SENTINEL


def _entry() -> Any:
    return compiler_settings().get(CACHE_KEY_TAG)


def _users_tag() -> str:
    entry = _entry()
    override = entry.user_override
    if isinstance(override, ContextVar):
        override = override.get()
    found = (override, entry.env_value_default, entry.default)
    return str(next(value for value in found if value is not UNSET_SENTINEL))


@cache
def _sources() -> str:
    """A hash of meshplan's sources: another version may plan differently or change operators."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha1()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"meshplan {digest.hexdigest()}"


def _groups() -> str:
    """This rank, and the ranks of each group that torch names by number: AOTAutograd's look-up does
    not see names, so its key needs the ranks. The look-up of a traced graph sees them, so its key
    needs only the rank. meshplan's own names mean the same in every job.
    """
    if not c10d.is_initialized():
        return ""
    groups = getattr(c10d, WORLD)
    where = f"rank {c10d.get_rank()} of {c10d.get_world_size()}"
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        return where
    numbered = sorted(
        (name, tuple(groups.pg_group_ranks.get(group, ())))
        for group, name in groups.pg_names.items()
        if not name.startswith("meshplan:")
    )
    return f"{where}, groups {hashlib.sha1(repr(numbered).encode()).hexdigest()}"
