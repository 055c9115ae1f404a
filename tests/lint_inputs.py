"""What the tests of the linter's readers share: job files in short, and damage to their texts."""

from __future__ import annotations

import difflib
import time

from hypothesis import strategies as st

from meshplan.errors import MeshplanError
from meshplan.layout import Layout
from meshplan.lint._job import Job, JobFile
from meshplan.lint._read_jobs import RankOptions, read_jobs


def format_jobs(found: JobFile) -> str:
    """Jobs with places, roles and use, then what was skipped."""
    lines = []
    for job in found.jobs:
        use = [job.framework, *(f"flattened {'+'.join(axes)}" for axes in job.flattened)]
        use += ["sequence parallel"] if job.sequence_parallel else []
        lines.append(f"{job.source} {job.layout} {' '.join(job.roles)}: {', '.join(use)}\n")
    lines += [f"{one}\n" for one in found.skipped]
    return "".join(lines)


def changed_lines(text: str, job: Job, **axes: int) -> str:
    """The lines that writing another mesh changes."""
    assert job.rewrite is not None
    new = job.rewrite(Layout.of(**axes))
    if new is None:
        return "cannot be written\n"
    lines = difflib.unified_diff(text.splitlines(), new.splitlines(), n=0, lineterm="")
    return "".join(f"{line}\n" for line in list(lines)[2:] if not line.startswith("@@"))


def refusal(name: str, text: str, world_size: int | None = 40) -> str:
    """Why the text is refused, in one line that names the file; empty if it is read."""
    started = time.process_time()
    said = ""
    try:
        notes = [str(one) for one in read_jobs(name, text, RankOptions(world_size)).skipped]
    except MeshplanError as error:
        said = str(error)
        notes = [said]
    # Far from what something quadratic needs, on a slow machine too.
    assert time.process_time() - started < 30
    assert all(name in note and "\n" not in note for note in notes)
    return said


def damaged_texts(text: str) -> st.SearchStrategy[str]:
    """The text with lines dropped, doubled, truncated and shuffled, and odd characters added."""
    lines = st.sampled_from(text.splitlines()) | st.text(max_size=10)
    cut = st.tuples(lines, st.integers(0, 60)).map(lambda one: one[0][: one[1]])
    return st.lists(lines | cut, max_size=25).map("\n".join)
