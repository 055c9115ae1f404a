"""Builds with what it finds: a C++ compiler gives the CPU library, nvcc the kernels for CUDA.

Without either the package is pure Python, and a wheel of it is for any machine. The kernels'
sources are installed in any case, so that they can be compiled at first use.
``MESHPLAN_CUDA_ARCHITECTURES`` says for which GPUs nvcc compiles: those of this machine if it is
not set, none if it is empty. ``pip install -v`` shows the progress.
``MESHPLAN_BUILD_KERNELS=0`` compiles nothing: the linter needs no kernels.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from glob import glob
from pathlib import Path
from types import SimpleNamespace

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

# Beside this file, which need not be on the path.
BUILD = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "tools/build_in_place.py")))
# pre-commit passes no options to a build, and only runs the linter. This is the name of its
# environments.
IN_PRE_COMMIT = Path(os.environ.get("VIRTUAL_ENV", "")).name.startswith("py_env-")
KERNELS = os.environ.get("MESHPLAN_BUILD_KERNELS") or str(int(not IN_PRE_COMMIT))
# Neither is a Python module: they are loaded through ctypes.
CPU = Extension(
    "meshplan.kernel._cpu",
    sources=BUILD.CPU_SOURCES,
    depends=BUILD.HEADERS,
    language="c++",
    extra_compile_args=BUILD.CPU_FLAGS,
    optional=True,
)
DEVICE = Extension(
    "meshplan.kernel._device", sources=BUILD.DEVICE_SOURCES, depends=BUILD.HEADERS, optional=True
)


class BuildExtensions(build_ext):
    """Has nvcc write a file that CUDA's driver loads. No name has the interpreter in it."""

    def run(self) -> None:
        if self.extensions:
            sys.stderr.write(f"compiling kernels for CPUs; {BUILD.describe_kernels()}\n")
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        suffix = ".fatbin" if fullname.split(".")[-1] == "_device" else ".so"
        return os.path.join(*fullname.split(".")) + suffix

    def build_extension(self, ext: Extension) -> None:
        if ext.name != DEVICE.name:
            super().build_extension(ext)
            return
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run([*BUILD.fatbin(), "-o", str(path)], check=True, timeout=BUILD.SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompileError(f"{error}; kernels will be compiled at first use") from error


class BuildPackage(build_py):
    """Puts the sources of the kernels into the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._sources().items():
                self.mkpath(os.path.dirname(target))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._sources().values()]

    def _sources(self) -> dict[str, str]:
        folder = os.path.join(self.build_lib, "meshplan")
        return {path: os.path.join(folder, path) for path in sorted(glob("csrc/*"))}


class BuildWheel(bdist_wheel):
    """Is for any Python; for this platform where something was compiled, else for any machine."""

    def get_tag(self) -> tuple[str, str, str]:
        built = self.get_finalized_command("build_ext").get_outputs()
        self.root_is_pure = not any(map(os.path.exists, built))
        return "py3", "none", "any" if self.root_is_pure else super().get_tag()[2]


COMPILED = [CPU, *([DEVICE] if BUILD.ARCHITECTURES else [])]
setup(
    ext_modules=[] if KERNELS == "0" else COMPILED,
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildPackage, "bdist_wheel": BuildWheel},
)
