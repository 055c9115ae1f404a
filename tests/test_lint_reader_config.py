"""``meshplan.toml``, and ``[tool.meshplan]`` of ``pyproject.toml``."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._job import Settings
from meshplan.lint._read_jobs import read_jobs
from tests.lint_inputs import changed_lines, damaged_texts, format_jobs, refusal

FULL = """\
# what this project has chosen
select = ["MP1", "MP301"]
ignore = ["MP104"]
extend-select = ["MP2"]
fail-level = "warning"
topology = ["topo.txt", "nccl.xml"]
hosts = 5
domain-size = 8
rank-order = [0, 1, 2]
output-format = "github"

[[mesh]]
axes = "ddp=8,fsdp=5,tp=1"   # pretraining
flattened = [["ddp", "fsdp"]]
dims = [4096, 1000]
roles = { tp = "apart" }
framework = "fsdp2"
reduce-order = ["fsdp", "ddp"]
sequence-parallel = true

[[mesh]]
axes = "dp=2,tp=2"
ranks = [
    [0, 2],  # a host
    [1, 3],
]

[[mesh]]
axes = "dp=4,tp=2"
roles = { dp = "shard", tp = "model" }

[[mesh]]
axes = "dp=4,fsdp=3"
reduce-order = ["fsdp", "dp"]
[mesh.roles]
dp = "apart"
"""


class TestConfiguration(TestCase):
    def test_meshes_of_a_configuration_are_read(self) -> None:
        found = "".join(
            format_jobs(read_jobs(name, text))
            for name, text in (
                ("meshplan.toml", FULL),
                ("meshplan.toml", 'select = []\nmesh = "8x5"\n'),
                ("conf/meshplan.toml", 'mesh = ["dp=2", "tp=4"]\n'),
                ("pyproject.toml", '[project]\nname = "x"\n[tool.meshplan]\nmesh = "dp=2"\n'),
                ("other.toml", '[[tool.meshplan.mesh]]\naxes = "a=2"\n'),
                ("ours.toml", '[[mesh]]\naxes = "a=2"\n'),
                ("configs/mesh.toml", '# a job\nmesh = "ddp=8,fsdp=5"\ndomain-size = 8\n'),
            )
        )
        self.assertExpectedInline(
            found,
            """\
meshplan.toml:12 (ddp=8, fsdp=5, tp=1) replicate shard apart: fsdp2, flattened ddp+fsdp, sequence parallel
meshplan.toml:21 (dp=2, tp=2; ranks 0, 2, 1, 3) replicate model: dtensor
meshplan.toml:28 (dp=4, tp=2) shard model: dtensor
meshplan.toml:32 (dp=4, fsdp=3) apart shard: dtensor
meshplan.toml:2 (axis0=8, axis1=5) unknown unknown: dtensor
conf/meshplan.toml:1 (dp=2) replicate: dtensor
conf/meshplan.toml:1 (tp=4) model: dtensor
pyproject.toml:4 (dp=2) replicate: dtensor
other.toml:1 (a=2) unknown: dtensor
ours.toml:1 (a=2) unknown: dtensor
configs/mesh.toml:2 (ddp=8, fsdp=5) replicate shard: dtensor
""",
        )

    def test_settings_are_read(self) -> None:
        found = read_jobs("meshplan.toml", FULL)
        assert found.settings == Settings(
            select=("MP1", "MP301"),
            ignore=("MP104",),
            extend_select=("MP2",),
            fail_level="warning",
            topology=("topo.txt", "nccl.xml"),
            hosts="5",
            domain_size=8,
            rank_order="0,1,2",
            output_format="github",
        )
        job = found.jobs[0]
        assert (job.dims, job.reduce_order) == ((4096, 1000), ("fsdp", "ddp"))
        assert found.jobs[-1].reduce_order == ("fsdp", "dp")

    def test_rewrite_changes_only_the_mesh(self) -> None:
        jobs = read_jobs("meshplan.toml", FULL).jobs
        plain = 'mesh = "8x5"  # ours\n'
        found = (
            changed_lines(FULL, jobs[0], fsdp=8, ddp=5, tp=1),
            changed_lines(FULL, jobs[1], dp=4, tp=1),
            changed_lines(FULL, jobs[2], dp=2, tp=4),
            changed_lines(FULL, jobs[3], fsdp=3, dp=4),
            changed_lines(plain, read_jobs("meshplan.toml", plain).jobs[0], axis0=5, axis1=8),
        )
        self.assertExpectedInline(
            "--\n".join(found),
            """\
-axes = "ddp=8,fsdp=5,tp=1"   # pretraining
+axes = "fsdp=8,ddp=5,tp=1"   # pretraining
--
cannot be written
--
-axes = "dp=4,tp=2"
+axes = "dp=2,tp=4"
--
-axes = "dp=4,fsdp=3"
+axes = "fsdp=3,dp=4"
--
-mesh = "8x5"  # ours
+mesh = "5x8"  # ours
""",
        )

    def test_invalid_configuration_is_refused_with_file_and_line(self) -> None:
        texts = (
            'slect = ["MP1"]',
            'select = "MP1x"',
            "\nselect = [1]",
            'fail-level = "warn"',
            "domain-size = 0",
            "domain_size = 8",
            "hosts = 1.5",
            "mesh = 8",
            "mesh = [8]",
            'mesh = "dp=0"',
            "\n[[mesh]]\n",
            '[[mesh]]\naxes = "dp=2"\nrole = {}',
            '[[mesh]]\naxes = "dp=2"\nroles = { tp = "model" }',
            '[[mesh]]\naxes = "dp=2"\nroles = { dp = "modle" }',
            '[[mesh]]\naxes = "dp=2"\nroles = ["shard", "shard"]',
            '[[mesh]]\naxes = "dp=2"\n\nframework = "fsdp"',
            '[[mesh]]\naxes = "dp=2"\nflattened = [["dp", "pd"]]',
            '[[mesh]]\naxes = "dp=2"\nreduce-order = ["dp", "dp"]',
            '[[mesh]]\naxes = "dp=2"\norder = "tree"',
            '[[mesh]]\naxes = "dp=2"\ndims = [0]',
            '[[mesh]]\naxes = "dp=2"\ndims = 8',
            '[[mesh]]\naxes = "dp=2"\nsequence-parallel = 1',
            '[[mesh]]\naxes = ["dp", "tp"]\nranks = [0, 1]',
            '[[mesh]]\naxes = "dp=2,tp=2"\nranks = [[0, 1], [1, 2]]',
            "[[mesh]]\naxes = { dp = true }",
            "select = [",
            "domain-size = 8\nmesh = ddp=8,fsdp=5",
            "sequence-parallel = True",
            "[tool]\nmeshplan = 3",
        )
        lines = [f"{refusal('meshplan.toml', text)}\n" for text in texts]
        self.assertExpectedInline(
            "".join(lines),
            """\
MP402: meshplan.toml:1: 'slect' is not a valid key; use one of domain-size, exclude, extend-select, fail-level, hosts, ignore, include, mesh, node-size, output-format, rank-order, roles, select, topology (did you mean 'select'?)
MP402: meshplan.toml:1: select takes codes and prefixes such as "MP101" and "MP3", got 'MP1x'
MP402: meshplan.toml:2: select must be a list of strings, got [1]
MP402: meshplan.toml:1: fail-level must be one of info, warning, error, got 'warn' (did you mean 'warning'?)
MP402: meshplan.toml:1: domain-size must be a positive integer, got 0
MP402: meshplan.toml:1: 'domain_size' is not a valid key; use one of domain-size, exclude, extend-select, fail-level, hosts, ignore, include, mesh, node-size, output-format, rank-order, roles, select, topology (did you mean 'domain-size'?)
MP402: meshplan.toml:1: hosts must be a string, an integer or a list of these, got 1.5
MP402: meshplan.toml:1: mesh is a string such as "ddp=8,fsdp=5", or tables [[mesh]] with axes, got int
MP402: meshplan.toml:1: mesh is a string such as "ddp=8,fsdp=5", or tables [[mesh]] with axes, got int
MP111: meshplan.toml:1: the size of axis 'dp' must be a positive integer, got '0'; use, for example, dp=8
MP402: meshplan.toml:2: axes are "ddp=8,fsdp=5", got nothing
MP402: meshplan.toml:3: 'role' is not a valid key; use one of axes, dims, flattened, framework, order, ranks, reduce-order, roles, sequence-parallel (did you mean 'roles'?)
MP112: meshplan.toml:1: no axis 'tp' in the mesh, it has dp
MP402: meshplan.toml:3: roles are replicate, shard, model, experts, apart, got 'modle' for axis dp (did you mean 'model'?)
MP402: meshplan.toml:3: roles are a table such as { fsdp = "shard" }, got ['shard', 'shard']
MP402: meshplan.toml:4: framework is one of dtensor, fsdp2, ddp, got 'fsdp'
MP112: meshplan.toml:1: no axis 'pd' in the mesh, it has dp
MP402: meshplan.toml:3: reduce-order names an axis twice: dp, dp
MP402: meshplan.toml:3: order may only be "exact", got 'tree'; leave it out for other orders
MP402: meshplan.toml:3: dims are lengths of tensor dims from 1 up, got [0]
MP402: meshplan.toml:3: dims are lengths of tensor dims from 1 up, got 8
MP402: meshplan.toml:3: sequence-parallel is true or false, got 1
MP402: meshplan.toml:2: axes are "ddp=8,fsdp=5", got ['dp', 'tp']
MP111: meshplan.toml:1: a mesh of 4 coordinates needs 4 different ranks from 0 up, got 4: 0, 1, 1, 2; pass the global rank at each coordinate, row-major
MP402: meshplan.toml:2: axes are "ddp=8,fsdp=5", got {'dp': True}
MP402: meshplan.toml: cannot be parsed as TOML (Invalid value at the end); is the file complete?
MP402: meshplan.toml:2: cannot be parsed as TOML (Invalid value); use mesh = "ddp=8,fsdp=5"
MP402: meshplan.toml:1: cannot be parsed as TOML (Invalid value); use sequence-parallel = true
MP402: meshplan.toml:2: [tool.meshplan] must be a table
""",
        )


def test_permuted_ranks_are_read() -> None:
    job = read_jobs("meshplan.toml", FULL).jobs[1]
    assert job.layout == Layout.of([0, 2, 1, 3], dp=2, tp=2)
    assert job.source == Source("meshplan.toml", 21)


@pytest.mark.parametrize(
    "text", ["", '[project]\nname = "x"\n', "[tool.ruff]\nline-length = 100\n"]
)
def test_pyproject_without_our_table_has_no_settings(text: str) -> None:
    found = read_jobs("pyproject.toml", text)
    assert (found.jobs, found.settings) == ((), None)


def test_empty_configuration_returns_default_settings() -> None:
    assert read_jobs("meshplan.toml", "").settings == Settings()


@given(damaged_texts(FULL) | st.text(max_size=200))
def test_damaged_configuration_raises_one_line(text: str) -> None:
    refusal("meshplan.toml", text)
    refusal("pyproject.toml", "[tool.meshplan]\n" + text)
