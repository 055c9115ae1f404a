"""meshplan as users install it: the wheel of this checkout, in a separate environment.

The environment has torch and the other libraries from the interpreter that runs the tests, but
neither the checkout nor an editable install of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from importlib.util import find_spec
from pathlib import Path

from tests.programs import capture

ROOT = Path(__file__).parents[1]
_SOURCES = ("csrc", "meshplan", "tools")
_FILES = ("*.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
_LIBRARIES = ("torch", "networkx", "numpy", "yaml", "rich", "spmd_types", "typing_extensions")
_TORCHRUN = '#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n'


@dataclass(frozen=True)
class Installed:
    """One installation.

    Attributes:
        source: a copy of what the wheel was built from, in which nothing is compiled.
        wheel: the file.
        prefix: the virtual environment.
        home: a folder for ``HOME``.
    """

    source: Path
    wheel: Path
    prefix: Path
    home: Path

    @property
    def python(self) -> str:
        return str(self.prefix / "bin" / "python")

    def run(
        self, command: str | list[str], folder: Path, *, timeout: float = 400, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of a shell, or a program with arguments, with nothing else in the environment."""
        path = f"{folder / 'bin'}:{self.prefix / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        # One thread for each process: a page's ranks share the cores.
        environment = {"PATH": path, "HOME": str(self.home), "OMP_NUM_THREADS": "1", **settings}
        return capture(
            ["bash", "-c", command] if isinstance(command, str) else command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )


def install(folder: Path) -> Installed:
    """Build the wheel and install it below ``folder``, once for all workers that share it."""
    assert not folder.is_relative_to(ROOT), f"{folder} is in the checkout"
    found = Installed(folder / "source", folder / "wheel", folder / "venv", folder / "home")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        flock(lock, LOCK_EX)
        if not (folder / "ready").exists():
            _build(found)
            _environment(found)
            (folder / "ready").touch()
    (wheel,) = found.wheel.glob("*.whl")
    return Installed(found.source, wheel, found.prefix, found.home)


def _build(to: Installed) -> None:
    made = shutil.ignore_patterns("__pycache__", "*.so", "*.fatbin")
    for name in _SOURCES:
        shutil.copytree(ROOT / name, to.source / name, ignore=made)
    for path in (path for name in _FILES for path in ROOT.glob(name)):
        shutil.copy2(path, to.source / path.name)
    # Built from another copy: it leaves what it has compiled there.
    build = to.source.with_name("build")
    shutil.copytree(to.source, build)
    words = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir"]
    _pip([*words, str(to.wheel), str(build)])
    shutil.rmtree(build)


def _environment(to: Installed) -> None:
    words = [sys.executable, "-m", "venv", "--without-pip", str(to.prefix)]
    subprocess.run(words, check=True, timeout=300)
    (site,) = (to.prefix / "lib").glob("python*/site-packages")
    # A line of a .pth file adds a folder; .pth files in that folder, such as that of an editable
    # install, are not read.
    folders = {Path(_origin(name)).parent.parent for name in _LIBRARIES if _origin(name)}
    (site / "libraries.pth").write_text("".join(f"{one}\n" for one in sorted(folders)))
    (wheel,) = to.wheel.glob("*.whl")
    python = str(to.prefix / "bin" / "python")
    _pip(["--python", python, "install", "--no-deps", "--no-index", str(wheel)])
    torchrun = to.prefix / "bin" / "torchrun"
    torchrun.write_text(_TORCHRUN)
    torchrun.chmod(0o755)
    to.home.mkdir()


def _origin(name: str) -> str:
    found = find_spec(name)
    origin = "" if found is None else found.origin or ""
    return origin if origin.endswith("__init__.py") else ""


def _pip(words: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    environment = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
    environment["MESHPLAN_CUDA_ARCHITECTURES"] = ""
    done = capture(command, env=environment, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
