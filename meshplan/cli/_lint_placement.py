"""The placement of jobs: by options, files or live ranks, or on every number of nodes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from meshplan._message_text import suggest
from meshplan._needs_torch import import_with_torch
from meshplan.cli._launch import check_timeout
from meshplan.cli._lint_input import LintRequest, NamedInput
from meshplan.cli._options import (
    find_cluster,
    list_placement_options,
    read_inputs,
    read_number,
    require_cluster,
)
from meshplan.errors import MeshplanError, PolicyError, TopologyError
from meshplan.layout import Layout
from meshplan.lint._every_size import judge_every_size
from meshplan.lint._finding import Source, join_names
from meshplan.lint._job import Job, JobFile, Skipped
from meshplan.lint._read_jobs import RankOptions, read_arguments
from meshplan.lint._roles import (
    AXIS_NAMES,
    ROLES,
    Role,
    assume_roles,
    resolve_roles,
)
from meshplan.topology import Cluster, Inputs, read_cluster


def place_jobs(request: LintRequest, given: argparse.Namespace) -> None:
    """Find the cluster of each job: by options, by ``--config``, or by its own file. Placement
    options replace all placement settings of a configuration. Raises MeshplanError if no input can
    be placed.
    """
    config = request.config
    options = read_inputs(given) if list_placement_options(given) else None
    placement = config.read_placement() if options is None and config is not None else options
    request.is_unplaced = placement is None
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
            if not one.is_found:
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
    if live is None and one.file.skipped:
        _judge_every_size(request, given, one, placement, roles)
    for job in (_apply_options(job, given, roles) for job in one.file.jobs):
        if unknown := job.find_unknown_axes():
            skipped = Skipped(job.source, _explain_roles(job, unknown, roles))
            one.file = replace(one.file, skipped=(*one.file.skipped, skipped))
        one.jobs.append((job, live or _find_cluster(job, one.file, placement, request)))
    if live is None and placement is not None:
        for name in placement.files:
            request.read_topology(name)


def _judge_every_size(
    request: LintRequest,
    given: argparse.Namespace,
    one: NamedInput,
    placement: Inputs | None,
    roles: Mapping[str, Role],
) -> None:
    """Read the input for a number of ranks that stands for all, if the number is unknown."""
    own = one.file
    per_node = own.ranks_per_host
    if placement is not None:
        per_node = placement.node_size or placement.domain_size
    if per_node is None or own.hosts or (placement is not None and placement.hosts):
        return

    def read(ranks: int) -> JobFile:
        if one.kind == "arguments":
            return read_arguments(given.arguments, options=RankOptions(ranks))
        return request.reader.read_for(one.name, ranks)

    def read_jobs(ranks: int) -> list[Job]:
        return [_apply_options(job, given, roles) for job in read(ranks).jobs]

    def place(job: Job) -> Cluster:
        return _find_cluster(job, own, placement, request)

    found = judge_every_size(read_jobs, place, per_node)
    if found is not None:
        file = read(found.nodes * per_node)
        jobs = (
            replace(job, roles=job.given, every_size=found.note, is_open=found.is_open)
            for job in file.jobs
        )
        one.file = replace(own, jobs=tuple(jobs), skipped=file.skipped)


def _prefer_file(
    file: JobFile, placement: Inputs | None, options: RankOptions
) -> tuple[Inputs | None, str]:
    """The placement with the numbers that the file itself has, and what contradicts them."""
    placement = placement or Inputs()
    hosts = placement.hosts[0] if len(placement.hosts) == 1 else None
    others = []
    if "hosts" in file.stated and hosts not in (None, file.hosts):
        others.append(f"--hosts {hosts}")
    if "ranks_per_host" in file.stated and placement.node_size not in (
        None,
        file.ranks_per_host,
    ):
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
    words = {
        "hosts": "hosts",
        "ranks_per_host": "ranks on each host",
        "world_size": "ranks",
    }
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
