"""``meshplan lint``: what is wrong with a mesh layout, before the job starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.cli._where import add_where, cluster_for, inputs_of, number
from meshplan.errors import MeshplanError, PolicyError

if TYPE_CHECKING:
    from meshplan.lint import Job, JobFile, Report, Settings
    from meshplan.topology import Cluster, Inputs

__all__ = ["add", "run"]

_LEVELS = ("info", "warning", "error")
_FORMATS = ("text", "concise", "json", "sarif", "github", "junit")
_CONFIG = ("meshplan.toml", "pyproject.toml")
_EPILOG = """\
examples:
  meshplan lint --mesh ddp=8,fsdp=5,tp=1 --domain-size 8
  nvidia-smi topo -m | meshplan lint --topology - --hosts 5 --mesh ddp=8,fsdp=5
  meshplan lint job.toml train.py --domain-size 8
  meshplan lint --node-size 8 -- --tensor-model-parallel-size 8 --num-gpus 64

exit status: 0 nothing at --fail-level or above, 1 some findings are, 2 the input is wrong
"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "lint",
        help="what is wrong with a mesh layout, before the job starts",
        description="Judge meshes by where their ranks sit, and the environment of NCCL.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="job file of torchtitan, meshplan.toml, Python that makes a mesh (it is not run), or "
        "a script with arguments; after --: the arguments themselves",
    )
    jobs = parser.add_argument_group("jobs")
    jobs.add_argument(
        "--mesh", action="append", default=[], metavar="AXES", help="ddp=8,fsdp=5,tp=1"
    )
    jobs.add_argument("--world-size", metavar="N", help="ranks, where a file leaves them open")
    jobs.add_argument(
        "--framework",
        choices=("dtensor", "fsdp2", "ddp"),
        help="how gradients are reduced; by default dtensor, or what a file is for",
    )
    jobs.add_argument("--reduce-order", metavar="AXES", help="axes in the order of reduction")
    jobs.add_argument(
        "--flatten",
        action="append",
        default=[],
        metavar="AXES",
        help="axes of a mesh that the job flattens itself: ddp,fsdp",
    )
    jobs.add_argument(
        "--dim", action="append", default=[], metavar="N", help="length of a sharded tensor dim"
    )
    jobs.add_argument(
        "--sequence-parallel", action="store_true", help="activations are reduce-scattered"
    )
    add_where(parser)
    _add_environment(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_environment(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("environment of NCCL")
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable of the job, besides those in force here",
    )
    group.add_argument("--no-env", action="store_true", help="leave out those in force here")
    group.add_argument("--nccl-version", metavar="V", help="such as 2.30.7; found if installed")
    group.add_argument("--driver", metavar="V", help="such as 550.54.15; found if installed")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rules and output")
    for option, what in (
        ("--select", "codes or prefixes of the rules that apply: MP1,MP301"),
        ("--extend-select", "further rules that apply"),
        ("--ignore", "rules that do not apply"),
    ):
        group.add_argument(option, action="append", default=[], metavar="CODES", help=what)
    group.add_argument(
        "--fail-level", choices=_LEVELS, help="the lowest severity that fails (default: error)"
    )
    group.add_argument("--exit-zero", action="store_true", help="findings do not fail")
    group.add_argument("--output-format", choices=_FORMATS, help="default: text")
    group.add_argument("--output-file", metavar="FILE", help="instead of standard output")
    group.add_argument(
        "--fix", action="store_true", help="print the cheapest fix of each mesh as a diff instead"
    )
    group.add_argument("--svg", metavar="FILE", help="draw the ranks of the first mesh")
    group.add_argument("--html", metavar="FILE", help="the same as a page, with the text")
    group.add_argument("--config", metavar="FILE", help="meshplan.toml or pyproject.toml to use")
    group.add_argument("--isolated", action="store_true", help="look for no such file")


def run(given: argparse.Namespace) -> int:
    """Lint; the exit status."""
    try:
        return _Run(given).status()
    except MeshplanError as error:
        sys.stderr.write(f"meshplan: {error}\n")
        return 2


class _Run:
    """One call: what is asked, read in order."""

    def __init__(self, given: argparse.Namespace) -> None:
        from meshplan.lint import Settings, Source, read_arguments
        from meshplan.topology import Inputs

        self.given = given
        self.texts: dict[str, str] = {}
        size = None if given.world_size is None else number(given.world_size, "--world-size")
        self.world_size = size
        files = [self._read(name) for name in given.files]
        if given.arguments:
            files.append(read_arguments(given.arguments, world_size=size))
        config = self._config()
        chosen = [file.settings for file in (*files, config) if file and file.settings]
        self.settings = chosen[0] if chosen else Settings()
        self.inputs: Inputs = inputs_of(self._with_settings())
        self.files = files + self._meshes(Source)
        if not any(file.jobs or file.skipped for file in self.files) and config is not None:
            self.files.append(config)
        self.jobs = self._jobs()

    def status(self) -> int:
        """Judge, write, and tell whether anything fails."""
        from meshplan.lint import SEVERITIES

        report = self._report()
        self._draw()
        self._write(report)
        level = self.given.fail_level or self.settings.fail_level or "error"
        worst = report.worst()
        fails = worst is not None and SEVERITIES.index(worst) >= SEVERITIES.index(level)
        return 1 if fails and not self.given.exit_zero else 0
