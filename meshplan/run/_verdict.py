"""The verdict on a job, from its report alone, on the terminal and as the page of ``--html``.

"Affected" means that replicas were seen to differ. Everything else that can change bits is a line
of its own: a reason to look closer, and no evidence. The page needs no script and no server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from meshplan._message_text import shorten
from meshplan.lint._drawing import (
    draw_meshes,
    quote,
    write_findings,
    write_page,
    write_table,
)
from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import Finding
from meshplan.lint._programs import FIXES, ProgramFix, find_fix
from meshplan.lint._reporters.text import escape_line
from meshplan.run._ledger import format_ranks, group_by_value
from meshplan.run._report import write_file

MOST_LINES = 20
"""Lines of a verdict, however much the report has: it limits the rows of each kind to these."""
# Each line has an indent.
_MOST = {"rows": 2, "hazards": 2, "meshes": 2, "fixes": 3, "width": 188}
_MOST_ROWS = 200  # of the page

Report = Mapping[str, Any]

# By the cause in the report: what it means, and what to do besides a contract.
_CAUSES = {
    "unequal steps": (
        "ranks that hold the same parameters took different numbers of optimizer steps",
        "skip a step on all ranks or on none: all-reduce the flag that decides it",
    ),
    "order": ("the same summands were added in different orders", ""),
    "not reduced": (
        "no reduction of its size was seen in this step between the ranks that differ",
        "reduce gradients over all of these ranks in each step; between the averages of local SGD "
        "replicas differ by design",
    ),
    "one rank": (
        "one rank holds other bits than all others",
        "run the job again: another step of the same rank points to its hardware, the same step to "
        "the job",
    ),
    "never equal": (
        "the replicas held different values when the first step was compared",
        "start replicas from the same values: one seed on all ranks, or a broadcast from one rank",
    ),
}


def format_verdict(report: Report, saved: str | None = None) -> str:
    """The verdict in at most ``MOST_LINES`` lines; ``saved`` is the name of the report's file."""
    lines = [
        format_head(report),
        *_describe_job(report),
        *_list_findings(report),
    ]
    last = list(_describe_certificate(report.get("certificate")))
    last += [f"report: {saved}"] if saved else []
    room = min(_MOST["fixes"], MOST_LINES - len(lines) - len(last))
    lines += [f"fix: {fix}" for fix in islice(_list_fixes(report), room)]
    lines += last
    text = [shorten(escape_line(line), _MOST["width"]) for line in lines]
    return "[meshplan] " + "\n  ".join(text) + "\n"


def _describe_certificate(found: Report | None) -> Iterator[str]:
    if found is not None:
        rest = "".join(f"; {why}" for why in found["ended"])
        if refused := len(found["not_certified"]):
            rest += f"; not certified: {_count(refused, 'tensor')}"
        links, tensors = (
            _count(found["links"], "link"),
            _count(found["tensors"], "tensor"),
        )
        yield f"certificate: {found['file']}, {links} of {tensors}, the last {found['last']}{rest}"


def find_status(report: Report) -> int:
    """The exit status with ``--strict`` of a job that has ended with 0: 3 if replicas differ or a
    reduction was outside the contract.
    """
    return 3 if _difference(report) or _list_outside(report) else 0


def format_head(report: Report) -> str:
    found, replicas = _difference(report), report["replicas"]
    if found:
        tensor = f"{found['kind']} {found['tensor']}"
        return f"affected: replicas differ, first seen at step {found['step']}: {tensor}"
    if not replicas["compared"]:
        return "not shown to be affected: no replicas were compared"
    compared = _count(replicas["compared"], "comparison")
    return f"not shown to be affected: replicas agreed in {compared} of tensors"


def _describe_job(report: Report) -> Iterator[str]:
    hosts = len(report["hosts"])
    parts = [_count(report["world_size"], "rank") + (f" on {_count(hosts, 'host')}" * bool(hosts))]
    for mesh in report["meshes"][: _MOST["meshes"]]:
        parts.append("mesh " + " x ".join(f"{axis}={n}" for axis, n in mesh["axes"].items()))
    yield f"job: {', '.join(parts)}, backend {report['backend']}, torch {report['torch']}"
    if refused := report.get("refused"):
        yield f"stopped by --require bitwise, first on rank {refused['rank']}: {refused['what']}"
    elif report["error"]:
        yield f"the job failed: {' '.join(report['error'].split())}"


def _list_findings(report: Report) -> Iterator[str]:
    if found := _difference(report):
        yield from _describe_difference(found, _find_cause(report))
    yield f"steps: {_describe_steps(report['steps'])}"
    outside = sorted(_list_outside(report), key=lambda row: -row["calls"])
    if outside:
        more = len(outside) - _MOST["rows"]
        rest = f", {more} of them only in the report" if more > 0 else ""
        yield f"outside the contract: {_count(len(outside), 'call site')}{rest}"
        yield from map(_describe_reduction, outside[: _MOST["rows"]])
    elif report["reductions"]:
        yield "every reduction of floating-point numbers ran under the contract"
    if probes := sorted(report.get("probes", ()), key=lambda row: len(row["contracts"])):
        yield f"probe: {'; '.join(map(_describe_probe, probes))}"
    # Warnings are about time, and in the report.
    hazards = [one for one in report["hazards"] if one["severity"] == "error"]
    for one in hazards[: _MOST["hazards"]]:
        yield f"hazard {one['code']}: {one['text']}"
    if len(hazards) > _MOST["hazards"]:
        codes = sorted({one["code"] for one in hazards[_MOST["hazards"] :]})
        yield f"  and {len(hazards) - _MOST['hazards']} more: {', '.join(codes)}"
    if differing := report["settings_that_differ"]:
        settings = (f"{name}={_list_values(values)}" for name, values in differing.items())
        yield f"settings differ: {'; '.join(settings)}"
    if report["not_observed"]:
        yield f"not observed: {'; '.join(report['not_observed'])}"


def _describe_difference(found: Report, cause: str | None) -> Iterator[str]:
    classes = sorted(found["ranks"]["agree"], key=len, reverse=True)
    parts = [" against ".join(map(format_ranks, classes))]
    if found["elements"] is not None:
        parts.append(f"{found['elements']:,} of {found['of']:,} elements")
    if found["largest"]:
        parts.append(f"largest difference {found['largest']}")
    yield "; ".join(parts)
    yield f"cause: {_CAUSES[cause][0] if cause in _CAUSES else 'unknown'}"
    if sums := found.get("sums"):
        yield f"sums: {_describe_sums(found['step'], sums)}"


def _describe_sums(step: int, sums: Report) -> str:
    if "compared" not in sums:
        return "ranks ended before they answered"
    lost = "".join(f"; {n} not kept: {why}" for why, n in sums["not_kept"].items())
    if not sums["compared"]:
        return f"no all_reduce of step {step} was kept on all ranks{lost}"
    if (call := sums.get("call")) is None:
        kept = f"each kept all_reduce of step {step} ({sums['compared']}) has one result"
        if changed := sums["changed"]:
            return f"{format_ranks(changed)} changed the gradient after its sum: {kept}{lost}"
        # An older difference does not come from the reductions of this step.
        older = "" if 0 < sums["since"] == step - 1 else f", or before step {step}"
        which = "the kept reductions" if lost else "reductions"
        return f"the difference arose outside of {which}{older}: {kept}{lost}"
    what = f"all_reduce {call['number']} of step {step} ({call['op']} of {call['dtype']}"
    what += f"{call['shape']} over {format_ranks(call['ranks'])})"
    if "element" not in sums:
        why = sums.get(
            "failed",
            "a rank has ended, or has dropped its leaves; pass a higher --keep-leaves",
        )
        return f"the results of {what} differ; {why}"
    wrong, expected = sums["wrong"], sums["expected"]
    if len(wrong) == len(call["ranks"]):
        return f"no rank has the sum of the leaves of {what}"
    several = f"{format_ranks(wrong)} {'has a wrong sum' if len(wrong) == 1 else 'have wrong sums'}"
    got = f"{sums['got'][str(wrong[0])]} instead of {expected}"
    return f"{several}: {got} in element {sums['element']} of {what}"


def _describe_steps(steps: Report) -> str:
    ranks = group_by_value({int(rank): number for rank, number in steps["taken"].items()})
    if not ranks:
        return "no optimizer step was seen"
    most_first = {number: ranks[number] for number in sorted(ranks, key=int, reverse=True)}
    taken = _list_values(most_first) if len(ranks) > 1 else f"{min(ranks)} on each rank"
    rest = steps.get("every", 1) > 1 and steps["not_compared"] > 0
    more = " (pass --every 1 to compare more)" * rest
    unequal = ", though these hold the same parameters" if steps.get("unequal") else ""
    return f"{taken}{unequal}; {steps['compared']} compared, {steps['not_compared']} not{more}"


def _list_values(values: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in values.items())


def _describe_reduction(row: Report) -> str:
    what = f"{row['call']} {row['op']} of {row['dtype']} over {row['group'] or 'a group'}"
    ranks, calls = (
        _count(row["group_size"], "rank"),
        _count(row["calls"], "call"),
    )
    return f"  {what} ({ranks}): {calls}, {row['site']}"


def _describe_probe(row: Report) -> str:
    first, *others = row["contracts"] or ["no contract"]
    parts = [f"{first} and {len(others)} more" if others else first]
    parts += ["size changes bits"] * row["size_changes_bits"]
    parts += ["members differ"] * (not row["members_agree"])
    if row["groups"] > 1:
        parts.append(f"siblings {'agree' if row['siblings_agree'] else 'differ'}")
    groups, ranks = (
        _count(row["groups"], "group"),
        _count(row["group_size"], "rank"),
    )
    return f"{row['group']} ({groups} of {ranks}): {', '.join(parts)}"


def _list_fixes(report: Report) -> Iterator[str]:
    """For what stopped the job, for the cause and for the order of additions."""
    if refused := report.get("refused"):
        yield refused["fix"]
    cause = _find_cause(report)
    if cause in _CAUSES and _CAUSES[cause][1]:
        yield _CAUSES[cause][1]
    fix = find_program_fix(report["reductions"])
    # Another layout changes the job: it stands behind what leaves it as it is.
    errors = [one for one in report["hazards"] if one["severity"] == "error"]
    layouts = [f"or {one['fix']}" for one in errors if one["fix"]]
    if cause not in ("never equal", "unequal steps") and _list_outside(report) and fix.action:
        yield "run the same command with --backend meshplan, and compare the two verdicts"
        yield f"then {fix.action} ({fix.cost})"
        yield from layouts[:1]


def _find_cause(report: Report) -> str | None:
    """The cause of the first difference; ``None``: there is no difference, or no evidence."""
    found = _difference(report)
    # What the elements suggest is a guess where ranks are known to have taken other steps.
    if found and report["steps"].get("unequal"):
        return "unequal steps"
    return str(found["cause"]) if found and found["cause"] else None


def find_program_fix(rows: Sequence[Report]) -> ProgramFix:
    """The row of the linter's table for the program that the call sites name."""
    words = {word.lower() for row in rows for word in re.findall(r"[\w-]+", row["site"])}
    frameworks = ("dtensor", "fsdp2", "ddp")
    for program in FIXES:
        if program not in ("unknown", "serving", *frameworks) and program in words:
            return FIXES[program]
    # The backend reaches DTensor too: `install` is for jobs in which nothing else reduces.
    only_dtensor = all("DTensor" in row["site"] for row in rows)
    return find_fix("torch", "dtensor" if only_dtensor else "fsdp2")


def _difference(report: Report) -> Any:
    return report["replicas"]["first_difference"]


def _list_outside(report: Report) -> list[Report]:
    return [row for row in report["reductions"] if not row["contract"]]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def write_verdict(
    path: str,
    report: Report,
    verdict: str,
    facts: Sequence[JobFacts],
    findings: Sequence[Finding],
) -> None:
    """Write the page of a final report; ``OSError`` if the file cannot be written."""
    parts = [_preformat(verdict.removeprefix("[meshplan] "))]
    if picture := draw_meshes(facts, findings, every=True):
        parts.append(f"<h2>Meshes</h2>\n<figure>\n{picture}</figure>\n")
    unseen = "".join(f"<li>{quote(one)}</li>\n" for one in report["not_observed"])
    for title, body in (
        (
            "First difference of replicas",
            _describe_ranks(report["replicas"]),
        ),
        ("Hazards", "".join(write_findings(findings))),
        (
            "Reductions by call site",
            _tabulate_reductions(report["reductions"]),
        ),
        ("Settings", _tabulate_settings(report)),
        ("Not observed", unseen and f"<ul>\n{unseen}</ul>"),
    ):
        parts.append(f"<h2>{title}</h2>\n{body or '<p>none</p>'}\n")
    command = " ".join(report["command"])[:80]
    write_file(path, write_page(f"meshplan run {command}", "".join(parts)))


def _preformat(text: str) -> str:
    return f"<pre>{quote(text, lines=True)}</pre>\n" if text else ""


def _describe_ranks(replicas: Report) -> str:
    found = replicas["first_difference"]
    if found is None:
        return f"<p>none in {replicas['compared']:,} comparisons of tensors</p>"
    return _preformat(found["text"] or "not located: ranks ended before they answered")


def _tabulate_reductions(rows: Sequence[Report]) -> str:
    ordered = sorted(rows, key=lambda row: (row["contract"] is not None, -row["calls"]))
    cells = [
        (
            row["site"],
            f"{row['call']} {row['op'] or ''}",
            row["dtype"],
            f"{row['group'] or 'a group'} ({row['group_size']} ranks)",
            f"{row['calls']:,}",
            f"{row['elements']:,}",
            row["contract"] or row["kind"],
        )
        for row in ordered[:_MOST_ROWS]
    ]
    heads = [
        "call site",
        "reduction",
        "dtype",
        "group",
        "calls",
        "elements",
        "contract",
    ]
    rest = len(rows) - _MOST_ROWS
    more = f"<p>and {rest} more</p>" if rest > 0 else ""
    return (write_table(heads, cells) if cells else "") + more


def _tabulate_settings(report: Report) -> str:
    differing = report["settings_that_differ"]
    rows = [
        (
            name,
            "not set" if value is None else str(value),
            _list_values(differing.get(name, {})),
        )
        for name, value in report["settings"].items()
    ]
    return write_table(("setting", "rank 0", "differs between ranks"), rows)
