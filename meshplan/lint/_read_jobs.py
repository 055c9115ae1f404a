"""Reads jobs from files and argument lists of any supported program."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from meshplan._message_text import shorten
from meshplan.errors import LayoutError, MeshplanError
from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._job import Job, JobFile

# Descriptions of jobs are written by hand. Python's own parser takes a second for four times that.
MAX_CHARACTERS = 1 << 18
# Modules of meshplan.lint._readers, in the order in which they are tried.
READERS = ("config", "document", "python", "command")


_Read = Callable[..., JobFile]


class RankOptions(NamedTuple):
    """Numbers of a launch that the user specifies, for files that do not have them."""

    world_size: int | None = None
    hosts: int | None = None
    node_size: int | None = None
    # Of the program that a Python file is, after ``--``
    arguments: tuple[str, ...] = ()

    def count_ranks(self, file: JobFile) -> int | None:
        """The ranks of the job of a file, whose own numbers beat these."""
        if "world_size" in file.stated:
            return self.world_size  # the reader does not use it
        hosts = file.hosts if "hosts" in file.stated else self.hosts
        per_host = file.ranks_per_host if "ranks_per_host" in file.stated else self.node_size
        if file.stated & {"hosts", "ranks_per_host"} and hosts and per_host:
            return hosts * per_host
        # The options count the ranks of other hosts.
        return self.world_size if self.hosts in (None, hosts) else None


_NO_OPTIONS = RankOptions()


def read_jobs(
    name: str,
    text: str,
    options: RankOptions = _NO_OPTIONS,
) -> JobFile:
    """Read the jobs that a file describes. The suffix of ``name`` identifies Python and TOML.
    ``options`` are numbers of the launch that the file does not specify. Raises LayoutError,
    AxisNameError or PolicyError, in one line with the file and the line.
    """
    is_python = name.endswith((".py", ".pyi"))
    is_long = len(text) > MAX_CHARACTERS
    if is_long and is_python:
        from meshplan.lint._readers import python

        if not python.makes_meshes(text):
            return JobFile()
    found = _read(name, text, options)
    if found is not None and (found.is_read or found.jobs or found.skipped or found.settings):
        return found
    if found is None and name.endswith(".toml") and not is_long:
        from meshplan.lint._readers._toml import load

        load(name, text)
    if is_python:
        from meshplan.lint._readers.command import read_strings

        commands = read_strings(name, text, world_size=options.world_size)
        if commands.is_read or commands.skipped:
            return commands
    from meshplan.lint._unread import find_unread_in_python, find_unread_in_text

    unread = (find_unread_in_python if is_python else find_unread_in_text)(name, text)
    return replace(found or JobFile(), skipped=() if unread is None else (unread,))


def read_arguments(
    words: Sequence[str],
    options: RankOptions = _NO_OPTIONS,
) -> JobFile:
    """Read the jobs in the arguments of a training or serving program, as `read_jobs`. ``rewrite``
    of its jobs returns the arguments as one line for a shell. Raises LayoutError if no option sets
    an axis.
    """
    text = shlex.join(words)
    shown = shorten(text, 80)
    found = _read("arguments", text, options)
    if found is None or not (found.jobs or found.skipped):
        raise LayoutError(
            f"no axis size in the arguments '{' '.join(shown.split())}'; use, for example, "
            "--tensor-model-parallel-size 8, --tp 8 or --dp 4"
        )
    source = Source(option=shown)
    return replace(
        found,
        jobs=tuple(replace(job, source=source) for job in found.jobs),
        skipped=tuple(replace(one, source=source) for one in found.skipped),
    )


def _read(name: str, text: str, options: RankOptions) -> JobFile | None:
    for module in READERS:
        reader: Any = import_module(f"meshplan.lint._readers.{module}")
        if reader.recognises(name, text):
            if len(text) > MAX_CHARACTERS:
                raise LayoutError(
                    f"{name}: longer than {MAX_CHARACTERS >> 10} thousand characters; "
                    "pass the file that describes the job, or the mesh with --mesh"
                )
            read: _Read = reader.read
            if module == "python":
                read = partial(
                    read,
                    per_node=options.node_size,
                    arguments=options.arguments,
                )
            world_size = options.world_size
            found = read(name, text, world_size=world_size)
            if options.count_ranks(found) != world_size:
                world_size = options.count_ranks(found)
                found = read(name, text, world_size=world_size)
            jobs = (
                _check_rewrite(job, i, read, name, world_size) for i, job in enumerate(found.jobs)
            )
            return replace(found, jobs=tuple(jobs))
    return None


def _check_rewrite(job: Job, index: int, read: _Read, name: str, world_size: int | None) -> Job:
    """The job with a checked ``rewrite``: its text, read again, has the requested mesh."""
    write = job.rewrite
    if write is None:
        return job

    def rewrite_and_reread(layout: Layout) -> tuple[str, tuple[Job, ...]] | None:
        text = write(layout)
        if text is None:
            return None
        try:
            again = read(name, text, world_size=world_size).jobs
        except MeshplanError:
            return None
        for one in again[index : index + 1]:
            # FSDP2 goes by position: in another order the axes would change their roles.
            keeps = all(one.role_of.get(axis, role) == role for axis, role in job.role_of.items())
            if keeps and _drop_short_axes(one.layout) == _drop_short_axes(layout):
                return text, (one, *again[:index], *again[index + 1 :])
        return None

    def rewrite(layout: Layout) -> str | None:
        found = rewrite_and_reread(layout)
        return None if found is None else found[0]

    def reread(layout: Layout) -> tuple[Job, ...] | None:
        found = rewrite_and_reread(layout)
        return None if found is None else found[1]

    return replace(job, rewrite=rewrite, reread=reread)


def _drop_short_axes(layout: Layout) -> tuple[object, ...]:
    """A layout without its axes of one rank."""
    axes = zip(layout.axes, layout.sizes, strict=True)
    return (layout.ranks, *((axis, size) for axis, size in axes if size > 1))
