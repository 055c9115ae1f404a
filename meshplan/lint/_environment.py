"""Rules about the environment: variables of NCCL that do nothing, contradict, or break a job.

What a variable does is said as of NCCL's sources: ``tuning.cc`` and ``connect.cc`` in ``src/graph``
of 2.30, and ``src/tuning/cost_model.cc`` of 2.31.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshplan.lint._environment_lists import list_findings
from meshplan.lint._finding import Finding, Source
from meshplan.lint._job import Job
from meshplan.lint._nccl_environment import NcclEnvironment, NcclVersion
from meshplan.lint._nccl_variables import near_variable
from meshplan.topology._nccl_algo import runnable

__all__ = ["NO_AGREEMENT", "check_environment"]

# Said once, with the first finding.
NO_AGREEMENT = (
    "no variable of NCCL makes groups agree that lie differently on nodes: they fix how one group "
    "adds, whatever the size of the message"
)
_NO_SUCH = {
    "NCCL_P2P_NET_DISABLE": "NCCL has no such variable, only RCCL has RCCL_P2P_NET_DISABLE",
    "NCCL_DETERMINISTIC": "NCCL has no such variable; what pins its order is NCCL_ALGO, NCCL_PROTO "
    "and the number of channels",
}
_NUMBERS = (
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_NTHREADS",
)


def check_environment(
    environ: Mapping[str, str],
    *,
    nccl_version: NcclVersion | None,
    driver: str | None,
    jobs: Sequence[Job],
) -> tuple[Finding, ...]:
    """What is wrong with the environment of a job.

    Args:
        environ: variables by name; only those of NCCL are looked at.
        nccl_version: e.g. (2, 30, 7); ``None`` if not known: then a finding says of which versions
            it holds.
        driver: version of NVIDIA's driver, e.g. ``550.90.07``; ``None`` if not known.
        jobs: those that run in it.

    Returns:
        Findings MP301 to MP305, in this order.
    """
    values = {
        name: value for name, value in sorted(environ.items()) if name.startswith("NCCL_") and value
    }
    known = NcclEnvironment(values, nccl_version)
    found = [
        *_without_effect(known),
        *_misspelt(known),
        *_affected_driver(known, driver),
        *list_findings(known, jobs),
        *_channels(known),
    ]
    found.sort(key=lambda finding: finding.code)
    if found:
        found[0] = replace(found[0], details=(*found[0].details, NO_AGREEMENT))
    return tuple(found)


def _without_effect(known: NcclEnvironment) -> Iterator[Finding]:
    for name, why in _NO_SUCH.items():
        if name in known.values:
            message = f" has no effect: {why}; take it out"
            yield known.finding("MP301", "warning", (name,), message)
    for name in _NUMBERS:
        if name in known.values and not known.is_number(name):
            message = f" is not a whole number, and NCCL reads {known.number(name)}; write a number"
            yield known.finding("MP301", "warning", (name,), message)
    threads = known.number("NCCL_NTHREADS")
    if threads is not None and known.is_number("NCCL_NTHREADS"):
        instead = _threads_instead(threads)
        if instead:
            message = (
                f" has no effect: a number of threads is a multiple of 32 from 64 to 512, and NCCL "
                f"takes {instead}; take it out or write NCCL_NTHREADS=64"
            )
            yield known.finding("MP301", "warning", ("NCCL_NTHREADS",), message)
    if "NCCL_SOCKET_NTHREADS" in known.values:
        message = (
            " has no effect on the order of additions: it sets how many CPU threads serve a TCP "
            "connection"
        )
        yield known.finding("MP301", "info", ("NCCL_SOCKET_NTHREADS",), message)
    if known.values.get("NCCL_LAUNCH_MODE", "PARALLEL").upper() != "PARALLEL":
        message = (
            " has no effect where each process has one GPU, and none on the order of additions: it "
            "is deprecated since NCCL 2.9; take it out"
        )
        yield known.finding("MP301", "warning", ("NCCL_LAUNCH_MODE",), message)


def _threads_instead(threads: int) -> str:
    """What NCCL takes for a number of threads that it does not accept; empty if it does."""
    if threads <= 0:
        return "its default"
    if threads % 32:
        return "its maximum, 512"
    return "512" if threads > 512 else "64" if threads < 64 else ""


def _misspelt(known: NcclEnvironment) -> Iterator[Finding]:
    for name in known.values:
        near = None if name in _NO_SUCH else near_variable(name)
        if near:
            message = f" has no effect: NCCL has no such variable; did you mean {near}?"
            yield known.finding("MP301", "warning", (name,), message, meant=near)


def _affected_driver(known: NcclEnvironment, driver: str | None) -> Iterator[Finding]:
    """Reductions in the switches of Hopper hosts, NVIDIA/nccl#2360 and #1497."""
    algorithms, protocols = known.choice("NCCL_ALGO"), known.choice("NCCL_PROTO")
    in_switch = any(
        runnable(one, algorithms, protocols) & {"NVLS", "NVLSTree"}
        for one in ("AllReduce", "ReduceScatter")
    )
    if known.number("NCCL_NVLS_ENABLE") == 0 or not in_switch or known.since(2, 17) is False:
        return
    parts = re.fullmatch(r"\s*(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?\s*", driver or "")
    listed = known.values.get("NCCL_ALGO", "").lower()
    asked = known.number("NCCL_NVLS_ENABLE") or ("nvls" in listed and "^" not in listed)
    cure = (
        "set NCCL_NVLS_ENABLE=0, or use driver and fabric manager 550.144.03 or later of 550, or "
        "570 or newer"
    )
    what = (
        "NVSwitch reductions (NVLS) are on, and their order depends on what was allocated before "
        "and differs between hosts"
    )
    softened = (
        "; NCCL 2.27 and later add in float32 there, which makes it rarer"
        if known.since(2, 27) is not False
        else ""
    )
    names = ("NCCL_NVLS_ENABLE", "NCCL_ALGO")
    source = Source(option=known.shown(*names) or "NCCL_NVLS_ENABLE")
    if parts is None:
        if asked:
            message = f"{what} with drivers before 550.144.03 and 551 to 569; this one is not known"
            message += f"{softened}; {cure}"
            yield Finding("MP302", "info", message, source)
        return
    version = tuple(int(part or 0) for part in parts.groups())
    if (550, 144, 3) <= version < (551,) or version >= (570,):
        return
    message = f"{what} with driver {driver.strip() if driver else ''}{softened}; {cure}"
    yield Finding("MP302", "warning", message, source, data={"driver": (driver or "").strip()})


def _channels(known: NcclEnvironment) -> Iterator[Finding]:
    bounds = {}
    for bound in ("MIN", "MAX"):
        old, channels, ctas = (f"NCCL_{bound}_{unit}" for unit in ("NRINGS", "NCHANNELS", "CTAS"))
        if old in known.values and channels in known.values:
            message = f" has no effect beside {known.shown(channels)}; take it out"
            yield known.finding("MP301", "warning", (old,), message)
        name = channels if channels in known.values else old
        given = {one: known.number(one) for one in (name, ctas) if one in known.values}
        if len(set(given.values())) > 1:
            wins = "larger" if bound == "MIN" else "smaller"
            message = f" are two names of one number, and the {wins} wins; set one of them"
            yield known.finding("MP305", "warning", (name, ctas), message)
        numbers = [number for number in given.values() if number is not None]
        if numbers:
            bounds[bound] = (max if bound == "MIN" else min)(numbers), tuple(given)
    if len(bounds) == 2 and bounds["MIN"][0] > max(bounds["MAX"][0], 1):
        message = (
            f" contradict: at least {bounds['MIN'][0]} channels and at most {bounds['MAX'][0]}; "
            "write the same number in both to pin it"
        )
        yield known.finding("MP305", "error", bounds["MIN"][1] + bounds["MAX"][1], message)
