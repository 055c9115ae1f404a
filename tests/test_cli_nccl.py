"""Variables and versions of NCCL and its driver."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from expecttest import TestCase

from meshplan.cli import _lint_run
from meshplan.cli._lint_run import find_driver_version, find_nccl_version, read_variables
from meshplan.errors import PolicyError
from tests.refusals import refusal


def test_variables() -> None:
    assert read_variables(["A=1", " B=x=y", "C="], {"A": "0", "D": "2"}) == {
        "A": "1",
        "B": "x=y",
        "C": "",
        "D": "2",
    }


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.30.7", (2, 30, 7)), ("2.31", (2, 31, 0)), ("2.30.7+cuda13.0", (2, 30, 7))],
)
def test_version_of_nccl_is_read(text: str, version: tuple[int, int, int]) -> None:
    assert find_nccl_version(text) == version


def test_installed_nccl_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "nvidia-nccl-cu12":
            raise metadata.PackageNotFoundError
        return "2.27.3"

    monkeypatch.setattr(metadata, "version", version)
    assert find_nccl_version(None) == (2, 27, 3)
    monkeypatch.setattr(_lint_run, "_PACKAGES", ())
    assert find_nccl_version(None) is None


def test_version_of_the_driver_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(_lint_run, "_DRIVER", file)
    assert find_driver_version(None) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    )
    assert find_driver_version(None) == "550.54.15"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n"
    )
    assert find_driver_version(None) == "570.86.10"
    file.write_text("something else\n")
    assert find_driver_version(None) is None
    assert find_driver_version("560.28") == "560.28"


class TestMessages(TestCase):
    def test_invalid_arguments_are_refused(self) -> None:
        found = []
        for call in (
            lambda: read_variables(["NCCL_ALGO"], {}),
            lambda: read_variables(["=x"], {}),
            lambda: find_nccl_version("new"),
            lambda: find_driver_version("550"),
        ):
            found.append(refusal(PolicyError, call))
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP402: --env: use KEY=VALUE, such as NCCL_ALGO=Ring, got 'NCCL_ALGO'
MP402: --env: use KEY=VALUE, such as NCCL_ALGO=Ring, got '=x'
MP402: --nccl-version: use a version such as 2.30.7, got 'new'
MP402: --driver: use a version such as 550.54.15, got '550'""",
        )
