"""``meshplan lint``: problems of a mesh layout, before the job starts.
``meshplan rule``: the page of a rule or an error code.
"""

from __future__ import annotations

import argparse
import inspect
import json
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
from meshplan.errors import PolicyError

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


def add_lint(verbs: Any) -> None:
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
    add_texts(
        group,
        (
            "--exclude",
            "PATTERN",
            "leave out files and directories: 'tests', 'configs/old/*'; may be repeated",
        ),
        **REPEATED,
    )
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
    add_texts(
        group,
        ("--env", "KEY=VALUE", "add a variable to those of this environment"),
        **REPEATED,
    )
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
    add_texts(
        jobs,
        (
            "--ranks",
            "RANKS",
            "global rank at each coordinate of --mesh, row-major: 0,2,1,3 or [[0,2],[1,3]]",
        ),
        ("--world-size", "N", "number of ranks, if a file does not specify it"),
        ("--reduce-order", "AXES", "axes in the order in which the job reduces them"),
    )
    jobs.add_argument(
        "--framework",
        choices=("dtensor", "fsdp2", "ddp"),
        help="how gradients are reduced (default: as the file does, else dtensor)",
    )
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
    add_switches(
        jobs,
        ("--sequence-parallel", "the job reduce-scatters activations along model axes"),
    )


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
    add_switches(
        group,
        ("--allow-unjudged", "list inputs that could not be judged, without failing"),
        (
            "--strict",
            "treat all files as if named: fail if one is not judged; read tests and libraries too",
        ),
        ("--exit-zero", "exit with 0 whatever is found"),
    )
    group = parser.add_argument_group("configuration")
    add_texts(group, ("--config", "FILE", "use this meshplan.toml or pyproject.toml"))
    add_switches(group, ("--isolated", "use no configuration file"))


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = add_output(parser, _FORMATS)
    add_texts(
        group,
        ("--output-file", "FILE", "write the report here, not to standard output"),
        ("--html", "FILE", "write a web page: findings, fixes and a drawing of the meshes"),
    )
    add_switches(
        group,
        ("--fix", "print a diff for git apply, with the cheapest fix of each mesh"),
        ("--write", "with --fix: change the files, and report what is left"),
    )


def _run(given: argparse.Namespace) -> int:
    from meshplan.cli._lint_run import run_lint

    return run_lint(given)


def add_rule(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "rule",
        explain_rules,
        "explain a rule of the linter or an error code",
        description="Explain a rule or an error code: its meaning, its reason, and how to fix it.",
    )
    parser.add_argument("codes", nargs="*", metavar="CODE", help="MP101, or jagged-reduction")
    parser.add_argument("--all", action="store_true", help="a table of all rules and errors")
    add_output(parser)


def explain_rules(given: argparse.Namespace) -> str:
    """The pages of the codes in Markdown, with ``--all`` a table. As JSON, one object or a list."""
    # The parsers of all verbs are built before one runs.
    from meshplan.lint._rules._rule import ERRORS, RULES, find_code, format_rule_page

    if bool(given.codes) == given.all:
        raise PolicyError("no code; use, for example, meshplan rule MP101, or --all")
    codes = [*RULES, *ERRORS] if given.all else list(dict.fromkeys(map(find_code, given.codes)))
    if given.output_format == "json":
        found = [{**_describe(code), "page": format_rule_page(code)} for code in codes]
        return json.dumps(found if given.all or len(found) > 1 else found[0], indent=2) + "\n"
    if not given.all:
        return "\n".join(map(format_rule_page, codes))
    lines = []
    for heading, some in (
        ("rules of meshplan lint", RULES),
        ("errors of meshplan", ERRORS),
    ):
        lines.append(heading)
        for one in map(_describe, some):
            severity = one["severity"] if one["kind"] == "rule" else ""
            lines.append(f"  {one['code']}  {severity:<7}  {one['name']:<23}  {one['summary']}")
    return "\n".join([*lines, ""])


def _describe(code: str) -> dict[str, Any]:
    from meshplan.lint._rules._rule import ERRORS, RULES

    if code in RULES:
        one = RULES[code]
        found = ("rule", one.name, one.severity, one.summary)
    else:
        first = inspect.cleandoc(ERRORS[code].__doc__ or "").partition("\n")[0]
        found = ("error", ERRORS[code].__name__, "error", first.replace("``", "`"))
    return {"code": code, **dict(zip(("kind", "name", "severity", "summary"), found, strict=True))}
