"""Rules about ``NCCL_ALGO`` and ``NCCL_PROTO``: MP303, MP304, and MP305 where they contradict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from meshplan.errors import PolicyError
from meshplan.lint._finding import Finding
from meshplan.lint._job import Job
from meshplan.lint._nccl_environment import NcclEnvironment
from meshplan.topology._nccl_algo import ALGORITHMS, COLLECTIVES, PROTOCOLS, parse_choice, runnable

__all__ = ["list_findings"]

_LISTS: tuple[Literal["NCCL_ALGO", "NCCL_PROTO"], ...] = ("NCCL_ALGO", "NCCL_PROTO")
_SWITCHES = {
    "NCCL_NVLS_ENABLE": frozenset({"NVLS", "NVLSTree"}),
    "NCCL_COLLNET_ENABLE": frozenset({"CollNetDirect", "CollNetChain"}),
}


def list_findings(known: NcclEnvironment, jobs: Sequence[Job]) -> Iterator[Finding]:
    """Findings about the two lists, alone, with each other, and with what the jobs do."""
    wrong = False
    for name in _LISTS:
        for finding in _not_read(known, name):
            wrong = True
            yield finding
    if wrong or not any(name in known.values for name in _LISTS):
        return
    yield from _without_algorithm(known)
    yield from _switched_off(known)
    yield from _unnamed(known)
    yield from _not_for_reduce_scatter(known, jobs)


def _not_read(
    known: NcclEnvironment, name: Literal["NCCL_ALGO", "NCCL_PROTO"]
) -> Iterator[Finding]:
    try:
        choice = parse_choice(
            known.values.get(name, ""), ALGORITHMS if name == "NCCL_ALGO" else PROTOCOLS
        )
    except PolicyError as error:
        message = f" cannot be read: {error.args[0]}"
        yield known.finding("MP305", "error", (name,), message)
        return
    if choice.per_collective and known.since(2, 24) is False:
        message = (
            f" is not understood by NCCL {known.version_text}, which knows lists for single "
            "collectives since 2.24: nothing in it is one of its words; write one list for all"
        )
        yield known.finding("MP305", "error", (name,), message)


def _without_algorithm(known: NcclEnvironment) -> Iterator[Finding]:
    """Older versions fall back to Ring; newer ones fail."""
    if known.since(2, 24) is False:
        return
    algorithms, protocols = (known.choice(name) for name in _LISTS)
    left = [one for one in COLLECTIVES if not runnable(one, algorithms, protocols)]
    if not left:
        return
    when = "" if known.since(2, 24) else ", if NCCL is 2.24 or newer (it is not known)"
    advice = "allow ring too, e.g. NCCL_ALGO=ring,tree"
    if "Simple" not in protocols.allowed[left[0]] and algorithms.allowed[left[0]]:
        advice = "only tree and ring can do without NCCL_PROTO=Simple"
    message = f": {_listed(left)} {_has(left)} no algorithm left and {_fails(left)}{when}; {advice}"
    severity: Literal["error", "warning"] = "error" if known.since(2, 24) else "warning"
    yield known.finding("MP305", severity, _set(known), message, collectives=left)


def _switched_off(known: NcclEnvironment) -> Iterator[Finding]:
    algorithms, protocols = (known.choice(name) for name in _LISTS)
    for switch, gone in _SWITCHES.items():
        if known.number(switch) != 0 or not known.is_number(switch):
            continue
        for one in ("AllReduce", "ReduceScatter"):
            possible = runnable(one, algorithms, protocols)
            if possible and possible <= gone:
                message = (
                    f" contradict: {_listed(sorted(possible))} alone may run {one}, and "
                    f"{switch}=0 takes {'it' if len(possible) == 1 else 'them'} away; take one out"
                )
                yield known.finding("MP305", "error", ("NCCL_ALGO", switch), message)
                break


def _unnamed(known: NcclEnvironment) -> Iterator[Finding]:
    """NCCL 2.31 allows no algorithm for what a list leaves out, as soon as another list names it.

    Its table starts from zeros when ``NCCL_ALGO`` is set, and is used for each collective that any
    list names; before 2.31 it started from ones. vllm-project/vllm#58179.
    """
    algorithms, protocols = (known.choice(name) for name in _LISTS)
    unnamed = [one for one in COLLECTIVES if one not in algorithms.named]
    newer = known.since(2, 31)
    if not algorithms.named or not unnamed or newer is False:
        return
    forced = [one for one in unnamed if one in protocols.named]
    value = known.values["NCCL_ALGO"]
    cure = f"write NCCL_ALGO='ring,tree;{' '.join(value.split())[:60]}'"
    if forced:
        names = _LISTS
        what = f": {_listed(forced)} {_has(forced)} no algorithm left and {_fails(forced)}"
    else:
        names = _LISTS[:1]
        what = (
            f": {_listed(unnamed)} {_has(unnamed)} no algorithm, and {_fails(unnamed)} as soon as "
            "NCCL_PROTO is set for all"
        )
    when = (
        f" with NCCL {known.version_text}"
        if newer
        else ", if NCCL is 2.31 or newer (it is not known)"
    )
    severity: Literal["error", "warning"] = "error" if newer and forced else "warning"
    message = f"{what}{when}; {cure}"
    yield known.finding("MP303", severity, names, message, collectives=forced or unnamed)


def _not_for_reduce_scatter(known: NcclEnvironment, jobs: Sequence[Job]) -> Iterator[Finding]:
    """A profile that pins all-reduce says nothing of reduce-scatter, which runs other code."""
    algorithms, protocols = (known.choice(name) for name in _LISTS)
    if "AllReduce" not in algorithms.named or known.since(2, 24) is False:
        return
    fails = not runnable("ReduceScatter", algorithms, protocols)
    fails |= bool(known.since(2, 31)) and "ReduceScatter" in protocols.named - algorithms.named
    if not fails and "ReduceScatter" in algorithms.named:
        return
    what = (
        ": reduce-scatter has no algorithm left"
        if fails
        else ": all-reduce is pinned, and how reduce-scatter adds is left to NCCL"
    )
    cure = "pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'"
    seen = set()
    for job in jobs:
        why = _scattered(job)
        if not why or (job.layout, why) in seen:
            continue
        seen.add((job.layout, why))
        finding = known.finding(
            "MP304", "error", _set(known), f"{what}, but {why} of {job.layout} need it; {cure}"
        )
        yield Finding(
            finding.code,
            finding.severity,
            finding.message,
            finding.source,
            subject=str(job.layout),
            data={**finding.data, "job": str(job.source)},
        )


def _scattered(job: Job) -> str:
    """What the job reduce-scatters, and along which axes; empty if nothing."""
    axes = list(zip(job.layout.axes, job.layout.sizes, job.roles, strict=True))
    shards = [axis for axis, size, role in axes if role == "shard" and size > 1]
    models = [axis for axis, size, role in axes if role == "model" and size > 1]
    parts = []
    if job.framework == "fsdp2" and shards:
        parts.append(f"gradients along {' and '.join(shards)}")
    if job.sequence_parallel and models:
        parts.append(f"activations along {' and '.join(models)}")
    return " and ".join(parts)


def _set(known: NcclEnvironment) -> tuple[str, ...]:
    return tuple(name for name in _LISTS if name in known.values)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _fails(names: Sequence[str]) -> str:
    return "fails" if len(names) == 1 else "fail"
