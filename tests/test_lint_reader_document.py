"""YAML, JSON, Hydra's overrides, and configurations that functions derive."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from expecttest import TestCase
from hypothesis import example, given
from hypothesis import strategies as st

from meshplan.layout import Layout
from meshplan.lint._job import JobFile
from meshplan.lint._read_jobs import RankOptions, read_jobs
from tests.lint_inputs import changed_lines, damaged_texts, format_jobs, refusal

NEMO = """\
trainer:
  devices: 8
  num_nodes: 4
model:
  # meshplan reads the next two
  tensor_model_parallel_size: 4  # within a host
  pipeline_model_parallel_size: 2
  sequence_parallel: true
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-8B
dp_replicate_size: 8
dp_shard_size: 5
"""
JSON = '{"parallelism_config": {"dp_replicate_size": 8, "dp_shard_size": 5}}\n'
VERL = """\
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    trainer.nnodes=4 \\
    trainer.n_gpus_per_node=8
"""
REFERENCE = """\
trainer: {devices: 8, num_nodes: 1}
tp: 4
model:
  tensor_model_parallel_size: ${tp}
  pipeline_model_parallel_size: ${oc.env:PP}
"""
REGISTRY = """\
from torchtitan.config import ParallelismConfig


def base():
    return Config(parallelism=ParallelismConfig(data_parallel_shard_degree=5))


def replicas():
    config = base()
    config.parallelism.data_parallel_replicate_degree = 8
    return config


def perhaps(large):
    config = base()
    if large:
        config.parallelism.tensor_parallel_degree = 8
    return config
"""


class TestDocuments(TestCase):
    def test_documents_are_read(self) -> None:
        files = {
            "nemo.yaml": NEMO,
            "axolotl.yml": AXOLOTL,
            "args.json": JSON,
            "verl.sh": VERL,
            "config.yaml": REFERENCE,
            "registry.py": REGISTRY,
        }
        self.assertExpectedInline(
            "".join(format_jobs(read_jobs(name, text)) for name, text in files.items()),
            """\
nemo.yaml:6 (pp=2, dp=4, tp=4) apart replicate model: ddp, sequence parallel
axolotl.yml:2 (dp_replicate=8, dp_shard=5) replicate shard: fsdp2
args.json:1 (dp_replicate=8, dp_shard=5) replicate shard: fsdp2
verl.sh:1 (dp=16, tp=2) shard model: fsdp2
config.yaml:5: not judged: pipeline_model_parallel_size = ${oc.env:PP} has no value in this file; use a number
registry.py:5 (dp_shard=5) shard: fsdp2
registry.py:10 (dp_replicate=8, dp_shard=5) replicate shard: fsdp2
registry.py:17: not judged: tensor_parallel_degree depends on a condition; use --run, or give the mesh with --mesh
""",
        )

    def test_rewrite_changes_only_the_sizes(self) -> None:
        found = []
        for name, text, sizes in (
            ("nemo.yaml", NEMO, {"pp": 1, "dp": 4, "tp": 8}),
            ("nemo.yaml", NEMO, {"pp": 2, "dp": 2, "cp": 2, "tp": 4}),
            ("axolotl.yml", AXOLOTL, {"dp_replicate": 5, "dp_shard": 8}),
            ("axolotl.yml", AXOLOTL, {"dp_shard": 5, "dp_replicate": 8}),
            ("args.json", JSON, {"dp_replicate": 5, "dp_shard": 8}),
            ("args.json", JSON, {"dp_replicate": 5, "dp_shard": 4, "tp": 2}),
            ("verl.sh", VERL, {"dp": 8, "cp": 2, "tp": 2}),
            ("registry.py", REGISTRY, {"dp_shard": 8}),
        ):
            job = read_jobs(name, text).jobs[0]
            found.append(changed_lines(text, job, **sizes))
        self.assertExpectedInline(
            "--\n".join(found),
            """\
-  tensor_model_parallel_size: 4  # within a host
-  pipeline_model_parallel_size: 2
+  tensor_model_parallel_size: 8  # within a host
+  pipeline_model_parallel_size: 1
--
+  context_parallel_size: 2
--
-dp_replicate_size: 8
-dp_shard_size: 5
+dp_replicate_size: 5
+dp_shard_size: 8
--
cannot be written
--
-{"parallelism_config": {"dp_replicate_size": 8, "dp_shard_size": 5}}
+{"parallelism_config": {"dp_replicate_size": 5, "dp_shard_size": 8}}
--
-{"parallelism_config": {"dp_replicate_size": 8, "dp_shard_size": 5}}
+{"parallelism_config": {"dp_replicate_size": 5, "dp_shard_size": 4, "tp_size": 2}}
--
-    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
+    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron.context_parallel_size=2 \\
--
-    return Config(parallelism=ParallelismConfig(data_parallel_shard_degree=5))
+    return Config(parallelism=ParallelismConfig(data_parallel_shard_degree=8))
""",
        )


def test_yaml_is_read_by_the_plain_installation() -> None:
    # The action and the hook of pre-commit install nothing else.
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert any(one.startswith("pyyaml") for one in project["dependencies"])
    # It is loaded for YAML and JSON only.
    script = (
        "import sys; from meshplan.lint._read_jobs import read_jobs\n"
        "for name in ('a.toml', 'a.sh', 'a.py'): read_jobs(name, 'parallel = 8')\n"
        "assert 'yaml' not in sys.modules\n"
        "read_jobs('a.yaml', 'parallel: 8'); assert 'yaml' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_json_has_the_place_of_each_of_two_equal_keys() -> None:
    part = '{"data_parallel_replicate_degree": 8,\n\t"data_parallel_shard_degree": 5}'
    text = f'{{"face": "\\ud83d\\ude00", "a": {{"parallelism": {part}}},\n"b": {{"parallelism": {part}}}}}'
    jobs = read_jobs("a.json", text.replace(part, part.replace("5", "4"), 1)).jobs
    assert [job.layout.sizes for job in jobs] == [(8, 4), (8, 5)]
    assert [job.source.line for job in jobs] == [1, 3]
    (_, second) = jobs
    assert second.rewrite is not None
    written = second.rewrite(Layout.of(dp_replicate=5, dp_shard=8))
    assert written is not None
    assert [job.layout.sizes for job in read_jobs("a.json", written).jobs] == [(8, 4), (5, 8)]


def test_values_are_named_as_the_file_has_them() -> None:
    data = "recipe: x\ndistributed: {strategy: fsdp2, dp_size: 5, dp_replicate_size: 2}\n"
    assert "a.yaml:2: 5 ranks of dp_size are not a multiple" in refusal("a.yaml", data)


def test_anchors_are_bounded() -> None:
    lines = ["a0: &a0 {tensor_model_parallel_size: 2}"]
    lines += [f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]" for i in range(1, 30)]
    assert isinstance(read_jobs("a.yaml", "\n".join(lines), RankOptions(8)), JobFile)


@given(damaged_texts(NEMO + AXOLOTL + REFERENCE + JSON) | st.text(max_size=200))
@example("\n 0")
def test_damaged_file_raises_one_line(text: str) -> None:
    for name in ("a.yaml", "a.json", "verl.sh"):
        refusal(name, text)
    refusal("a.yaml", "tensor_model_parallel_size: 2\n" + text, world_size=None)


@given(damaged_texts(REGISTRY))
def test_damaged_registry_raises_one_line(text: str) -> None:
    refusal("registry.py", text)


DEFAULTS = """\
policy:
  megatron_cfg:
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
  dtensor_cfg:
    tensor_parallel_size: 8
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


class TestDefaultsOfTheFile:
    """NeMo RL merges the files that ``defaults`` names, each relative to the one that names it."""

    def read(self, folder: Path, defaults: str, text: str) -> str:
        (folder / "below").mkdir(exist_ok=True)
        (folder / "below/base.yaml").write_text(DEFAULTS)
        (folder / "below/middle.yaml").write_text("defaults: base.yaml\ncluster: {num_nodes: 2}\n")
        return format_jobs(read_jobs(str(folder / "a.yaml"), f"defaults: {defaults}\n{text}"))

    def test_own_values_come_first(self, tmp_path: Path) -> None:
        own = "policy:\n  dtensor_cfg: null\n  megatron_cfg: {tensor_model_parallel_size: 4}\n"
        found = self.read(tmp_path, "below/middle.yaml", own)
        assert found.startswith(f"{tmp_path}/a.yaml:1 (pp=2, dp=2, cp=1, tp=4)")

    def test_marked_section_replaces_that_of_the_file_below(self, tmp_path: Path) -> None:
        own = (
            "policy:\n  _override_: true\n  megatron_cfg:\n    tensor_model_parallel_size: 4\n"
            "    pipeline_model_parallel_size: 1\n"
        )
        found = self.read(tmp_path, "below/middle.yaml", own)
        assert found.startswith(f"{tmp_path}/a.yaml:5 (pp=1, dp=4, tp=4)")
        # NeMo RL reads the marker in sections of the root only.
        deeper = "policy:\n  dtensor_cfg: null\n  megatron_cfg:\n    _override_: true\n"
        found = self.read(tmp_path, "below/middle.yaml", deeper)
        assert found.startswith(f"{tmp_path}/a.yaml:1 (pp=2, dp=4, cp=1, tp=2)")

    def test_later_files_come_first(self, tmp_path: Path) -> None:
        own = "policy: {dtensor_cfg: null}\n"
        found = self.read(tmp_path, "[below/middle.yaml, below/base.yaml]", own)
        assert found.startswith(f"{tmp_path}/a.yaml:1 (pp=2, dp=2, cp=1, tp=2)")

    def test_a_missing_file_may_set_anything(self, tmp_path: Path) -> None:
        own = "policy: {megatron_cfg: {tensor_model_parallel_size: 4}}\n"
        found = self.read(tmp_path, "[below/base.yaml, below/none.yaml]", own)
        assert "names another configuration, which may set pp" in found

    def test_other_folders_are_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for folder in ("job", "repository/.git", "repository/job"):
            (tmp_path / folder).mkdir(parents=True)
        self.read(tmp_path, "below/base.yaml", "")
        (tmp_path / "repository/base.yaml").write_text(DEFAULTS)
        (tmp_path / "job/link.yaml").symlink_to(tmp_path / "below/base.yaml")

        def read(folder: str, base: str) -> str:
            text = f"defaults: {base}\npolicy: {{dtensor_cfg: null}}\n"
            return format_jobs(read_jobs(str(tmp_path / folder / "a.yaml"), text))

        mesh = "(pp=2, dp=2, cp=1, tp=2)"
        assert mesh in read("repository/job", "../base.yaml")
        (tmp_path / "repository/circle.yaml").symlink_to(tmp_path / "repository/circle.yaml")
        assert read("repository/job", "../circle.yaml") == ""
        outside = ("job", "../below/base.yaml"), ("job", "link.yaml")
        assert "".join(read(*one) for one in outside) == ""
        monkeypatch.chdir(tmp_path)
        assert all(mesh in read(*one) for one in outside)
        assert read("repository/job", "../../below/base.yaml") == ""

    def test_a_file_that_names_itself_ends(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("defaults: [a.yaml, a.yaml]\ntp: 1\n")
        own = "policy: {megatron_cfg: {tensor_model_parallel_size: 4}}\n"
        found = self.read(tmp_path, "[a.yaml, a.yaml]", own)
        assert "names another configuration, which may set pp" in found
