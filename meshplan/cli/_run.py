"""``meshplan run``: a training script, observed from its start, and a verdict when it ends.

    torchrun --nproc-per-node 4 -m meshplan run --report run.json train.py --lr 1e-3

The script runs as ``__main__`` of this process, as it does alone: the same arguments, output,
traceback and exit status. ``meshplan compare``: the first difference of two certificates that it
wrote, or two reports side by side.
"""

from __future__ import annotations

import argparse
import builtins
import io
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from meshplan._needs_torch import import_with_torch
from meshplan.cli._options import (
    add_switches,
    add_texts,
    add_verb,
    read_number,
    refuse,
    say,
    try_to_open,
)
from meshplan.errors import MeshplanError, PolicyError


def add_run(verbs: Any) -> None:
    """Add the verb to the command line."""
    what = "run a training script and report whether its replicas differ"
    about = "Use torchrun, or another launcher, to run it on all ranks of a job. The script runs as"
    about += " it does alone, and rank 0 writes a verdict to standard error when it ends."
    parser = add_verb(verbs, "run", run, what, description=about)
    option = parser.add_argument
    compares = "compare replicas every N steps (default: 100), and at steps 1, 2, 3, 4, 8, 16, ..."
    add_texts(
        parser,
        ("--report", "FILE", "write the report, as JSON, after each compared step"),
        ("--html", "FILE", "write a web page: findings, fixes and a drawing of the meshes"),
        ("--certify", "FILE", "write a certificate, a link for each step, for meshplan compare"),
    )
    option("--every", metavar="N", default="100", help=compares)
    add_switches(
        parser,
        ("--gradients", "compare gradients of each compared step"),
        ("--probe", "before the first reduction of each group, test which contract its sums match"),
        ("--strict", "exit with 3 if replicas differ or a reduction is outside the contract"),
    )
    keeps = "keep up to MIB of summands and sums, to name the rank with a wrong sum (default: 0)"
    option("--keep-leaves", metavar="MIB", default="0", help=keeps)
    creates = "create all process groups with it: every reduction under the contract"
    option("--backend", choices=("meshplan",), help=creates)
    stops = "stop the job at a reduction outside the contract, a setting that varies bits, or an "
    stops += "operator that torch lists as nondeterministic: error MP707 names the fix"
    option("--require", choices=("bitwise",), help=stops)
    option(
        "-m",
        "--module",
        action="store_true",
        help="the script is a module, as for python -m",
    )
    option("script", help="the training script, or the module")
    words = option("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    words.required = False  # for the message about a missing script


def add_compare(verbs: Any) -> None:
    what = "compare the certificates, or the reports, of two runs"
    about = "Certificates: the first step and tensor that differ, and the conditions that do."
    about += " Reports: verdicts and time per step. 0: same. 1: different. 2: cannot be compared."
    argument = add_verb(verbs, "compare", compare, what, description=about).add_argument
    argument("first", metavar="A", help="a file of meshplan run --certify or --report")
    argument("second", metavar="B", help="one of another run")


def compare(given: argparse.Namespace) -> int:
    """Print what differs, and return the status."""
    compare_files = import_with_torch("meshplan.run._compare", "meshplan compare").compare_files
    text, status = compare_files(given.first, given.second)
    say(f"{text}\n")
    return int(status)


# Options with the names and values of settings.
_SETTINGS = ("report", "gradients", "strict", "html", "backend", "certify", "probe", "require")


def run(given: argparse.Namespace) -> int:
    """Run the script; returns 0 or 3 (``--strict``, ``--require``). Its errors end the process."""
    # The command stands for the variable, which torch's entry point reads.
    os.environ.pop("MESHPLAN_RUN", None)
    rank = os.environ.get("RANK") or "0"
    try:
        source = None if given.module else _read_script(given.script)
        # Rank 0 alone writes them: another host may have no such folder.
        if rank == "0":
            for name in filter(None, (given.report, given.html, given.certify)):
                try_to_open(name)
        chosen = {name: getattr(given, name) for name in _SETTINGS}
        chosen["every"] = read_number(given.every, "--every")
        chosen["keep_leaves"] = read_number(given.keep_leaves, "--keep-leaves", least=0)
        settings = import_with_torch("meshplan.run", "meshplan run").RunSettings(**chosen)
        job = import_with_torch("meshplan.run._job", "meshplan run").ObservedJob(settings)
    except MeshplanError as error:
        # Once for each host, whose files may be others.
        return refuse(error) if (os.environ.get("LOCAL_RANK") or rank) == "0" else 2
    # The parser would have removed --, which is a word of the script.
    arguments = [word.removeprefix("\0") for word in given.arguments]
    try:
        _execute(given.script, source, arguments)
    except SystemExit as stop:
        if status := job.finish(stop if stop.code else None):
            raise SystemExit(status) from None
        raise
    except BaseException as error:
        _show_before_the_end(error, job.finish)
        raise
    return int(job.finish(None))


def _read_script(name: str) -> bytes:
    try:
        with io.open_code(os.path.abspath(name)) as file:
            return file.read()
    except OSError as error:
        raise PolicyError(f"{name[:200]}: cannot be read: {error.strerror or error}") from error


def _execute(name: str, source: bytes | None, arguments: list[str]) -> None:
    """Run a script, or without its source a module, as Python does: in a new ``__main__``, which
    remains for threads, workers and exit handlers of the script.
    """
    sys.argv = [name, *arguments]
    path = os.path.abspath(name)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if source is None else os.path.dirname(os.path.realpath(path))
    first = sys.modules["__main__"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    # Newer Pythons compute it.
    if "__annotations__" in vars(first):
        module.__annotations__ = {}
    if source is None:
        # What python -m itself calls; run_module would end with another __main__.
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    else:
        module.__file__ = path
        module.__dict__["__cached__"] = None
        module.__loader__ = SourceFileLoader("__main__", path)
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _show_before_the_end(error: BaseException, finish: Callable[[BaseException], int]) -> None:
    """Let the traceback of the script begin where it begins without this command, and stand before
    the verdict: launchers may end this process while rank 0 waits for the other ranks.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    # torch has replaced it with one that adds the rank to each line.
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: Any) -> None:
        try:
            hook(kind, value.with_traceback(trace), trace)
        finally:
            finish(error)

    sys.excepthook = show
