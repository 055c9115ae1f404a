"""``meshplan lint``: problems of a mesh layout, before the job starts."""

from __future__ import annotations

import argparse
from typing import Any

from meshplan.cli._options import (
    REPEATED,
    add_mesh,
    add_output,
    add_placement,
    add_switches,
    add_texts,
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
    what = "leave out files and directories: 'tests', 'configs/old/*'; may be repeated"
    add_texts(group, ("--exclude", "PATTERN", what), **REPEATED)
    add_texts(group, ("--stdin-filename", "FILE", "name of the file on standard input"))
    _add_jobs(parser)
    placement = add_placement(parser)
    placement.add_argument(
        "--live",
        action="store_true",
        help="read the placement from running ranks: torchrun ... -m meshplan lint --live ...",
    )
    add_timeout(placement, None)
    group = parser.add_argument_group("environment of NCCL")
    what = "add a variable to those of this environment"
    add_texts(group, ("--env", "KEY=VALUE", what), **REPEATED)
    add_switches(group, ("--no-env", "ignore the variables of this environment"))
    add_texts(
        group,
        ("--nccl-version", "V", "such as 2.30.7 (default: the installed one)"),
        ("--driver", "V", "such as 550.54.15 (default: the running one)"),
    )
    _add_rules(parser)
    _add_output(parser)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    jobs = parser.add_argument_group("jobs")
    add_mesh(jobs, **REPEATED)
    what = "global rank at each coordinate of --mesh, row-major: 0,2,1,3 or [[0,2],[1,3]]"
    add_texts(
        jobs,
        ("--ranks", "RANKS", what),
        ("--world-size", "N", "number of ranks, if a file does not specify it"),
    )
    jobs.add_argument(
        "--framework",
        choices=("dtensor", "fsdp2", "ddp"),
        help="how gradients are reduced (default: as the file does, else dtensor)",
    )
    what = "axes in the order in which the job reduces them"
    add_texts(jobs, ("--reduce-order", "AXES", what))
    add_texts(
        jobs,
        (
            "--flatten",
            "AXES",
            "axes that the job flattens with DeviceMesh._flatten: ddp,fsdp",
        ),
        ("--dim", "N", "length of a sharded tensor dim"),
        **REPEATED,
    )
    what = "the job reduce-scatters activations along model axes"
    add_switches(jobs, ("--sequence-parallel", what))


def _add_rules(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rules")
    add_texts(
        group,
        ("--select", "CODES", "check only these codes or prefixes: MP1,MP301"),
        ("--extend-select", "CODES", "check these too"),
        ("--ignore", "CODES", "do not check these"),
        **REPEATED,
    )
    group.add_argument(
        "--fail-level",
        choices=_LEVELS,
        help="lowest severity that fails (default: error)",
    )
    what = "treat all files as if named: fail if one is not judged; read tests and libraries too"
    add_switches(
        group,
        ("--allow-unjudged", "list inputs that could not be judged, without failing"),
        ("--strict", what),
        ("--exit-zero", "exit with 0 whatever is found"),
    )
    group = parser.add_argument_group("configuration")
    add_texts(group, ("--config", "FILE", "use this meshplan.toml or pyproject.toml"))
    add_switches(group, ("--isolated", "use no configuration file"))


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = add_output(parser, _FORMATS)
    what = "write the report here, not to standard output"
    add_texts(group, ("--output-file", "FILE", what))
    add_switches(
        group,
        ("--fix", "print a diff for git apply, with the cheapest fix of each mesh"),
        ("--write", "with --fix: change the files, and report what is left"),
    )
    what = "write a web page: findings, fixes and a drawing of the meshes"
    add_texts(group, ("--html", "FILE", what))


def _run(given: argparse.Namespace) -> int:
    from meshplan.cli._lint_run import run_lint

    return run_lint(given)
