"""Fixes of a jagged layout. Each is tried: the linter finds nothing harmful after it.

Nor does any other rule find more than before. Every other mesh is checked, and if a file describes
the job, the changed file is read again. Lines of code come from the table of `_programs`.

Cheapest first: fixes without cost at run time, then changes of the training set-up, then fixes that
leave GPUs idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from meshplan.layout import Layout
from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import Edit, Fix
from meshplan.lint._job import Job
from meshplan.lint._orders import (
    count_domains,
    list_axis_orders,
    list_other_sizes,
    permute_ranks,
    weigh_domains,
)
from meshplan.lint._programs import find_fix, is_reached
from meshplan.lint._reductions import find_gradient_axes, is_uniform
from meshplan.lint._reporters.text import make_diff
from meshplan.lint._spec import format_axes
from meshplan.topology import Cluster, Topology

_MOST_ORDERS = 24  # of reductions
_MOST_SIZES = 2


def find_fixes(facts: JobFacts) -> tuple[Fix, ...]:
    """The changes that make the replicas of this job agree, cheapest first."""
    return tuple(_Search(facts).run())


def make_mesh_fix(job: Job, layout: Layout, what: str, cost: str) -> Fix:
    """A fix by another mesh, with the change of the file if that can express it."""
    mesh, edit, diff = format_axes(layout), None, ""
    if job.rewrite is not None:
        before, after = job.rewrite(job.layout), job.rewrite(layout)
        if after is not None:
            assert before is not None
            edit = Edit(job.source.file, before, after)
            diff = make_diff(edit)
    return Fix(f"{what} --mesh {mesh}", cost, mesh, diff, edit)


class _Search:
    """The changes that are tried for one job."""

    def __init__(self, facts: JobFacts) -> None:
        self.facts = facts
        self.job = facts.job
        self.layout = facts.layout
        self.topology = facts.topology
        self.axes = find_gradient_axes(self.job)
        # The jobs of the file before the change, this one first; and the harmful axes of each.
        self._before = self.job.reread(self.layout) if self.job.reread else None
        self._harm: dict[int, set[tuple[str, ...]]] = {}

    def run(self) -> Iterator[Fix]:
        orders = filter(self._can_be_written, list_axis_orders(self.layout))
        turned = next(filter(self._is_better, orders), None)
        farther = "" if turned is None else self._list_farther(turned)
        if turned is not None and not farther:
            yield make_mesh_fix(
                self.job,
                turned,
                "order the axes as",
                "the groups with most traffic span no more domains",
            )
        yield from self._suggest_reduce_order()
        integration = find_fix(self.job.program, self.job.framework)
        if integration.action:
            yield Fix(integration.action, integration.cost)
        for sized in itertools.islice(
            filter(self._is_better, list_other_sizes(self.layout, self.axes)),
            _MOST_SIZES,
        ):
            unchanged = "memory and traffic of each rank change, the number of GPUs does not"
            yield make_mesh_fix(
                self.job,
                sized,
                "choose other sizes:",
                self._list_farther(sized) or unchanged,
            )
        if turned is not None and farther:
            yield make_mesh_fix(self.job, turned, "order the axes as", farther)
        if turned is not None and not self.job.flattened and not self.job.reduce_order:
            yield from self._suggest_permutation(turned, farther)
        yield from self._suggest_fewer_ranks()

    def _adds_no_finding(self, job: Job, topology: Topology | None = None) -> bool:
        cluster = self.facts.cluster if topology is None else Cluster(topology)
        return JobFacts(job, cluster, is_trial=True).codes <= self.facts.trial.codes

    def _suggest_reduce_order(self) -> Iterator[Fix]:
        job = self.job
        if job.framework != "dtensor" or job.reduce_order or len(self.axes) < 2:
            return
        if not is_reached(job.program):
            return
        names = [self.layout.axes[i] for i in self.axes]
        for order in itertools.islice(itertools.permutations(names), 1, _MOST_ORDERS):
            changed = replace(job, reduce_order=order, rewrite=None)
            if _is_clean(changed, self.topology) and self._adds_no_finding(changed):
                yield Fix(
                    f"reduce {', then '.join(order)} (--reduce-order {','.join(order)}), in one "
                    "redistribution each",
                    f"the number of collectives stays; a reduction over {order[-1]} alone is safe, "
                    "over the others it is not",
                )
                return

    def _suggest_permutation(self, turned: Layout, farther: str) -> Iterator[Fix]:
        if self.job.program not in ("unknown", "torch"):
            return  # the program creates its own mesh
        layout = permute_ranks(self.layout, turned)
        moved = move_job(self.job, layout)
        if not (_is_clean(moved, self.topology) and self._adds_no_finding(moved)):
            return
        sizes = ", ".join(map(str, turned.sizes))
        order = ", ".join(str(turned.axes.index(axis)) for axis in layout.axes)
        ranks = f"torch.arange({layout.world_size}).view({sizes}).permute({order})"
        yield Fix(
            f"keep the mesh and permute its ranks: DeviceMesh(device, {ranks})",
            "never flatten such a mesh: torch sorts the ranks (MP106)"
            + (f"; {farther}" if farther else ""),
        )

    def _suggest_fewer_ranks(self) -> Iterator[Fix]:
        """Use fewer ranks of each node, so that all groups have the same placement."""
        size, world = self.topology.node_map, self.layout.world_size
        domain = self.topology.domain_map if isinstance(self.topology.domain_map, int) else None
        if domain is None and self.topology.domains is not None:
            return
        if not isinstance(size, int) or world <= size or self.layout.ranks != range(world):
            return
        for used in range(size - 1, size // 2, -1):
            if world % used == 0 and self._fits_on(used, size, domain):
                nodes, before = world // used, -(-world // size)
                more = f"{nodes} nodes instead of {before}" if nodes > before else f"{nodes} nodes"
                yield Fix(
                    f"use {used} of the {size} GPUs of each node",
                    f"{more}, {nodes * size - world} of their GPUs idle",
                )
                return

    def _fits_on(self, used: int, size: int, domain: int | None) -> bool:
        """Whether all jobs of the file are clean on ``used`` of the ``size`` GPUs of each node."""
        world = self.layout.world_size
        if domain is None or domain >= used:
            joined = None if domain is None else used
            topology = Topology.uniform(world, node_size=used, domain_size=joined)
        else:
            nodes = [rank // used for rank in range(world)]
            per_node = -(-size // domain)
            domains = [rank // used * per_node + rank % used // domain for rank in range(world)]
            topology = Topology.of(nodes, domains)
        jobs = self._before or (self.job,)
        return self._adds_no_finding(self.job, topology) and all(
            _is_clean(one, topology) for one in jobs if one.layout.world_size == world
        )

    def _can_be_written(self, layout: Layout) -> bool:
        return self.job.rewrite is None or self.job.rewrite(layout) is not None

    def _is_better(self, layout: Layout) -> bool:
        """Whether this mesh is clean, also in its file, and no layer's groups span more domains."""
        roles = self.job.role_of
        return (
            _is_clean(move_job(self.job, layout), self.topology)
            and all(
                roles[a] not in ("model", "experts") for a, *_ in self._find_more_domains(layout)
            )
            and self._is_clean_in_file(layout)
            and self._adds_no_finding(move_job(self.job, layout))
        )

    def _is_clean_in_file(self, layout: Layout) -> bool:
        """Whether the file with this mesh, read again, is clean and no other mesh is worse.

        A file that cannot express the mesh does not matter if the program accepts any mesh.
        """
        if self.job.reread is None:
            return is_reached(self.job.program)
        after, before = self.job.reread(layout), self._before
        if after is None or before is None:
            return self.job.program in ("unknown", "torch")
        if not _is_clean(after[0], self.topology):
            return False
        for i, (old, new) in enumerate(zip(before[1:], after[1:], strict=True)):
            if new.layout == old.layout:
                continue
            if new.layout.world_size != self.topology.world_size:
                return False
            if i not in self._harm:
                self._harm[i] = self._find_harm(old)
            if not self._find_harm(new) <= self._harm[i]:
                return False
        return True

    def _find_harm(self, job: Job) -> set[tuple[str, ...]]:
        return {one.hazard.labels for one in JobFacts(job, Cluster(self.topology)).harmful}

    def _list_farther(self, layout: Layout) -> str:
        """Groups that span more domains than before; empty if busier groups span fewer."""
        if self.topology.domains is None:
            return ""
        before, after = (count_domains(one, self.topology) for one in (self.layout, layout))
        if weigh_domains(move_job(self.job, layout), after) <= weigh_domains(self.job, before):
            return ""
        return ", ".join(
            f"a group over {axis} spans {then} domains instead of {now}"
            for axis, now, then in self._find_more_domains(layout)
        )

    def _find_more_domains(self, layout: Layout) -> list[tuple[str, int, int]]:
        if self.topology.domains is None:
            return []
        before, after = (count_domains(one, self.topology) for one in (self.layout, layout))
        return [(a, before.get(a, 1), n) for a, n in after.items() if n > before.get(a, 1)]


def move_job(job: Job, layout: Layout) -> Job:
    """The same job on another mesh; roles go with their axes."""
    roles = job.role_of
    return replace(
        job,
        layout=layout,
        roles=tuple(roles[axis] for axis in layout.axes),
        rewrite=None,
    )


def _is_clean(job: Job, topology: Topology) -> bool:
    return all(job.layout.ascends(axes) for axes in job.flattened) and is_uniform(job, topology)
