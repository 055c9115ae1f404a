"""Settings of all tests."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installed import Installed, install
from tests.marks import CASES, VERBS

# A machine with a GPU may have torch and pytest only.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # Time is for benchmarks: a machine with two cores and eight processes is slow now and then.
    settings.register_profile("meshplan", deadline=None, max_examples=CASES)
    settings.load_profile("meshplan")

# Files whose tests run autograd in their own process. Where torch knows of devices it then has
# threads that do not come along into a fork, so that no ranks can be forked afterwards.
_LAST = {
    "test_dp_controls",
    "test_dp_leaves",
    "test_dp_reduce",
    "test_replica_check",
    "test_replica_tensors",
    "test_tp_composition",
    "test_tp_logprobs",
    "test_tp_masked",
    "test_tp_math",
    "test_tp_policy",
}

# Folders whose tests wait for missing ranks and broken links.
_WAITING = {"backend", "faults", "multinode"}


def pytest_report_header() -> str:
    """Which meshplan is tested: a source tree's, or an installed one."""
    found = importlib.util.find_spec("meshplan")
    where = found.submodule_search_locations if found is not None else None
    return f"meshplan: {where[0] if where else 'not found'}"


# Before -m selects.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by name, with the one that starts 40 processes first and some files last.

    Each of the two workers takes a file. The one next to the 40 processes runs light tests, and
    none that waits for a missing rank.
    """

    def place(item: pytest.Item) -> int:
        name = item.path.stem
        if name == "test_demo":
            return 0
        return 3 if name in _LAST else 2 if item.path.parent.name in _WAITING else 1

    items.sort(key=place)
    for item in items:
        verbs = VERBS.intersection(mark.name for mark in item.iter_markers())
        if len(verbs) > 1:
            raise pytest.UsageError(f"{item.nodeid} has the markers {sorted(verbs)}; keep one")
        if not verbs and _is_long(item):
            item.add_marker(pytest.mark.full)


def _is_long(item: pytest.Item) -> bool:
    """Jobs of several hosts, faults, and tests of a wheel in a separate environment."""
    return (
        item.get_closest_marker("multinode") is not None
        or item.path.parent.name == "faults"
        or "installed" in getattr(item, "fixturenames", ())
    )


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """A test must leave no installed meshplan and no report entries to the next one."""
    yield
    if "meshplan.execute" in sys.modules:
        sys.modules["meshplan.execute"].clear_report()
    dtensor = sys.modules.get("meshplan.dtensor")
    if dtensor is not None and dtensor.current_config() is not None:
        dtensor.uninstall()
        pytest.fail("meshplan is still installed in the tests' own process")


@pytest.fixture
def no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and no variable of a job that the linter reads."""
    monkeypatch.chdir(tmp_path)
    for key in ("LOCAL_WORLD_SIZE", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "NCCL_ALGO"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture(scope="module")
def compiled() -> None:
    """What plays GPUs, before processes fork."""
    devices = importlib.import_module("tests.devices")
    devices.emulated_library("cuda")
    devices.emulated_library("hip")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of this checkout in a separate environment; built once for all workers."""
    folder = tmp_path_factory.getbasetemp()
    return install((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "installed")
