"""The source of the installation in doctor and errors, and the commands that they propose."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshplan
from meshplan._installation import installation
from tests.installed import Installed


def package(folder: Path) -> Path:
    """A folder ``meshplan``, as far as it is looked at."""
    found = folder / "meshplan"
    found.mkdir(parents=True)
    return found


def tree(folder: Path) -> Path:
    found = package(folder)
    (folder / "setup.py").touch()
    (folder / "csrc").mkdir()
    return found


def metadata(site: Path, direct: Any = None, kind: str = "meshplan-0.1.0.dist-info") -> None:
    folder = site / kind
    folder.mkdir(parents=True)
    (folder / ("PKG-INFO" if "egg" in kind else "METADATA")).write_text(
        "Metadata-Version: 2.1\nName: meshplan\nVersion: 0.1.0\n"
    )
    if direct is not None:
        text = direct if isinstance(direct, str) else json.dumps(direct)
        (folder / "direct_url.json").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that stands for all of ``sys.path``."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


VCS = {"vcs": "git", "commit_id": "0123abc", "requested_revision": "main"}


@pytest.mark.parametrize(
    ("direct", "remedy"),
    [
        (None, "in a clone of the repository: pip install --force-reinstall --no-deps ."),
        ("[", "in a clone of the repository: pip install --force-reinstall --no-deps ."),
        ("[]", "in a clone of the repository: pip install --force-reinstall --no-deps ."),
        (
            {"url": "file:///a/meshplan-0.1.0-py3-none-any.whl", "archive_info": {}},
            "in a clone of the repository: pip install --force-reinstall --no-deps .",
        ),
        (
            {"url": "file:///a/folder/that/is/gone", "dir_info": {}},
            "in a clone of the repository: pip install --force-reinstall --no-deps .",
        ),
        (
            {"url": "https://host.example/a/meshplan", "vcs_info": VCS},
            "pip install --force-reinstall --no-deps "
            "'meshplan @ git+https://host.example/a/meshplan@0123abc'",
        ),
    ],
)
def test_installation_names_its_source(site: Path, direct: Any, remedy: str) -> None:
    metadata(site, direct)
    found = installation(package(site))
    assert found.about == f"installed in {site}"
    assert found.uncompiled == "meshplan was installed without a C++ compiler"
    assert found.remedy == remedy


def test_installed_folder_is_named(site: Path, tmp_path: Path) -> None:
    tree(tmp_path / "a clone")
    url = (tmp_path / "a clone").as_uri()
    metadata(site, {"url": url, "dir_info": {}})
    remedy = installation(package(site)).remedy
    assert remedy == f"pip install --force-reinstall --no-deps '{tmp_path}/a clone'"


def test_editable_install_is_named(site: Path, tmp_path: Path) -> None:
    inside = tree(tmp_path / "clone")
    url = (tmp_path / "clone").as_uri()
    metadata(site, {"url": url, "dir_info": {"editable": True}})
    found = installation(inside)
    assert found.about == f"editable install of {tmp_path}/clone"
    assert found.remedy == f"pip install --no-deps --editable {tmp_path}/clone"


@pytest.mark.parametrize("built", [False, True])
def test_source_tree_is_named(site: Path, tmp_path: Path, built: bool) -> None:
    inside = tree(tmp_path / "clone")
    if built:  # the metadata that a build leaves in the tree is not an installation
        metadata(tmp_path / "clone", kind="meshplan.egg-info")
    sys.path.insert(0, str(tmp_path / "clone"))
    package(site)
    metadata(site)  # of another installation
    found = installation(inside)
    assert found.about == f"source tree {tmp_path}/clone, not installed by pip"
    assert found.uncompiled == "this source tree of meshplan has no compiled library"
    assert found.remedy == f"pip install --editable {tmp_path}/clone"


def test_copied_package_is_named(site: Path, tmp_path: Path) -> None:
    """Such as a copy next to a user's scripts, which pip cannot install."""
    found = installation(package(tmp_path))
    assert found.about == f"copy {tmp_path}, not installed by pip"
    assert found.uncompiled == "this copy of meshplan has no compiled library"
    assert found.remedy == "in a clone of the repository: pip install --editable ."


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The line about meshplan, and the two about the compiled library."""
    assert done.stderr == ""
    found = done.stdout.splitlines()
    (about,) = (line for line in found if "meshplan: " in line)
    at = next(i for i, line in enumerate(found) if "compiled reductions" in line)
    return [about, *found[at : at + 2]]


@pytest.mark.dist
@pytest.mark.timeout(1500)
def test_doctor_names_the_clone_or_the_wheel(installed: Installed, tmp_path: Path) -> None:
    """The wheel is complete; in the folder of the sources ``python -m`` imports those."""
    version = meshplan.__version__
    (site,) = (installed.prefix / "lib").glob("python*/site-packages")
    complete = [
        f"ok      meshplan: {version}, installed in {site}",
        "ok      compiled reductions on CPUs: as fast as memory",
    ]
    module = [installed.python, "-m", "meshplan", "doctor"]
    for done in (
        installed.run(module, tmp_path),
        installed.run("meshplan doctor", installed.source),
        installed.run([installed.python, "-P", "-m", "meshplan", "doctor"], installed.source),
    ):
        assert lines(done)[:2] == complete
    about, missing, remedy = lines(installed.run(module, installed.source))
    assert about == (
        f"ok      meshplan: {version}, source tree {installed.source}, not installed by pip"
    )
    assert "this source tree of meshplan has no compiled library" in missing
    assert remedy.endswith(f"pip install --editable {installed.source}")


@pytest.mark.timeout(1500)
def test_doctor_reports_a_missing_compiled_library(installed: Installed, tmp_path: Path) -> None:
    (site,) = (installed.prefix / "lib").glob("python*/site-packages")
    shutil.copytree(site, tmp_path / "target")
    (tmp_path / "target" / "meshplan" / "kernel" / "_cpu.so").unlink()
    module = [installed.python, "-m", "meshplan", "doctor"]
    done = installed.run(module, tmp_path, PYTHONPATH=str(tmp_path / "target"))
    assert done.returncode == 1
    about, library, remedy = lines(done)
    assert about == f"ok      meshplan: {meshplan.__version__}, installed in {tmp_path}/target"
    assert library.endswith(
        "meshplan was installed without a C++ compiler, so that reductions on CPUs run in plain torch"
    )
    # The wheel was a file of another folder, which cannot be compiled again.
    assert remedy.removeprefix("        ").removeprefix("apt-get install g++, and then: ") == (
        "in a clone of the repository: pip install --force-reinstall --no-deps ."
    )
