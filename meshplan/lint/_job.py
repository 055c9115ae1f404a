"""The subject of the linter: a mesh and the use of its axes in a training job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshplan.errors import MeshplanError
from meshplan.layout import Layout
from meshplan.lint._finding import Severity, Source
from meshplan.lint._programs import Program
from meshplan.lint._roles import Framework, Role, resolve_roles


@dataclass(frozen=True, slots=True)
class Job:
    """One mesh and its use."""

    layout: Layout
    source: Source
    # One for each axis; those that are ``unknown`` or missing follow from its name
    roles: tuple[Role, ...] = ()
    framework: Framework = "dtensor"
    # Axis names of each mesh that the job flattens (``DeviceMesh._flatten``)
    flattened: tuple[tuple[str, ...], ...] = ()
    dims: tuple[int, ...] = ()  # lengths of sharded tensor dims, if known
    # Axis names in the order of reduction; empty: the order of the framework
    reduce_order: tuple[str, ...] = ()
    sequence_parallel: bool = False  # whether activations are reduce-scattered along model axes
    # Whether every reduction runs under ``order="exact"``, whose bits no order changes
    exact: bool = False
    # Returns the file with another layout of the same axis names, in any order, or ``None`` if the
    # file cannot express it
    rewrite: Callable[[Layout], str | None] | None = field(default=None, compare=False, repr=False)
    # Returns all jobs of the file after ``rewrite``, this one first, or ``None``
    reread: Callable[[Layout], tuple[Job, ...] | None] | None = field(
        default=None, compare=False, repr=False
    )
    program: Program = "unknown"
    has_all_ranks: bool = False  # whether the job has these ranks and no others
    # The roles as given, without those of names
    given: tuple[Role, ...] = field(default=(), init=False, compare=False, repr=False)
    # The verdict for every number of nodes, if the job has no number of its own
    every_size: str = ""
    is_open: bool = False  # whether that verdict depends on the number

    def __post_init__(self) -> None:
        axes = self.layout.axes
        nothing: tuple[Role, ...] = ("unknown",)
        given = self.roles or nothing * len(axes)
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "roles", resolve_roles(axes, given, self.framework))

    @property
    def role_of(self) -> dict[str, Role]:
        """The role of each axis, by name."""
        return dict(zip(self.layout.axes, self.roles, strict=True))

    def find_unknown_axes(self) -> tuple[str, ...]:
        """The axes without a role, if roles matter: groups along one axis have no siblings."""
        sizes = self.layout.sizes
        if sum(size > 1 for size in sizes) < 2:
            return ()
        named = zip(self.layout.axes, sizes, self.roles, strict=True)
        return tuple(axis for axis, size, role in named if size > 1 and role == "unknown")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A mesh that could not be read."""

    source: Source  # of the mesh
    why: str  # one line, with a remedy

    def __str__(self) -> str:
        return f"{self.source}: not judged: {self.why}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a project; ``None`` or empty if not set.

    ``hosts``, ``rank_order`` and ``output_format`` have the form of the options of the same name; a
    list in the file is joined by commas.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    fail_level: Severity | None = None  # lowest severity that makes the linter fail
    # Names of files that describe the cluster, as written: relative to this file
    topology: tuple[str, ...] = ()
    hosts: str = ""
    node_size: int | None = None
    domain_size: int | None = None  # GPUs that NVLink or xGMI joins
    rank_order: str = ""
    output_format: str = ""
    # Of axes, by name, in all meshes that the files describe
    roles: Mapping[str, Role] = field(default_factory=dict)
    # Patterns of the files of directories that are linted, instead of the default
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # patterns of files and directories that are not linted


@dataclass(frozen=True, slots=True)
class JobFile:
    """The jobs of one file."""

    jobs: tuple[Job, ...] = ()
    skipped: tuple[Skipped, ...] = ()  # meshes that depend on values of the running program
    settings: Settings | None = None  # of a configuration of the linter; else ``None``
    hosts: int | None = None  # number of hosts of the job, if the file or its framework has it
    ranks_per_host: int | None = None
    world_size: int | None = None
    # Which of these three the file itself has. They beat the options of the command.
    stated: frozenset[str] = frozenset()
    is_read: bool = False  # whether a reader found the degrees of a mesh, which may have one rank
    takes_arguments: bool = False  # whether it is a program with all options that follow ``--``
    # Meshes of one axis of unknown size: no other group must agree
    one_axis: tuple[Source, ...] = ()


def add_source(source: Source, error: MeshplanError) -> MeshplanError:
    """The same error, with the source in front of its message."""
    return type(error)(f"{source}: {error.args[0]}")
