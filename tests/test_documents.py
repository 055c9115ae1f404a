"""The version, the setup of a clone and the site of a release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import meshplan

ROOT = Path(__file__).parents[1]


def test_version_is_the_same_everywhere() -> None:
    cite = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == meshplan.__version__ == cite["version"]


def test_readme_sets_up_a_fresh_clone(tmp_path: Path) -> None:
    """Its first lines name the main job and its tests, and both begin with the virtual environment."""
    page = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(page) <= 90
    commands = [line.partition("  #")[0] for line in page[:30]]
    assert {"make demo", "make test", 'pip install -e ".[torch]"'} <= set(commands)
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path], check=True)
    for verb, program in (("demo", "examples/jagged_mesh.py"), ("test", "pytest")):
        words = ["make", "--no-print-directory", "--dry-run", verb]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        first, *rest = done.stdout.splitlines()
        assert first.endswith("-m venv .venv")
        assert any("pip install" in line and "--editable ." in line for line in rest)
        assert program in done.stdout


@pytest.mark.full
def test_site_of_a_version_is_committed_to_its_branch(tmp_path: Path) -> None:
    """``make docs-release`` in a clone, with the tools of this environment."""
    pytest.importorskip("mike")
    version = meshplan.__version__
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path], check=True)
    words = ["make", "--old-file=setup", f"BIN={Path(sys.executable).parent}", "docs-release"]
    author = {f"GIT_{role}_NAME": "release" for role in ("AUTHOR", "COMMITTER")}
    author |= {f"GIT_{role}_EMAIL": "release@example.org" for role in ("AUTHOR", "COMMITTER")}
    environment = os.environ | author
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    def read(path: str) -> str:
        words = ["git", "show", f"gh-pages:{path}"]
        done = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout

    assert json.loads(read("versions.json")) == [
        {"version": version, "title": version, "aliases": ["latest"]}
    ]
    assert read("latest") == version  # a link
    assert "latest/" in read("index.html")
    assert "MP101" in read(f"{version}/codes/MP101/index.html")
