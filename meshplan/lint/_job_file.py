"""What one file or one command line says about jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshplan.errors import MeshplanError
from meshplan.lint._finding import Source
from meshplan.lint._job import Job
from meshplan.lint._settings import Settings

__all__ = ["JobFile", "Skipped", "located"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A mesh that is there and could not be read.

    Attributes:
        source: where it is written.
        why: one line, with what to do.
    """

    source: Source
    why: str

    def __str__(self) -> str:
        return f"{self.source}: not judged: {self.why}"


@dataclass(frozen=True, slots=True)
class JobFile:
    """What was read.

    Attributes:
        jobs: in order of lines.
        skipped: meshes that depend on what only the running program knows.
        settings: of a configuration of the linter; else ``None``.
        hosts: how many hosts the job is started on, where that is written.
        ranks_per_host: how many ranks are started on each, where that is written.
    """

    jobs: tuple[Job, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    settings: Settings | None = None
    hosts: int | None = None
    ranks_per_host: int | None = None

    def with_source(self, source: Source) -> JobFile:
        """The same, all of it read from ``source``."""
        return replace(
            self,
            jobs=tuple(replace(job, source=source) for job in self.jobs),
            skipped=tuple(replace(one, source=source) for one in self.skipped),
        )


def located(source: Source, error: MeshplanError) -> MeshplanError:
    """The same error, its message with the place in front."""
    return type(error)(f"{source}: {error.args[0]}")
