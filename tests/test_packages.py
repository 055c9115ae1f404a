"""The content and the metadata of packages. `make packages` installs and tries them."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import meshplan
from tests.programs import capture

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
# Each of them leaves arguments of its own there.
folder = sys.argv[1]
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return capture(command, cwd=ROOT, check=True).stdout.splitlines()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what belongs to it is known from git")
def test_packages_build_without_a_compiler(tmp_path: Path) -> None:
    """Both packages of a copy of the checkout, built where no program is found."""
    script = runpy.run_path(str(ROOT / "tools" / "check_packages.py"))
    files = [path for path in tracked() if (ROOT / path).is_file()]
    for path in files:
        target = tmp_path / "copy" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    (tmp_path / "empty").mkdir()
    environment = {key: text for key, text in os.environ.items() if key not in ("CC", "CXX")}
    environment |= {"PATH": str(tmp_path / "empty"), "MESHPLAN_CUDA_ARCHITECTURES": ""}
    dist = tmp_path / "dist"
    dist.mkdir()
    done = capture([sys.executable, "-c", BUILD, str(dist)], cwd=tmp_path / "copy", env=environment)
    assert done.returncode == 0, done.stderr
    version = meshplan.__version__
    source, wheel = (dist / f"meshplan-{version}{e}" for e in (".tar.gz", "-py3-none-any.whl"))
    assert script["in_source"](source) == set(files) | script["MADE"]
    assert script["in_wheel"](wheel) == script["wheel_files"](files, compiled=())
    with zipfile.ZipFile(wheel) as archive:
        info = f"meshplan-{version}.dist-info"
        about = archive.read(f"{info}/METADATA").decode()
        tags = archive.read(f"{info}/WHEEL").decode()
        licence = archive.read(f"{info}/licenses/LICENSE")
    assert "\nRoot-Is-Purelib: true\nTag: py3-none-any\n" in tags
    assert licence == (ROOT / "LICENSE").read_bytes()
    # What the linter needs, and nothing else, unless an extra such as torch is requested.
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", about, re.M)
    assert needed == ["networkx", "numpy", "pyyaml", "rich"]
    assert re.findall(r"^Requires-Dist: (torch.*)$", about, re.M) == [
        'torch>=2.11; extra == "torch"'
    ]
    assert re.findall("^License-Expression: (.*)$", about, re.M) == ["BSD-3-Clause"]


def test_kernels_are_compiled_for_the_gpus_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(said: str) -> list[str]:
        """The architectures. What is said about them names them, or how to name some."""
        for name, text in (("nvcc", ""), ("nvidia-smi", said)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        build = runpy.run_path(str(ROOT / "tools" / "build_in_place.py"))
        for one in build["ARCHITECTURES"] or ["at first use", "MESHPLAN_CUDA_ARCHITECTURES=90"]:
            assert one in build["describe_kernels"]()
        return list(build["ARCHITECTURES"])

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("MESHPLAN_CUDA_ARCHITECTURES", raising=False)
    assert found("echo 10.0; echo 9.0; echo 9.0") == ["90", "100"]
    # Who only lints waits for none.
    assert found("echo '[N/A]'") == []
    assert found("echo no driver; exit 9") == []
    monkeypatch.setenv("MESHPLAN_CUDA_ARCHITECTURES", "80,90")
    assert found("echo 10.0") == ["80", "90"]
    monkeypatch.setenv("MESHPLAN_CUDA_ARCHITECTURES", "")
    assert found("echo 10.0") == []
