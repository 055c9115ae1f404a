"""The states of the inputs of ``meshplan lint``: judged, not judged, or without a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import replace

from meshplan.cli._lint_input import LintRequest, NamedInput
from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import InputState, LintInput, join_names
from meshplan.lint._job import Job
from meshplan.lint._rules import list_codes_needing
from meshplan.topology import Cluster, Reading

_MOST_REASONS = 2
_TRAY, _RACK = 4, 72  # GPUs


def list_states(request: LintRequest, fatal: Set[str]) -> tuple[LintInput, ...]:
    """The state of all inputs, those that describe jobs first. Files that were not named are listed
    only if they were judged. ``fatal``: codes of the selected rules whose findings fail the
    command.
    """
    judged = [(one, _judge_jobs(one, fatal)) for one in request.inputs]
    found = [state for one, state in judged if state.state == "judged" or not one.is_found]
    if request.unused is not None:
        found.append(_judge_settings(request.unused))
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
    state: InputState = "not judged" if why else "judged" if one.jobs else "no mesh"
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
    if fatal & {*now} or not fatal & {*then}:
        return ""
    return (
        f"{job.layout}: hosts of {_TRAY} GPUs may be trays of a rack that NVLink joins, and with "
        f"racks of {_RACK} GPUs {join_names(sorted(fatal & {*then}))} applies; pass --domain-size "
        f"{_RACK}, or --domain-size {_TRAY} if NVLink joins the GPUs of a host only"
    )


def _judge_settings(one: NamedInput) -> LintInput:
    meshes = len(one.file.jobs)
    why = "read for its settings only"
    if meshes:
        why += f"; its {meshes} mesh{'es are' if meshes > 1 else ' is'} judged where it is a FILE"
    return LintInput(one.name, "settings", "no mesh", (why,))


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
