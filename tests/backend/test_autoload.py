"""Torch finds the backend by its entry point, without an import and at no cost to other groups."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.marks import full
from tests.programs import capture

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]
START = """
import sys
import torch
import torch.distributed as dist

def start(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """A folder with the entry points of the checkout, which may not be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, target),) = project["entry-points"]["torch.backends"].items()
    folder = tmp_path / "meshplan_entry-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: meshplan_entry\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {target}\n")
    return tmp_path


# Scripts run in forks of one interpreter, each as if torch were imported there.
FORKS = """
import atexit, json, os, sys
import torch, torch.distributed
for line in sys.stdin:
    environment, script, out = json.loads(line)
    child = os.fork()
    if not child:
        try:
            sys.stdout = open(out, "w")
            os.environ.update(environment)
            sys.path[:0] = environment["PYTHONPATH"].split(":")
            if torch._is_device_backend_autoload_enabled():
                torch._import_device_backends()
            exec(script, {})
            atexit._run_exitfuncs()
        except BaseException as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    plain = {"PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=plain, **pipes) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def run(forks: subprocess.Popen[str], metadata: Path, tmp_path: Path) -> Run:
    def call(script: str, **environment: str) -> str:
        environment = {
            "PYTHONPATH": f"{metadata}:{ROOT}",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
            **environment,
        }
        words = [environment, START + dedent(script), str(tmp_path / "out")]
        forks.stdin.write(json.dumps(words) + "\n")  # type: ignore[union-attr]
        forks.stdin.flush()  # type: ignore[union-attr]
        assert forks.stdout.readline() == "done\n"  # type: ignore[union-attr]
        return (tmp_path / "out").read_text().strip()

    return call


@pytest.mark.parametrize(
    "backend", ["meshplan", full("cpu:meshplan,cuda:meshplan"), full("Meshplan")]
)
def test_the_name_is_enough(metadata: Path, backend: str) -> None:
    """In an interpreter of its own, which imports torch."""
    script = f"""
    early = [name for name in sys.modules if name.startswith("meshplan")]
    start({backend!r})
    x = torch.ones(2)
    dist.all_reduce(x)
    print(early, type(dist.group.WORLD).__name__, x.tolist())
    """
    found = capture(
        [sys.executable, "-W", "ignore", "-c", START + dedent(script)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{metadata}:{ROOT}"},
    )
    expected = "['meshplan_autoload'] MeshplanProcessGroup [1.0, 1.0]\n"
    assert found.stdout == expected, found.stderr


@pytest.mark.parametrize("variable", ["MESHPLAN_BACKEND_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_a_variable_turns_it_off(run: Run, variable: str) -> None:
    script = """
    print([name for name in sys.modules if name.startswith("meshplan.")])
    print(dist.is_backend_available("meshplan"))
    """
    assert run(script, **{variable: "0"}) == "[]\nFalse"


def test_a_broken_installation_breaks_its_own_name_alone(
    run: Run, metadata: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "meshplan"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('a broken meshplan')\n")
    script = """
    start("gloo")
    dist.barrier()
    dist.destroy_process_group()
    try:
        start("meshplan")
    except RuntimeError as error:
        print(error)
    print(dist.is_backend_available("gloo"), "meshplan_autoload" in sys.modules)
    """
    # Before the folder in which the tests run.
    script = f"sys.path.insert(0, {str(broken.parent)!r})\n" + dedent(script)
    path = f"{broken.parent}:{metadata}:{ROOT}"
    assert run(script, PYTHONPATH=path) == "a broken meshplan\nTrue True"


def test_other_groups_are_as_without_it(run: Run) -> None:
    """A backend that is registered would take the default backend from such a group."""
    script = """
    start("cpu:gloo,cuda:gloo")
    dist.barrier()
    print(dist.get_backend(), dist.group.WORLD._get_sequence_number_for_group())
    print("meshplan.backend" in sys.modules)
    """
    assert run(script) == "cpu:gloo,cuda:gloo 1\nFalse"


def test_variable_observes_a_process_that_becomes_a_rank(run: Run) -> None:
    """Its children inherit the variable no more: they are not ranks of the job."""
    script = """
    import os
    sys.stderr = sys.stdout
    print([name for name in sys.modules if name.startswith("meshplan")])
    start("gloo")
    print("meshplan.run" in sys.modules, "MESHPLAN_RUN" in os.environ, dist.get_backend())
    dist.destroy_process_group()
    start("gloo")
    print(dist.get_backend())
    """
    before, first, second, verdict, *_ = run(
        script, MESHPLAN_RUN="every=5 backend=meshplan"
    ).splitlines()
    assert before == "['meshplan_autoload']"
    assert (first, second) == ("True False meshplan", "meshplan")
    assert verdict.startswith("[meshplan] not shown to be affected")


def test_process_without_a_group_is_not_observed(run: Run) -> None:
    """Such as torchrun's agent, and the workers of a loader."""
    script = """
    sys.stderr = sys.stdout
    print([name for name in sys.modules if name.startswith("meshplan")])
    """
    assert run(script, MESHPLAN_RUN="every=5") == "['meshplan_autoload']"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("evry=5", "'evry=5' is not a setting of a run (did you mean 'every'?); use"),
        ("strict", "MESHPLAN_RUN: nothing can change the exit status of a script from inside"),
        full("keep_leaves=1GB", "'keep_leaves=1GB': pass a whole number, 0 or more"),
        full("backend=gloo", "MESHPLAN_RUN: backend='gloo' is not supported; use meshplan"),
        full("require=1", "MESHPLAN_RUN: require='1' is not supported; use bitwise, or leave it"),
    ],
)
def test_invalid_settings_end_the_job_at_its_first_group(run: Run, text: str, error: str) -> None:
    assert error in run("start('gloo')", MESHPLAN_RUN=text)


def test_failure_to_observe_leaves_the_job_alone(run: Run) -> None:
    script = """
    sys.stderr = sys.stdout
    sys.modules["meshplan.run"] = None
    start("gloo")
    print(dist.get_backend())
    """
    told, backend = run(script, MESHPLAN_RUN="every=5").splitlines()
    assert told.startswith("[meshplan] not observed: ModuleNotFoundError: ")
    assert backend == "gloo"


def test_it_takes_less_than_two_milliseconds(run: Run) -> None:
    """Of processor time, which a busy machine does not change."""
    script = """
    import time
    times = []
    for _ in range(25):
        for name in [name for name in sys.modules if name.startswith("meshplan")]:
            del sys.modules[name]
        begun = time.process_time()
        from meshplan_autoload import autoload
        autoload()
        times.append(time.process_time() - begun)
    print(min(times) < 0.002, min(times))
    """
    assert run(script).startswith("True")
