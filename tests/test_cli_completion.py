"""The scripts for the shells, made by shtab: what bash completes with its own."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from meshplan.cli import main, make_parser
from tests.cli import meshplan

pytest.importorskip("shtab")


def completed(folder: Path, *lines: list[str]) -> list[list[str]]:
    """What bash offers for the last word of each line, whose words are as bash splits them."""
    script = [meshplan("completion", "bash")[1], "complete -p meshplan || exit 1"]
    for words in lines:
        script.append(f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}")
        script.append('_shtab_meshplan; printf "%s " "${COMPREPLY[@]}"; echo')
    bash = ["bash", "--norc", "-c", "\n".join(script)]
    done = subprocess.run(bash, capture_output=True, text=True, timeout=300, check=True, cwd=folder)
    registered, *found = done.stdout.splitlines()
    assert registered.endswith("-F _shtab_meshplan meshplan")
    return [line.split() for line in found]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_options_files_and_codes(tmp_path: Path) -> None:
    for name in ("job.toml", "joke.py", "plan"):
        (tmp_path / name).touch()
    expected = {
        "meshplan li": ["links", "lint"],
        "meshplan --v": ["--version"],
        "meshplan lint --out": ["--output-format", "--output-file"],
        "meshplan lint --output-format sa": ["sarif"],
        "meshplan lint jo": ["job.toml", "joke.py"],
        "meshplan lint --topology jo": ["job.toml", "joke.py"],
        "meshplan lint --mesh jo": [],
        # The first word that is no option is the verb.
        "meshplan lint plan --fi": ["--fix"],
        # After --, the words are no options of meshplan.
        "meshplan lint -- --fi": ["job.toml", "joke.py", "plan"],
        "meshplan rule MP30": ["MP301", "MP302", "MP303", "MP304", "MP305"],
        "meshplan completion z": ["zsh"],
        "meshplan doctor --": ["--help"],
    }
    found = completed(tmp_path, *(line.split() for line in expected))
    assert dict(zip(expected, map(sorted, found), strict=True)) == {
        line: sorted(words) for line, words in expected.items()
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_has_all_verbs(shell: str) -> None:
    status, out, err = meshplan("completion", shell)
    assert (status, err) == (0, "")
    for word in ("simulate", "domain-size", "sarif", "MP305"):
        assert word in out


def test_without_shtab_the_error_says_how_to_install_it() -> None:
    with mock.patch.dict(sys.modules, {"shtab": None}):
        found = meshplan("completion", "bash")
    hint = "pip install shtab"
    assert found == (2, "", f"meshplan: MP402: meshplan completion needs shtab; {hint}\n")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out.split()[0]) == (0, "meshplan")


def test_an_option_is_the_same_in_all_verbs() -> None:
    verbs = next(
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ).choices
    found: dict[str, set[object]] = {}
    groups = []
    for verb in verbs.values():
        groups.append([group.title for group in verb._action_groups if group._group_actions])
        for action in verb._actions:
            for option in action.option_strings:
                # Their values and defaults are those of the verb.
                special = option in ("--backend", "--dtype", "--numel", "--algorithm", "--from")
                special |= option in ("--node-size", "--reduce-order", "--output-file", "--strict")
                found.setdefault(option, set()).add(
                    (action.metavar, "" if special else str(action.help))
                )
    assert {option: seen for option, seen in found.items() if len(seen) > 1} == {}
    # The report is described last.
    for titles in groups:
        assert "output" not in titles[:-1]
