"""Names of degrees: whether a key is one that programs use, or a misspelt one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from meshplan._message_text import suggest
from meshplan.lint._readers._documents import Degrees, Unknown, find_replaced
from meshplan.lint._readers._frameworks import FRAMEWORKS
from meshplan.lint._readers._numbers import INSTEAD, UnknownMesh

_UNIT = r"[-_]?(?:size|degree|world[-_]size)"
_AXIS = r"(?:tp|pp|dp|cp|sp|ep|mp|etp|edp|ddp|fsdp|hsdp)"
_PART = r"[-_]?(?:shards?|replicas?|replicate|shard[-_]cp)"
_PARALLEL = (
    r"(?:tensor|pipeline|data|context|sequence|expert|model)(?:[-_]model|[-_]tensor)?"
    r"[-_]?parallel(?:ism)?"
)
# The names that programs give to the sizes of axes, such as tensor_model_parallel_size,
# rollout.tp_size, dp_replicate, ici_mesh_shape or zero_hpz_partition_size.
SIZE = re.compile(
    rf"(?:[\w.-]+[-_.])?(?:{_PARALLEL}(?:{_PART})?(?:{_UNIT}|[-_]dim)?|(?:auto)?{_AXIS}(?:{_PART})?{_UNIT}"
    rf"|{_AXIS}{_PART}|(?:device|ici|dcn|logical)[-_]mesh(?:[-_](?:shape|sizes?))?"
    r"|zero[-_]hpz[-_]partition[-_]size|mics[-_]shard[-_]size)"
)
# Short names that other texts use too. They count alone or as the last part of a dotted path.
SHORT = re.compile(rf"(?:[\w-]+\.)*{_AXIS}")
# Degrees of other meshes than those of the trainer, and of parts of an axis.
_INNER = re.compile(
    r"vllm|sglang|rollout|generat|infer|teacher|serv|virtual|ulysses|target|checkpoint|(?:^|[._])(?:ref|gen)[._]"
)
# Keys of one program often differ by a word, and a spelling mistake by a letter or two.
_NEAR = 0.92
_STEM = re.compile(r"para|pral|ral+el|llel|degr|gree|repl|shard|dp_")
_DEGREES = {key for one in FRAMEWORKS for mesh in one.meshes for key in mesh.keys if len(key) > 8}


def is_size(key: str) -> bool:
    """Whether a key is a name that programs use for the size of an axis."""
    return bool(SIZE.fullmatch(key.lower()) or SHORT.fullmatch(key.lower()))


def is_open_degree(value: object) -> bool:
    """Whether the value of a key may be the size of an axis of several ranks."""
    return isinstance(value, Unknown) or (type(value) is int and value not in (0, 1))


def suggest_key(key: str, keys: Iterable[str]) -> str:
    """`` (did you mean ...)`` for a misspelt key of ``keys``; empty for a key of its own."""
    return suggest(key, keys, _NEAR) if _STEM.search(key) and key not in _DEGREES else ""


def suggest_degree(key: str) -> str:
    """`suggest_key` for the keys of all programs, as they are written in the table."""
    key = key.rpartition(".")[2].replace("-", "_").lower()
    return suggest_key(key, _DEGREES)


def check_unread(
    found: Degrees,
    order: Iterable[str],
    given: Mapping[str, int],
    total: int | None,
) -> None:
    """Check that nothing in the file may have another size for an axis than the mesh has.

    Raises:
        UnknownMesh: a misspelt key, a degree that no mesh of the framework reads, or another
            configuration whose sizes may be in place of the defaults.
    """
    keys = {key for mesh in found.framework.meshes for key in mesh.keys}
    section = re.compile(found.mesh.section)
    for one in found.document.settings:
        prefix, _, key = one.path.rpartition(".")
        is_inside = section.fullmatch(prefix) is not None
        if key in keys or not is_open_degree(one.value):
            continue
        if is_inside and (near := suggest_key(key, found.mesh.keys) or suggest_degree(key)):
            raise UnknownMesh(f"{one.key} is not a key of this program{near}", one.line)
        if is_size(key) and not _INNER.search(one.path) and (is_inside or not given):
            # A variable of the file: the degree that refers to it has its value.
            if re.search(rf"\$\{{[\w.]*\b{re.escape(one.key)}\}}", found.document.text):
                continue
            shown = "" if isinstance(one.value, Unknown) else f" = {one.value}"
            raise UnknownMesh(
                f"{one.key}{shown} is a degree that is not read; {INSTEAD}",
                one.line,
            )
    free = [axis for axis in order if axis not in given]
    fixed = math.prod(given.get(axis, 1) for axis in order)
    # One axis follows from the ranks of the job.
    if len(free) > any(axis in free for axis in (found.mesh.rest, found.mesh.fill)) and (
        fixed != total
    ):
        replaced = find_replaced(found)
        if replaced is not None:
            raise UnknownMesh(
                f"{replaced.key} names another configuration, which may set {free[0]}; {INSTEAD}",
                replaced.line,
            )
