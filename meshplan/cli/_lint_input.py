"""The inputs of ``meshplan lint``: jobs, where their ranks are placed, settings; their state."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshplan._message_text import suggest
from meshplan._needs_torch import import_with_torch
from meshplan.cli._launch import check_timeout
from meshplan.cli._lint_files import (
    INCLUDED,
    FilePatterns,
    FileReader,
    expand_names,
    find_files,
)
from meshplan.cli._options import (
    PLACEMENT_OPTIONS,
    find_cluster,
    list_placement_options,
    read_hosts,
    read_inputs,
    read_number,
    require_cluster,
)
from meshplan.cli._output import track
from meshplan.errors import MeshplanError, PolicyError, TopologyError
from meshplan.layout import Layout
from meshplan.lint._finding import InputKind, Source, join_names
from meshplan.lint._job import Job, JobFile, Skipped
from meshplan.lint._read_jobs import RankOptions, read_arguments
from meshplan.lint._roles import AXIS_NAMES, ROLES, Role, assume_roles, resolve_roles
from meshplan.lint._settings import Settings
from meshplan.lint._spec import parse_mesh
from meshplan.topology import Cluster, Inputs, Reading, read_cluster
from meshplan.topology._assignment import is_rank_order
from meshplan.topology._files import read_content, read_file

_CONFIGS = ("meshplan.toml", "pyproject.toml")
_NOTHING = (
    "no mesh to check; pass --mesh ddp=8,fsdp=5 or the name of a job file, or put a mesh into "
    "meshplan.toml"
)


@dataclass(slots=True)
class NamedInput:
    """One input that describes jobs.

    Attributes:
        name: as the user named it.
        kind: of the input.
        file: its content.
        is_found: whether it was found in a directory that the user named.
        jobs: of the file, each with its cluster.
        contradiction: of the numbers of ranks in the file and in the options; may be empty.
    """

    name: str
    kind: InputKind
    file: JobFile
    is_found: bool = False
    jobs: list[tuple[Job, Cluster]] = field(default_factory=list)
    contradiction: str = ""

    def read_placement(self) -> Inputs | None:
        """The placement in its settings, with paths relative to the configuration."""
        settings, folder = self.file.settings, Path(self.name).parent
        if settings is None or not any(getattr(settings, name) for name in PLACEMENT_OPTIONS):
            return None
        order = settings.rank_order or "block"
        return Inputs(
            files=tuple(str(folder / name) for name in settings.topology),
            hosts=read_hosts(settings.hosts) if settings.hosts else (),
            node_size=settings.node_size,
            domain_size=settings.domain_size,
            rank_order=order if is_rank_order(order) else str(folder / order),
        )


@dataclass(slots=True)
class LintRequest:
    """The inputs of one command.

    Attributes:
        inputs: those that describe jobs, in the order of the command.
        topologies: the reading of each cluster description, by name.
        unused: a configuration whose settings apply and whose meshes are not checked.
        settings: of a configuration; the options override them.
        reader: of the files.
    """

    reader: FileReader
    inputs: list[NamedInput] = field(default_factory=list)
    topologies: dict[str, Reading] = field(default_factory=dict)
    unused: NamedInput | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def jobs(self) -> list[tuple[Job, Cluster]]:
        """All jobs, each with its cluster."""
        return [job for one in self.inputs for job in one.jobs]

    @property
    def skipped(self) -> list[Skipped]:
        """All meshes that could not be read."""
        return [skipped for one in self.inputs for skipped in one.file.skipped]

    def read_topology(self, name: str) -> Reading:
        """The reading of a cluster description, cached: standard input can be read once only."""
        if name not in self.topologies:
            self.topologies[name] = read_file(name)
        return self.topologies[name]


def read_request(given: argparse.Namespace, reader: FileReader) -> LintRequest:
    """Read all inputs of the command line.

    Placement options replace all placement settings of a configuration.

    Args:
        given: the options.
        reader: of the files; it keeps those that it has read.

    Raises:
        MeshplanError: the command is invalid, no input can be read, or no input has a mesh.
    """
    request = LintRequest(reader)
    names, folders = expand_names(given.files)
    if "-" in names:
        names[names.index("-")] = _read_standard_input(given, reader)
    files = [NamedInput(name, "file", reader.try_to_read(name, named=True)) for name in names]
    config = _find_config(given, files, folders, reader)
    if config is not None:
        request.settings = config.file.settings or request.settings
    place = "." if config is None else os.path.dirname(config.name)
    excluded = (FilePatterns(tuple(given.exclude)), FilePatterns(request.settings.exclude, place))
    included = FilePatterns(request.settings.include or INCLUDED, place)
    files = [one for one in files if not any(two.match(one.name) for two in excluded)]
    known = {os.path.abspath(one.name) for one in files}
    walks = (find_files(folder, included, excluded, reader.errors) for folder in folders)
    for name in track("reading file", [*itertools.chain.from_iterable(walks)]):
        if os.path.abspath(name) not in known:
            known.add(os.path.abspath(name))
            files.append(NamedInput(name, "file", reader.try_to_read(name, named=False), True))
    inputs = [*files, *_read_meshes(given)]
    if given.arguments:
        file = read_arguments(given.arguments, options=reader.ranks)
        inputs.append(NamedInput(shlex.join(given.arguments), "arguments", file))
    if config is not None:
        if not inputs and not given.files and config.file.jobs:
            inputs = [config]
        elif not any(config.name == one.name for one in files):
            # Its meshes are not checked, so its ignore comments cannot match.
            reader.comments.pop(config.name, None)
            request.unused = config if given.config is not None else None
    if not inputs and not given.files:
        raise PolicyError(_NOTHING)
    request.inputs = inputs
    _place(request, given, config)
    return request


def _read_standard_input(given: argparse.Namespace, reader: FileReader) -> str:
    """The name of the file on standard input, whose text is in the reader from now on."""
    if "-" in given.topology:
        raise PolicyError("standard input is FILE and --topology; pass the name of one of them")
    name: str = given.stdin_filename or "-"
    if name not in reader.texts:
        reader.replace(name, read_content("-"))
    return name


def _place(request: LintRequest, given: argparse.Namespace, config: NamedInput | None) -> None:
    """Find the cluster of each job: by options, by ``--config``, or by its own file."""
    options = read_inputs(given) if list_placement_options(given) else None
    placement = config.read_placement() if options is None and config is not None else options
    live = _find_live(given, placement)
    each_its_own = options is None and config is not None and given.config is None
    for one in request.inputs:
        own = (one is not config and each_its_own and one.read_placement()) or placement
        roles = request.settings.roles
        if one.is_found and one.file.settings is not None:
            own = (options is None and one.read_placement()) or placement
            roles = {**roles, **one.file.settings.roles}
        try:
            _place_jobs(request, given, one, own, roles, live)
        except MeshplanError as error:
            request.reader.errors[one.name] = error
            skipped = Skipped(_find_source(one), str(error.args[0]))
            one.jobs.clear()
            one.file = replace(one.file, skipped=(*one.file.skipped, skipped))
    errors = list(request.reader.errors.values())
    unread = sum(one.name in request.reader.errors or bool(one.jobs) for one in request.inputs)
    if errors and not request.jobs and (unread == 1 or len({*map(str, errors)}) == 1):
        raise errors[0]


def _find_source(one: NamedInput) -> Source:
    """The place of the first mesh of an input."""
    return next((job.source for job in one.file.jobs), Source(one.name))


def _place_jobs(
    request: LintRequest,
    given: argparse.Namespace,
    one: NamedInput,
    placement: Inputs | None,
    roles: Mapping[str, Role],
    live: Cluster | None,
) -> None:
    """Apply the options to the jobs of an input, and find their clusters."""
    if one.file.jobs and live is None:
        placement, one.contradiction = _prefer_file(one.file, placement, request.reader.ranks)
    for job in (_apply_options(job, given, roles) for job in one.file.jobs):
        if unknown := job.find_unknown_axes():
            skipped = Skipped(job.source, _explain_roles(job, unknown, roles))
            one.file = replace(one.file, skipped=(*one.file.skipped, skipped))
        one.jobs.append((job, live or _find_cluster(job, one.file, placement, request)))
    if live is None and placement is not None:
        for name in placement.files:
            request.read_topology(name)


def _prefer_file(
    file: JobFile, placement: Inputs | None, options: RankOptions
) -> tuple[Inputs | None, str]:
    """The placement with the numbers that the file itself has, and what contradicts them."""
    placement = placement or Inputs()
    hosts = placement.hosts[0] if len(placement.hosts) == 1 else None
    others = []
    if "hosts" in file.stated and hosts not in (None, file.hosts):
        others.append(f"--hosts {hosts}")
    if "ranks_per_host" in file.stated and placement.node_size not in (None, file.ranks_per_host):
        others.append(f"--node-size {placement.node_size}")
    size = options.world_size
    if hosts and placement.node_size:
        size = hosts * placement.node_size
    if "world_size" in file.stated and not others and size not in (None, file.world_size):
        others.append(f"{size} ranks")
    if not others:
        return placement if placement != Inputs() else None, ""
    own = {
        "hosts": file.hosts,
        "ranks_per_host": file.ranks_per_host,
        "world_size": file.world_size,
    }
    words = {"hosts": "hosts", "ranks_per_host": "ranks on each host", "world_size": "ranks"}
    stated = [f"{own[key]} {word}" for key, word in words.items() if key in file.stated]
    known = () if "hosts" not in file.stated or file.hosts is None else (file.hosts,)
    per_host = file.ranks_per_host if "ranks_per_host" in file.stated else placement.node_size
    return replace(placement, hosts=known, node_size=per_host), (
        f"the file has {join_names(stated)}, but the options have {join_names(others)}; the "
        "numbers of the file are used"
    )


def _find_cluster(
    job: Job, file: JobFile, placement: Inputs | None, request: LintRequest
) -> Cluster:
    """The cluster by options, by the launch command in the job's file, or by environment."""
    ranks = job.layout.highest_rank + 1
    if placement is None and (file.hosts is not None or file.ranks_per_host is not None):
        hosts = () if file.hosts is None else (file.hosts,)
        inputs = Inputs(hosts=hosts, node_size=file.ranks_per_host)
        return require_cluster(read_cluster(inputs, ranks, {}))
    return require_cluster(find_cluster(placement or Inputs(), ranks, request.read_topology))


def _find_live(given: argparse.Namespace, placement: Inputs | None) -> Cluster | None:
    if not given.live:
        if given.timeout is not None:
            raise PolicyError("--timeout needs --live; add it, or leave out --timeout")
        return None
    if placement is not None:
        raise PolicyError(
            "--live reads the placement from the ranks; leave out the placement options, and "
            "those of the configuration with --isolated"
        )
    ranks = import_with_torch("meshplan.cli._ranks", "meshplan lint --live")
    timeout = 300.0 if given.timeout is None else given.timeout
    check_timeout(timeout)
    found: Cluster = ranks.find_live_cluster(os.environ, timeout)
    return found


def read_ranks(given: argparse.Namespace) -> RankOptions:
    """Ranks of the job, for files that do not specify them: ``--world-size``, or from the hosts."""
    inputs = read_inputs(given)
    hosts = inputs.hosts[0] if len(inputs.hosts) == 1 else None
    per_host = inputs.node_size or inputs.domain_size
    size = None
    if given.world_size is not None:
        size = read_number(given.world_size, "--world-size", error=TopologyError)
    elif hosts is not None:
        size = per_host and hosts * per_host
    elif inputs.hosts and len(inputs.files) < 2:
        size = sum(inputs.hosts)
    return RankOptions(size, hosts, per_host)


def _find_config(
    given: argparse.Namespace,
    files: Sequence[NamedInput],
    folders: Sequence[str],
    reader: FileReader,
) -> NamedInput | None:
    """The configuration: that of ``--config``, one of the files, in this folder, or in a named one.

    Raises:
        PolicyError: several of the files have different settings.
        MeshplanError: it is unreadable or invalid.
    """
    if given.config is not None:
        path = os.path.abspath(given.config)
        named = next((one for one in files if os.path.abspath(one.name) == path), None)
        return named or NamedInput(given.config, "settings", reader.read(given.config))
    own = [one for one in files if one.file.settings is not None]
    # A configuration without settings cannot conflict with the others.
    configs = [one for one in own if one.file.settings != Settings()] or own[:1]
    elsewhere = len(configs) < len(files) or bool(given.mesh or given.arguments)
    for other in configs[1:]:
        if _differ(configs[0], other, elsewhere=elsewhere):
            raise PolicyError(
                f"{configs[0].name} and {other.name} have different settings; choose one "
                "with --config, or lint them one by one"
            )
    if configs or given.isolated:
        return configs[0] if configs else None
    for folder in ("", *folders):
        for name in (os.path.normpath(os.path.join(folder, one)) for one in _CONFIGS):
            if os.path.isfile(name):
                file = reader.read(name)
                if file.settings is not None:
                    return NamedInput(name, "settings", file)
    return None


def _differ(one: NamedInput, other: NamedInput, *, elsewhere: bool) -> bool:
    """Whether settings differ; placement settings matter only to jobs in other inputs."""
    first, second = one.file.settings, other.file.settings
    assert first is not None
    assert second is not None
    if not elsewhere:
        second = replace(second, **{name: getattr(first, name) for name in PLACEMENT_OPTIONS})
    elif first.topology or first.rank_order:
        # Names of files are relative to the configuration.
        return first != second or Path(one.name).parent != Path(other.name).parent
    return first != second


def _read_meshes(given: argparse.Namespace) -> list[NamedInput]:
    ranks = None
    if given.ranks is not None:
        if len(given.mesh) != 1:
            raise PolicyError(f"--ranks needs exactly one --mesh, got {len(given.mesh)}")
        try:
            ranks = json.loads(f"[{given.ranks}]")
        except (ValueError, RecursionError):
            raise PolicyError(
                f"--ranks: use numbers, such as 0,2,1,3 or [[0,2],[1,3]], got {given.ranks[:60]!r}"
            ) from None
        ranks = ranks[0] if len(ranks) == 1 and isinstance(ranks[0], list) else ranks
    return [
        NamedInput(name, "mesh", JobFile((Job(parse_mesh(text, ranks), Source(option=name)),)))
        for text, name in ((text, f"--mesh {text}") for text in given.mesh)
    ]


def _explain_roles(job: Job, axes: Sequence[str], roles: Iterable[str]) -> str:
    """The axes without a role, with the line for the configuration."""
    # A guess to start from: two axes without a role are often replicas, then shards.
    guesses = ["replicate"] * (len(axes) - 1) + ["shard"]
    line = ", ".join(f'{axis} = "{role}"' for axis, role in zip(axes, guesses, strict=True))
    # A spelling mistake in the mesh, or in the roles of the configuration.
    known = [*roles, *(name for names in AXIS_NAMES.values() for name in names)]
    hints = dict.fromkeys(suggest(axis, known, 0.75) for axis in axes)
    return (
        f"the use of {join_names(axes)} in {job.layout} is not visible and the "
        f"name{'s are' if len(axes) > 1 else ' is'} unknown{''.join(hints)}; add to meshplan.toml: "
        f"roles = {{ {line} }} (each {', '.join(ROLES[:-1])} or {ROLES[-1]})"
    )


def _apply_options(job: Job, given: argparse.Namespace, roles: Mapping[str, Role]) -> Job:
    """The job with the options and the roles that apply to all jobs."""
    layout = job.layout
    changes: dict[str, Any] = {}
    if any(axis in roles for axis in layout.axes):
        pairs = zip(layout.axes, job.given, strict=True)
        changes["roles"] = tuple(roles.get(axis, role) for axis, role in pairs)
    if given.framework:
        stated = changes.get("roles", job.given)
        changes["roles"] = assume_roles(
            resolve_roles(layout.axes, stated, given.framework), given.framework
        )
        changes["framework"] = given.framework
        if job.program == "unknown":
            changes["program"] = "torch"
    if given.reduce_order:
        changes["reduce_order"] = _read_axes(layout, given.reduce_order)
    if given.flatten:
        changes["flattened"] = job.flattened + tuple(_read_axes(layout, a) for a in given.flatten)
    if given.dim:
        lengths = (n for text in given.dim for n in text.split(","))
        changes["dims"] = job.dims + tuple(
            read_number(n, "--dim", least=0, error=TopologyError) for n in lengths
        )
    if given.sequence_parallel:
        changes["sequence_parallel"] = True
    if changes and job.reread is not None:
        changes["reread"] = partial(_reread, job, given, roles)
    return replace(job, **{"roles": job.given, **changes})


def _reread(
    job: Job, given: argparse.Namespace, roles: Mapping[str, Role], layout: Layout
) -> tuple[Job, ...] | None:
    """The jobs of a file with another mesh in it, with the options applied."""
    assert job.reread is not None
    found = job.reread(layout)
    return None if found is None else tuple(_apply_options(one, given, roles) for one in found)


def _read_axes(layout: Layout, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        layout.axis_index(name)
    return names
