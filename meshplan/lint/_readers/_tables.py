"""The form of the table of degree keys: a framework, and a mesh that it makes of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshplan.lint._programs import Program
from meshplan.lint._roles import Framework as Reduction
from meshplan.lint._roles import Role

Kind = Literal["document", "command", "python"]
"""The place of keys: TOML, YAML, JSON; a script or arguments; calls and assignments in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A mesh that a framework makes of its keys.

    Regular expressions match a whole text in lower case, with underscores for hyphens: a dotted
    path, ``model.tp``, or a setting, ``model.tp=2``.

    Attributes:
        keys: the axis of each key; of several keys for an axis, the first is today's. A key for
            ``""`` only marks the framework.
        order: the axes, outermost first.
        section: regular expression of the dotted path before the keys. Each value of its group
            ``part`` is a mesh of its own.
        rest: the axis of the ranks that the others leave, if it is absent or -1.
        fill: the same for the ranks that remain if ``rest`` has a size.
        shown: axes that are shown even if they have one rank and no key.
        needs: axes of which one has a key in the file; empty if the mark is enough.
        unless: regular expression of a setting with which the mesh does not exist.
        refused: why the mesh is not judged, by regular expressions of settings.
        orders: other orders of axes, innermost first, joined by hyphens, by key; empty for the
            value of the key.
        per_host: regular expression of a setting with which ``rest`` is the ranks of a host.
        experts: axes of the experts' mesh over the same ranks. The one that is in no key has the
            ranks that the others leave.
        expert_tp: whether ``etp`` is ``tp`` by default; else it is 1.
        roles: of axes, other than those of their names.
        sharded: regular expression of a setting with which ``dp`` and ``cp`` are sharded; empty if
            the names of the axes say it.
        unsharded: the same for replicated.
        is_sharded: the default of both.
        reduction: of gradients, if they are sharded.
        flattened: axes that are flattened into one mesh.
        sequence_parallel: the default of the key ``sequence_parallel``.
        zero_is_one: whether a size of 0 means that there is no such axis.
    """

    keys: Mapping[str, str]
    order: tuple[str, ...]
    section: str = ""
    rest: str = ""
    fill: str = ""
    shown: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    unless: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, str] = field(default_factory=dict)
    per_host: str = ""
    experts: tuple[str, ...] = ()
    expert_tp: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict)
    sharded: str = ""
    unsharded: str = ""
    is_sharded: bool = True
    reduction: Reduction = "fsdp2"
    flattened: tuple[str, ...] = ()
    sequence_parallel: bool = False
    zero_is_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A program, and the meshes of its jobs.

    Attributes:
        program: that issues the reductions.
        mark: regular expression of a dotted key that this program has.
        without: regular expression of a dotted key that this program does not have.
        word: regular expression of a text that the file has too; empty if the mark is enough.
        meshes: in the order of the report.
        launch: ``hosts``, ``ranks per host`` or ``world size`` of dotted keys.
        defaults: of ``launch``.
        kinds: where its keys stand.
        classes: Python's classes and functions that take the keys as arguments.
        bases: names of configurations that have the defaults of ``meshes``. Any other one that a
            file builds on may have replaced them.
    """

    program: Program
    mark: str
    meshes: tuple[Mesh, ...]
    without: str = ""
    word: str = ""
    launch: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    kinds: frozenset[Kind] = frozenset({"document", "command"})
    classes: frozenset[str] = frozenset()
    bases: frozenset[str] = frozenset()
