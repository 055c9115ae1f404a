"""One runtime for GPUs in a process: the copy that torch has loaded, for any search path of the loader.

Real shared objects of a runtime's name are compiled and loaded in processes of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import capture

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: no library is compiled"),
]
HEAD = """
import ctypes, sys, types
import torch
from meshplan.kernel._driver import *

def which(path):
    return ctypes.CDLL(path).which()
"""


def library(path: Path, number: int, soname: str = "") -> Path:
    """A library that knows its number; its functions are those of HIP's runtime that are named."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    command += [f"-Wl,-soname,{soname}"] if soname else []
    text = f'extern "C" int which() {{ return {number}; }}'
    subprocess.run(command, input=text, text=True, check=True, timeout=300)
    return path


def run_code(text: str, **environment: str) -> str:
    done = capture(
        [sys.executable, "-W", "ignore", "-c", HEAD + text], cwd=ROOT, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "name", ["libamdhip64.so.7", "libamdhip64.so.6.4.1", "libamdhip64-0a1b.so"]
)
def test_loaded_copy_is_used(tmp_path: Path, name: str) -> None:
    """The loader's path has another, under the name that has no version."""
    private = library(tmp_path / "torch's own" / name, 1, "libamdhip64.so.7")
    library(tmp_path / "system" / "libamdhip64.so", 2)
    text = f"ctypes.CDLL({str(private)!r}, ctypes.RTLD_LOCAL)\n"
    text += "found = find_library('libamdhip64.so')\nprint(which(found), found)"
    path = str(tmp_path / "system")
    assert run_code(text, LD_LIBRARY_PATH=path) == f"1 {private}"
    # The driver loads that file, and no second one: it lacks the functions, and the error names it.
    text = f"ctypes.CDLL({str(private)!r}, ctypes.RTLD_LOCAL)\n"
    text += "from meshplan.kernel._driver import Driver\n"
    text += "try: Driver('hip', 0)\nexcept Exception as error: print(error)\n"
    text += "print(loaded_files('libamdhip64.so'))"
    first, last = run_code(text, LD_LIBRARY_PATH=path).splitlines()
    assert first.startswith(f"{private}: ")
    assert last == str([str(private)])


def test_symbolic_link_is_the_same_copy(tmp_path: Path) -> None:
    private = library(tmp_path / "libamdhip64.so.7.1.5", 1)
    (tmp_path / "libamdhip64.so").symlink_to(private.name)
    text = f"ctypes.CDLL({str(tmp_path / 'libamdhip64.so')!r})\nctypes.CDLL({str(private)!r})\n"
    assert run_code(text + "print(find_library('libamdhip64.so'))") == str(private)


def test_package_then_loader_are_searched(tmp_path: Path) -> None:
    packaged = library(tmp_path / "sdk" / "libamdhip64.so.7", 3)
    library(tmp_path / "system" / "libamdhip64.so", 2)
    package = tmp_path / "path" / "rocm_sdk.py"
    package.parent.mkdir()
    package.write_text(
        "from pathlib import Path\n"
        "def find_libraries(name):\n"
        "    if name != 'amdhip64':\n"
        "        raise ModuleNotFoundError(name)\n"
        f"    return [Path({str(packaged)!r})]\n"
    )
    ask = "print(which(find_library('libamdhip64.so')))"
    path = str(tmp_path / "system")
    assert run_code(ask, LD_LIBRARY_PATH=path, PYTHONPATH=str(package.parent)) == "3"
    assert run_code(ask, LD_LIBRARY_PATH=path) == "2"
    # Neither is there: the name, for the loader's own message.
    ask = "print(find_library('libhiprtc.so'), find_library('libcuda.so', 'libcuda.so.1'))"
    assert run_code(ask, PYTHONPATH=str(package.parent)) == "libhiprtc.so libcuda.so.1"


def test_several_loaded_copies_are_refused(tmp_path: Path) -> None:
    first = library(tmp_path / "one" / "libamdhip64.so.6", 1)
    second = library(tmp_path / "two" / "libamdhip64.so.7", 2)
    text = "from meshplan.kernel._driver import Driver, DriverError\n"
    text += f"ctypes.CDLL({str(first)!r})\nctypes.CDLL({str(second)!r})\n"
    refused = "try: Driver('hip', 0)\nexcept DriverError as error: print(error)"
    found = run_code(text + refused)
    assert found == (
        f"libamdhip64.so: several copies of libamdhip64.so are loaded: {first}, {second}; start the "
        "process with one, without the others in LD_LIBRARY_PATH and LD_PRELOAD"
    )
    # One of them is of torch's packages.
    text += f"torch.__file__ = {str(tmp_path / 'two' / 'torch' / '__init__.py')!r}\n"
    assert run_code(text + "print(which(find_library('libamdhip64.so')))") == "2"


def test_compiler_matches_the_loaded_runtime(tmp_path: Path) -> None:
    """It was not loaded itself, and the loader's path has that of another ROCm."""
    runtime = library(tmp_path / "torch" / "libamdhip64.so.7", 1)
    compiler = library(tmp_path / "torch" / "libhiprtc.so.7", 2)
    library(tmp_path / "system" / "libhiprtc.so", 3)
    text = f"ctypes.CDLL({str(runtime)!r})\nfrom meshplan.kernel import _device_code\n"
    text += "print(list(_device_code._libraries('hip')))"
    assert run_code(text, LD_LIBRARY_PATH=str(tmp_path / "system")) == str([str(compiler)])
