"""MP301 to MP305: variables of NCCL that do nothing, contradict each other, or break a job.

Sources: NCCL, ``tuning.cc`` and ``connect.cc`` in ``src/graph`` of 2.30, and
``src/tuning/cost_model.cc`` of 2.31.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from meshplan._message_text import find_near, shorten
from meshplan.errors import PolicyError
from meshplan.lint._finding import Finding, Severity, Source, join_names
from meshplan.lint._rules._rule import Rule, rule
from meshplan.topology._nccl_algo import (
    ALGORITHMS,
    COLLECTIVES,
    PROTOCOLS,
    NcclChoice,
    list_allowed_algorithms,
    parse_choice,
)

if TYPE_CHECKING:
    from meshplan.lint._job import Job

NcclVersion = tuple[int, int, int]
LISTS = ("NCCL_ALGO", "NCCL_PROTO")
# A number as strtoll parses it with base 0: the rest of the text is ignored.
_NUMBER = re.compile(r"\s*([+-]?(?:0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18}))")
# Of plugins for networks, tuners and profilers, which have names of their own.
_PLUGINS = (
    "GPUDIRECTTCPX_",
    "FASTRAK_",
    "DXS_",
    "IBEXT_",
    "SHARP_",
    "INSPECTOR_",
    "TUNER_",
)
# Expected names that no measure of similarity finds.
_EXPECTED = {
    "ALGORITHM": "ALGO",
    "PROTOCOL": "PROTO",
    "NVLS": "NVLS_ENABLE",
    "COLLNET": "COLLNET_ENABLE",
    "CHANNELS": "MAX_NCHANNELS",
    "THREADS": "NTHREADS",
}


@dataclass(frozen=True)
class NcclEnvironment:
    """The variables that are set and not empty, and the versions that read them."""

    values: Mapping[str, str]  # by name; NCCL treats an empty one as not set
    version: NcclVersion | None  # of NCCL; ``None`` if unknown
    driver: str | None = None  # version of NVIDIA's driver; ``None`` if unknown
    jobs: Sequence[Job] = ()  # those that run with the variables

    def is_at_least(self, *version: int) -> bool | None:
        """Whether NCCL is of this version or newer; ``None`` if unknown."""
        return None if self.version is None else self.version >= version

    @property
    def version_text(self) -> str:
        """``2.31.2``, or that it is unknown."""
        if self.version is None:
            return "of an unknown version"
        return ".".join(map(str, self.version))

    def read_number(self, name: str) -> int | None:
        """The number that NCCL reads; 0 for text, ``None`` if it is not set."""
        value = self.values.get(name)
        if value is None:
            return None
        found = _NUMBER.match(value)
        if found is None:
            return 0
        digits = found[1].lower()
        octal = re.fullmatch(r"[+-]?0[0-7]+", digits)
        return int(digits, 16 if "0x" in digits else 8 if octal else 10)

    def is_number(self, name: str) -> bool:
        """Whether all of the value is a number."""
        found = _NUMBER.match(self.values.get(name, ""))
        return found is not None and not self.values[name][found.end() :].strip()

    def format_variables(self, *names: str) -> str:
        """``NCCL_ALGO=ring`` for each that is set, shortened, on one line."""
        parts = []
        for name in names:
            if name in self.values:
                value = " ".join(self.values[name].split())
                parts.append(f"{name}={shorten(value)}")
        return " and ".join(parts)

    @property
    def lists(self) -> tuple[str, ...]:
        """Those of ``NCCL_ALGO`` and ``NCCL_PROTO`` that are set."""
        return tuple(name for name in LISTS if name in self.values)

    @cached_property
    def _read_lists(self) -> list[tuple[NcclChoice, str]]:
        """The choices of each list, and why NCCL cannot read it; all choices if it cannot."""
        found = []
        for name, elements in zip(LISTS, (ALGORITHMS, PROTOCOLS), strict=True):
            choice, why = parse_choice("", elements), ""
            try:
                choice = parse_choice(self.values.get(name, ""), elements)
            except PolicyError as error:
                why = f" cannot be read: {error.args[0]}"
            if choice.per_collective and self.is_at_least(2, 24) is False:
                why = (
                    f" is not valid for NCCL {self.version_text}: lists for single "
                    "collectives need NCCL 2.24; use one list for all collectives"
                )
            found.append((choice, why))
        return found

    @property
    def choices(self) -> tuple[NcclChoice, NcclChoice]:
        """The algorithms and the protocols that the lists allow; all if one is not set."""
        (algorithms, _), (protocols, _) = self._read_lists
        return algorithms, protocols

    @property
    def unread_lists(self) -> dict[str, str]:
        """The lists that NCCL cannot read, and why."""
        return {name: why for name, (_, why) in zip(LISTS, self._read_lists, strict=True) if why}

    @property
    def lists_are_read(self) -> bool:
        """Whether a list is set, and NCCL can read those that are."""
        return bool(self.lists) and not self.unread_lists


def find_near_variable(name: str) -> str | None:
    """The variable that a misspelt ``NCCL_...`` probably means; ``None`` if it may be right."""
    from importlib.resources import files

    # From NCCL_PARAM and getenv in the sources and plugins of NCCL 2.3 to 2.31 and from the user
    # guide of 2.30, with the variables that PyTorch, installers and containers read.
    known = files("meshplan.lint").joinpath("nccl_variables.txt").read_text("utf-8").split()
    bare = name.removeprefix("NCCL_")
    if bare in known or bare.startswith(_PLUGINS) or len(bare) > 60:
        return None
    near = find_near(bare, known, cutoff=0.85)
    found = _EXPECTED.get(bare) or (near[0] if near else "")
    return f"NCCL_{found}" if found else None


_NO_SUCH = {
    "NCCL_P2P_NET_DISABLE": "NCCL has no such variable, only RCCL has RCCL_P2P_NET_DISABLE",
    "NCCL_DETERMINISTIC": "NCCL has no such variable; NCCL_ALGO, NCCL_PROTO and the number of "
    "channels pin its order",
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
_SWITCHES = {
    "NCCL_NVLS_ENABLE": {"NVLS", "NVLSTree"},
    "NCCL_COLLNET_ENABLE": {"CollNetDirect", "CollNetChain"},
}


@rule(
    "environment",
    "MP301",
    "no-effect",
    "warning",
    "A variable is set that does not have the intended effect.",
)
def _check_no_effect(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    values, number = nccl.values, nccl.read_number
    found = [(name, f"{why}; remove it") for name, why in _NO_SUCH.items() if name in values]
    threads = number("NCCL_NTHREADS") if nccl.is_number("NCCL_NTHREADS") else None
    if threads is not None and (instead := _replace_threads(threads)):
        why = f"a number of threads is a multiple of 32 from 64 to 512, and NCCL uses {instead}"
        found.append(("NCCL_NTHREADS", f"{why}; remove it or use NCCL_NTHREADS=64"))
    for name, why in found:
        yield rule.make_variable_finding(nccl, (name,), f" has no effect: {why}")
    for name in _NUMBERS:
        if name in values and not nccl.is_number(name):
            message = f" is not an integer, and NCCL reads {number(name)}; use an integer"
            yield rule.make_variable_finding(nccl, (name,), message)
    if "NCCL_SOCKET_NTHREADS" in values:
        message = (
            " has no effect on the order of additions: it sets how many CPU threads serve a TCP "
            "connection"
        )
        yield rule.make_variable_finding(nccl, ("NCCL_SOCKET_NTHREADS",), message, severity="info")
    if values.get("NCCL_LAUNCH_MODE", "PARALLEL").upper() != "PARALLEL":
        message = (
            " has no effect where each process has one GPU, and none on the order of additions: it "
            "is deprecated since NCCL 2.9; remove it"
        )
        yield rule.make_variable_finding(nccl, ("NCCL_LAUNCH_MODE",), message)
    for name in values:
        if name not in _NO_SUCH and (near := find_near_variable(name)):
            message = f" has no effect: NCCL has no such variable; did you mean {near}?"
            yield rule.make_variable_finding(nccl, (name,), message, meant=near)
    for bound in ("MIN", "MAX"):
        old, channels = (f"NCCL_{bound}_{unit}" for unit in ("NRINGS", "NCHANNELS"))
        if old in values and channels in values:
            message = f" has no effect together with {nccl.format_variables(channels)}; remove it"
            yield rule.make_variable_finding(nccl, (old,), message)


def _replace_threads(threads: int) -> str:
    """The number of threads that NCCL uses in place of an invalid one; empty for a valid one."""
    if threads <= 0:
        return "its default"
    if threads % 32:
        return "its maximum, 512"
    return "512" if threads > 512 else "64" if threads < 64 else ""


@rule(
    "environment",
    "MP302",
    "nvls-driver",
    "warning",
    "NVLS may add in another order from run to run with this driver.",
)
def _check_nvls_driver(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    algorithms, protocols = nccl.choices
    in_switch = any(
        list_allowed_algorithms(one, algorithms, protocols) & {"NVLS", "NVLSTree"}
        for one in ("AllReduce", "ReduceScatter")
    )
    if (
        nccl.read_number("NCCL_NVLS_ENABLE") == 0
        or not in_switch
        or nccl.is_at_least(2, 17) is False
    ):
        return
    driver = (nccl.driver or "").strip()
    parts = re.fullmatch(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", driver)
    version = tuple(int(part or 0) for part in parts.groups()) if parts else (0,)
    listed = nccl.values.get("NCCL_ALGO", "").lower()
    requested = nccl.read_number("NCCL_NVLS_ENABLE") or ("nvls" in listed and "^" not in listed)
    if (550, 144, 3) <= version < (551,) or version >= (570,) or not (parts or requested):
        return
    known = f"with driver {driver}"
    if not parts:
        known = "with drivers before 550.144.03 and 551 to 569; this driver is unknown"
    softened = (
        "; NCCL 2.27 and later add in float32 there, which makes it rarer"
        if nccl.is_at_least(2, 27) is not False
        else ""
    )
    yield rule.make_finding(
        "NVSwitch reductions (NVLS) are on, and their order depends on what was allocated before "
        f"and differs between hosts {known}{softened}; set NCCL_NVLS_ENABLE=0, or use driver and "
        "fabric manager 550.144.03 or later of 550, or 570 or newer",
        Source(option=nccl.format_variables("NCCL_NVLS_ENABLE", "NCCL_ALGO") or "NCCL_NVLS_ENABLE"),
        severity=rule.severity if parts else "info",
        data={"driver": driver} if parts else {},
    )


@rule(
    "environment",
    "MP303",
    "allreduce-only",
    "warning",
    "NCCL_ALGO names all-reduce only; NCCL 2.31 leaves the others without an algorithm.",
)
def _check_allreduce_only(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    if not nccl.lists_are_read:
        return
    algorithms, protocols = nccl.choices
    unnamed = [one for one in COLLECTIVES if one not in algorithms.named]
    newer = nccl.is_at_least(2, 31)
    if not algorithms.named or not unnamed or newer is False:
        return
    forced = [one for one in unnamed if one in protocols.named]
    value = " ".join(nccl.values["NCCL_ALGO"].split())[:60]
    what = _describe_failure(forced) if forced else _describe_failure(unnamed, "")
    if not forced:
        what += " as soon as NCCL_PROTO is set for all"
    when = (
        f" with NCCL {nccl.version_text}"
        if newer
        else ", if NCCL is 2.31 or newer (its version is unknown)"
    )
    yield rule.make_variable_finding(
        nccl,
        LISTS if forced else LISTS[:1],
        f"{what}{when}; use NCCL_ALGO='ring,tree;{value}'",
        severity="error" if newer and forced else "warning",
        collectives=forced or unnamed,
    )


def _describe_failure(collectives: Sequence[str], left: str = " left and") -> str:
    """``: AllGather has no algorithm left and fails``."""
    has, fails = ("has", "fails") if len(collectives) == 1 else ("have", "fail")
    return f": {join_names(collectives)} {has} no algorithm{left or ', and'} {fails}"


@rule(
    "environment",
    "MP304",
    "reduce-scatter-unpinned",
    "error",
    "The order of all-reduces is pinned, the order of reduce-scatters is not.",
)
def _check_reduce_scatter(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    if not nccl.lists_are_read:
        return
    algorithms, protocols = nccl.choices
    if "AllReduce" not in algorithms.named or nccl.is_at_least(2, 24) is False:
        return
    fails = not list_allowed_algorithms("ReduceScatter", algorithms, protocols)
    fails |= bool(nccl.is_at_least(2, 31)) and "ReduceScatter" in protocols.named - algorithms.named
    if not fails and "ReduceScatter" in algorithms.named:
        return
    what = (
        ": reduce-scatter has no algorithm left"
        if fails
        else ": all-reduce is pinned, and NCCL chooses the algorithm of reduce-scatter"
    )
    remedy = "pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'"
    seen = set()
    for job in nccl.jobs:
        why = _describe_scattered(job)
        if not why or (job.layout, why) in seen:
            continue
        seen.add((job.layout, why))
        message = f"{what}, but {why} of {job.layout} need it; {remedy}"
        finding = rule.make_variable_finding(
            nccl,
            nccl.lists,
            message,
            job=str(job.source),
        )
        yield replace(finding, subject=str(job.layout))


def _describe_scattered(job: Job) -> str:
    """The tensors that the job reduce-scatters, and their axes; empty if there are none."""
    axes = list(zip(job.layout.axes, job.layout.sizes, job.roles, strict=True))
    shards = [axis for axis, size, role in axes if role == "shard" and size > 1]
    models = [axis for axis, size, role in axes if role == "model" and size > 1]
    parts = []
    if job.framework == "fsdp2" and shards:
        parts.append(f"gradients along {' and '.join(shards)}")
    if job.sequence_parallel and models:
        parts.append(f"activations along {' and '.join(models)}")
    return " and ".join(parts)


@rule(
    "environment",
    "MP305",
    "conflicting-variables",
    "error",
    "Variables contradict each other.",
)
def _check_conflicts(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    for name, message in nccl.unread_lists.items():
        yield rule.make_variable_finding(nccl, (name,), message)
    if nccl.lists_are_read:
        yield from _check_algorithms_left(rule, nccl)
        yield from _check_switches(rule, nccl)
    yield from _check_channels(rule, nccl)


def _check_algorithms_left(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    """Older versions fall back to Ring; newer ones fail."""
    if nccl.is_at_least(2, 24) is False:
        return
    algorithms, protocols = nccl.choices
    left = [one for one in COLLECTIVES if not list_allowed_algorithms(one, algorithms, protocols)]
    if not left:
        return
    when = "" if nccl.is_at_least(2, 24) else ", if NCCL is 2.24 or newer (its version is unknown)"
    advice = "allow ring too, e.g. NCCL_ALGO=ring,tree"
    if "Simple" not in protocols.allowed[left[0]] and algorithms.allowed[left[0]]:
        advice = "only tree and ring can do without NCCL_PROTO=Simple"
    message = f"{_describe_failure(left)}{when}; {advice}"
    severity: Severity = "error" if nccl.is_at_least(2, 24) else "warning"
    yield rule.make_variable_finding(nccl, nccl.lists, message, severity=severity, collectives=left)


def _check_switches(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    algorithms, protocols = nccl.choices
    for switch, gone in _SWITCHES.items():
        if nccl.read_number(switch) != 0 or not nccl.is_number(switch):
            continue
        for one in ("AllReduce", "ReduceScatter"):
            possible = list_allowed_algorithms(one, algorithms, protocols)
            if possible and possible <= gone:
                message = (
                    f" contradict: {join_names(sorted(possible))} alone may run {one}, "
                    f"and {switch}=0 disables {'it' if len(possible) == 1 else 'them'}; "
                    "remove one of them"
                )
                yield rule.make_variable_finding(nccl, ("NCCL_ALGO", switch), message)
                break


def _check_channels(rule: Rule, nccl: NcclEnvironment) -> Iterator[Finding]:
    bounds = {}
    for bound in ("MIN", "MAX"):
        old, channels, ctas = (f"NCCL_{bound}_{unit}" for unit in ("NRINGS", "NCHANNELS", "CTAS"))
        name = channels if channels in nccl.values else old
        given = {one: nccl.read_number(one) for one in (name, ctas) if one in nccl.values}
        if len(set(given.values())) > 1:
            wins = "larger" if bound == "MIN" else "smaller"
            message = f" are two names of one number, and the {wins} wins; set one of them"
            yield rule.make_variable_finding(nccl, (name, ctas), message, severity="warning")
        numbers = [number for number in given.values() if number is not None]
        if numbers:
            bounds[bound] = (
                (max if bound == "MIN" else min)(numbers),
                tuple(given),
            )
    if len(bounds) == 2 and bounds["MIN"][0] > max(bounds["MAX"][0], 1):
        message = (
            f" contradict: at least {bounds['MIN'][0]} channels and at most {bounds['MAX'][0]}; "
            "use the same number in both to pin it"
        )
        yield rule.make_variable_finding(nccl, bounds["MIN"][1] + bounds["MAX"][1], message)
