"""What all verbs of the command line share."""

from __future__ import annotations

import argparse

import pytest

from meshplan.cli import main, make_parser


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
