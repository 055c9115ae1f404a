"""The linter and the planner run where torch is not installed, and say the same as where it is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from tests.programs import capture

# Runs commands of the command line in one process, and reports of each what it wrote and what has
# been loaded by then. An import of a hidden package fails as one that is not installed does.
PROGRAM = """\
import contextlib, importlib, io, json, sys

hidden, loaded, steps = json.load(sys.stdin)

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
for name in loaded:
    importlib.import_module(name)
found = []
for step in steps:
    out, error, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        if isinstance(step, str):
            exec(step, {})
        else:
            from meshplan.cli import main
            try:
                status = main(step)
            except SystemExit as end:
                status = end.code
    there = [name for name in ("torch", "networkx", "numpy") if name in sys.modules]
    found.append([status, out.getvalue(), error.getvalue(), there])
json.dump(found, sys.stdout)
"""
MESH = ["--mesh", "ddp=8,fsdp=5,tp=2", "--domain-size", "8"]
PROBLEM = ["--from", "P,P,R", "--to", "R,R,R"]
TITAN = """\
[parallelism]
data_parallel_replicate_degree = 4
data_parallel_shard_degree = 6
"""
SCRIPT = """\
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (8, 5), mesh_dim_names=("ddp", "fsdp"))
"""
MATRIX = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\t0-31\t0
GPU1\tNV18\t X \t0-31\t0
"""
# In the order in which they run: until one of them searches a graph, networkx is not loaded.
COUNTING = [
    [],
    ["--help"],
    ["--version"],
    ["lint", "--help"],
    ["rule", "MP101", "MP610"],
    ["rule", "--all", "--output-format", "json"],
    ["topo", "matrix.txt", "--output-format", "json"],
    ["lint", "--no-env", *MESH],
    *(
        ["lint", "--no-env", *MESH, "--output-format", form]
        for form in ("concise", "json", "sarif", "github", "junit")
    ),
    ["lint", "--no-env", "--node-size", "8", "job.toml", "train.py"],
    ["lint", "--no-env", "--fix", *MESH],
    ["lint", "--no-env", "--mesh", "dp=4,tp=2", "--topology", "matrix.txt", "--hosts", "4"],
    ["lint", "--no-env", *MESH, "--html", "mesh.html"],
    ["lint", *MESH, "--env", "NCCL_ALGO=Ring", "--nccl-version", "2.30.7"],
    ["lint", "--no-env", "--node-size", "8", "--", "--tensor-model-parallel-size", "8"],
    ["simulate", *MESH, "--reduce-order", "fsdp,ddp"],
    ["simulate", *MESH, "--dtype", "bf16", "--flat", "--output-format", "json"],
    ["nothing"],
]
SEARCHING = [
    ["plan", *MESH, *PROBLEM],
    ["plan", *MESH, *PROBLEM, "--explain", "--dtype", "bf16", "--shape", "4096,4096"],
    ["plan", *MESH, *PROBLEM, "--policy", "fast", "--output-format", "json"],
    ["simulate", "--cost", *MESH],
    ["simulate", "--cost", *MESH, "--output-format", "json"],
]
IMPORTS = "import meshplan; meshplan.lint; meshplan.planner; meshplan.topology; meshplan.layout; "
IMPORTS += "meshplan.cli; meshplan.contract; meshplan.errors; import meshplan.topology.formats"


MISSING = (
    " needs torch, which is not installed; pip install 'torch>=2.11', or choose the extra [torch]. "
    "The verbs lint, topo, rule, plan and simulate run without it"
)


def run(
    steps: list[Any], folder: Path, *, hidden: tuple[str, ...] = (), loaded: tuple[str, ...] = ()
) -> list[Any]:
    (folder / "job.toml").write_text(TITAN)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "matrix.txt").write_text(MATRIX)
    done = capture(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([hidden, loaded, steps]),
        cwd=folder,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.full
def test_every_verb_prints_the_same_without_torch(tmp_path: Path) -> None:
    steps = [*COUNTING, *SEARCHING]
    without = run(steps, tmp_path, hidden=("torch",))
    drawn = {name: (tmp_path / name).read_bytes() for name in ("mesh.html",)}
    loaded = run(steps, tmp_path, loaded=("torch",))
    for step, bare, full in zip(steps, without, loaded, strict=True):
        assert bare[:3] == full[:3], step
        assert "Traceback" not in bare[2], step
        assert bare[0] in ((2,) if step in ([], ["nothing"]) else (0, 1)), bare
    assert drawn == {name: (tmp_path / name).read_bytes() for name in drawn}


def test_each_verb_loads_only_what_it_needs(tmp_path: Path) -> None:
    found = run([IMPORTS, *COUNTING, *SEARCHING], tmp_path)
    there = [one[3] for one in found]
    assert not any("torch" in names for names in there)
    assert not any("networkx" in names for names in there[: 1 + len(COUNTING)])
    # Otherwise the line above would hold for a search too.
    assert "networkx" in there[-1]


def test_rule_pages_do_not_load_numpy(tmp_path: Path) -> None:
    steps = [["--help"], ["rule", "MP101"], ["rule", "--all"]]
    assert [one[3] for one in run(steps, tmp_path)] == [[], [], []]


def test_missing_torch_is_reported(tmp_path: Path) -> None:
    calls = [
        "meshplan.install()",
        "meshplan.deterministic_all_reduce(None)",
        "meshplan.verify_replicas(None)",
        "meshplan.kernel",
        "meshplan.integrations.fsdp.apply(None)",
        "import meshplan.dtensor",
        "import meshplan.integrations.ddp",
        "from meshplan.collectives import functional",
        "from meshplan.replicas import digest",
        "from meshplan.testing import tp",
    ]
    tried = [
        f"import meshplan\ntry:\n    {call}\nexcept ImportError as error:\n"
        "    assert isinstance(error, meshplan.MeshplanError)\n    print(error)"
        for call in calls
    ]
    ranks = "import os; os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='1')"
    verbs = [["links"], ["lint", "--live", "--mesh", "ddp=2"]]
    found = run([*tried, ranks, *verbs, ["doctor"]], tmp_path, hidden=("torch",))
    *told, doctor = [f"{status} {out}{error}" for status, out, error, _ in found]
    assert "host, as ranks identify it: " in doctor
    doctor = re.sub(r"meshplan: .*", "meshplan: ...", "".join(doctor.splitlines(True)[:3]))
    assert_expected_inline(
        "".join(told).replace(MISSING, " ..."),
        """\
0 MP610: meshplan.install ...
0 MP610: meshplan.deterministic_all_reduce ...
0 MP610: meshplan.verify_replicas ...
0 MP610: meshplan.kernel ...
0 MP610: meshplan.integrations ...
0 MP610: this module of meshplan ...
0 MP610: this module of meshplan ...
0 MP610: this module of meshplan ...
0 MP610: this module of meshplan ...
0 MP610: this module of meshplan ...
0 2 meshplan: rank 0: MP610: meshplan links ...
2 meshplan: MP610: meshplan lint --live ...
""",
    )
    assert_expected_inline(
        doctor,
        """\
1 ok      meshplan: ...
missing torch: not installed: the linter and the planner work, reductions do not
        pip install 'torch>=2.11', or choose the extra [torch]
""",
    )


def test_other_import_errors_are_passed_on(tmp_path: Path) -> None:
    call = (
        "import meshplan\ntry:\n    meshplan.layout\nexcept ImportError as error:\n    print(error)"
    )
    ((_, out, _, _),) = run([call], tmp_path, hidden=("numpy",))
    assert out == "No module named 'numpy'\n"
