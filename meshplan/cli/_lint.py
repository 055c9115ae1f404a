"""``meshplan lint``: problems of a mesh layout, before the job starts."""

from __future__ import annotations

import argparse
from typing import Any

from meshplan.cli._options import (
    add_mesh,
    add_output,
    add_placement,
    add_timeout,
    add_verb,
)

_LEVELS = ("info", "warning", "error")
_FORMATS = ("text", "concise", "json", "sarif", "github", "junit")
_EPILOG = """\
examples:
  meshplan lint --mesh ddp=8,fsdp=5,tp=1 --domain-size 8
  nvidia-smi topo -m | meshplan lint --topology - --hosts 5 --mesh ddp=8,fsdp=5
  meshplan lint job.toml train.py --domain-size 8
  meshplan lint --node-size 8 -- --tensor-model-parallel-size 8 --num-gpus 64

exit status:
  0  no finding at --fail-level or above; every named input was judged or has no mesh
  1  a finding at --fail-level or above, or a named input that was not judged
  2  the command or its input is invalid
"""


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "lint",
        _run,
        "find problems of a mesh layout before the job starts",
        description="Check meshes on the placement of their ranks, and NCCL's environment.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="job file, meshplan.toml, Python with a mesh (parsed, not run), launch script, "
        "directory or pattern; - for standard input. Arguments of a job may follow --",
    )
    group = parser.add_argument_group("files")
    group.add_argument(
        "--run",
        dest="script",
        metavar="SCRIPT",
        help="execute this script as one rank of --world-size N, up to its first optimizer step, "
        "and check its meshes. Arguments after -- are its own",
    )
    group.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out files and directories: 'tests', 'configs/old/*'; may be repeated",
    )
    group.add_argument(
        "--stdin-filename",
        metavar="FILE",
        help="name of the file on standard input",
    )
    jobs = parser.add_argument_group("jobs")
    add_mesh(jobs, action="append", default=[])
    jobs.add_argument(
        "--ranks",
        metavar="RANKS",
        help="global rank at each coordinate of --mesh, row-major: 0,2,1,3 or [[0,2],[1,3]]",
    )
    jobs.add_argument(
        "--world-size",
        metavar="N",
        help="number of ranks, if a file does not specify it",
    )
    jobs.add_argument(
        "--framework",
        choices=("dtensor", "fsdp2", "ddp"),
        help="how gradients are reduced (default: as the file does, else dtensor)",
    )
    jobs.add_argument(
        "--reduce-order",
        metavar="AXES",
        help="axes in the order in which the job reduces them",
    )
    jobs.add_argument(
        "--flatten",
        action="append",
        default=[],
        metavar="AXES",
        help="axes that the job flattens with DeviceMesh._flatten: ddp,fsdp",
    )
    jobs.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="N",
        help="length of a sharded tensor dim",
    )
    jobs.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="the job reduce-scatters activations along model axes",
    )
    placement = add_placement(parser)
    placement.add_argument(
        "--live",
        action="store_true",
        help="read the placement from running ranks: torchrun ... -m meshplan lint --live ...",
    )
    add_timeout(placement, None)
    _add_environment(parser)
    _add_output(parser)


def _add_environment(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("environment of NCCL")
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="add a variable to those of this environment",
    )
    group.add_argument(
        "--no-env",
        action="store_true",
        help="ignore the variables of this environment",
    )
    group.add_argument(
        "--nccl-version",
        metavar="V",
        help="such as 2.30.7 (default: the installed one)",
    )
    group.add_argument("--driver", metavar="V", help="such as 550.54.15 (default: the running one)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rules")
    for option, what in (
        ("--select", "check only these codes or prefixes: MP1,MP301"),
        ("--extend-select", "check these too"),
        ("--ignore", "do not check these"),
    ):
        group.add_argument(option, action="append", default=[], metavar="CODES", help=what)
    group.add_argument(
        "--fail-level",
        choices=_LEVELS,
        help="lowest severity that fails (default: error)",
    )
    group.add_argument(
        "--allow-unjudged",
        action="store_true",
        help="list inputs that could not be judged, without failing",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="treat all files as if named: fail if one is not judged; read tests and libraries too",
    )
    group.add_argument(
        "--exit-zero",
        action="store_true",
        help="exit with 0 whatever is found",
    )
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", metavar="FILE", help="use this meshplan.toml or pyproject.toml")
    group.add_argument("--isolated", action="store_true", help="use no configuration file")
    group = add_output(parser, _FORMATS)
    group.add_argument(
        "--output-file",
        metavar="FILE",
        help="write the report here, not to standard output",
    )
    group.add_argument(
        "--fix",
        action="store_true",
        help="print a diff for git apply, with the cheapest fix of each mesh",
    )
    group.add_argument(
        "--write",
        action="store_true",
        help="with --fix: change the files, and report what is left",
    )
    group.add_argument(
        "--html",
        metavar="FILE",
        help="write a web page: findings, fixes and a drawing of the meshes",
    )


def _run(given: argparse.Namespace) -> int:
    from meshplan.cli._lint_run import run_lint

    return run_lint(given)
