"""What verbs print, and what is told of standard streams that take nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.test_cli_lint import HERE

LINT = "lint --isolated --no-env --domain-size 8 --mesh"


def shell(command: str) -> tuple[str, str]:
    """Of a command line in which `meshplan` is the command: standard output and error."""
    done = subprocess.run(
        ["bash", "-c", f'meshplan() {{ "{sys.executable}" -m meshplan "$@"; }}; {command}'],
        env=HERE,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (f"{LINT} ddp=8,fsdp=5", 1),
        (f"{LINT} ddp=8,fsdp=5 --exit-zero", 0),
        (f"{LINT} ddp=5,fsdp=8", 0),
        ("rule --all", 0),
    ],
)
def test_the_status_holds_where_the_reader_leaves(words: str, status: int) -> None:
    # Nothing reads any more when the verb starts.
    out, err = shell(f"exec 3> >(exec true); wait $!; meshplan {words} >&3; echo $?")
    assert (out, err) == (f"{status}\n", "")
