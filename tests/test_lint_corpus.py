"""Files in the manner of each framework, with the meshes and the verdict of a careful person.

``lint_corpus.txt`` has for each file its name, the options, the verdict and the meshes. The verdict
is ``clean``, ``MP101``, ``not judged`` or ``no mesh``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from meshplan.cli import main
from meshplan.lint._read_jobs import read_jobs

PATH = Path(__file__).parent / "lint_corpus.txt"
FRAMEWORKS = (
    *("torchtitan", "megatron", "nemo", "verl", "prime-rl", "accelerate", "axolotl", "deepspeed"),
    *("lightning", "transformers", "vllm", "sglang", "torchtune", "nanotron"),
)


class File(NamedTuple):
    """A file of the corpus."""

    name: str
    options: tuple[str, ...]
    verdict: str
    meshes: list[str]
    text: str


def read_corpus() -> list[File]:
    found = []
    for part in PATH.read_text(encoding="utf-8").split("=== ")[1:]:
        head, _, text = part.partition("\n")
        name, options, verdict, meshes = (one.strip() for one in f"{head} ".split("|"))
        listed = [one.strip() for one in meshes.split(";") if one.strip()]
        found.append(File(name, tuple(options.split()), verdict, listed, text))
    return found


CORPUS = read_corpus()


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_file_has_the_meshes_and_the_verdict(
    file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file.name).parent.mkdir()
    Path(file.name).write_text(file.text)
    words = ("--no-env", "--isolated", "--select", "MP101", "--output-format", "json")
    status = main(["lint", file.name, *words, *file.options])
    report = json.loads(capsys.readouterr().out)
    (given,) = report["inputs"]
    codes = {one["code"] for one in report["findings"]}
    state = given["state"]
    verdict = state if state != "judged" else "MP101" if "MP101" in codes else "clean"
    assert (verdict, status) == (file.verdict, int(verdict in ("MP101", "not judged")))
    at = file.options.index("--world-size") + 1 if "--world-size" in file.options else None
    size = None if at is None else int(file.options[at])
    jobs = read_jobs(file.name, file.text, world_size=size).jobs
    assert [str(job.layout) for job in jobs] == file.meshes


def test_every_framework_has_six_files() -> None:
    counts = Counter(file.name.partition("/")[0] for file in CORPUS)
    assert set(counts) == {*FRAMEWORKS, "areal"}  # whose allocations are not read
    assert min(counts[name] for name in FRAMEWORKS) >= 6
