"""What ``meshplan lint`` judges: jobs, where their ranks sit, and the settings, read in order."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshplan.cli._where import found_cluster, inputs_of, needed, number
from meshplan.errors import PolicyError
from meshplan.layout import Layout
from meshplan.lint import (
    Job,
    JobFile,
    Settings,
    Skipped,
    Source,
    parse_mesh,
    read_arguments,
    read_jobs,
)
from meshplan.topology import Cluster, Inputs, cluster_of
from meshplan.topology._files import content_of
from meshplan.topology._hosts import is_rank_order

__all__ = ["Asked", "asked_of"]

_CONFIGS = ("meshplan.toml", "pyproject.toml")
_WHERE = ("topology", "hosts", "node_size", "domain_size", "rank_order")


@dataclass(slots=True)
class Asked:
    """What is judged.

    Attributes:
        jobs: each with where its ranks sit.
        skipped: meshes that are there and could not be read.
        settings: of a configuration; the options go before them.
        texts: of the files that were read, by name, for comments in them.
    """

    jobs: list[tuple[Job, Cluster]] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    texts: dict[str, str] = field(default_factory=dict)


def asked_of(given: argparse.Namespace) -> Asked:
    """Read all that the command line names.

    Options that say where ranks sit replace those of a configuration altogether.

    Raises:
        MeshplanError: something cannot be read or cannot be, or there is no mesh in it.
    """
    asked = Asked()
    size = _world_size(given)
    named = [(name, _read(name, size, asked)) for name in given.files]
    config = _config(given, named, size, asked)
    if config is not None:
        name, file = config
        asked.settings = file.settings or asked.settings
        if not any(getattr(given, option) for option in _WHERE):
            _fill(given, asked.settings, Path(name).parent)
    files = [file for _, file in named]
    files += _of_meshes(given)
    if given.arguments:
        files.append(read_arguments(given.arguments, world_size=size))
    if config is not None and not files:
        files = [config[1]]
    elif config is not None and config[0] not in given.files:
        # Of its meshes none is judged, so that its comments have nothing to take out.
        del asked.texts[config[0]]
    live = _live(given)
    for file in files:
        asked.skipped += file.skipped
        jobs = [_with_options(job, given) for job in file.jobs]
        asked.jobs += [(job, live or _placed(job, file, given)) for job in jobs]
    if not asked.jobs:
        raise PolicyError(
            str(asked.skipped[0])
            if asked.skipped
            else "no mesh to judge; write --mesh ddp=8,fsdp=5, or the name of a job file, or put a "
            "mesh into meshplan.toml"
        )
    return asked


def _world_size(given: argparse.Namespace) -> int | None:
    """Ranks of the job, for files that leave it open: as said, or as hosts and their ranks tell."""
    if given.world_size is not None:
        return number(given.world_size, "--world-size")
    inputs = inputs_of(given)
    if len(inputs.hosts) == 1:
        size = inputs.node_size or inputs.domain_size
        return None if size is None else inputs.hosts[0] * size
    return sum(inputs.hosts) if inputs.hosts and len(inputs.files) < 2 else None


def _read(name: str, size: int | None, asked: Asked) -> JobFile:
    if name == "-":
        raise PolicyError("a job is not read from standard input; write the name of its file")
    asked.texts[name] = content_of(name)
    return read_jobs(name, asked.texts[name], world_size=size)


def _config(
    given: argparse.Namespace,
    named: Sequence[tuple[str, JobFile]],
    size: int | None,
    asked: Asked,
) -> tuple[str, JobFile] | None:
    """The one that is named, the first among the files, or the one that lies here."""
    if given.config is not None:
        return given.config, _read(given.config, size, asked)
    for name, file in named:
        if file.settings is not None:
            return name, file
    if given.isolated:
        return None
    for name in _CONFIGS:
        if Path(name).is_file():
            file = _read(name, size, asked)
            if file.settings is not None:
                return name, file
    return None


def _fill(given: argparse.Namespace, settings: Settings, folder: Path) -> None:
    given.topology = [str(folder / name) for name in settings.topology]
    given.hosts = settings.hosts or None
    given.node_size = None if settings.node_size is None else str(settings.node_size)
    given.domain_size = None if settings.domain_size is None else str(settings.domain_size)
    given.rank_order = settings.rank_order or None
    if settings.rank_order and not is_rank_order(settings.rank_order):
        given.rank_order = str(folder / settings.rank_order)


def _of_meshes(given: argparse.Namespace) -> list[JobFile]:
    ranks = None
    if given.ranks is not None:
        if len(given.mesh) != 1:
            raise PolicyError(f"--ranks are those of one --mesh, found {len(given.mesh)}")
        try:
            ranks = json.loads(f"[{given.ranks}]")
        except (ValueError, RecursionError):
            raise PolicyError(
                f"--ranks is {given.ranks[:60]!r}; write numbers, such as 0,2,1,3 or [[0,2],[1,3]]"
            ) from None
        ranks = ranks[0] if len(ranks) == 1 and isinstance(ranks[0], list) else ranks
    return [
        JobFile((Job(parse_mesh(text, ranks), Source(option=f"--mesh {text}")),))
        for text in given.mesh
    ]


def _live(given: argparse.Namespace) -> Cluster | None:
    if not given.live:
        if given.timeout is not None:
            raise PolicyError("--timeout is for --live; leave it out")
        return None
    if any(getattr(given, option) for option in _WHERE):
        raise PolicyError(
            "--live asks the ranks where they sit; leave out the options that say it, and those "
            "of the configuration with --isolated"
        )
    from meshplan.cli._live import live_cluster

    return live_cluster(os.environ, number(given.timeout or "300", "--timeout"))


def _with_options(job: Job, given: argparse.Namespace) -> Job:
    """The job, with what the options say of all jobs."""
    layout = job.layout
    changes: dict[str, Any] = {}
    if given.framework:
        changes["framework"] = given.framework
    if given.reduce_order:
        changes["reduce_order"] = _axes(layout, given.reduce_order)
    if given.flatten:
        changes["flattened"] = job.flattened + tuple(_axes(layout, a) for a in given.flatten)
    if given.dim:
        changes["dims"] = job.dims + tuple(
            number(n, "--dim") for text in given.dim for n in text.split(",")
        )
    if given.sequence_parallel:
        changes["sequence_parallel"] = True
    return replace(job, **changes)


def _axes(layout: Layout, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        layout.axis_index(name)
    return names


def _placed(job: Job, file: JobFile, given: argparse.Namespace) -> Cluster:
    """Where its ranks sit: by options, by how its own file starts it, or by the environment."""
    ranks = job.layout.highest_rank + 1
    if not any(getattr(given, option) for option in _WHERE):
        inputs = Inputs(
            hosts=() if file.hosts is None else (file.hosts,), node_size=file.ranks_per_host
        )
        if inputs != Inputs():
            return needed(cluster_of(inputs, ranks, {}))
    return needed(found_cluster(given, ranks))
