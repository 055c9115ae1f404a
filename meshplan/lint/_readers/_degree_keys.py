"""The records of the table of degree keys in `_frameworks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshplan.lint._programs import Program
from meshplan.lint._roles import Framework as Reduction
from meshplan.lint._roles import Role

Kind = Literal["document", "command", "python"]
"""The place of keys: TOML, YAML, JSON; a script or arguments; calls and assignments in Python."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """A mesh that a framework makes of its keys.

    Regular expressions match a whole text in lower case, with underscores for hyphens: a dotted
    path, ``model.tp``, or a setting, ``model.tp=2``.
    """

    # The axis of each key; of several keys for an axis, the first is today's. A key for ``""`` only
    # marks the framework.
    keys: Mapping[str, str]
    order: tuple[str, ...]  # the axes, outermost first
    # Regular expression of the dotted path before the keys. Each value of its group ``part`` is a
    # mesh of its own.
    section: str = ""
    rest: str = ""  # the axis of the ranks that the others leave, if it is absent or -1
    fill: str = ""  # the same for the ranks that remain if ``rest`` has a size
    # Axes of which one has a key in the file; empty if the mark is enough
    needs: tuple[str, ...] = ()
    unless: str = ""  # regular expression of a setting with which the mesh does not exist
    when: str = ""  # the same of one that decides, with which it exists in spite of ``unless``
    # The same of a setting without which it is not judged, by regular expressions of its keys
    only: Mapping[str, str] = field(default_factory=dict)
    # Why the mesh is not judged, by regular expressions of settings
    refused: Mapping[str, str] = field(default_factory=dict)
    # Other orders of axes, innermost first, joined by hyphens, by key; empty for the value of the
    # key
    orders: Mapping[str, str] = field(default_factory=dict)
    per_host: str = ""  # regular expression of a setting with which ``rest`` is the ranks of a host
    # Axes of the experts' mesh over the same ranks. The one that is in no key has the ranks that
    # the others leave.
    experts: tuple[str, ...] = ()
    expert_tp: bool = False  # whether ``etp`` is ``tp`` by default; else it is 1
    roles: Mapping[str, Role] = field(default_factory=dict)
    # Regular expression of a setting with which ``dp`` and ``cp`` are sharded; empty if the names
    # of the axes say it
    sharded: str = ""
    unsharded: str = ""  # the same for replicated
    is_sharded: bool = True  # the default of both
    reduction: Reduction = "fsdp2"  # of gradients, if they are sharded
    # Axes that gradients are reduced over as one
    flattened: tuple[str, ...] = ("dp", "dp_shard", "cp")
    sequence_parallel: bool = False  # the default of the key ``sequence_parallel``
    zero_is_one: bool = False  # whether a size of 0 means that there is no such axis
    is_part: bool = False  # whether the job may have ranks besides those of its sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Framework:
    """A program, and the meshes of its jobs."""

    program: Program
    mark: str  # regular expression of a dotted key that this program has
    meshes: tuple[Mesh, ...]  # in the order of the report
    without: str = ""  # regular expression of a dotted key that this program does not have
    # Regular expression of a text that the file has too; empty if the mark is enough
    word: str = ""
    # ``hosts``, ``ranks_per_host`` or ``world_size`` of dotted keys
    launch: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ("document", "command")  # where its keys stand
    # Python's classes and functions that take the keys as arguments
    classes: tuple[str, ...] = ()
    # Regular expression of the configurations that have the defaults of ``meshes``. Any other one
    # that a file builds on may have replaced them.
    bases: str = ""
