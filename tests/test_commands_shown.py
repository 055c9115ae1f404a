"""Commands that the action, the hook and the pages of rules show: they exist, and print that."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from meshplan.lint._rules import RULES, rule_page

ROOT = Path(__file__).parents[1]
SHOWN = "\n".join(
    [
        *(
            (ROOT / name).read_text(encoding="utf-8")
            for name in ("action.yml", ".pre-commit-hooks.yaml")
        ),
        *map(rule_page, RULES),
    ]
)
# Commands that read no file, and what they print.
EXAMPLES = [
    (code, *found)
    for code in RULES
    for found in re.findall(
        r"^\$ ((?:\w+=\S+ )*)meshplan (lint --mesh [^\n]*)\n(.*?)```", rule_page(code), re.M | re.S
    )
    # MP302 is about the driver of the machine.
    if "--topology" not in found[1] and code != "MP302"
]


def meshplan(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshplan", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


@cache
def help_of(*words: str) -> str:
    done = meshplan(*words, "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_verbs_exist() -> None:
    verbs = set(re.findall(r"\bmeshplan (?:/bin/meshplan )?(lint|topo|rule|doctor)\b", SHOWN))
    assert {"lint", "topo"} <= verbs
    for verb in verbs:
        help_of(verb)


def test_options_of_lint_exist() -> None:
    lines = [line for line in SHOWN.splitlines() if re.search(r"meshplan\"? lint ", line)]
    shown = {option for line in lines for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", line)}
    shown |= {"--output-file", "--ignore"}  # on lines of their own
    assert "--output-format" in shown
    assert shown <= set(re.findall(r"--[a-z][a-z-]*", help_of("lint")))


@pytest.mark.parametrize(("code", "setting", "command", "printed"), EXAMPLES)
def test_examples_of_lint(code: str, setting: str, command: str, printed: str) -> None:
    environment = dict(word.split("=", 1) for word in shlex.split(setting))
    done = meshplan(*shlex.split(command), "--select", code, **environment)
    assert done.stdout == printed, done.stderr
