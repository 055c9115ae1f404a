"""Fixes: each is tried here once more."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from expecttest import TestCase

from meshplan.layout import Layout
from meshplan.lint._facts import JobFacts, check_facts
from meshplan.lint._finding import Fix, Source
from meshplan.lint._fixes import make_mesh_fix
from meshplan.lint._job import Job
from meshplan.lint._spec import parse_mesh
from meshplan.topology import Cluster, Topology
from tests.jobs import job, layout


def fixes(mesh: str, node: int, domain: int | None = None, **options: object) -> list[str]:
    one = job(mesh, **options)
    topology = Topology.uniform(one.layout.world_size, node_size=node, domain_size=domain)
    return [f"{fix.title} ({fix.cost})" for fix in JobFacts(one, Cluster(topology)).fixes]


class TestText(TestCase):
    def test_fixes_of_the_jagged_mesh_are_listed(self) -> None:
        self.assertExpectedInline(
            "\n".join(fixes("ddp=8,fsdp=5,tp=1", 8, 8)),
            """\
if torch.distributed issues these reductions: call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order; not for vLLM, SGLang or Horovod, which bypass it)
choose other sizes: --mesh ddp=10,fsdp=4,tp=1 (memory and traffic of each rank change, the number of GPUs does not)
choose other sizes: --mesh ddp=5,fsdp=8,tp=1 (memory and traffic of each rank change, the number of GPUs does not)
order the axes as --mesh fsdp=5,ddp=8,tp=1 (a group over fsdp spans 5 domains instead of 2)
keep the mesh and permute its ranks: DeviceMesh(device, torch.arange(40).view(5, 8, 1).permute(1, 0, 2)) (never flatten such a mesh: torch sorts the ranks (MP106); a group over fsdp spans 5 domains instead of 2)
use 5 of the 8 GPUs of each node (8 nodes instead of 5, 24 of their GPUs idle)""",
        )

    def test_order_of_reductions_is_proposed(self) -> None:
        self.assertExpectedInline(
            "\n".join(fixes("ddp=4,fsdp=12", 8, 8)),
            """\
reduce fsdp, then ddp (--reduce-order fsdp,ddp), in one redistribution each (the number of collectives stays; a reduction over ddp alone is safe, over the others it is not)
if torch.distributed issues these reductions: call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order; not for vLLM, SGLang or Horovod, which bypass it)
choose other sizes: --mesh ddp=3,fsdp=16 (memory and traffic of each rank change, the number of GPUs does not)
choose other sizes: --mesh ddp=6,fsdp=8 (memory and traffic of each rank change, the number of GPUs does not)
order the axes as --mesh fsdp=12,ddp=4 (a group over fsdp spans 6 domains instead of 2)
keep the mesh and permute its ranks: DeviceMesh(device, torch.arange(48).view(12, 4).permute(1, 0)) (never flatten such a mesh: torch sorts the ranks (MP106); a group over fsdp spans 6 domains instead of 2)
use 6 of the 8 GPUs of each node (8 nodes instead of 6, 16 of their GPUs idle)""",
        )

    def test_model_axes_stay_together(self) -> None:
        self.assertExpectedInline(
            "\n".join(fixes("tp=4,dp=6", 8, 8)),
            """\
order the axes as --mesh dp=6,tp=4 (the groups with most traffic span no more domains)
if torch.distributed issues these reductions: call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order; not for vLLM, SGLang or Horovod, which bypass it)
keep the mesh and permute its ranks: DeviceMesh(device, torch.arange(24).view(6, 4).permute(1, 0)) (never flatten such a mesh: torch sorts the ranks (MP106))
use 6 of the 8 GPUs of each node (4 nodes instead of 3, 8 of their GPUs idle)""",
        )

    def test_file_fix_has_a_diff(self) -> None:
        one = replace(
            job("a=2,b=3"),
            source=Source("job.toml", 2),
            rewrite=lambda other: (
                "x = 1\n"
                + "".join(f"{a} = {s}\n" for a, s in zip(other.axes, other.sizes, strict=True))
            ),
        )
        self.assertExpectedInline(
            make_mesh_fix(one, layout("a=3,b=2"), "use", "").diff,
            """\
--- a/job.toml
+++ b/job.toml
@@ -1,3 +1,3 @@
 x = 1
-a = 2
-b = 3
+a = 3
+b = 2
""",
        )


def test_inexpressible_fix_is_not_proposed() -> None:
    def sizes_alone(other: Layout) -> str | None:
        return str(other.sizes) if other.axes == ("ddp", "fsdp") else None

    one = Job(layout("ddp=8,fsdp=5"), Source("job.toml", 1), rewrite=sizes_alone)
    topology = Topology.uniform(40, node_size=8, domain_size=8)
    found = JobFacts(one, Cluster(topology)).fixes
    assert [fix.mesh for fix in found if fix.mesh] == ["ddp=10,fsdp=4", "ddp=5,fsdp=8"]
    assert all(fix.diff.startswith("--- a/job.toml\n") for fix in found if fix.mesh)


def test_experts_stay_together() -> None:
    orders = [fix for fix in fixes("ddp=2,fsdp=4,ep=5", 8, 8) if fix.startswith("order the axes")]
    assert [fix.partition(" (")[0] for fix in orders] == [
        "order the axes as --mesh fsdp=4,ep=5,ddp=2"  # and not ddp=2,ep=5,fsdp=4
    ]


AXES = ("dp", "ddp", "fsdp", "tp", "ep", "pp")


def draw_case(random: Random) -> tuple[Job, Cluster]:
    names = random.sample(AXES, k=random.choice((2, 2, 3)))
    sizes = [random.choice((1, 2, 3, 4, 5, 6, 8, 9, 12, 16)) for _ in names]
    mesh = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    options: dict[str, object] = {"framework": random.choice(("dtensor", "fsdp2", "ddp"))}
    if random.random() < 0.15:
        options["flattened"] = (tuple(names[:2]),)
    one = job(mesh, **options)
    node = random.choice((4, 6, 8, 8, 12, 36, 72))
    domain = random.choice((None, node, node, node // 2))
    world = one.layout.world_size
    topology = Topology.uniform(world, node_size=node, domain_size=domain)
    return one, Cluster(topology, domain_gpus=domain)


def count_codes(one: Job, cluster: Cluster) -> Counter[str]:
    found = check_facts([JobFacts(one, cluster)])
    return Counter(finding.code for finding in found if finding.severity != "info")


def apply_fix(one: Job, cluster: Cluster, fix: Fix) -> tuple[Job, Cluster] | None:
    """The job and its cluster with the change; ``None`` for lines of code."""
    if fix.mesh:
        roles = dict(zip(one.layout.axes, one.roles, strict=True))
        layout = parse_mesh(fix.mesh)
        changed = tuple(roles[axis] for axis in layout.axes)
        return replace(one, layout=layout, roles=changed), cluster
    if order := re.search(r"--reduce-order ([\w,]+)", fix.title):
        return replace(one, reduce_order=tuple(order[1].split(","))), cluster
    if used := re.match(r"use (\d+) of the \d+ GPUs", fix.title):
        size, world = int(used[1]), one.layout.world_size
        domain = cluster.domain_gpus
        if domain is None or domain >= size:
            return one, Cluster(
                Topology.uniform(world, node_size=size, domain_size=domain and size)
            )
        nodes = [rank // size for rank in range(world)]
        domains = [(rank // size, rank % size // domain) for rank in range(world)]
        number = {key: i for i, key in enumerate(dict.fromkeys(domains))}
        return one, Cluster(Topology.of(nodes, [number[key] for key in domains]))
    if shape := re.search(r"view\(([\d, ]+)\)\.permute\(([\d, ]+)\)", fix.title):
        sizes, axes = ([int(n) for n in text.split(",")] for text in shape.groups())
        ranks = np.arange(one.layout.world_size).reshape(sizes).transpose(axes).flatten().tolist()
        return replace(
            one, layout=Layout(one.layout.sizes, one.layout.names, tuple(ranks))
        ), cluster
    assert "call" in fix.title, fix.title
    return None


def check_fixes(random: Random, cases: int) -> Counter[str]:
    """The kinds of fixes that were tried, by their first word."""
    tried: Counter[str] = Counter()
    while tried.total() < cases:
        one, cluster = draw_case(random)
        before = count_codes(one, cluster)
        for finding in check_facts([JobFacts(one, cluster)]):
            for fix in finding.fixes:
                changed = apply_fix(one, cluster, fix)
                if changed is None:
                    continue
                after = count_codes(*changed)
                assert after[finding.code] == 0, (one.layout, cluster.topology, fix)
                assert after <= before, (one.layout, cluster.topology, fix, before, after)
                tried[fix.title.split()[0]] += 1
    return tried


def test_fixed_jobs_have_no_such_finding_and_no_other_one_more() -> None:
    tried = check_fixes(Random(7), 150)
    assert set(tried) == {"order", "choose", "reduce", "keep", "use"}


@pytest.mark.full
def test_fixes_of_many_random_jobs_hold() -> None:
    check_fixes(Random(2026), 2000)
