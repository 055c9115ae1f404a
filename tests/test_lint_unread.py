"""A job-like file with a degree above 1 is read or not judged, never a default mesh or none."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.lint._job import JobFile
from meshplan.lint._read_jobs import RankOptions, read_jobs

KEYS = {
    "torchtitan": ("data_parallel_replicate_degree", "tensor_parallel_degree"),
    "megatron": ("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    "torchtune": ("data_parallel_replicate_dim", "tensor_parallel_dim"),
}
OTHERS = ("tensor_parallel_size", "expert_parallel_size", "my_tp_size", "cp_degree", "dp_shard")


def write(name: str, sizes: dict[str, int]) -> str:
    """A job with these degrees, in the format of the name."""
    if name.endswith(".toml"):
        return "[parallelism]\n" + "".join(f"{key} = {size}\n" for key, size in sizes.items())
    if name.endswith(".yaml"):
        return "parallelism:\n" + "".join(f"  {key}: {size}\n" for key, size in sizes.items())
    if name.endswith(".json"):
        return json.dumps({"parallelism": sizes}, indent=1)
    words = [word for key, size in sizes.items() for word in (f"--{key}", str(size))]
    line = " ".join(["torchrun --nproc-per-node 8 --nnodes 6 train.py", *words])
    if name == "string.py":
        return f"import os\n\nos.system({line!r})\n"
    return f"import subprocess\n\nsubprocess.run({line.split()!r})\n" if ".py" in name else line


NAMES = ("job.toml", "job.yaml", "job.json", "job.sh", "string.py", "list.py")


def has_size(found: JobFile, size: int) -> bool:
    return any(size in job.layout.sizes for job in found.jobs)


@given(st.sampled_from(NAMES), st.sampled_from(OTHERS), st.integers(2, 64), st.booleans())
def test_degree_of_any_name_is_read_or_not_judged(
    name: str, key: str, size: int, hyphens: bool
) -> None:
    key = key.replace("_", "-") if hyphens and name not in ("job.toml", "job.json") else key
    found = read_jobs(name, write(name, {key: size}), RankOptions(7 * size))
    assert found.skipped or has_size(found, size)


@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(KEYS)),
    st.integers(0, 1),
    st.integers(2, 9),
    st.data(),
)
def test_misspelt_degree_has_a_suggestion(
    name: str, program: str, which: int, size: int, data: st.DataObject
) -> None:
    keys = KEYS[program]
    key = keys[which]
    at = data.draw(st.integers(key.index("_") + 2, len(key) - 3))
    wrong = key[:at] + key[at + 1 :]
    sizes = {wrong: size, keys[1 - which]: 2}
    found = read_jobs(name, write(name, sizes), RankOptions(2 * size))
    assert not found.jobs
    if wrong not in key.replace("__", "_"):  # as without the second of two equal letters
        assert any(key in one.why.replace("-", "_") for one in found.skipped)


@pytest.mark.parametrize("name", ["a.yaml", "a.sh", "a.py"])
def test_many_unknown_keys_take_time_in_proportion(name: str) -> None:
    keys = {f"data_paralel_{i:05}_degree": 8 for i in range(6000)}
    before = time.process_time()
    read_jobs(name, write(name, {"tensor_model_parallel_size": 2, **keys})[: 1 << 18])
    assert time.process_time() - before < 30


def test_long_name_takes_time_in_proportion() -> None:
    before = time.process_time()
    read_jobs("a.py", "x_parallel_degree" * 8000 + " = 4\n")
    assert time.process_time() - before < 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "ici_mesh_shape = (-1, 8)\n"),
        ("a.py", "deepspeed.initialize(model=model, mesh_param=(2, 4))\n"),
        ("a.py", "FSDPConfig(hsdp_sharding_size=5)\n"),
        ("a.py", "setattr(config.parallelism, 'tensor_parallel_degree', 4)\n"),
        ("a.py", "config['tensor_parallel_size'] = 8\n"),
        ("a.py", "config['tensor_parallel_size']: int = 8\n"),
        ("a.py", "config.tensor_parallel_size: int = 8\n"),
        ("a.py", "object.__setattr__(config, 'tensor_parallel_size', 4)\n"),
        ("a.py", "config.__setitem__('tensor_parallel_size', 4)\n"),
        ("a.yaml", "ici_mesh_shape: [-1, 8]\n"),
        ("a.yaml", "ici_mesh_shape:\n  - 1\n  - 8\n"),
    ],
)
def test_size_of_any_form_is_not_judged(name: str, text: str) -> None:
    assert [one.source.line for one in read_jobs(name, text).skipped] == [1]
