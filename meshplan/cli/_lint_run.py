"""The run of ``meshplan lint``: placement of jobs, states of inputs, findings, and their output."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshplan._message_text import suggest
from meshplan._needs_torch import import_with_torch
from meshplan.cli._lint_input import (
    FileReader,
    LintRequest,
    NamedInput,
    read_ranks,
    read_request,
)
from meshplan.cli._options import (
    check_timeout,
    complain,
    count_hosts,
    find_cluster,
    list_placement_options,
    read_inputs,
    read_number,
    refuse,
    require_cluster,
    save,
    write,
)
from meshplan.errors import MeshplanError, PolicyError, TopologyError
from meshplan.layout import Layout
from meshplan.lint._facts import (
    JobFacts,
    check_environment,
    check_facts,
    sort_findings,
)
from meshplan.lint._finding import (
    SEVERITIES,
    Edit,
    Fix,
    InputState,
    LintInput,
    LintReport,
    Source,
    join_names,
)
from meshplan.lint._job import Job, JobFile, Settings
from meshplan.lint._read_jobs import RankOptions
from meshplan.lint._reductions import is_uniform
from meshplan.lint._reporters import render, wants_color
from meshplan.lint._reporters.text import format_fix, format_source, make_diff
from meshplan.lint._roles import (
    ROLE_OF,
    ROLES,
    Role,
    assume_roles,
)
from meshplan.lint._rules._rule import RULES, list_codes_needing
from meshplan.lint._rules.cluster import CONTRADICTION, NOT_JUDGED
from meshplan.lint._select import Selection, remove_ignored
from meshplan.topology import Cluster, Inputs, Reading, read_cluster


@dataclass(frozen=True, slots=True)
class _Run:
    report: LintReport
    facts: Sequence[JobFacts]
    settings: Settings
    level: int  # index of the lowest severity that fails

    def find_status(self, *, exit_zero: bool) -> int:
        fails = any(SEVERITIES.index(one.severity) >= self.level for one in self.report.findings)
        fails |= bool(self.report.list_inputs("not judged")) and not self.report.allow_unjudged
        return 1 if fails and not exit_zero else 0


def run_lint(given: argparse.Namespace) -> int:
    """Lint the inputs of the command and write the report; the exit status."""
    if given.write and not given.fix:
        raise PolicyError("--write needs --fix; add it, or leave out --write")
    if given.write and "-" in given.files:
        raise PolicyError("--write changes files, and - is standard input; leave out --write")
    if given.stdin_filename is not None and "-" not in given.files:
        raise PolicyError("--stdin-filename needs the file -, which is standard input; add -")
    reader = FileReader(read_ranks(given))
    run = _lint(given, reader)
    short = "concise" if run.report.is_quiet else "text"
    output_format = given.output_format or run.settings.output_format or short
    if given.fix and not given.write and output_format not in ("text", "concise"):
        raise PolicyError(
            f"--fix prints a diff, so --output-format {output_format} cannot apply; leave out one "
            "of them, or add --write"
        )
    # All ranks of a live job have the same findings, and rank 0 reports them.
    is_first = not given.live or os.environ.get("RANK") == "0"
    if given.write and is_first:
        run, changes = _fix(given, reader, run)
        for edit, titles in changes:
            edit.write()
            complain(f"meshplan: {Source(edit.file)}: changed; {'; '.join(titles)}\n")
    errors = {str(error): error for error in reader.errors.values()}
    if is_first:
        for error in errors.values():
            refuse(error)
        if given.html is not None:
            # Imported here: few commands draw.
            from meshplan.lint._drawing import write_report

            save(given.html, write_report(run.report, run.facts))
        if given.fix and not given.write:
            _write_diffs(given, reader, run)
        else:
            # A closed stream is None.
            is_shown = given.output_file is None and sys.stdout is not None
            color = is_shown and wants_color(sys.stdout, os.environ)
            write(given.output_file, render(run.report, output_format, color=color))
    return 2 if errors else run.find_status(exit_zero=given.exit_zero)


def _lint(given: argparse.Namespace, reader: FileReader) -> _Run:
    reader.errors.clear()
    request = read_request(given, reader)
    place_jobs(request, given)
    settings = request.settings
    # Options override the settings: --select replaces them, the others add to them.
    kept = Settings() if given.select else settings
    selection = Selection.of(
        given.select or settings.select,
        (*kept.extend_select, *given.extend_select),
        (*kept.ignore, *given.ignore),
    )
    level = SEVERITIES.index(given.fail_level or settings.fail_level or "error")
    severe = [one.code for one in RULES.values() if SEVERITIES.index(one.severity) >= level]
    inputs = list_states(request, {*filter(selection.wants, severe)})
    facts = [JobFacts(job, cluster) for job, cluster in request.jobs]
    report = _report(given, request, facts, selection, inputs)
    return _Run(report, facts, settings, level)


def _fix(
    given: argparse.Namespace, reader: FileReader, run: _Run
) -> tuple[_Run, Iterable[tuple[Edit, list[str]]]]:
    """Change the texts of the reader until no finding has a fix that is a change of a file. A fix
    is tried with the other meshes of its file as they are, so each round makes one change of each
    file and lints again. Returns the last run, and the change of each file with titles of fixes.
    """
    changes: dict[str, tuple[Edit, list[str]]] = {}
    seen: set[tuple[str, str]] = set()
    while True:
        chosen: dict[str, tuple[str, Edit]] = {}
        for finding in run.report.findings:
            fix = next(filter(_changes_file, finding.fixes), None)
            if fix and fix.edit and (fix.edit.file, fix.edit.after) not in seen:
                chosen.setdefault(fix.edit.file, (fix.title, fix.edit))
        if not chosen:
            return run, changes.values()
        for file, (title, edit) in chosen.items():
            seen.add((file, edit.after))
            first, titles = changes.get(file, (edit, []))
            changes[file] = replace(first, after=edit.after), [*titles, title]
            reader.replace(file, edit.after)
        run = _lint(given, reader)


def _changes_file(fix: Fix) -> bool:
    """Whether a fix changes a file, and not standard input without a name."""
    return fix.edit is not None and fix.edit.file != "-"


def _report(
    given: argparse.Namespace,
    request: LintRequest,
    facts: Sequence[JobFacts],
    selection: Selection,
    inputs: tuple[LintInput, ...],
) -> LintReport:
    found = list(check_facts(facts))
    environ = read_variables(given.env, {} if given.no_env else os.environ)
    version = None if given.nccl_version is None else find_nccl_version(given.nccl_version)
    driver = find_driver_version(given.driver)
    # Finding the installed NCCL takes a while, and often there is nothing to check.
    if version is None and (driver or any(name.startswith("NCCL_") for name in environ)):
        version = find_nccl_version(None)
    found += check_environment(
        environ,
        nccl_version=version,
        driver=driver,
        jobs=[one.job for one in facts],
    )
    for one in (one for one in request.inputs if not one.is_found):
        found += [
            NOT_JUDGED.make_finding(f"not judged: {two.why}", two.source)
            for two in one.file.skipped
        ]
        if one.contradiction:
            found.append(CONTRADICTION.make_finding(one.contradiction, Source(one.name)))
    kept, ignored, unused = remove_ignored(found, request.reader.comments)
    wanted = [
        finding
        for finding in (*kept, *unused)
        if selection.wants(finding.code) and not (finding.severity == "info" and request.is_quiet)
    ]
    placed = [
        (
            one.job.source,
            "; ".join(filter(None, (f"{one.layout} on {one.topology}", one.job.every_size))),
        )
        for one in facts
        if one.topology.known and not one.job.find_unknown_axes()
    ]
    notes = tuple(dict.fromkeys(one for one in placed if one[1].endswith(_NOT_READ)))
    about = [f"{source}: {text}" for source, text in placed]
    single = [source for one in request.inputs for source in one.file.one_axis]
    about += [
        f"{source}: one axis; no hazard for any number of ranks: no other group must agree"
        for source in single
    ]
    return LintReport(
        sort_findings(wanted),
        tuple(dict.fromkeys(about)),
        ignored,
        inputs,
        given.allow_unjudged,
        files=sum(one.kind == "file" for one in request.inputs),
        meshes=len(facts) + len(single),
        notes=() if request.is_quiet else notes,
        is_quiet=request.is_quiet,
        unlisted=_describe_unlisted(request),
    )


def _describe_unlisted(request: LintRequest) -> str:
    count = sum(one.is_found and bool(one.file.skipped) for one in request.inputs)
    remedy = "--strict lists them"
    remedy += ", --node-size 8 places the ranks" * request.is_unplaced
    return f"{count} file{'s' * (count > 1)} not judged ({remedy})" if count else ""


def _write_diffs(given: argparse.Namespace, reader: FileReader, run: _Run) -> None:
    complain(render(run.report, "concise"))
    _, changes = _fix(given, reader, run)
    seen = set()
    for finding in run.report.findings:
        # Two findings are often about one mesh, and one change fixes both.
        if finding.fixes and (finding.source, finding.subject) not in seen:
            seen.add((finding.source, finding.subject))
            if not any(map(_changes_file, finding.fixes)):
                where = format_source(finding.source)
                fix = next(
                    (fix for fix in finding.fixes if fix.mesh),
                    finding.fixes[0],
                )
                complain(f"meshplan: {where}: no change of a file; {format_fix(fix)}\n")
    write(given.output_file, "".join(make_diff(edit) for edit, _ in changes))


# The placement of the jobs of each input, and with that its state.

_MOST_REASONS = 2
_TRAY, _RACK = 4, 72  # GPUs
# Common hosts. A mesh without a hazard on any needs no description of its hosts.
_USUAL = (
    Inputs(node_size=8),
    Inputs(node_size=_TRAY),
    Inputs(node_size=_TRAY, domain_size=_RACK),
)
_NOT_READ = f"of {_TRAY} or in racks of {_RACK}; their size was not read"


def place_jobs(request: LintRequest, given: argparse.Namespace) -> None:
    """Find the cluster of each job: by options, by ``--config``, or by its own file. Placement
    options replace all placement settings of a configuration.
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
            first = next((job.source for job in one.file.jobs), Source(one.name))
            one.jobs.clear()
            one.skip(first, str(error.args[0]))
    errors = list(request.reader.errors.values())
    unread = sum(one.name in request.reader.errors or bool(one.jobs) for one in request.inputs)
    if errors and not request.jobs and (unread == 1 or len({*map(str, errors)}) == 1):
        raise errors[0]


def _place_jobs(
    request: LintRequest,
    given: argparse.Namespace,
    one: NamedInput,
    placement: Inputs | None,
    roles: Mapping[str, Role],
    live: Cluster | None,
) -> None:
    apply = partial(_apply_options, given=given, roles=roles)
    if one.file.jobs:
        own, one.contradiction = _prefer_file(one, placement, request.reader.ranks)
        placement = own if live is None else None
    has_nodes = live or placement or one.file.hosts or one.file.ranks_per_host
    is_guess = one.kind == "file" and not has_nodes
    if live is None and one.file.skipped:
        _judge_every_size(request, one, _USUAL if is_guess else (placement,), apply)
    for job in map(apply, one.file.jobs):
        if unknown := job.find_unknown_axes():
            one.skip(job.source, _explain_roles(job, unknown, roles))
        usual = _find_usual(job) if is_guess and not unknown else None
        if usual is not None:
            note = f"{job.every_size or 'no hazard on nodes of 8'}, {_NOT_READ}"
            job = replace(job, roles=job.given, every_size=note)
        cluster = live or usual or _find_cluster(job, one.file, placement, request)
        one.jobs.append((job, cluster))
    if live is None and placement is not None:
        for name in placement.files:
            request.read_topology(name)


def _find_usual(job: Job) -> Cluster | None:
    """Nodes of 8, for a job without a size of nodes that has no hazard on usual ones."""
    ranks = job.layout.highest_rank + 1
    if find_cluster(Inputs(), ranks) is not None:
        return None  # the environment has a number
    found = [require_cluster(read_cluster(one, ranks, {})) for one in _USUAL]
    return found[0] if all(is_uniform(job, one.topology) for one in found) else None


def _judge_every_size(
    request: LintRequest,
    one: NamedInput,
    # Several are guesses, and no hazard on any is judged.
    placements: Sequence[Inputs | None],
    apply: Callable[[Job], Job],  # the options
) -> None:
    """Read the input for a number of ranks that stands for all, if the number is unknown."""
    own = one.file

    def read(ranks: int) -> JobFile:
        return request.reader.read_for(one, ranks, node_size)

    def read_jobs(ranks: int) -> list[Job]:
        return [*map(apply, read(ranks).jobs)]

    from meshplan.lint._every_size import judge_every_size

    judged = []
    for placement in placements:
        per_node = node_size = own.ranks_per_host
        if placement is not None:
            node_size = placement.node_size
            per_node = node_size or placement.domain_size
        if per_node is None or own.hosts or (placement is not None and placement.hosts):
            return
        place = partial(_find_cluster, file=own, placement=placement, request=request)
        found = judge_every_size(read_jobs, place, per_node)
        if found is None or (len(placements) > 1 and found.is_hazard):
            return
        judged.append((found, per_node))
    found, per_node = judged[0]
    node_size = node_size and per_node
    file = read(found.nodes * per_node)
    jobs = (
        replace(
            job,
            roles=job.given,
            every_size=found.note,
            is_open=found.is_open,
        )
        for job in file.jobs
    )
    one.file = replace(own, jobs=tuple(jobs), skipped=file.skipped)


def _prefer_file(
    one: NamedInput,
    placement: Inputs | None,
    options: RankOptions,
) -> tuple[Inputs | None, str]:
    """The placement with the numbers that the input itself has, and what contradicts them. These
    are the numbers of its launch, and the ranks of sizes that leave no axis open.
    """
    file, stated = one.file, one.file.stated
    placement = placement or Inputs()
    hosts, node_size = count_hosts(placement)
    listed = f"--hosts {','.join(map(str, placement.hosts))}"
    sized = f"--node-size {placement.node_size}" if placement.node_size else listed
    own, others = [], []
    for key, words, number, option in (
        ("hosts", "hosts", hosts, listed),
        ("ranks_per_host", "ranks on each host", node_size, sized),
        ("world_size", "ranks", None, ""),
    ):
        if key in stated:
            own.append(f"{getattr(file, key)} {words}")
            others += [option] * (number not in (None, getattr(file, key)))
    several = len(placement.files) > 1
    size = options.world_size or (hosts * node_size if hosts and node_size else None)
    ranks = file.world_size if "world_size" in stated else options.count_ranks(file)
    if ranks is None and not options.world_size:
        ranks = size  # of a configuration
    if not others and size not in (None, ranks):
        others.append(f"{size} ranks")
    # Hosts for a mesh of the user's own are compared with it where its ranks are placed.
    is_own = one.kind == "mesh" or file.settings is not None
    sizes: set[int] = set()
    if ranks and "world_size" not in stated and not (is_own and placement.hosts):
        # An engine, or a mesh that Python makes, may have some ranks of its job.
        counts = [(job.layout.highest_rank + 1, job.has_all_ranks) for job in file.jobs]
        sizes = {n for n, is_whole in counts if n > ranks or (n < ranks and is_whole)}
    if sizes:
        own.append(f"sizes of {join_names([str(n) for n in sorted(sizes)])} ranks")
        others = others or [f"{size} ranks" if size else sized]
    per_host = file.ranks_per_host if "ranks_per_host" in stated else node_size
    why = ""
    if others:
        has = "have" if one.kind == "arguments" else "has"
        why = f"the {one.kind} {has} {join_names(own)}, but the options have "
        why += join_names([*dict.fromkeys(others)])
        known = () if per_host and not several else placement.hosts
        if "hosts" in stated:
            # Its hosts may be of several descriptions, or have other ranks than the sizes need.
            if (several and listed in others) or (sizes and node_size):
                raise TopologyError(f"{why}; correct one of them")
            known = placement.hosts if several or file.hosts is None else (file.hosts,)
        placement = replace(placement, hosts=known, node_size=per_host or None)
        why += f"; the numbers of the {one.kind} are used"
    elif per_host and len(placement.hosts) == 1:
        placement = replace(placement, node_size=per_host)
    return placement if placement != Inputs() else None, why


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
    # A guess: two axes without a role are often replicas, then shards.
    guesses = ["replicate"] * (len(axes) - 1) + ["shard"]
    line = ", ".join(f'{axis} = "{role}"' for axis, role in zip(axes, guesses, strict=True))
    # A spelling mistake in the mesh, or in the roles of the configuration.
    hints = dict.fromkeys(suggest(axis, [*roles, *ROLE_OF], 0.75) for axis in axes)
    return (
        f"the use of {join_names(axes)} in {job.layout} is not visible and the "
        f"name{'s are' if len(axes) > 1 else ' is'} unknown{''.join(hints)}; add to meshplan.toml: "
        f"roles = {{ {line} }} (each {', '.join(ROLES[:-1])} or {ROLES[-1]})"
    )


def _apply_options(job: Job, given: argparse.Namespace, roles: Mapping[str, Role]) -> Job:
    layout = job.layout
    changes: dict[str, Any] = {}
    if any(axis in roles for axis in layout.axes):
        pairs = zip(layout.axes, job.given, strict=True)
        changes["roles"] = tuple(roles.get(axis, role) for axis, role in pairs)
    if given.framework:
        stated = changes.get("roles", job.given)
        changes["roles"] = assume_roles(layout.axes, stated, given.framework)
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
    if changes and (read := job.reread):

        def reread(layout: Layout) -> tuple[Job, ...] | None:
            return tuple(_apply_options(one, given, roles) for one in read(layout) or ()) or None

        changes["reread"] = reread
    return replace(job, **{"roles": job.given, **changes})


def _read_axes(layout: Layout, text: str) -> tuple[str, ...]:
    return tuple(layout.axes[layout.axis_index(name.strip())] for name in text.split(","))


def list_states(request: LintRequest, fatal: Set[str]) -> tuple[LintInput, ...]:
    """The state of all inputs, those that describe jobs first. Files that were not named are listed
    only if they were judged. ``fatal``: codes whose findings fail the command.
    """
    judged = [(one, _judge_jobs(one, fatal)) for one in request.inputs]
    found = [state for one, state in judged if state.state == "judged" or not one.is_found]
    if (config := request.unused) is not None:
        why = "read for its settings only"
        why += "; pass it as a FILE to judge its meshes" * bool(config.file.jobs)
        found.append(LintInput(config.name, "settings", "no mesh", (why,)))
    # Slurm's blocks have no GPUs; they place ranks together with the node list of a job.
    joined = all(cluster.topology.domains is not None for _, cluster in request.jobs)
    found += [
        _judge_topology(name, reading, bool(request.jobs), bool(reading.blocks) and joined)
        for name, reading in request.topologies.items()
    ]
    return tuple(found)


def _judge_jobs(one: NamedInput, fatal: Set[str]) -> LintInput:
    why = []
    for skipped in one.file.skipped:
        line = skipped.source.line
        why.append(skipped.why if line is None else f"line {line}: {skipped.why}")
    why += filter(
        None,
        (_explain_incomplete(job, cluster, fatal) for job, cluster in one.jobs),
    )
    is_judged = one.jobs or one.file.one_axis
    state: InputState = "not judged" if why else "judged" if is_judged else "no mesh"
    return LintInput(one.name, one.kind, state, tuple(dict.fromkeys(why)))


def _explain_incomplete(job: Job, cluster: Cluster, fatal: Set[str]) -> str:
    """Why the verdict on a mesh is incomplete; empty if it is not."""
    if job.is_open:
        return f"{job.layout}: {job.every_size}; pass --hosts"
    if not cluster.topology.known:
        return f"{job.layout}: the node of each rank is unknown"
    rules = [code for code in list_codes_needing("domains") if code in fatal]
    if cluster.topology.domains is None and rules:
        return (
            f"{job.layout}: {' and '.join(rules)} need the NVLink domain of each rank, which is "
            "unknown; pass --domain-size"
        )
    return _explain_tray(job, cluster, fatal) if cluster.topology.domains is None else ""


def _explain_tray(job: Job, cluster: Cluster, fatal: Set[str]) -> str:
    """Why hosts of 4 GPUs leave a verdict open: as trays of a rack they would have findings.

    GB200 and GB300 racks have 18 such trays, which NVLink joins to one node.
    """
    nodes = cluster.topology.node_map
    counts = {nodes} if isinstance(nodes, int) else {*Counter(nodes).values()}
    if counts != {_TRAY} or job.layout.highest_rank < _TRAY:
        return ""
    now = JobFacts(job, cluster, is_trial=True).codes
    trays = _RACK // _TRAY
    racks = _RACK if isinstance(nodes, int) else tuple(node // trays for node in nodes or ())
    topology = replace(cluster.topology, node_map=racks, domain_map=racks)
    then = JobFacts(job, replace(cluster, topology=topology), is_trial=True).codes
    if fatal & now.keys() or not fatal & then.keys():
        return ""
    return (
        f"{job.layout}: hosts of {_TRAY} GPUs may be trays of a rack that NVLink joins, and with "
        f"racks of {_RACK} GPUs {join_names(sorted(fatal & {*then}))} applies; pass --domain-size "
        f"{_RACK}, or --domain-size {_TRAY} if NVLink joins the GPUs of a host only"
    )


def _judge_topology(name: str, reading: Reading, has_jobs: bool, joined: bool) -> LintInput:
    # A description of all ranks or hosts is usable if it has the nodes: truncated lines about rings
    # do not matter. A truncated table of one host may lack GPUs. A complete one may lack domains,
    # as a list of links does: `_explain_incomplete` checks the rules that need them.
    whole = reading.complete if reading.scope == "host" else reading.nodes is not None
    if not (whole or joined):
        notes = [note for note in reading.notes if note.code == "MP202"] or list(reading.notes)
        first, *more = [*map(str, notes[:_MOST_REASONS]), ""]
        what = f"{reading.kind} that does not report the placement of all GPUs or ranks"
        why = (f"{what}: {first}" if first else what, *filter(None, more))
        return LintInput(name, "topology", "not judged", why)
    if not has_jobs:
        return LintInput(name, "topology", "no mesh", ("no mesh was placed on it",))
    return LintInput(name, "topology", "judged")


# Variables and versions of NCCL and of the driver for a job on this machine.

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,6}))?(?:[-+.].{0,40})?", re.ASCII)


def read_variables(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    found = dict(environ)
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise PolicyError(f"--env: use KEY=VALUE, such as NCCL_ALGO=Ring, got {text[:60]!r}")
        found[key.strip()] = value
    return found


def find_nccl_version(given: str | None) -> tuple[int, int, int] | None:
    """The given version (``PolicyError`` if it is not one), else that of the NCCL of pip."""
    if given is not None:
        return _read_version(given, "--nccl-version", "2.30.7")
    from importlib import metadata

    for name in _PACKAGES:
        try:
            return _read_version(metadata.version(name), name, "2.30.7")
        except metadata.PackageNotFoundError:
            continue
    return None


def find_driver_version(given: str | None) -> str | None:
    """The given version (``PolicyError`` if it is not one), else that of the running driver."""
    # The kernel module writes "NVRM version: ... Kernel Module  550.54.15  ..." to its file in
    # /proc.
    if given is not None:
        _read_version(given, "--driver", "550.54.15")
        return given
    try:
        match = re.search(
            r"Kernel Module.{0,80}?\b(\d{3,4}\.\d+(?:\.\d+)?)",
            _DRIVER.read_text(),
        )
    except OSError:
        return None
    return match[1] if match else None


def _read_version(text: str, what: str, example: str) -> tuple[int, int, int]:
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise PolicyError(f"{what}: use a version such as {example}, got {text[:40]!r}")
    return int(match[1]), int(match[2]), int(match[3] or 0)
