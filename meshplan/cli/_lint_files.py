"""The files of ``meshplan lint``: names, patterns, directories, standard input; each read once."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from meshplan.cli._output import complain
from meshplan.errors import MeshplanError, PolicyError
from meshplan.lint._finding import Source
from meshplan.lint._ignores import Ignore, read_ignores
from meshplan.lint._job import JobFile, Skipped
from meshplan.lint._read_jobs import MAX_CHARACTERS, RankOptions, read_jobs
from meshplan.topology._files import read_content

INCLUDED = (
    "*.py",
    "*.toml",
    "*.yaml",
    "*.yml",
    "*.json",
    "*.sh",
    "*.bash",
    "*.slurm",
    "*.sbatch",
)
"""The files of a directory that are linted."""
# Besides directories whose names begin with a dot, such as .git and .venv.
_TESTS = re.compile(r"(?:\w+_)?tests?(?:_\w+)?|testing|fixtures")
_TEST = re.compile(r"(?:test_.*|.*_tests?|conftest)\.\w+")
# A program, a configuration of a framework, a launcher, or a mesh outside of functions.
_LAUNCH = re.compile(
    r"__main__|ArgumentParser\b|@hydra\.main|\btyro\.cli\b|torchrun|\bsubprocess\b|\bos\.system\b"
    r"|\w(?:Config|Strategy|Trainer|ParallelDims)\("
    r"|^(?:[\w., ]+=\s*)?[\w.]*(?:init_device_mesh|DeviceMesh)\(",
    re.M,
)
_NEVER = ("__pycache__", "build", "dist", "node_modules", "venv", "*.egg-info")


@dataclass(frozen=True, slots=True)
class FilePatterns:
    """Patterns of ``fnmatch``, as ruff reads them.

    One without a slash matches the name of a file or of a directory above it; one with a slash the
    path from ``folder``. ``*`` matches slashes too.
    """

    patterns: tuple[str, ...]  # such as ``*.json``, ``old`` or ``configs/old/*``
    folder: str = "."  # that paths begin in

    def match(self, path: str) -> bool:
        """Whether a pattern matches a file or a directory above it."""
        if not self.patterns:
            return False
        parts = os.path.relpath(path, self.folder or ".").split(os.sep)
        paths = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        stripped = [one.removeprefix("./").rstrip("/") for one in self.patterns]
        return any(
            fnmatchcase(name, one) for one in stripped for name in (paths if "/" in one else parts)
        )


@dataclass(slots=True)
class FileReader:
    """Reads the jobs of files. An error in one does not prevent the others from being read."""

    # Of the jobs whose files do not specify them
    ranks: RankOptions = field(default_factory=RankOptions)
    # Of all files that were read, by name. `replace` changes one.
    texts: dict[str, str] = field(default_factory=dict)
    # The ignore comments of these files
    comments: dict[str, tuple[Ignore, ...]] = field(default_factory=dict)
    # Of files that the user named, and of directories
    errors: dict[str, MeshplanError] = field(default_factory=dict)
    _files: dict[str, JobFile] = field(default_factory=dict)

    def replace(self, name: str, text: str) -> None:
        """Read this text from now on, instead of the file: standard input, or a changed file."""
        self._files.pop(name, None)
        self.texts[name] = text

    def read(self, name: str) -> JobFile:
        """The jobs of a file. Raises MeshplanError: it is unreadable or invalid."""
        if name not in self._files:
            if name not in self.texts:
                self.texts[name] = read_content(name)
            text = self.texts[name]
            found = read_jobs(name, text, options=self.ranks)
            if name == "-":
                hint = ", or name the format with --stdin-filename job.toml"
                unread = (replace(one, why=one.why + hint) for one in found.skipped)
                found = replace(found, skipped=tuple(unread))
            self._files[name] = found
            self.comments[name] = read_ignores(text, file=name)
        return self._files[name]

    def run(self, name: str, arguments: Sequence[str]) -> JobFile:
        """The jobs that a script makes while it is executed, once."""
        from meshplan.lint._run_script import run_script

        ranks = self.ranks
        if ranks.world_size is None:
            raise PolicyError(f"--run {name[:80]} needs the number of ranks; pass --world-size 40")
        key = f"--run {name}"
        if key not in self._files:
            node = min(ranks.node_size or 8, ranks.world_size)
            complain(f"meshplan: {name[:200]} is executed, as rank 0 of {ranks.world_size}\n")
            self._files[key] = run_script(name, arguments, ranks.world_size, node)
            self.texts[name] = read_content(name)
            self.comments[name] = read_ignores(self.texts[name], file=name)
        return self._files[key]

    def read_for(self, name: str, ranks: int) -> JobFile:
        """The jobs of a file that `read` has read, with this number of ranks. Raises MeshplanError:
        no mesh has that many.
        """
        return read_jobs(name, self.texts.get(name, ""), options=RankOptions(ranks))

    def try_to_read(self, name: str, *, named: bool, below: str | None = None) -> JobFile:
        """The jobs of a file; one that is unreadable or invalid has a mesh that is not judged.
        ``below`` is the directory that the user named, whose files are read if they may start a job
        (`is_job`).
        """
        try:
            if below is not None:
                if name not in self.texts:
                    self.texts[name] = read_content(name)
                if not is_job(os.path.relpath(name, below or "."), self.texts[name]):
                    return JobFile()
            return self.read(name)
        except MeshplanError as error:
            if named:
                self.errors[name] = error
            self._files[name] = JobFile(skipped=(_skip(name, error),))
            return self._files[name]


def _skip(name: str, error: MeshplanError) -> Skipped:
    """The error, at its line of the file."""
    text = str(error.args[0])
    place = re.match(rf"{re.escape(str(Source(name)))}(?::(\d+))?: ", text)
    if place is None:
        return Skipped(Source(name), text)
    line = None if place[1] is None else int(place[1])
    return Skipped(Source(name, line), text[place.end() :])


def expand_names(
    names: Sequence[str],
) -> tuple[list[str], list[str], dict[str, str]]:
    """The files, the directories and the matches of patterns of a command line, each once. A match
    has the directory in front of the first wildcard. Raises PolicyError: a pattern that matches no
    file, or axes that are in no ``--mesh``.
    """
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    matches: dict[str, str] = {}
    for name in names:
        found, is_pattern = [name], False
        if re.search("[*?[]", name) and not os.path.lexists(name):
            from glob import glob

            found, is_pattern = sorted(glob(name, recursive=True)), True
            if not found:
                raise PolicyError(f"{name[:200]}: no file matches this pattern")
        elif re.fullmatch(r"\w+=\d+(,\w+=\d+)*", name) and not os.path.lexists(name):
            raise PolicyError(
                f"{name[:200]}: no such file; pass all axes after --mesh, with commas: "
                "--mesh ddp=8,fsdp=5"
            )
        for one in found:
            group = folders if one != "-" and os.path.isdir(one) else files
            if is_pattern and group is files:
                matches.setdefault(one, os.path.dirname(re.split("[*?[]", name)[0]))
                continue
            group.setdefault(one if one == "-" else os.path.abspath(one), one)
    return list(files.values()), list(folders.values()), matches


def is_job(name: str, text: str) -> bool:
    """Whether a file of a directory may start a job: no test, and no library of Python."""
    *folders, base = name.lower().split("/")
    if _TEST.fullmatch(base) or any(_TESTS.fullmatch(one) for one in folders):
        return False
    return not base.endswith((".py", ".pyi")) or bool(_LAUNCH.search(text))


def find_files(
    folder: str,
    included: FilePatterns,
    excluded: Sequence[FilePatterns],
    errors: dict[str, MeshplanError],
) -> list[str]:
    """The files below a directory, sorted; links to directories are not followed. A file that is
    not Python and longer than a description of a job is left out, and so are the files that git
    ignores. ``errors`` gets those of directories that cannot be read.
    """

    def fail(error: OSError) -> None:
        name = str(error.filename)
        errors[name] = PolicyError(
            f"{name[:200]}: cannot be read: {error.strerror}; leave it out with --exclude"
        )

    found = []
    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and not any(fnmatchcase(name, one) for one in _NEVER)
            and not any(one.match(os.path.join(here, name)) for one in excluded)
        )
        for name in sorted(names):
            path = os.path.normpath(os.path.join(here, name))
            is_wanted = included.match(path) and not any(one.match(path) for one in excluded)
            if is_wanted and _is_description(Path(path)):
                found.append(path)
    ignored = _find_ignored(folder, found)
    return [path for path in found if path not in ignored]


def _find_ignored(folder: str, paths: Sequence[str]) -> set[str]:
    """Those that git ignores; none without git or outside of a repository."""
    # Relative names, for git refuses paths through links; a repository may name a program to run.
    names = {os.fsencode(os.path.relpath(path, folder)): path for path in paths}
    command = [
        "git",
        "-C",
        folder,
        "-c",
        "core.fsmonitor=false",
        "check-ignore",
        "-z",
        "--stdin",
    ]
    try:
        run = subprocess.run(command, input=b"\0".join(names), capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {names[name] for name in run.stdout.split(b"\0") if name in names}


def _is_description(file: Path) -> bool:
    try:
        is_short = file.suffix == ".py" or file.stat().st_size <= MAX_CHARACTERS
        return is_short and file.is_file()
    except FileNotFoundError:  # a link to nothing
        return False
    except OSError:  # reading it reports why
        return True
