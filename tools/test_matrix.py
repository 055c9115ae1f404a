"""Test the seam and what is built on it with each supported version of torch.

    python tools/test_matrix.py [VERSION...]    all of them by default

Each version is installed into ``.venv/matrix``, with the interpreter that runs this script, and its
row in ``docs/torch-versions.md`` is rewritten. Other rows stay. Exits with 1 if a test failed or a
version could not be installed.

If the index only has torch for CUDA, the libraries that its import needs are installed too, without
Triton.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv" / "matrix"
PAGE = ROOT / "docs" / "torch-versions.md"

# The last patch of each minor version in TESTED_TORCH of meshplan._torch.
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# What depends on torch's private names or on how its versions differ. The rest of the suite is the
# contract, the planner, the linter and the like, which see no more of torch than its tensors.
FILES = (
    "tests/backend",
    "tests/test_self_check.py",
    "tests/test_torch_names.py",
    "tests/test_moved_internals.py",
    "tests/test_install.py",
    "tests/test_dtensor.py",
    "tests/test_guards.py",
    "tests/test_executed_plans.py",
    "tests/test_shard_order.py",
    "tests/test_in_place.py",
    "tests/test_strict.py",
    "tests/test_compile.py",
    "tests/test_compile_cache.py",
    "tests/test_tracing.py",
    "tests/test_functional.py",
    "tests/test_tensor_parallel.py",
    "tests/test_groups.py",
    "tests/test_elastic_gradients.py",
    "tests/test_elastic_uses.py",
    "tests/test_every_path.py",
    "tests/test_random_redistributions.py",
)
# Of what torch requires: not needed in order to import it and to compile for CPUs.
NOT_NEEDED = ("triton", "cuda-bindings")
PIP_SECONDS, TEST_SECONDS = 1800, 3600

TOP = """\
# torch versions

`make test-matrix` runs these tests with each version of torch that meshplan takes, each in an
environment of its own, on CPUs over gloo, and writes this page:

FILES

Builds for CUDA were run on a machine without a GPU. Each row has the number of tests on its date.

"""
HEADER = (
    "torch",
    "build",
    "Python",
    "passed",
    "failed",
    "skipped",
    "seconds",
    "date",
    "what else",
)


class Row(NamedTuple):
    """One line of the table, as text."""

    torch: str
    build: str = ""
    python: str = ""
    passed: str = ""
    failed: str = ""
    skipped: str = ""
    seconds: str = ""
    date: str = ""
    note: str = ""


class InstallError(Exception):
    """A version could not be installed; one line says why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(VERSIONS))
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="test files at once (default: 2)"
    )
    given = parser.parse_args()
    rows = {row.torch: row for row in _written()}
    for version in given.versions or VERSIONS:
        print(f"torch {version}", flush=True)
        rows[version] = _row(version, given.workers)
        # Also if the next one is interrupted.
        PAGE.write_text(page(rows.values()), encoding="utf-8")
        print(_line(rows[version]), flush=True)
    asked = [rows[version] for version in given.versions or VERSIONS]
    # Nothing at all stands there where a version could not be installed.
    return 0 if all(row.failed == "0" for row in asked) else 1


def page(rows: Iterable[Row]) -> str:
    """The page with these rows, by version."""
    files = ", ".join(f"`{name}`" for name in FILES)
    found = sorted(rows, key=lambda row: tuple(map(int, row.torch.split("."))))
    table = [_line(HEADER), "|---" * len(HEADER) + "|", *map(_line, found)]
    return TOP.replace("FILES", f"{files}.") + "\n".join(table) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _written() -> list[Row]:
    """The rows of the page as it is."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)]
    return [Row(*map(str.strip, cells)) for cells in lines]


def _row(version: str, workers: int) -> Row:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        python = _environment(version)
    except InstallError as error:
        return Row(version, date=date, note=f"not installed: {error}")
    about = "import platform, torch; print(torch.__version__, torch.version.cuda, "
    about += "platform.python_version())"
    found, cuda, interpreter = _run([python, "-c", about], 300).stdout.split()
    build = found.partition("+")[2] or (f"CUDA {cuda}" if cuda != "None" else "CPU")
    row = Row(version, build.replace("cpu", "CPU"), interpreter, date=date)
    report = FOLDER / f"{version}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-m", "not dist"]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    started = time.monotonic()
    with (FOLDER / f"{version}.log").open("w", encoding="utf-8") as log:
        # Two workers and the processes that they start share the cores.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(
                [*command, *FILES],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return row._replace(failed="all", note=f"did not end within {TEST_SECONDS} s")
    seconds = f"{time.monotonic() - started:.0f}"
    if not report.exists():
        return row._replace(failed="all", seconds=seconds, note="pytest did not write a report")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    count = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    cases = suite.iter("testcase")
    bad = [
        case.attrib["name"]
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return row._replace(
        passed=str(passed),
        failed=str(failed),
        skipped=str(count["skipped"]),
        seconds=seconds,
        note=", ".join(f"`{name.replace('|', '/')}`" for name in bad),
    )


def _environment(version: str) -> str:
    """The interpreter of an environment with this torch.

    Raises:
        InstallError: it cannot be made.
    """
    folder = FOLDER / version
    python = str(folder / "bin" / "python")
    ready = folder / ".ready"
    if ready.exists():
        return python
    _run([sys.executable, "-m", "venv", str(folder)], 300)
    _pip(python, "--no-deps", f"torch=={version}")
    needed = [one for one in _required(python) if "extra ==" not in one]
    plain = [one for one in needed if ";" not in one]
    _pip(python, *plain, *_tools())
    if _run([python, "-c", "import torch"], 300).returncode != 0:
        named = [re.match(r"[\w.-]+", one) for one in needed]
        pairs = zip(needed, named, strict=True)
        _pip(python, *(one for one, name in pairs if name and name[0] not in NOT_NEEDED))
    # Torch finds the backend by the entry point of an installed package. The compiled library in
    # the source tree is for any version of Python and torch.
    _pip(python, "--no-deps", "--editable", ".", MESHPLAN_BUILD_KERNELS="0")
    imported = _run([python, "-c", "import torch"], 300)
    if imported.returncode != 0:
        raise InstallError(imported.stderr.strip().splitlines()[-1])
    ready.touch()
    return python


def _required(python: str) -> list[str]:
    asked = "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')"
    return _run([python, "-c", asked], 60).stdout.splitlines()


def _tools() -> list[str]:
    """What the tests need, as pinned for them, without what is for GPUs."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)["dependency-groups"]
    found = [*groups["examples"], *groups["test"]]
    return [one for one in found if isinstance(one, str) and not one.startswith("nvidia-")]


def _pip(python: str, *words: str, **environment: str) -> None:
    done = _run([python, "-m", "pip", "install", "--quiet", *words], PIP_SECONDS, **environment)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        said = errors[-1] if errors else f"pip ended with status {done.returncode}"
        raise InstallError(said.removeprefix("ERROR: "))


def _run(
    command: list[str], seconds: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{' '.join(command[1:4])} took longer than {seconds:g} s") from None


if __name__ == "__main__":
    sys.exit(main())
