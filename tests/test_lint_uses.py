"""Programs in the manner of public ones, with the roles and the verdict of a careful person."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from meshplan.lint._facts import JobFacts
from meshplan.lint._read_jobs import read_jobs
from meshplan.topology import Cluster, Topology
from tests.lint_inputs import format_jobs

FOLDER = Path(__file__).parent / "lint_programs"


class Program(NamedTuple):
    """A program, with its jobs in comments before the first line of code."""

    node: int
    verdict: str
    jobs: str
    text: str


def read_programs() -> dict[str, Program]:
    found = {}
    for file in sorted(FOLDER.glob("*.txt")):
        for part in file.read_text(encoding="utf-8").split("#%% ")[1:]:
            title, _, text = part.partition("\n")
            name, node, verdict = title.split("; ")
            jobs = re.match(r"(?:# .*\n)*", text)
            assert jobs is not None
            lines = jobs[0].replace("# ", "")
            found[f"{file.stem}, {name}"] = Program(int(node[5:]), verdict, lines, text)
    return found


PROGRAMS = read_programs()


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_verdict_of_a_careful_person(name: str) -> None:
    program = PROGRAMS[name]
    found = read_jobs("train.py", program.text)
    jobs = re.sub(r"train\.py:\d+ \(", "(", format_jobs(found))
    assert sorted(jobs.splitlines()) == sorted(program.jobs.splitlines())
    not_judged = bool(found.skipped)
    jagged = False
    for job in found.jobs:
        world = job.layout.highest_rank + 1
        topology = Topology.uniform(world, node_size=program.node, domain_size=program.node)
        not_judged |= bool(job.find_unknown_axes())
        jagged |= bool(JobFacts(job, Cluster(topology)).harmful)
    assert ("not judged" if not_judged else "jagged" if jagged else "clean") == program.verdict
