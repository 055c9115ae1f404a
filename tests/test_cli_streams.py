"""The command line with closed or full standard streams."""

from __future__ import annotations

import io
import itertools
import sys
import time
from pathlib import Path

import pytest

from meshplan.cli._options import track
from tests.programs import capture
from tests.test_cli_lint import HERE

LINT = "lint --isolated --no-env --domain-size 8 --mesh"


def shell(command: str) -> tuple[str, str]:
    """Of a command line in which `meshplan` is the command: standard output and error."""
    done = capture(
        ["bash", "-c", f'meshplan() {{ "{sys.executable}" -m meshplan "$@"; }}; {command}'],
        env=HERE,
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
def test_closed_pipe_keeps_the_exit_status(words: str, status: int) -> None:
    # Nothing reads any more when the verb starts.
    out, err = shell(f"exec 3> >(exec true); wait $!; meshplan {words} >&3; echo $?")
    assert (out, err) == (f"{status}\n", "")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (f"{LINT} ddp=5,fsdp=8 >&-", "it is closed"),
        (f"{LINT} ddp=8,fsdp=5 >/dev/full", "No space left on device"),
        (f"{LINT} ddp=8,fsdp=5 --fix >&-", "it is closed"),
        ("rule --all >/dev/full", "No space left on device"),
    ],
)
def test_full_standard_output_is_an_error(command: str, reason: str) -> None:
    _, err = shell(f"meshplan {command}; echo $? >&2")
    *_, line, status = err.splitlines()
    assert line == f"meshplan: MP402: standard output: cannot be written: {reason}"
    assert status == "2"
    assert "Traceback" not in err


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_closed_standard_error_keeps_the_exit_status(stream: str) -> None:
    assert shell(f"meshplan {LINT} ddp=0 {stream}; echo $?") == ("2\n", "")


def test_closed_standard_output_is_harmless_when_unused(tmp_path: Path) -> None:
    file = tmp_path / "report"
    out, err = shell(f"meshplan {LINT} ddp=8,fsdp=5 --output-file {file} >&-; echo $?")
    assert (out, err) == ("1\n", "")
    assert "MP101" in file.read_text()


@pytest.mark.parametrize("words", ["topo -", f"{LINT} ddp=8 --topology -"])
def test_closed_standard_input_is_an_error(words: str) -> None:
    out, err = shell(f"meshplan {words.replace(' --domain-size 8', '')} <&-; echo $?")
    assert out == "2\n"
    assert err == "meshplan: MP212: standard input: cannot be read: it is closed\n"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    shown = "\r\x1b[Kmeshplan: reading file 1 of 2\r\x1b[Kmeshplan: reading file 2 of 2\r\x1b[K"
    for stream, variables, expected in (
        (Terminal(), {}, shown),
        (io.StringIO(), {}, ""),
        (Terminal(), {"CI": "true"}, ""),
        (Terminal(), {"TERM": "dumb"}, ""),
        (Terminal(), {"RANK": "1"}, ""),
    ):
        with monkeypatch.context() as context:
            for name, value in variables.items():
                context.setenv(name, value)
            context.setattr("sys.stderr", stream)
            assert list(track("reading file", ["a", "b"])) == ["a", "b"]
        assert stream.getvalue() == expected
