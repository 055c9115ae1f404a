"""Findings of the linter, their sources, checked fixes, and reports."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from meshplan.errors import PolicyError
from meshplan.lint._programs import Program

Severity = Literal["info", "warning", "error"]
"""How severe a finding is."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All of ``Severity``, ascending."""
_LINE = re.compile(r"line \d+: ")  # before the reason why a mesh was not judged


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a mesh, a variable or a finding."""

    # As the user named it; ``-`` is standard input. Empty: not a file, see ``option``.
    file: str = ""
    line: int | None = None  # from 1 on; ``None`` if it is about the whole file
    option: str = ""  # the input if it is not a file, e.g. ``--mesh ddp=8,fsdp=5``, ``NCCL_ALGO``.

    def __str__(self) -> str:
        name = "standard input" if self.file == "-" else self.file or self.option
        return name if self.line is None else f"{name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a file."""

    file: str
    before: str = field(repr=False)
    after: str = field(repr=False)

    def write(self) -> None:
        """Change the file. Raises PolicyError if it is unreadable, or changed since it was read."""
        path = Path(self.file)
        try:
            content = path.read_bytes()
            mark = BOM_UTF8 if content.startswith(BOM_UTF8) else b""
            if content != mark + self.before.encode():
                raise PolicyError(
                    f"{self.file}: not written, because it is not the UTF-8 text that was linted; "
                    "run the command again, or convert the file"
                )
            path.write_bytes(mark + self.after.encode())
        except OSError as error:
            raise PolicyError(f"{self.file}: cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Fix:
    """A checked change: with it, the finding is no longer reported, and no other one more."""

    title: str  # what to do, imperative, one line
    cost: str  # one line, e.g. ``no GPU is left out``.
    mesh: str = ""  # the corrected mesh as ``ddp=5,fsdp=8``; empty if the fix is not another mesh
    diff: str = field(default="", repr=False)  # of the file as `git apply` reads it; may be empty
    edit: Edit | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, str]:
        """JSON-ready: title, cost, mesh and diff."""
        return {key: getattr(self, key) for key in ("title", "cost", "mesh", "diff")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a rule."""

    code: str
    severity: Severity
    message: str  # one line, complete in itself
    source: Source
    subject: str = ""  # the mesh, e.g. ``(ddp=8, fsdp=5, tp=1)``; may be empty.
    details: tuple[str, ...] = ()  # further lines of text: groups, signatures, orders, shares
    fixes: tuple[Fix, ...] = ()  # cheapest first
    # The details for programs, JSON-ready
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    program: Program = "unknown"


InputState = Literal["judged", "not judged", "no mesh"]
"""The result of an input.

* judged: all its meshes were judged; a topology was read completely.
* not judged: a mesh or part of it could not be judged, which might change the verdict.
* no mesh: it has no mesh.
"""

InputKind = Literal["file", "mesh", "arguments", "settings", "topology"]
"""The kind of an input: ``file``, ``mesh`` and ``arguments`` describe jobs, ``settings`` is a
configuration that is not among the files, ``topology`` describes the cluster.
"""


@dataclass(frozen=True, slots=True)
class LintInput:
    """One input of a command."""

    name: str  # as the user named it: a file, ``-``, ``--mesh ddp=8``, or the arguments
    kind: InputKind
    state: InputState
    why: tuple[str, ...] = ()  # one line for each reason; empty if it was judged

    @property
    def is_file(self) -> bool:
        """Whether ``name`` is that of a file."""
        return self.kind in ("file", "settings", "topology") and self.name != "-"


@dataclass(frozen=True, slots=True)
class LintReport:
    """The findings of one run, most severe first, and its inputs."""

    findings: tuple[Finding, ...]  # selected and not ignored
    judged: tuple[str, ...] = ()  # one line for each mesh with its rank placement
    ignored: int = 0  # number of findings that comments suppressed
    # Inputs with their states, in the order of the command; without files that were found by a
    # directory or a pattern and were not judged
    inputs: tuple[LintInput, ...] = ()
    allow_unjudged: bool = False  # whether inputs that were not judged pass
    files: int = 0  # number of files that were read as jobs
    meshes: int = 0
    # Meshes on nodes of unknown size, with what was judged; none if no file was named
    notes: tuple[tuple[Source, str], ...] = ()
    is_quiet: bool = False  # whether no file was named: the report always has its summary line
    # A remark on files that are not among the inputs and were not judged; may be empty
    unlisted: str = ""

    def list_inputs(self, state: InputState) -> tuple[LintInput, ...]:
        """The inputs that ended in a state."""
        return tuple(one for one in self.inputs if one.state == state)

    def list_unjudged(self) -> Iterator[LintInput]:
        """The inputs that were not judged, each with the reasons that no finding has."""
        told = {
            (
                one.source.file or one.source.option,
                one.message.removeprefix("not judged: "),
            )
            for one in self.findings
        }
        for one in self.list_inputs("not judged"):
            left = tuple(why for why in one.why if (one.name, _LINE.sub("", why)) not in told)
            if left:
                yield replace(one, why=left)


def join_names(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
