"""MP105, MP106 and MP107."""

from __future__ import annotations

from typing import Any

import pytest
from expecttest import TestCase

from meshplan._chunks import chunk_sizes, nested_chunk_sizes
from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._job import Job
from meshplan.lint._programs import Program
from tests.jobs import format_findings, job, run_rules


def codes(one: Job) -> list[str]:
    return [finding.code for finding in run_rules("MP105 MP106 MP107", one)]


def issued(mesh: str, **options: Any) -> Job:
    """A job whose reductions DTensor, FSDP2 or DDP issues."""
    return job(mesh, program="torch", **options)


def permuted(ranks: list[int], **options: Any) -> Job:
    return Job(Layout((2, 2), ("a", "b"), tuple(ranks)), Source("m.toml", 3), **options)


class TestText(TestCase):
    def test_sequential_reductions_are_reported(self) -> None:
        self.assertExpectedInline(
            format_findings(run_rules("MP105 MP106 MP107", issued("ddp=8,fsdp=5,tp=1"))),
            """\
warning MP105 (P, P) -> (R, R) over ddp and fsdp is 2 all-reduces: ddp, then fsdp; over one flattened group it would be 1
  call meshplan.install() in the training script, or flatten these axes once, on every rank, before training""",
        )
        self.assertExpectedInline(
            format_findings(run_rules("MP105 MP106 MP107", issued("dp=2,ddp=2,fsdp=3"))),
            """\
warning MP105 (P, P) -> (R, R) over dp and ddp and fsdp is 3 all-reduces: dp, then ddp, then fsdp; over one flattened group it would be 1
  call meshplan.install() in the training script, or flatten these axes once, on every rank, before training""",
        )

    def test_permuted_flattened_axes_are_reported(self) -> None:
        one = permuted([0, 2, 1, 3], flattened=(("a", "b"),))
        self.assertExpectedInline(
            format_findings(run_rules("MP105 MP106 MP107", one)),
            """\
error MP106 the mesh flattened over a and b does not have its ranks in ascending order (0, 2, 1, 3): torch sorts them, and merged all-gathers and reduce-scatters put shards in the wrong place
  no error is raised: tensors are silently wrong""",
        )

    def test_uneven_flattened_shards_are_reported(self) -> None:
        one = job("a=2,b=2", flattened=(("a", "b"),), dims=(5, 8, 5))
        self.assertExpectedInline(
            format_findings(run_rules("MP105 MP106 MP107", one)),
            """\
error MP107 a dim of 5 does not divide evenly over a and b (2 x 2), which the job flattens: torch's merged all-gather corrupts it
  shards by axis: 2, 1, 1, 1; of the flattened mesh: 2, 2, 1, 0
  pad the dim to 8""",
        )


class TestSequential:
    def test_single_reduction_has_no_finding(self) -> None:
        assert codes(issued("ddp=8,tp=4")) == []
        assert codes(issued("ddp=8,fsdp=1")) == []
        assert codes(issued("ddp=8,fsdp=5", flattened=(("ddp", "fsdp"),))) == []
        assert codes(issued("ddp=8,fsdp=5", framework="ddp")) == []
        assert codes(issued("ddp=8,fsdp=5", framework="fsdp2")) == []

    @pytest.mark.parametrize("program", ["unknown", "torchtitan", "fsdp1", "megatron"])
    def test_reductions_of_other_programs_have_no_finding(self, program: Program) -> None:
        assert codes(job("ddp=8,fsdp=5", program=program)) == []

    def test_partly_flattened_axes_are_reported(self) -> None:
        one = issued("dp=2,ddp=2,fsdp=3", flattened=(("dp", "ddp"),))
        (finding,) = run_rules("MP105 MP106 MP107", one)
        assert finding.code == "MP105"
        assert finding.data["reductions"] == 2


class TestPermuted:
    def test_ascending_ranks_have_no_finding(self) -> None:
        assert "MP106" not in codes(job("a=2,b=2", flattened=(("a", "b"),)))
        # The flattened axes ascend, though those of the mesh do not.
        one = Job(
            Layout((2, 2, 2), ("a", "b", "c"), (4, 5, 6, 7, 0, 1, 2, 3)),
            Source(),
            flattened=(("b", "c"),),
        )
        assert "MP106" not in codes(one)

    def test_unflattened_axes_have_no_finding(self) -> None:
        assert "MP106" not in codes(permuted([0, 2, 1, 3]))

    def test_one_axis_has_no_finding(self) -> None:
        assert "MP106" not in codes(permuted([0, 2, 1, 3], flattened=(("a",),)))


class TestUneven:
    @pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 4096])
    def test_even_shards_have_no_finding(self, length: int) -> None:
        assert nested_chunk_sizes(length, (2, 2)) == chunk_sizes(length, 4)
        assert "MP107" not in codes(job("a=2,b=2", flattened=(("a", "b"),), dims=(length,)))

    @pytest.mark.parametrize("length", [2, 5, 6, 4097])
    def test_uneven_flattened_shards_are_reported(self, length: int) -> None:
        assert "MP107" in codes(job("a=2,b=2", flattened=(("a", "b"),), dims=(length,)))

    def test_unflattened_axes_have_no_finding(self) -> None:
        assert "MP107" not in codes(job("a=2,b=2", dims=(5,)))
