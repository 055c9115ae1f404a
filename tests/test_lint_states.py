"""The state of every input of ``meshplan lint``: judged, not judged, or without a mesh."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshplan.lint._read_jobs import MAX_CHARACTERS, read_jobs
from meshplan.lint._reporters import FORMATS
from tests.cli import meshplan, refused
from tests.test_read_cluster import matrix

GOOD = """\
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (5, 8), mesh_dim_names=("dp", "tp"))
"""
OPEN = GOOD.replace("(5, 8)", "(replicas, 8)")
ONE_AXIS = GOOD.replace('(5, 8), mesh_dim_names=("dp", "tp")', "(dist.get_world_size(),)")
PLAIN = "def sizes(tp_size):\n    return f(tp_size=tp_size)\n"
# A registry of torchtitan: a debug job that is read, and production jobs that are not.
REGISTRY = """\
from torchtitan.config import ParallelismConfig

def debug():
    return ParallelismConfig(data_parallel_shard_degree=8, tensor_parallel_degree=1)

def production(nodes):
    return [
        ParallelismConfig(data_parallel_shard_degree=nodes, tensor_parallel_degree=8),
        ParallelismConfig(data_parallel_shard_degree=-1, tensor_parallel_degree=8),
        ParallelismConfig(**read("parallelism.json")),
    ]
"""
PARTIAL_LOG = "".join(
    f"host{rank // 2}:1{rank}:2{rank} [{rank % 2}] NCCL INFO comm 0x1 rank {rank} nRanks 8 nNodes 4 "
    f"localRanks 2 localRank {rank % 2} MNNVL 0\n"
    for rank in range(3)
)
FILES = {
    "good.py": GOOD,
    "one.py": ONE_AXIS,
    "open.py": OPEN,
    "plain.py": PLAIN,
    "registry.py": REGISTRY,
    "both.py": GOOD + 'other = init_device_mesh("cuda", (replicas, 8))\n',
    "empty.py": "",
    "titan.toml": "[parallelism]\ndata_parallel_shard_degree = 8\n",
    "rest.toml": "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 8\n",
    "tool.toml": '[project]\nname = "x"\n[training]\nsteps = 5\n',
    "rl.toml": "[trainer.model]\ntp = 4\ndp_replicate = 2\n",
    "verl.sh": "python -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron."
    "tensor_model_parallel_size=$TP\n",
    "jax.yaml": "ici_mesh_shape: [1, 8]\n",
    "hf.yaml": "parallelism_config_tp_size: 4\n",
    "run.sh": "torchrun --nnodes 5 --nproc-per-node 8 train.py --dp 5 --tp 8\n",
    "copy.sh": "cp 2026.log /tmp\n",
    "settings.toml": '[tool.meshplan]\nignore = ["MP105"]\n',
    "meshes.toml": '[[mesh]]\naxes = "dp=5,tp=8"\n',
    "model.bin": "\0\1",
}
STATES = {
    "judged": ["good.py", "one.py", "titan.toml", "run.sh", "meshes.toml", "hf.yaml", "rest.toml"],
    "not judged": [
        *("open.py", "registry.py", "both.py", "rl.toml", "verl.sh", "jax.yaml", "model.bin"),
    ],
    "no mesh": ["plain.py", "empty.py", "tool.toml", "copy.sh", "settings.toml"],
}
WHERE = ("--domain-size", "8")


@pytest.fixture(autouse=True)
def place(no_scheduler: None) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("host.txt").write_text(matrix(8, 8))
    Path("cut.txt").write_text("".join(matrix(8, 8).splitlines(keepends=True)[:5]))
    Path("log.txt").write_text(PARTIAL_LOG)


@pytest.fixture
def lint() -> Any:
    return partial(meshplan, "lint", "--no-env", "--isolated")


def states(lint: Any, *words: str, given: str = "") -> tuple[int, dict[str, str]]:
    status, out, err = lint("--output-format", "json", *words, given=given)
    assert err == ""
    return status, {one["name"]: one["state"] for one in json.loads(out)["inputs"]}


def test_one_axis_of_all_ranks_needs_no_placement(lint: Any) -> None:
    line = "one axis; no hazard for any number of ranks: no other group must agree\n"
    text = f"judged one.py:3: {line}checked 1 file, 1 mesh\nno findings\n"
    assert lint("one.py") == lint("one.py", *WHERE) == (0, text, "")


EACH = [(name, state) for state, names in STATES.items() for name in names]


@pytest.mark.parametrize(("name", "state"), EACH)
def test_state_of_one_file(lint: Any, name: str, state: str) -> None:
    fails = int(state == "not judged")
    assert states(lint, name, *WHERE) == (fails, {name: state})
    assert states(lint, name, *WHERE, "--allow-unjudged") == (0, {name: state})


@pytest.mark.parametrize("second", ["good.py", "plain.py"])
@pytest.mark.parametrize(("name", "state"), EACH)
def test_state_does_not_depend_on_other_files(
    lint: Any, name: str, state: str, second: str
) -> None:
    expected = {name: state, second: dict(EACH)[second]}
    for words in itertools.permutations((name, second)):
        assert states(lint, *words, *WHERE) == (int(state == "not judged"), expected)


def test_all_files_at_once(lint: Any) -> None:
    for names in (list(FILES), list(FILES)[::-1]):
        assert states(lint, *names, *WHERE) == (1, dict(EACH))
    passing = [*STATES["judged"], *STATES["no mesh"]]
    assert states(lint, *passing, *WHERE)[0] == 0


def test_rules_levels_and_comments_do_not_change_a_state(lint: Any) -> None:
    for words in (("--select", "MP101"), ("--ignore", "MP191"), ("--ignore", "ALL")):
        assert states(lint, "open.py", *WHERE, *words) == (1, {"open.py": "not judged"})
    Path("open.py").write_text(OPEN.replace("mesh =", "# meshplan: ignore[MP191] agreed\nmesh ="))
    assert states(lint, "open.py", *WHERE) == (1, {"open.py": "not judged"})
    # The one option that never fails.
    assert states(lint, "open.py", *WHERE, "--exit-zero")[0] == 0


def test_file_named_twice_is_one_input(lint: Any) -> None:
    words = ("good.py", "./good.py", str(Path("good.py").absolute()))
    assert states(lint, *words, *WHERE) == (0, {"good.py": "judged"})
    Path("link.py").symlink_to("open.py")
    found = states(lint, "open.py", "link.py", *WHERE)
    assert found == (1, {"open.py": "not judged", "link.py": "not judged"})


def test_meshes_and_arguments_have_states(lint: Any) -> None:
    found = states(lint, "--mesh", "dp=5,tp=8", "--mesh", "dp=8", *WHERE, "--", "--tp", "8")
    assert found == (0, {"--mesh dp=5,tp=8": "judged", "--mesh dp=8": "judged", "--tp 8": "judged"})
    found = states(lint, *WHERE, "--", "--tp", "$TP")
    assert found == (1, {"--tp '$TP'": "not judged"})


def test_unreadable_input_is_an_error(lint: Any) -> None:
    Path("broken.toml").write_text("x = [")
    Path("broken.py").write_text(f"{GOOD}(")
    for name in ("missing.py", "broken.toml", "broken.py"):
        for words in ((name,), (name, "plain.py")):
            refused("lint", "--no-env", *words, *WHERE, "--allow-unjudged")
        status, out, err = lint("good.py", name, *WHERE, "--allow-unjudged")
        assert (status, err.count("\n")) == (2, 1)
        assert "judged good.py:3" in out
        assert f"  at {name}" in out


class TestTopologies:
    MESH = ("--mesh", "dp=2,tp=4")

    def test_partial_log_is_not_judged(self, lint: Any) -> None:
        status, found = states(lint, *self.MESH, "--topology", "log.txt")
        assert (status, found) == (1, {"--mesh dp=2,tp=4": "not judged", "log.txt": "not judged"})
        assert states(lint, *self.MESH, "--topology", "log.txt", "--allow-unjudged")[0] == 0
        out = lint(*self.MESH, "--topology", "log.txt")[1]
        assert "not judged log.txt: NCCL log that does not report " in out
        assert "only 3 of 8 ranks wrote here; join the logs of all: cat FILES" in out
        # No mesh may be called judged whose ranks are nowhere.
        assert "\njudged" not in out

    def test_partial_log_stays_unjudged_with_given_sizes(self, lint: Any) -> None:
        words = ("--topology", "log.txt", "--hosts", "2", "--node-size", "4")
        found = states(lint, *self.MESH, *words)
        assert found == (1, {"--mesh dp=2,tp=4": "judged", "log.txt": "not judged"})

    def test_complete_log_is_judged(self, lint: Any) -> None:
        Path("log.txt").write_text(
            "".join(
                f"host{r // 2}:1{r}:2{r} [{r % 2}] NCCL INFO comm 0x1 rank {r} nRanks 8 nNodes 4 "
                f"localRanks 2 localRank {r % 2} MNNVL 0\n"
                for r in range(8)
            )
        )
        found = states(lint, *self.MESH, "--topology", "log.txt")
        assert found == (0, {"--mesh dp=2,tp=4": "judged", "log.txt": "judged"})

    def test_truncated_table_is_not_judged(self, lint: Any) -> None:
        mesh = ("--mesh", "dp=2,tp=8", "--hosts", "2")
        found = states(lint, *mesh, "--topology", "cut.txt")
        assert found == (1, {"--mesh dp=2,tp=8": "judged", "cut.txt": "not judged"})
        found = states(lint, *mesh, "--topology", "host.txt")
        assert found == (0, {"--mesh dp=2,tp=8": "judged", "host.txt": "judged"})

    def test_slurm_file_without_ranks_is_not_judged(self, lint: Any) -> None:
        Path("topology.conf").write_text("BlockName=b1 Nodes=n[0-3]\nBlockSizes=4\n")
        found = states(
            lint, *self.MESH, "--topology", "topology.conf", "--hosts", "2", "--node-size", "4"
        )
        assert found == (1, {"--mesh dp=2,tp=4": "judged", "topology.conf": "not judged"})

    def test_topology_on_standard_input_serves_several_meshes(self, lint: Any) -> None:
        words = ("--mesh", "dp=2,tp=8", "--mesh", "tp=16", "--hosts", "2", "--topology", "-")
        found = states(lint, *words, given=Path("host.txt").read_text())
        assert found == (0, {"--mesh dp=2,tp=8": "judged", "--mesh tp=16": "judged", "-": "judged"})

    def test_a_topology_without_a_mesh_is_read(self, lint: Any) -> None:
        found = states(lint, "plain.py", "--topology", "host.txt", "--hosts", "2")
        assert found == (0, {"plain.py": "no mesh", "host.txt": "no mesh"})
        assert states(lint, "plain.py", "--topology", "cut.txt", "--hosts", "2")[0] == 1
        assert lint("plain.py", "--topology", "missing")[0] == 2

    def test_rules_that_cannot_run_count_where_they_can_fail(self, lint: Any) -> None:
        words = ("--mesh", "tp=8", "--node-size", "8")
        assert states(lint, *words) == (0, {"--mesh tp=8": "judged"})
        warning = (*words, "--fail-level", "warning")
        assert states(lint, *warning) == (1, {"--mesh tp=8": "not judged"})
        assert states(lint, *warning, "--ignore", "MP103,MP104,MP108")[0] == 0
        assert states(lint, *warning, "--domain-size", "8")[0] == 0


class TestConfigurations:
    def test_each_configuration_places_its_own_meshes(self, lint: Any) -> None:
        Path("jagged.toml").write_text('mesh = "ddp=8,fsdp=5"\nnode-size = 8\n')
        Path("even.toml").write_text('mesh = "ddp=8,fsdp=5"\nnode-size = 5\n')
        assert lint("jagged.toml")[0] == 1
        assert lint("even.toml")[0] == 0
        for names in (("jagged.toml", "even.toml"), ("even.toml", "jagged.toml")):
            status, out, _ = lint(*names, "--output-format", "json")
            files = {one["file"] for one in json.loads(out)["findings"] if one["code"] == "MP101"}
            assert (status, files) == (1, {"jagged.toml"})

    def test_contradicting_configurations_are_refused(self, lint: Any) -> None:
        Path("a.toml").write_text('mesh = "dp=5,tp=8"\nnode-size = 8\nselect = ["MP1"]\n')
        Path("b.toml").write_text('mesh = "dp=5,tp=8"\nnode-size = 8\n')
        for names in (("a.toml", "b.toml"), ("b.toml", "a.toml")):
            status, out, err = lint(*names)
            assert (status, out) == (2, "")
            assert "have different settings; choose one with --config" in err
        Path("b.toml").write_text('mesh = "dp=5,tp=8"\nnode-size = 4\nselect = ["MP1"]\n')
        # Which of the two places a mesh of another file is not for the order to decide.
        assert lint("a.toml", "b.toml")[0] == 0
        assert lint("a.toml", "b.toml", "good.py")[0] == 2
        assert lint("a.toml", "b.toml", "good.py", "--config", "a.toml")[0] == 0

    def test_configuration_used_for_settings_only_has_no_mesh(self, lint: Any) -> None:
        Path("a.toml").write_text('mesh = "ddp=8,fsdp=5"\nnode-size = 8\n')
        found = states(lint, "--config", "a.toml", "good.py")
        assert found == (0, {"good.py": "judged", "a.toml": "no mesh"})
        assert states(lint, "--config", "a.toml") == (1, {"a.toml": "judged"})
        assert states(lint, "--config", "./a.toml", "a.toml") == (1, {"a.toml": "judged"})


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_unchecked_inputs(lint: Any, name: str) -> None:
    files = [*STATES["no mesh"], *STATES["not judged"]]
    for words in ((), ("--allow-unjudged",)):
        status, out, _ = lint(*files, "good.py", *WHERE, "--output-format", name, *words)
        assert status == (0 if words else 1)
        # The texts for people name three of those without a mesh.
        some = files if name in ("json", "sarif", "junit") else [*files[:3], *files[5:]]
        assert all(file in out for file in some)
        if name == "junit":
            suite = xml.etree.ElementTree.fromstring(out)[0]
            assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
            assert int(suite.attrib["failures"]) == len(suite.findall("*/failure"))
            assert int(suite.attrib["skipped"]) == len(suite.findall("*/skipped"))


@pytest.mark.parametrize(
    "text",
    [
        "make = functools.partial(init_device_mesh, 'cuda')\n",
        "from torch.distributed import init_device_mesh as mk\nf(mk)\n",
        "init_device_mesh('cuda', (2, 2), **names)\n",
        "DeviceMesh.from_group([a, b], 'cuda', mesh_dim_names=('dp', 'tp'))\n",
        "ParallelismConfig(dp_replicate_size=2, tp_size=n)\n",
        "ParallelismConfig(tensor_parallel_degree=8, **rest)\n",
        "ParallelDims(2, 4)\n",
        "LLM('model', tensor_parallel_size=gpus)\n",
        "OPTIONS = {'tensor_model_parallel_size': 4}\n",
        "parallel_state.initialize_model_parallel(2, 4)\n",
        "FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)\n",
        "job = dict(tp=8, dp=4)\n",
    ],
)
def test_unreadable_python_mesh_is_not_judged(text: str) -> None:
    found = read_jobs("train.py", text)
    assert not found.jobs
    assert len(found.skipped) == 1
    assert "--mesh" in found.skipped[0].why


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed.device_mesh import DeviceMesh\ndef f(mesh: DeviceMesh): ...\n",
        "try: import init_device_mesh\nexcept ImportError: init_device_mesh = None\n"
        "if init_device_mesh is None: raise ImportError\n",
        "LLM('model', tensor_parallel_size=1)\n",
        "def f(tp_size=8): return g(tp_size=tp_size)\n",
        '"""Say tensor_parallel_size=8."""  # or tp_size = 4\n',
        "dp = [0]\ncp, tp = 3, 5\nscore(tp=5, fp=2)\n",
        "class {{ name }}:\n",
        "x = 1\n" * (MAX_CHARACTERS // 4),
    ],
)
def test_python_without_a_mesh_has_no_mesh(text: str) -> None:
    found = read_jobs("util.py", text)
    assert (found.jobs, found.skipped) == ((), ())
