"""Job files of torchtitan."""

from __future__ import annotations

from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.layout import Layout
from meshplan.lint._read_jobs import RankOptions, read_jobs
from tests.lint_inputs import changed_lines, damaged_texts, format_jobs, refusal

JAGGED = """\
# for 40 GPUs
[job]
description = "not a [parallelism] table"

[parallelism]
data_parallel_replicate_degree = 8
data_parallel_shard_degree = 5  # within a domain
tensor_parallel_degree = 1

[checkpoint]
interval = 500
"""
# As of 2024: degrees in two other tables.
OLD = """\
[training]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[experimental]
context_parallel_degree = 2
"""
EXPERTS = """\
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
expert_parallel_degree = 4
"""


class TestTorchtitan(TestCase):
    def test_meshes_of_degrees_are_read(self) -> None:
        flat = "parallelism = { tensor_parallel_degree = 8, data_parallel_shard_degree = 2 }\n"
        etp = EXPERTS + "expert_tensor_parallel_degree = 2\nenable_sequence_parallel = false\n"
        dotted = "parallelism.pipeline_parallel_degree = 2\n"
        found = "".join(
            format_jobs(read_jobs("job.toml", text, RankOptions(40)))
            for text in (JAGGED, OLD, EXPERTS, etp, flat, dotted)
        )
        self.assertExpectedInline(
            found,
            """\
job.toml:5 (dp_replicate=8, dp_shard=5, tp=1) replicate shard model: fsdp2
job.toml:1 (dp_shard=5, cp=2, tp=4) shard shard model: fsdp2, flattened dp_shard+cp, sequence parallel
job.toml:1 (dp_replicate=2, dp_shard=8, tp=2) replicate shard model: fsdp2, sequence parallel
job.toml:1 (dp_replicate=2, efsdp=4, ep=4) replicate shard experts: fsdp2
job.toml:1 (dp_replicate=2, dp_shard=8, tp=2) replicate shard model: fsdp2
job.toml:1 (dp_replicate=2, efsdp=2, ep=4, etp=2) replicate shard experts model: fsdp2
job.toml:1 (dp_shard=2, tp=8) shard model: fsdp2, sequence parallel
job.toml:1 (pp=2, dp_shard=20) apart shard: fsdp2
""",
        )

    def test_rewrite_changes_only_the_degrees(self) -> None:
        job = read_jobs("job.toml", JAGGED).jobs[0]
        (rest,) = read_jobs("job.toml", OLD, RankOptions(64)).jobs
        dense, sparse = read_jobs("job.toml", EXPERTS).jobs
        found = (
            changed_lines(JAGGED, job, dp_replicate=5, dp_shard=8, tp=1),
            changed_lines(JAGGED, job, dp_replicate=5, dp_shard=4, cp=2, tp=1),
            changed_lines(JAGGED, job, dp_shard=5, dp_replicate=8, tp=1),
            changed_lines(JAGGED, job, dp_shard=40, dp_replicate=1, tp=1),
            changed_lines(OLD, rest, dp_shard=4, cp=2, tp=8),
            changed_lines(OLD, rest, dp_shard=4, cp=2, tp=4),
            changed_lines(EXPERTS, dense, dp_replicate=4, dp_shard=4, tp=2),
            changed_lines(EXPERTS, sparse, dp_replicate=2, efsdp=2, ep=8),
            changed_lines(EXPERTS, sparse, dp_replicate=2, efsdp=1, ep=3),
        )
        self.assertExpectedInline(
            "--\n".join(found),
            """\
-data_parallel_replicate_degree = 8
-data_parallel_shard_degree = 5  # within a domain
+data_parallel_replicate_degree = 5
+data_parallel_shard_degree = 8  # within a domain
--
-data_parallel_replicate_degree = 8
-data_parallel_shard_degree = 5  # within a domain
+data_parallel_replicate_degree = 5
+data_parallel_shard_degree = 4  # within a domain
+context_parallel_degree = 2
--
cannot be written
--
-data_parallel_replicate_degree = 8
-data_parallel_shard_degree = 5  # within a domain
+data_parallel_replicate_degree = 1
+data_parallel_shard_degree = 40  # within a domain
--
-tensor_parallel_degree = 4
+tensor_parallel_degree = 8
--
cannot be written
--
-data_parallel_replicate_degree = 2
-data_parallel_shard_degree = 8
+data_parallel_replicate_degree = 4
+data_parallel_shard_degree = 4
--
-expert_parallel_degree = 4
+expert_parallel_degree = 8
--
cannot be written
""",
        )

    def test_invalid_degrees_are_refused_with_file_and_line(self) -> None:
        texts = (
            "[parallelism]\ndata_parallel_shard_degree = -2\n",
            '\n[parallelism]\ntensor_parallel_degree = "8"\n',
            "[parallelism]\ntensor_parallel_degree = true\n",
            EXPERTS + "expert_tensor_parallel_degree = 3\n",
            "[parallelism]\ntensor_parallel_degree = 99999999\ndata_parallel_shard_degree = 1\n",
            "[parallelism]\ntensor_parallel_degree = \n",
            "[parallelism]\n" + "a." * 40 + "a = 1\n",
            "[parallelism]\nx = " + "[" * 5000 + "\n",
            "[parallelism]\nx = " + "9" * 5000 + "\n",
        )
        self.assertExpectedInline(
            "".join(f"{refusal('job.toml', t)}\n" for t in texts),
            """\
MP111: job.toml:1: data_parallel_shard_degree must be 1 or more, or -1 for the rest, got -2
MP111: job.toml:2: tensor_parallel_degree must be an integer, got '8'
MP111: job.toml:1: tensor_parallel_degree must be an integer, got True
MP111: job.toml:1: 32 ranks are not a multiple of dp_replicate 2 x ep 4 x etp 3 = 24; use sizes whose product divides the ranks
MP111: job.toml:1: a mesh has at most 4194304 ranks, got axes of 1 x 99999999; is a size wrong?
MP402: job.toml:2: cannot be parsed as TOML (Invalid value); is the file complete?
MP402: job.toml:2: a key of more than 32 parts; use tables
MP402: job.toml: cannot be parsed as TOML: nested too deeply
MP402: job.toml: cannot be parsed as TOML: a number is too long
""",
        )


def test_rewrite_keeps_windows_line_ends() -> None:
    text = JAGGED.replace("\n", "\r\n")
    (job,) = read_jobs("job.toml", text).jobs
    assert job.source.line == 5
    assert job.rewrite is not None
    assert job.rewrite(Layout.of(dp_replicate=5, dp_shard=8, tp=1)) == text.replace(
        "_replicate_degree = 8", "_replicate_degree = 5"
    ).replace("_shard_degree = 5", "_shard_degree = 8")


def test_permuted_ranks_have_no_rewrite() -> None:
    (job,) = read_jobs("job.toml", EXPERTS).jobs[:1]
    assert job.rewrite is not None
    ranks = [1, 0, *range(2, 32)]
    assert job.rewrite(Layout.of(ranks, dp_replicate=2, dp_shard=8, tp=2)) is None


@given(damaged_texts(JAGGED + OLD + EXPERTS) | st.text(max_size=200))
def test_damaged_file_raises_one_line(text: str) -> None:
    refusal("job.toml", text)
    refusal("job.toml", "[parallelism]\n" + text, world_size=None)
