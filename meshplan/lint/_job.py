"""The subject of the linter: a mesh and the use of its axes in a training job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshplan.errors import MeshplanError
from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._programs import Program
from meshplan.lint._roles import Framework, Role, resolve_roles
from meshplan.lint._settings import Settings


@dataclass(frozen=True, slots=True)
class Job:
    """One mesh and its use.

    Attributes:
        layout: the mesh, with names.
        source: of the mesh.
        roles: one for each axis; those that are ``unknown`` or missing follow from its name.
        framework: how gradients are reduced.
        flattened: axis names of each mesh that the job flattens (``DeviceMesh._flatten``).
        dims: lengths of sharded tensor dims, if known.
        reduce_order: axis names in the order of reduction; empty: the order of the framework.
        exact: whether every reduction runs under ``order="exact"``, whose bits no order changes.
        sequence_parallel: whether activations are reduce-scattered along model axes.
        rewrite: returns the file with another layout of the same axis names, in any order, or
            ``None`` if the file cannot express it.
        reread: returns all jobs of the file after ``rewrite``, this one first, or ``None``.
        program: the program that issues the reductions.
        given: the roles as given, without those of names.
        every_size: the verdict for every number of nodes, if the job has no number of its own.
        is_open: whether that verdict depends on the number.
    """

    layout: Layout
    source: Source
    roles: tuple[Role, ...] = ()
    framework: Framework = "dtensor"
    flattened: tuple[tuple[str, ...], ...] = ()
    dims: tuple[int, ...] = ()
    reduce_order: tuple[str, ...] = ()
    sequence_parallel: bool = False
    exact: bool = False
    rewrite: Callable[[Layout], str | None] | None = field(default=None, compare=False, repr=False)
    reread: Callable[[Layout], tuple[Job, ...] | None] | None = field(
        default=None, compare=False, repr=False
    )
    program: Program = "unknown"
    given: tuple[Role, ...] = field(default=(), init=False, compare=False, repr=False)
    every_size: str = ""
    is_open: bool = False

    def __post_init__(self) -> None:
        axes = self.layout.axes
        nothing: tuple[Role, ...] = ("unknown",)
        given = self.roles or nothing * len(axes)
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "roles", resolve_roles(axes, given, self.framework))

    def find_unknown_axes(self) -> tuple[str, ...]:
        """The axes without a role, if roles matter: groups along one axis have no siblings."""
        sizes = self.layout.sizes
        if sum(size > 1 for size in sizes) < 2:
            return ()
        named = zip(self.layout.axes, sizes, self.roles, strict=True)
        return tuple(axis for axis, size, role in named if size > 1 and role == "unknown")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A mesh that could not be read.

    Attributes:
        source: of the mesh.
        why: one line, with a remedy.
    """

    source: Source
    why: str

    def __str__(self) -> str:
        return f"{self.source}: not judged: {self.why}"


@dataclass(frozen=True, slots=True)
class JobFile:
    """The jobs of one file.

    Attributes:
        jobs: in order of lines.
        skipped: meshes that depend on values of the running program.
        settings: of a configuration of the linter; else ``None``.
        hosts: number of hosts of the job, if the file or its framework has it.
        ranks_per_host: number of ranks on each host, likewise.
        world_size: number of ranks of the job, likewise.
        stated: which of these three the file itself has. They beat the options of the command.
        is_read: whether a reader found the degrees of a mesh, which may have one rank.
    """

    jobs: tuple[Job, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    settings: Settings | None = None
    hosts: int | None = None
    ranks_per_host: int | None = None
    world_size: int | None = None
    stated: frozenset[str] = frozenset()
    is_read: bool = False

    def with_source(self, source: Source) -> JobFile:
        """A copy with ``source`` as the source of all jobs and skipped meshes."""
        return replace(
            self,
            jobs=tuple(replace(job, source=source) for job in self.jobs),
            skipped=tuple(replace(one, source=source) for one in self.skipped),
        )


def add_source(source: Source, error: MeshplanError) -> MeshplanError:
    """The same error, with the source in front of its message."""
    return type(error)(f"{source}: {error.args[0]}")
