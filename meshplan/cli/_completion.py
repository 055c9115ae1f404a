"""``meshplan completion``: the script with which a shell completes the command line."""

from __future__ import annotations

import argparse
from typing import Any

from meshplan.cli._options import add_verb
from meshplan.errors import PolicyError

_EPILOG = """\
to enable it in every new shell:
  bash: eval "$(meshplan completion bash)" in ~/.bashrc
  zsh:  meshplan completion zsh > DIRECTORY/_meshplan, for a directory in $fpath
  fish: meshplan completion fish > ~/.config/fish/completions/meshplan.fish
"""


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "completion",
        _write_script,
        "print the completion script for bash, zsh or fish",
        description="Print the completion script for a shell. Requires shtab: pip install shtab",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def _write_script(given: argparse.Namespace) -> str:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise PolicyError("meshplan completion needs shtab; pip install shtab") from error
    from meshplan.cli import make_parser
    from meshplan.lint._rules import ERRORS, RULES

    def complete_values(command: argparse.ArgumentParser) -> None:
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    complete_values(verb)
            elif action.metavar == "FILE":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "CODE":
                # Names of rules are valid too, but only codes are completed.
                action.choices = [*RULES, *ERRORS]

    command = make_parser()
    complete_values(command)
    script: str = shtab.complete(command, given.shell)
    return script
