"""Torch finds the backend by its entry point, without an import and at no cost to other groups."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

from tests.marks import full

ROOT = Path(__file__).parents[2]
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


def run(metadata: Path, script: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + dedent(script)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{metadata}:{ROOT}", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = found.stderr.strip().splitlines()
    return found.stdout.strip() if found.returncode == 0 else [f"{found.returncode}", *lines][-1]


@pytest.mark.parametrize(
    "backend", ["meshplan", full("cpu:meshplan,cuda:meshplan"), full("Meshplan")]
)
def test_the_name_is_enough(metadata: Path, backend: str) -> None:
    script = f"""
    early = [name for name in sys.modules if name.startswith("meshplan")]
    start({backend!r})
    x = torch.ones(2)
    dist.all_reduce(x)
    print(early, type(dist.group.WORLD).__name__, x.tolist())
    """
    expected = "['meshplan_autoload'] MeshplanProcessGroup [1.0, 1.0]"
    assert run(metadata, script) == expected


@pytest.mark.parametrize("variable", ["MESHPLAN_BACKEND_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_a_variable_turns_it_off(metadata: Path, variable: str) -> None:
    script = """
    print([name for name in sys.modules if name.startswith("meshplan.")])
    print(dist.is_backend_available("meshplan"))
    """
    assert run(metadata, script, **{variable: "0"}) == "[]\nFalse"


def test_a_broken_installation_breaks_its_own_name_alone(metadata: Path, tmp_path: Path) -> None:
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
    assert run(metadata, script, PYTHONPATH=path) == "a broken meshplan\nTrue True"


def test_other_groups_are_as_without_it(metadata: Path) -> None:
    """A backend that is registered would take the default backend from such a group."""
    script = """
    start("cpu:gloo,cuda:gloo")
    dist.barrier()
    print(dist.get_backend(), dist.group.WORLD._get_sequence_number_for_group())
    print("meshplan.backend" in sys.modules)
    """
    assert run(metadata, script) == "cpu:gloo,cuda:gloo 1\nFalse"


def test_variable_observes_a_process_that_becomes_a_rank(metadata: Path) -> None:
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
        metadata, script, MESHPLAN_RUN="every=5 backend=meshplan"
    ).splitlines()
    assert before == "['meshplan_autoload']"
    assert (first, second) == ("True False meshplan", "meshplan")
    assert verdict.startswith("[meshplan] not shown to be affected")


def test_process_without_a_group_is_not_observed(metadata: Path) -> None:
    """Such as torchrun's agent, and the workers of a loader."""
    script = """
    sys.stderr = sys.stdout
    print([name for name in sys.modules if name.startswith("meshplan")])
    """
    assert run(metadata, script, MESHPLAN_RUN="every=5") == "['meshplan_autoload']"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("evry=5", "'evry=5' is not a setting of a run (did you mean 'every'?); use"),
        ("strict", "MESHPLAN_RUN: nothing can change the exit status of a script from inside"),
        full("backend=gloo", "MESHPLAN_RUN: backend='gloo' is not supported; use meshplan"),
    ],
)
def test_invalid_settings_end_the_job_at_its_first_group(
    metadata: Path, text: str, error: str
) -> None:
    assert error in run(metadata, "start('gloo')", MESHPLAN_RUN=text)


def test_failure_to_observe_leaves_the_job_alone(metadata: Path) -> None:
    script = """
    sys.stderr = sys.stdout
    sys.modules["meshplan.run"] = None
    start("gloo")
    print(dist.get_backend())
    """
    told, backend = run(metadata, script, MESHPLAN_RUN="every=5").splitlines()
    assert told.startswith("[meshplan] not observed: ModuleNotFoundError: ")
    assert backend == "gloo"


def test_it_takes_less_than_two_milliseconds(metadata: Path) -> None:
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
    assert run(metadata, script).startswith("True")
