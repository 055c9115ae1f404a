"""MP101 and MP102: groups that are placed on nodes or domains in different ways."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshplan._message_text import elide, format_first
from meshplan.lint._finding import Finding, join_names
from meshplan.lint._programs import find_fix, is_reached
from meshplan.lint._rules._rule import Rule, rule

if TYPE_CHECKING:
    from meshplan.lint._facts import JaggedReduction, JobFacts
    from meshplan.planner import Hazard

_MOST_SIGNATURES = 6
_MOST_LISTED = 1000  # ranks or signatures, in the data for programs


@rule(
    "mesh",
    "MP101",
    "jagged-reduction",
    "error",
    "Groups that must agree are placed on nodes in different ways; replicas may differ.",
    needs="nodes",
)
def _check_jagged(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    for jagged in facts.harmful:
        yield _report_jagged(rule, facts, jagged)


def _report_jagged(rule: Rule, facts: JobFacts, jagged: JaggedReduction) -> Finding:
    hazard, unit = jagged.hazard, "domain" if jagged.islands else "node"
    placement = facts.find_placement(hazard.axes, islands=jagged.islands)
    details = [
        f"in {jagged.reductions.what}",
        *([facts.job.every_size] if facts.job.every_size else []),
        _describe_signatures(placement.signatures, unit),
    ]
    simulated: dict[str, float] = {}
    if jagged.islands:
        details.append("the same on nodes; the order inside a node of several domains is unknown")
    else:
        details += [
            f"{_name_channel(hazard)}, ranks {format_first(one.ranks)} "
            f"{_format_signature(one.signature)}: {elide(one.expression)}"
            for one in hazard.examples
        ]
        simulated = {str(name): share for name, share in facts.simulate(hazard).items()}
    what = jagged.reductions.what.partition(":")[0]
    scalar = what in ("the gradient norm", "the loss")
    shares = ", ".join(
        f"{name} {share:.0%} of {'draws' if scalar else 'elements'} differ"
        if share
        else f"{name} none differ"
        for name, share in simulated.items()
    )
    if shares:
        details.append(f"simulated, 1 channel, float32: {shares}")
    details.append(f"order undocumented under {', '.join(hazard.unknown)}")
    if not is_reached(facts.job.program):
        fix = find_fix(facts.job.program)
        remedy = {
            "backend": "they pass torch's process groups, and not DTensor",
            "plugin": "only its plugin reaches them",
        }.get(fix.way, "only another mesh or launch changes how they are placed")
        details.append(f"{fix.name} issues these reductions itself: {remedy}")
    return rule.make_mesh_finding(
        facts,
        f"replicas may differ{f' in {what}' * scalar}: the {hazard.groups} groups of "
        f"{hazard.group_size} ranks over {join_names(hazard.labels)} are placed on "
        f"{unit}s in {placement.ways} different ways, but their results must be "
        f"identical across {join_names(hazard.along)}",
        *details,
        fixes=facts.fixes,
        severity="warning" if facts.job.is_open else rule.severity,
        axes=list(hazard.labels),
        along=list(hazard.along),
        groups=hazard.groups,
        group_size=hazard.group_size,
        siblings=hazard.siblings,
        signatures=_list_signatures(placement.signatures, unit),
        orders=dict(hazard.classes),
        examples=[] if jagged.islands else _list_examples(hazard),
        simulated_share=simulated,
    )


@rule(
    "mesh",
    "MP102",
    "jagged-not-shown-to-differ",
    "info",
    "Groups of an axis are placed on nodes in different ways; replicas are not shown to differ.",
    needs="nodes",
)
def _check_not_shown(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    for jagged in facts.harmful:
        order = facts.find_safe_order(jagged)
        if order:
            yield rule.make_mesh_finding(
                facts,
                f"replicas are not shown to differ if {order[0]} is reduced first: "
                f"{', then '.join(order)}; they may differ if it is reduced last, or by itself",
                axes=list(jagged.hazard.labels),
                order=list(order),
            )
    harmful = {jagged.hazard.axes for jagged in facts.harmful}
    for axes in dict.fromkeys(step for r in facts.reductions for step in r.steps):
        placement = facts.find_placement(axes)
        if axes in harmful or placement.ways == 1:
            continue
        names = facts.name_axes(axes)
        yield rule.make_mesh_finding(
            facts,
            f"groups over {join_names(names)} are placed on nodes in {placement.ways} different "
            f"ways; replicas are not shown to differ: {_explain_agreement(facts, axes)}",
            _describe_signatures(placement.signatures, "node"),
            axes=list(names),
            signatures=_list_signatures(placement.signatures, "node"),
        )


def _explain_agreement(facts: JobFacts, axes: tuple[int, ...]) -> str:
    if math.prod(facts.layout.sizes[i] for i in axes) == 2:
        return "a sum of two does not depend on its order"
    # Siblings must agree, and no channel of the model has them add in different orders.
    if any(axes in r.steps and axes in facts.find_hazards(r) for r in facts.reductions):
        return "siblings have equal rings and equal trees, of both kinds, in the model"
    if all(facts.job.roles[i] == "model" for i in axes):
        return "no two of the groups add the same activations"
    return "no two groups that add the same values must agree"


def _name_channel(hazard: Hazard) -> str:
    """``tree``, or ``tree of channel 3``."""
    return (
        f"{hazard.algorithm} of channel {hazard.channel}"
        if hazard.channel
        else f"{hazard.algorithm}"
    )


def _list_examples(hazard: Hazard) -> list[dict[str, Any]]:
    """For programs: whole, unless that is megabytes."""
    return [
        {
            "ranks": list(one.ranks[:_MOST_LISTED]),
            "signature": list(one.signature[:_MOST_LISTED]),
            "algorithm": hazard.algorithm,
            "channel": hazard.channel,
            "order": one.expression if len(one.ranks) <= _MOST_LISTED else elide(one.expression),
        }
        for one in hazard.examples
    ]


def _list_signatures(
    signatures: Sequence[tuple[tuple[int, ...], int]], unit: str
) -> list[dict[str, list[int] | int]]:
    return [
        {f"ranks_per_{unit}": list(signature[:_MOST_LISTED]), "groups": count}
        for signature, count in signatures[:_MOST_LISTED]
    ]


def _describe_signatures(signatures: Sequence[tuple[tuple[int, ...], int]], unit: str) -> str:
    parts = [
        f"{_format_signature(signature)} in {count} group{'s' if count > 1 else ''}"
        for signature, count in signatures[:_MOST_SIGNATURES]
    ]
    rest = len(signatures) - len(parts)
    more = f"; {rest} more" if rest else ""
    return f"ranks per {unit}, in rank order: {'; '.join(parts)}{more}"


def _format_signature(signature: Sequence[int]) -> str:
    return elide(f"({', '.join(map(str, signature))})")
