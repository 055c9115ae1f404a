"""The action for GitHub and the hook for pre-commit: well-formed, and safe with any input."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from meshplan.lint._reporters import FORMATS
from tests.cli import meshplan
from tests.programs import capture

ROOT = Path(__file__).parents[1]
ACTION = (ROOT / "action.yml").read_text(encoding="utf-8")
INPUT = re.compile(r"\$\{\{\s*inputs\.([\w-]+)\s*\}\}")


def load(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


def lint(tmp_path: Path, **inputs: str) -> tuple[int, list[str]]:
    """What the action's last step calls ``meshplan`` with, and its exit status."""
    folder = tmp_path / "meshplan" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meshplan").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 1\n')
    (folder / "meshplan").chmod(0o755)
    given = {"args": "", "output-format": "github", "output-file": "", **inputs}
    step = next(one for one in load(ACTION)["runs"]["steps"] if one["name"] == "meshplan lint")
    environment = {key: INPUT.sub(lambda m: given[m[1]], text) for key, text in step["env"].items()}
    done = capture(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env={**os.environ, **environment, "RUNNER_TEMP": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_action_is_well_formed() -> None:
    action = load(ACTION)
    assert list(action) == ["name", "description", "inputs", "runs"]
    assert action["runs"]["using"] == "composite"
    for name, one in action["inputs"].items():
        assert one["description"].endswith("."), name
        assert one.get("required") or "default" in one, name
    assert action["inputs"]["output-format"]["default"] in FORMATS
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        # Expressions are replaced before the shell reads the script: there they could run code.
        assert "${{" not in step["run"]


def test_inputs_become_options_of_lint(tmp_path: Path) -> None:
    (tmp_path / "a b.toml").touch()
    (tmp_path / "c.toml").touch()
    assert lint(tmp_path, args="c.toml --domain-size 8") == (
        1,
        ["lint", "--output-format", "github", "c.toml", "--domain-size", "8"],
    )
    assert lint(tmp_path, args="*.toml")[1][3:] == ["a b.toml", "c.toml"]
    assert lint(tmp_path)[1] == ["lint", "--output-format", "github"]
    found = lint(tmp_path, args="c.toml", **{"output-format": "sarif", "output-file": "a b.sarif"})
    assert found[1][1:] == ["--output-format", "sarif", "c.toml", "--output-file", "a b.sarif"]


def test_no_input_is_run_as_code(tmp_path: Path) -> None:
    code = 'x; touch 1 $(touch 2) `touch 3` "; touch 4'
    lint(tmp_path, args=code, **{"output-format": code, "output-file": code})
    assert {path.name for path in tmp_path.iterdir()} == {"meshplan"}


@pytest.mark.parametrize(
    ("environment", "compiles"),
    [
        ({}, True),
        ({"MESHPLAN_BUILD_KERNELS": "0"}, False),
        ({"VIRTUAL_ENV": "/cache/repo1/py_env-python3"}, False),
        ({"VIRTUAL_ENV": "/cache/repo1/py_env-python3", "MESHPLAN_BUILD_KERNELS": "1"}, True),
    ],
)
def test_kernels_are_not_compiled_for_the_linter(
    environment: dict[str, str], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setuptools = pytest.importorskip("setuptools")
    for name in ("MESHPLAN_BUILD_KERNELS", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    assert bool(given["ext_modules"]) == compiles


def test_problem_matcher_reads_real_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/howto/lint-in-ci.md").read_text(encoding="utf-8")
    section = page.partition("## Editors")[2]
    command, matcher = re.findall(r"`(meshplan lint \. .*|\^.*\$)`", section)
    monkeypatch.chdir(tmp_path)
    text = "from torch.distributed.device_mesh import init_device_mesh\n"
    text += "mesh = init_device_mesh('cuda', (8, 5), mesh_dim_names=('ddp', 'fsdp'))\n"
    Path("a: b.py").write_text(text)
    Path("open.py").write_text(text.replace("8, 5", "n, 5"))
    words = ["--isolated", "--domain-size", "8", *command.split()[2:]]
    status, out, err = meshplan("lint", *words)
    assert (status, err) == (1, "")
    read = [re.fullmatch(matcher, line) for line in out.splitlines()]
    found = [one.groups()[:4] for one in read if one is not None]
    assert set(found) == {
        ("a: b.py", "2", "error", "MP101"),
        ("open.py", "2", "warning", "MP191"),
    }
