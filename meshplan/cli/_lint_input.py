"""The inputs of ``meshplan lint``: files, each read once, their jobs, and settings."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from meshplan.cli._options import (
    PLACEMENT_OPTIONS,
    complain,
    count_hosts,
    read_hosts,
    read_inputs,
    read_number,
    track,
)
from meshplan.errors import MeshplanError, PolicyError, TopologyError
from meshplan.lint._finding import InputKind, Source
from meshplan.lint._job import Job, JobFile, Settings, Skipped
from meshplan.lint._read_jobs import (
    MAX_CHARACTERS,
    RankOptions,
    read_arguments,
    read_jobs,
)
from meshplan.lint._select import Ignore, read_ignores
from meshplan.lint._spec import parse_mesh
from meshplan.topology import Cluster, Inputs, Reading
from meshplan.topology._files import read_content, read_file
from meshplan.topology._read_cluster import is_rank_order

_CONFIGS = ("meshplan.toml", "pyproject.toml")
# Without it, a pyproject.toml needs no parser.
_TOOL = re.compile(r"^[ \t\[]*[\"']?tool[\"' \t]*(?:\]|[.=][^\n]*meshplan)", re.M)
_NOTHING = "no mesh to check; pass --mesh ddp=8,fsdp=5, a job file or a meshplan.toml with a mesh"
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
_TESTS = re.compile(r"(?:\w+_)?tests?(?:_\w+)?|testing|fixtures")
_TEST = re.compile(r"(?:test_.*|.*_tests?|conftest)\.\w+")
# A program, a configuration of a framework, a launcher, or a mesh outside of functions.
_LAUNCH = re.compile(
    r"__main__|ArgumentParser\b|@hydra\.main|\btyro\.cli\b|torchrun|\bsubprocess\b|\bos\.system\b"
    r"|\w(?:Config|Strategy|Trainer|ParallelDims)\("
    r"|^(?:[\w., ]+=\s*)?[\w.]*(?:init_device_mesh|DeviceMesh)\(",
    re.M,
)
# Besides directories whose names begin with a dot, such as .git and .venv.
_NEVER = ("__pycache__", "build", "dist", "node_modules", "site-packages", "*.egg-info")
# What virtual environments and those of conda have.
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")


@dataclass(frozen=True, slots=True)
class FilePatterns:
    """Patterns of ``fnmatch``, as ruff reads them. Without a slash one matches the name of a file
    or of a directory above it, with a slash the path from ``folder``. ``*`` matches slashes too.
    """

    patterns: tuple[str, ...]  # such as ``*.json``, ``old`` or ``configs/old/*``
    folder: str = "."  # that paths begin in

    def match(self, path: str) -> bool:
        if not self.patterns:
            return False
        parts = os.path.relpath(path, self.folder or ".").split(os.sep)
        paths = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        stripped = [one.removeprefix("./").rstrip("/") for one in self.patterns]
        return any(
            fnmatchcase(name, one) for one in stripped for name in (paths if "/" in one else parts)
        )


def _match_any(patterns: Iterable[FilePatterns], path: str) -> bool:
    return any(one.match(path) for one in patterns)


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
        if name not in self._files:
            if name not in self.texts:
                self.texts[name] = read_content(name)
            text = self.texts[name]
            found = read_jobs(name, text, self.ranks)
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

    def read_for(self, one: NamedInput, ranks: int, node_size: int | None) -> JobFile:
        """The jobs of an input with this number of ranks."""
        options = RankOptions(ranks, node_size=node_size, arguments=self.ranks.arguments)
        if one.kind == "arguments":
            return read_arguments(options.arguments, options)
        return read_jobs(one.name, self.texts.get(one.name, ""), options)

    def try_to_read(self, name: str, *, named: bool, below: str | None = None) -> JobFile:
        """The jobs of a file; one that is unreadable or invalid has a mesh that is not judged.
        ``below`` is the directory that the user named.
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
    text = str(error.args[0])
    place = re.match(rf"{re.escape(str(Source(name)))}(?::(\d+))?: ", text)
    line = int(place[1]) if place and place[1] else None
    return Skipped(Source(name, line), text[place.end() if place else 0 :])


def expand_names(
    names: Sequence[str],
) -> tuple[list[str], list[str], dict[str, str]]:
    """The files, the directories and the matches of patterns of a command line, each once. A match
    has the directory in front of the first wildcard.
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
    is_excluded: Callable[[str], bool],
    errors: dict[str, MeshplanError],
) -> list[str]:
    """The files below a directory, sorted, without those that git ignores or that are too long.
    ``errors`` gets those of directories that cannot be read.
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
            and not any(os.path.exists(os.path.join(here, name, one)) for one in _ENVIRONMENT)
            and not is_excluded(os.path.join(here, name))
        )
        for name in sorted(names):
            path = os.path.normpath(os.path.join(here, name))
            if included.match(path) and not is_excluded(path) and _is_description(Path(path)):
                found.append(path)
    ignored = _find_ignored(folder, found)
    return [path for path in found if path not in ignored]


def _find_ignored(folder: str, paths: Sequence[str]) -> set[str]:
    import subprocess  # here, because single files and meshes need no git

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


@dataclass(slots=True)
class NamedInput:
    name: str
    kind: InputKind
    file: JobFile
    is_found: bool = False  # whether it was found by a directory or a pattern, without ``--strict``
    # Of the file, each with its cluster
    jobs: list[tuple[Job, Cluster]] = field(default_factory=list)
    contradiction: str = ""  # of the numbers of ranks in the file and in the options; may be empty

    def skip(self, source: Source, why: str) -> None:
        """Note a mesh that is not judged."""
        self.file = replace(self.file, skipped=(*self.file.skipped, Skipped(source, why)))

    def read_placement(self) -> Inputs | None:
        """The placement in its settings, with paths relative to the configuration."""
        settings, folder = self.file.settings, Path(self.name).parent
        if settings is None or not any(getattr(settings, name) for name in PLACEMENT_OPTIONS):
            return None
        order = settings.rank_order or "block"
        return Inputs(
            files=tuple(str(folder / name) for name in settings.topology),
            hosts=read_hosts(settings.hosts) if settings.hosts else (),
            node_size=settings.node_size,
            domain_size=settings.domain_size,
            rank_order=order if is_rank_order(order) else str(folder / order),
        )


@dataclass(slots=True)
class LintRequest:
    reader: FileReader
    # Those that describe jobs, in the order of the command
    inputs: list[NamedInput] = field(default_factory=list)
    # The reading of each cluster description, by name
    topologies: dict[str, Reading] = field(default_factory=dict)
    # A configuration whose settings apply and whose meshes are not checked
    unused: NamedInput | None = None
    # Of a configuration; the options override them
    settings: Settings = field(default_factory=Settings)
    config: NamedInput | None = None
    is_unplaced: bool = False  # whether neither options nor the configuration place the ranks

    @property
    def is_quiet(self) -> bool:
        """Whether all inputs are files that the user did not name."""
        return bool(self.inputs) and all(one.is_found for one in self.inputs)

    @property
    def jobs(self) -> list[tuple[Job, Cluster]]:
        return [job for one in self.inputs for job in one.jobs]

    def read_topology(self, name: str) -> Reading:
        """The reading of a cluster description, cached: standard input can be read once only."""
        if name not in self.topologies:
            self.topologies[name] = read_file(name)
        return self.topologies[name]


def read_request(given: argparse.Namespace, reader: FileReader) -> LintRequest:
    """Read all inputs of the command line; MeshplanError if none can be read or none has a mesh."""
    request = LintRequest(reader)
    names, folders, matches = expand_names(given.files)
    if "-" in names:
        names[names.index("-")] = _read_standard_input(given, reader)
    files = [NamedInput(name, "file", reader.try_to_read(name, named=True)) for name in names]
    config = _find_config(given, files, folders, reader)
    if config is not None:
        request.settings = config.file.settings or request.settings
    place = "." if config is None else os.path.dirname(config.name)
    excluded = FilePatterns(tuple(given.exclude)), FilePatterns(request.settings.exclude, place)
    is_excluded = partial(_match_any, excluded)
    included = FilePatterns(request.settings.include or INCLUDED, place)
    files = [one for one in files if not is_excluded(one.name)]
    known = {os.path.abspath(one.name) for one in files}
    below = {one: at for one, at in matches.items() if not is_excluded(one)}
    for folder in folders:
        for name in find_files(folder, included, is_excluded, reader.errors):
            below.setdefault(name, folder)
    for name, folder in track("reading file", [*below.items()]):
        if os.path.abspath(name) not in known:
            known.add(os.path.abspath(name))
            file = reader.try_to_read(name, named=False, below=None if given.strict else folder)
            files.append(NamedInput(name, "file", file, not given.strict))
    inputs = [*files, *_read_meshes(given)]
    if given.script is not None or not any(one.file.takes_arguments for one in files):
        inputs += _read_command(given, reader)
    if config is not None:
        if not inputs and not given.files and config.file.jobs:
            inputs = [config]
        elif not any(config.name == one.name for one in files):
            # Its meshes are not checked, so its ignore comments cannot match.
            reader.comments.pop(config.name, None)
            request.unused = config if given.config is not None else None
    if not inputs and not given.files:
        raise PolicyError(_NOTHING)
    request.inputs = inputs
    request.config = config
    return request


def _read_command(given: argparse.Namespace, reader: FileReader) -> list[NamedInput]:
    """The script of ``--run``, to which the arguments after ``--`` belong, or only these."""
    if given.script is not None:
        return [NamedInput(given.script, "file", reader.run(given.script, given.arguments))]
    if not given.arguments:
        return []
    file = read_arguments(given.arguments, reader.ranks)
    return [NamedInput(shlex.join(given.arguments), "arguments", file)]


def _read_standard_input(given: argparse.Namespace, reader: FileReader) -> str:
    """The name of the file on standard input, whose text is in the reader from now on."""
    if "-" in given.topology:
        raise PolicyError("standard input is FILE and --topology; pass the name of one of them")
    name: str = given.stdin_filename or "-"
    if name not in reader.texts:
        reader.replace(name, read_content("-"))
    return name


def read_ranks(given: argparse.Namespace) -> RankOptions:
    """For files that do not specify ranks: those of ``--world-size``, or of the hosts."""
    inputs = read_inputs(given)
    hosts, node_size = count_hosts(inputs)
    # Hosts in a list may differ.
    per_host = node_size or (inputs.domain_size if len(inputs.hosts) < 2 else None)
    size = None
    if given.world_size is not None:
        size = read_number(given.world_size, "--world-size", error=TopologyError)
    elif len(inputs.hosts) > 1 and len(inputs.files) < 2:
        size = sum(inputs.hosts)
    elif hosts:
        size = per_host and hosts * per_host
    elif given.live and os.environ.get("WORLD_SIZE", "").isdecimal():
        size = int(os.environ["WORLD_SIZE"])
    # Without a number of hosts, a domain of NVLink may have several.
    per_node = per_host if hosts else inputs.node_size
    return RankOptions(size, hosts, per_node, tuple(given.arguments))


def _find_config(
    given: argparse.Namespace,
    files: Sequence[NamedInput],
    folders: Sequence[str],
    reader: FileReader,
) -> NamedInput | None:
    """That of ``--config``, one of the files, in this folder or above it, or in a named one."""
    if given.config is not None:
        path = os.path.abspath(given.config)
        named = next((one for one in files if os.path.abspath(one.name) == path), None)
        return named or NamedInput(given.config, "settings", reader.read(given.config))
    own = [one for one in files if one.file.settings is not None]
    # A configuration without settings cannot conflict with the others.
    configs = [one for one in own if one.file.settings != Settings()] or own[:1]
    elsewhere = len(configs) < len(files) or bool(given.mesh or given.arguments)
    for other in configs[1:]:
        if _differ(configs[0], other, elsewhere=elsewhere):
            raise PolicyError(
                f"{configs[0].name} and {other.name} have different settings; choose one "
                "with --config, or lint them one by one"
            )
    if configs or given.isolated:
        return configs[0] if configs else None
    for folder in (*_list_parents(), *folders):
        for name in (os.path.normpath(os.path.join(folder, one)) for one in _CONFIGS):
            if os.path.isfile(name) and (
                name.endswith(_CONFIGS[0]) or _TOOL.search(read_content(name))
            ):
                file = reader.read(name)
                if file.settings is not None:
                    return NamedInput(name, "settings", file)
    return None


def _list_parents() -> list[str]:
    """The working directory and those above it in its repository."""
    found, here = ["."], Path.cwd()
    while not (here / ".git").exists() and here != here.parent:
        found.append(os.path.join(found[-1], "..").removeprefix("./"))
        here = here.parent
    return found if (here / ".git").exists() else found[:1]


def _differ(one: NamedInput, other: NamedInput, *, elsewhere: bool) -> bool:
    """Whether settings differ; placement settings matter only to jobs in other inputs."""
    first, second = (each.file.settings or Settings() for each in (one, other))
    if not elsewhere:
        second = replace(
            second,
            **{name: getattr(first, name) for name in PLACEMENT_OPTIONS},
        )
    elif first.topology or first.rank_order:
        # Names of files are relative to the configuration.
        return first != second or Path(one.name).parent != Path(other.name).parent
    return first != second


def _read_meshes(given: argparse.Namespace) -> list[NamedInput]:
    ranks = None
    if given.ranks is not None:
        if len(given.mesh) != 1:
            raise PolicyError(f"--ranks needs exactly one --mesh, got {len(given.mesh)}")
        try:
            ranks = json.loads(f"[{given.ranks}]")
        except (ValueError, RecursionError):
            raise PolicyError(
                f"--ranks: use numbers, such as 0,2,1,3 or [[0,2],[1,3]], got {given.ranks[:60]!r}"
            ) from None
        ranks = ranks[0] if len(ranks) == 1 and isinstance(ranks[0], list) else ranks
    return [
        NamedInput(
            name,
            "mesh",
            JobFile((Job(parse_mesh(text, ranks), Source(option=name)),)),
        )
        for text, name in ((text, f"--mesh {text}") for text in given.mesh)
    ]
