"""The tests for GPUs need torch, pytest and this repository: no other package and no registry.

Each test builds a virtual environment that holds torch, pytest and their requirements only, and
runs the tests for GPUs in it with the GPUs hidden. All of them must be collected, and skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.programs import capture

ROOT = Path(__file__).parents[1]
FILES = ("test_gpu.py", "test_gpu_fold.py", "test_gpu_backend.py")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists the files to copy"),
]


def required(*names: str) -> set[str]:
    """The distributions of these names and all that they require here.

    Not setuptools, which nothing of torch needs that is used here: a machine may have none, or one
    that is too old for this project.
    """
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in found or name == "setuptools":
            continue
        found.add(name)
        for text in distribution(name).requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.append(need.name)
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that belong to the project, without anything that was compiled."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = capture(command, cwd=ROOT, check=True).stdout.splitlines()
    folder = tmp_path_factory.mktemp("clone")
    for path in listed:
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    return folder


def environment_with(folder: Path, *names: str) -> Path:
    """The interpreter of a new environment that has only these distributions, by links."""
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in required(*names):
        one = distribution(name)
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(one.locate_file(top))))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(tmp_path_factory.mktemp("bare") / "venv", "torch", "pytest")


def run(command: list[str | Path], folder: Path, **more: str) -> str:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    kept = {
        key: text for key, text in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))
    }
    done = capture(
        [str(word) for word in command],
        cwd=folder,
        env=kept | hidden | {"MESHPLAN_CUDA_ARCHITECTURES": ""} | more,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_skipped(text: str, package: Path) -> None:
    """All were collected and skipped, with ``package`` as the meshplan that they would test."""
    assert f"meshplan: {package}\n" in text, text
    collected = re.search(r"collected (\d+) items", text)
    assert collected is not None, text
    assert int(collected[1]) > 10
    # The warning is that of torch without numpy.
    assert re.search(rf"^=+ {collected[1]} skipped(, 1 warning)? in ", text, re.M), text


def test_environment_holds_required_packages_only(bare: Path, tmp_path: Path) -> None:
    ask = "import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    names = "hypothesis numpy expecttest pytest_timeout xdist setuptools meshplan torch pytest"
    found = run([bare, "-c", ask.format(names=names.split())], tmp_path)
    assert found == "['torch', 'pytest']\n"


def test_make_test_gpu_runs(bare: Path, clone: Path) -> None:
    text = run(["make", "test-gpu", f"PYTHON={bare}"], clone)
    check_skipped(text, clone / "meshplan")
    # Tests on a GPU need it, and this environment has no way to install anything.
    ask = "from meshplan import kernel; print(kernel.available(), kernel.why_not())"
    assert run([bare, "-W", "ignore", "-c", ask], clone) == "True None\n"


def test_tests_run_from_any_folder_with_pythonpath_only(
    bare: Path, clone: Path, tmp_path: Path
) -> None:
    paths = [clone / "tests" / name for name in ("gpu.ini", *FILES)]
    command = [bare, "-m", "pytest", "-c", *paths]
    check_skipped(run(command, tmp_path, PYTHONPATH=str(clone)), clone / "meshplan")


def test_installed_wheel_is_tested(clone: Path, tmp_path: Path) -> None:
    """The installed package is tested, though the clone with the tests has another one."""
    run([sys.executable, "-c", BUILD, tmp_path], clone, CC="", PATH="/nowhere")
    (wheel,) = tmp_path.glob("*.whl")
    python = environment_with(tmp_path / "venv", "torch", "pytest")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*install, "--no-deps", "--no-index", wheel], tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    command = [python, "-m", "pytest", "-c", clone / "tests" / "gpu.ini"]
    text = run([*command, *(clone / "tests" / name for name in FILES)], tmp_path)
    check_skipped(text, site / "meshplan")
