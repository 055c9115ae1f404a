"""A script runs under `meshplan run` as it does alone; what observes it is a stand-in here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import expecttest
import pytest

from meshplan.run import RunSettings
from meshplan.run._job import ObservedJob
from tests.cli import meshplan
from tests.programs import capture
from tests.test_run_verdict import report

ROOT = Path(__file__).parents[1]
# Without torch. The verdict is one line, so that it can be taken out again.
COMMAND = """
import sys
from types import SimpleNamespace
from meshplan.cli import _run, main

class Job:
    def __init__(self, settings):
        self.strict = settings.strict

    def finish(self, error):
        sys.stderr.write(f"[verdict] {error!r}\\n")
        return 3 if self.strict and error is None else 0

def settings(**options):
    return SimpleNamespace(**options)

_run.import_with_torch = lambda *_: SimpleNamespace(RunSettings=settings, ObservedJob=Job)
sys.exit(main())
"""
SCRIPT = """
import atexit, os, sys, __main__

def show(text):
    print(text, sys.argv, sys.path[0], __name__, os.environ.get("OPENBLAS_NUM_THREADS"))
    # Exit handlers and threads find their own module.
    print(__main__.show is show, "MESHPLAN_RUN" in os.environ, type(__builtins__))

def main():
    show("runs " + __file__)
    print(*sorted(name for name in globals() if name.startswith("__")), type(__loader__))
    match sys.argv[1:]:
        case ["raise"]:
            raise ValueError("of the script")
        case ["refuse"]:
            from meshplan.errors import PolicyError

            raise PolicyError("of the script")
        case ["interrupt"]:
            raise KeyboardInterrupt
        case ["exit", status]:
            sys.exit(int(status) if status.isdigit() else status)
        case ["signal"]:
            os.kill(os.getpid(), 15)

atexit.register(show, "ends")
main()
"""


def start(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    done = capture(
        [sys.executable, *words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("def (\n")
    (tmp_path / "linked.py").symlink_to("package/train.py")
    return tmp_path


CASES = {
    "train.py": "None",
    "train.py --every 3 -- --report x": "None",
    "package/train.py": "None",
    "linked.py": "None",
    "train.py raise": "ValueError('of the script')",
    "train.py refuse": "PolicyError(",
    "train.py exit 0": "None",
    "train.py exit 7": "SystemExit(7)",
    "train.py exit text": "SystemExit('text')",
    "train.py interrupt": "KeyboardInterrupt()",
    "train.py signal": "",
    "broken.py": "SyntaxError('invalid syntax', ",
    "-m package.train raise": "ValueError('of the script')",
    "-m package.train exit 0": "None",
    "-m package.nothing": "SystemExit(",
}


@pytest.mark.parametrize("words", CASES)
def test_script_runs_as_it_does_alone(folder: Path, words: str) -> None:
    alone = start(folder, *words.split())
    status, out, errors = start(
        folder, "-c", COMMAND, "run", *words.split(), MESHPLAN_RUN="every=1"
    )
    lines = errors.splitlines(keepends=True)
    verdicts = [line for line in lines if line.startswith("[verdict]")]
    assert (status, out, "".join(line for line in lines if line not in verdicts)) == alone
    assert "".join(verdicts).removeprefix("[verdict] ").startswith(CASES[words])
    # A launcher may end the process while rank 0 waits for the others.
    assert not verdicts or "Traceback" not in errors or lines[-1] == verdicts[0]


@pytest.mark.parametrize(
    ("words", "status"),
    [("train.py", 3), ("train.py exit 0", 3), ("train.py exit 7", 7), ("train.py raise", 1)],
)
def test_strict_replaces_a_status_of_zero(folder: Path, words: str, status: int) -> None:
    assert start(folder, "-c", COMMAND, "run", "--strict", *words.split())[0] == status


@pytest.fixture
def observe() -> Iterator[Any]:
    with mock.patch("meshplan.run._job.observe") as found:
        yield found


def test_forked_child_has_no_verdict(observe: Any) -> None:
    observe.return_value.finish.return_value = report()
    job = ObservedJob(RunSettings(strict=True))
    with mock.patch("meshplan.run._job.os.getpid", return_value=os.getpid() + 1):
        assert job.finish(None) == 0
    observe.return_value.finish.assert_not_called()
    assert (job.finish(ValueError()), job.finish(None)) == (0, 3)


def test_report_keeps_its_folder(
    observe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("", "/elsewhere"):
        ObservedJob(RunSettings(report="run.json"), folder)
    reports = [one.args[0].report for one in observe.call_args_list]
    assert reports == [str(tmp_path / "run.json"), "/elsewhere/run.json"]


def test_fault_of_the_observation_does_not_fail_the_job(observe: Any, capsys: Any) -> None:
    found = observe.return_value
    found.finish.side_effect = [{}, OSError("no space"), None]
    found.rank, found.notes = 0, []
    job = ObservedJob(RunSettings(strict=True))
    assert [job.finish(None), job.finish(ValueError()), job.finish(None)] == [3, 0, 3]
    found.finish.side_effect, found.finish.return_value, found.rank = None, None, 1
    assert job.finish(None) == 0
    assert capsys.readouterr().err.splitlines() == [
        "[meshplan] no verdict: KeyError: 'replicas'",
        "[meshplan] no verdict: OSError: no space",
        "[meshplan] no verdict: no process group was created; see any error, use torchrun "
        "--nproc-per-node 8 -m meshplan run train.py, or set MESHPLAN_RUN if the script starts "
        "ranks",
    ]


def test_fault_of_the_page_does_not_cost_the_verdict(observe: Any, capsys: Any) -> None:
    observe.return_value.finish.return_value = report()
    job = ObservedJob(RunSettings(html="page", strict=True))
    fault = TypeError("no text")
    with mock.patch("meshplan.run._job.write_verdict", side_effect=fault):
        assert job.finish(None) == 3
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("[meshplan] not shown to be affected")
    assert last == "  the page could not be written: no text"


class CommandTest(expecttest.TestCase):
    def test_invalid_commands(self) -> None:
        commands = (
            ["run"],
            ["run", "--evry", "5", "train.py"],
            ["run", "--every", "0", __file__],
            ["run", "--keep-leaves", "1GB", __file__],
            ["run", "--backend", "gloo", __file__],
            ["run", "--require", "equal", __file__],
            ["run", "nothing.py"],
            ["run", "--report", "/nowhere/run.json", __file__],
        )
        lines = [meshplan(*words) for words in commands]
        assert {status for status, _, _ in lines} == {2}
        self.assertExpectedInline(
            "".join(text for _, _, text in lines),
            """\
meshplan run: the following arguments are required: script; see meshplan run --help
meshplan run: unknown argument '--evry' (did you mean '--every'?); see meshplan run --help
meshplan: MP402: --every: use an integer from 1 to 1000000000, got '0'
meshplan: MP402: --keep-leaves: use an integer from 0 to 1000000000, got '1GB'
meshplan run: argument --backend: use meshplan, got 'gloo'; see meshplan run --help
meshplan run: argument --require: use bitwise, got 'equal'; see meshplan run --help
meshplan: MP402: nothing.py: cannot be read: No such file or directory
meshplan: MP402: /nowhere/run.json: cannot be written: No such file or directory
""",
        )

    def test_one_rank_of_a_host_reports_an_invalid_command(self) -> None:
        with mock.patch.dict(os.environ, {"RANK": "1"}):
            assert meshplan("run", "nothing.py") == (2, "", "")
            os.environ["LOCAL_RANK"] = "0"
            assert meshplan("run", "nothing.py")[2]
            # Its host needs no folder for the files, which rank 0 writes.
            words = ("--report", "/nowhere/run.json", "--every", "0", __file__)
            assert "--every" in meshplan("run", *words)[2]


BACKENDS = """
import torch.distributed as dist
from torch.distributed import init_process_group, new_group
from torch.distributed.device_mesh import init_device_mesh
from meshplan.run._job import use_backend
from meshplan.testing import nccl_model

nccl_model.register()
use_backend()

def describe(group):
    options = getattr(group, "options", None)
    return f"{dist.get_backend(group)}/{getattr(options, 'inner', None)}"

for backend in (None, "gloo", dist.Backend.GLOO, "cpu:gloo,cuda:gloo", "nccl_model", "meshplan"):
    # Imported by this module before the replacement.
    init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    groups = [dist.group.WORLD, mesh.get_group("a"), new_group([0]), new_group([0], None, "gloo")]
    print(backend, *map(describe, groups))
    dist.destroy_process_group()
"""


class BackendTest(expecttest.TestCase):
    def test_every_group_is_of_the_backend(self) -> None:
        status, out, errors = start(ROOT, "-W", "ignore", "-c", BACKENDS)
        assert status == 0, errors
        self.assertExpectedInline(
            out,
            """\
None meshplan/None meshplan/None meshplan/None meshplan/gloo
gloo meshplan/gloo meshplan/gloo meshplan/gloo meshplan/gloo
gloo meshplan/gloo meshplan/gloo meshplan/gloo meshplan/gloo
cpu:gloo,cuda:gloo meshplan/cpu:gloo,cuda:gloo meshplan/cpu:gloo,cuda:gloo meshplan/cpu:gloo,cuda:gloo meshplan/gloo
nccl_model meshplan/nccl_model meshplan/nccl_model meshplan/nccl_model meshplan/gloo
meshplan meshplan/None meshplan/None meshplan/None meshplan/gloo
""",
        )
