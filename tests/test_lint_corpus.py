"""Files in the manner of each framework, with the meshes and the verdict of a careful person.

``lint_corpus.txt`` has for each file its name, the options, the verdict and the meshes. The verdict
is ``clean``, ``MP101``, ``not judged`` or ``no mesh``.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed

from meshplan.cli import main
from meshplan.lint._read_jobs import RankOptions, read_jobs

PATH = Path(__file__).parent / "lint_corpus.txt"
_VARIANT = re.compile(r"\{([^{}|\n]*)\|([^{}|\n]*)\}")


class File(NamedTuple):
    """A file of the corpus."""

    name: str
    options: tuple[str, ...]
    verdict: str
    meshes: list[str]
    text: str


def read_corpus() -> list[File]:
    found = []
    parts = PATH.read_text(encoding="utf-8").split("=== ")[1:]
    # ``{6|8}`` makes two files of one.
    both = [[_VARIANT.sub(rf"\{i}", one) for i in (1, 2)] for one in parts]
    for part in [one for pair in both for one in dict.fromkeys(pair)]:
        head, _, text = part.partition("\n")
        name, options, verdict, meshes = (one.strip() for one in f"{head} ".split("|"))
        listed = [one.strip() for one in re.split(";(?! ranks)", meshes) if one.strip()]
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
    given = dict(zip(file.options[::2], map(int, file.options[1::2]), strict=True))
    ranks = RankOptions(given.get("--world-size"), node_size=given.get("--node-size"))
    jobs = read_jobs(file.name, file.text, ranks).jobs
    assert [str(job.layout) for job in jobs] == file.meshes


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_repository_without_a_hazard_is_quiet(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2,000 files of jobs and of a library: those of the corpus, and torch's own."""
    monkeypatch.chdir(tmp_path)
    chance = random.Random(seed)
    jobs = [one for one in CORPUS if one.verdict != "MP101" and "any_replicas" not in one.name]
    library = sorted(Path(torch.distributed.__file__).parent.rglob("*.py"))
    for number in range(2000):
        file, module = chance.choice(jobs), chance.choice(library)
        name, text = file.name, file.text
        if chance.random() < 0.5:
            name, text = module.name, module.read_text(encoding="utf-8")
        top = chance.choice(("configs", "examples", "scripts", "src/trainer", "tests"))
        place = Path(top, f"part_{number % 40}", f"{number}_{Path(name).name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    words = ("lint", ".", "--no-env", "--isolated", "--node-size", "8")
    assert main(words) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("checked 2000 files, ")
    hazard = "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 5\n"
    Path("configs/hazard.toml").write_text(f"[parallelism]\n{hazard}")
    assert main(("lint", "configs", *words[2:])) == 1
    assert "configs/hazard.toml:" in capsys.readouterr().out
