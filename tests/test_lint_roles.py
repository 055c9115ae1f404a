"""The roles of axes: from names, from settings, and axes without any."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshplan.layout import Layout
from meshplan.lint._read_jobs import read_jobs
from meshplan.lint._roles import (
    AXIS_NAMES,
    ROLES,
    Framework,
    Role,
    assume_roles,
    find_role,
    resolve_roles,
)
from tests.cli import meshplan


@pytest.fixture
def lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return partial(meshplan, "lint", "--no-env", "--domain-size", "8")


@pytest.mark.parametrize(
    ("axis", "role"),
    [
        ("data_parallel", "replicate"),
        ("tensor_parallel", "model"),
        ("Tensor-Parallel", "model"),
        ("tensor_model_parallel_size", "model"),
        ("dp_replicate", "replicate"),
        ("dp_shard_cp", "shard"),
        ("dp_shard_mod_ep", "shard"),
        ("sequence_parallel", "shard"),
        ("infer_tp", "model"),
        ("inter_node", "replicate"),
        ("nodes", "replicate"),
        ("gpus", "shard"),
        ("dp1", "replicate"),
        ("dp_outer", "replicate"),
        ("replica", "replicate"),
        ("sharding", "shard"),
        ("expert_parallel", "experts"),
        ("pp", "apart"),
        ("stages", "apart"),
        ("foo", "unknown"),
        ("axis0", "unknown"),
        ("", "unknown"),
        ("_1", "unknown"),
        ("world", "unknown"),
    ],
)
def test_names_have_roles(axis: str, role: Role) -> None:
    assert find_role(axis) == role


def test_every_name_has_one_role() -> None:
    names = [name for role in AXIS_NAMES for name in AXIS_NAMES[role]]
    assert len(names) == len(set(names))
    assert AXIS_NAMES.keys() == set(ROLES)
    # Each name is reached as written, and with the endings that frameworks add.
    assert all(find_role(name) == role for role in AXIS_NAMES for name in AXIS_NAMES[role])
    assert all(
        find_role(f"{name}_parallel") == role for role in AXIS_NAMES for name in AXIS_NAMES[role]
    )


@pytest.mark.parametrize(
    ("axes", "given", "framework", "expected"),
    [
        ("dp tp", "unknown unknown", "dtensor", "replicate model"),
        ("dp tp", "unknown unknown", "fsdp2", "shard model"),
        ("dp cp", "unknown unknown", "fsdp2", "shard shard"),
        ("dp fsdp", "unknown unknown", "fsdp2", "replicate shard"),
        ("dp_replicate tp", "unknown unknown", "fsdp2", "replicate model"),
        ("dp tp", "replicate unknown", "fsdp2", "replicate model"),
        ("dp data", "unknown unknown", "fsdp2", "replicate shard"),
        ("tp dp", "shard model", "fsdp2", "shard model"),
    ],
)
def test_use_comes_before_names(axes: str, given: Any, framework: Framework, expected: str) -> None:
    found = resolve_roles(axes.split(), given.split(), framework)
    assert found == tuple(expected.split())


@pytest.mark.parametrize(
    ("roles", "framework", "expected"),
    [
        ("unknown unknown", "fsdp2", "replicate shard"),
        ("unknown", "fsdp2", "shard"),
        ("unknown shard", "fsdp2", "replicate shard"),
        ("unknown unknown model", "fsdp2", "replicate shard model"),
        ("unknown unknown unknown", "fsdp2", "unknown unknown unknown"),
        ("model", "fsdp2", "model"),
        ("unknown model", "ddp", "replicate model"),
        ("unknown unknown", "dtensor", "replicate replicate"),
    ],
)
def test_stated_framework_decides_axes_without_role(
    roles: Any, framework: Framework, expected: str
) -> None:
    axes = [f"a{i}" for i in range(len(roles.split()))]
    assert assume_roles(axes, roles.split(), framework) == tuple(expected.split())


def test_axis_of_unknown_role_fails_with_the_line_to_add(lint: Any) -> None:
    status, out, _ = lint(
        "--mesh", "foo=4,bar=6", "--output-format", "json", "--fail-level", "error"
    )
    report = json.loads(out)
    (finding,) = (one for one in report["findings"] if one["code"] == "MP191")
    assert status == 1
    assert [one["state"] for one in report["inputs"]] == ["not judged"]
    line = 'roles = { foo = "replicate", bar = "shard" }'
    assert f"add to meshplan.toml: {line} (each replicate, shard," in finding["message"]
    # The line as printed makes the run pass to the verdict.
    Path("meshplan.toml").write_text(line + "\n")
    status, out, _ = lint("--mesh", "foo=4,bar=6", "--output-format", "json")
    report = json.loads(out)
    assert [one["state"] for one in report["inputs"]] == ["judged"]
    assert {one["code"] for one in report["findings"]} >= {"MP101"}
    assert lint("--isolated", "--mesh", "foo=4,bar=6", "--allow-unjudged")[0] == 0


def test_axis_of_unknown_role_does_not_hide_corrupt_data(lint: Any) -> None:
    words = ("--mesh", "foo=2,bar=2", "--ranks", "0,2,1,3", "--flatten", "foo,bar")
    status, out, _ = lint(*words, "--output-format", "json")
    codes = {one["code"] for one in json.loads(out)["findings"]}
    assert (status, codes) == (1, {"MP106", "MP191"})


def test_role_is_kept_when_axes_change_places() -> None:
    """FSDP2 goes by position, so that the text in another order is another job."""
    make = 'mesh = init_device_mesh("cuda", (4, 6), mesh_dim_names=("a", "b"))\n'
    turned = Layout.of(b=6, a=4)
    for use, can_turn in (
        ("fully_shard(model, mesh=mesh)", False),
        ('fully_shard(model, mesh=mesh["b"])\nparallelize_module(model, mesh["a"], {})', True),
    ):
        (job,) = read_jobs("train.py", f"{make}{use}\n").jobs
        assert job.rewrite is not None
        assert (job.rewrite(turned) is not None) == can_turn


def test_single_axis_needs_no_role(lint: Any) -> None:
    status, out, _ = lint("--mesh", "foo=24,bar=1", "--output-format", "json")
    assert (status, json.loads(out)["findings"]) == (0, [])


def test_settings_override_names(lint: Any) -> None:
    Path("meshplan.toml").write_text('roles = { dp = "apart" }\nmesh = "dp=8,fsdp=5"\n')
    status, out, _ = lint("--output-format", "json")
    codes = {one["code"] for one in json.loads(out)["findings"]}
    assert (status, codes) == (0, {"MP102"})
    Path("meshplan.toml").write_text('mesh = "dp=8,fsdp=5"\n')
    assert lint()[0] == 1


@pytest.mark.parametrize("roles", ['"shard"', '{ dp = "unknown" }', "{ dp = 1 }"])
def test_invalid_roles_are_refused(lint: Any, roles: str) -> None:
    Path("meshplan.toml").write_text(f"roles = {roles}\n")
    status, out, err = lint("--mesh", "dp=8")
    assert (status, out) == (2, "")
    assert "roles are" in err
