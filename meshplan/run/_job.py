"""One observed process from its start to its verdict, for the command and ``MESHPLAN_RUN``."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch.distributed as dist

from meshplan.errors import PolicyError
from meshplan.run import RunSettings
from meshplan.run._observation import observe
from meshplan.run._verdict import Report, find_status, format_verdict, write_verdict

_NO_GROUP = (
    "no process group was created; see any error, use torchrun --nproc-per-node 8 -m meshplan run "
    "train.py, or set MESHPLAN_RUN if the script starts ranks"
)


class ObservedJob:
    """An observer of this process, which reports on rank 0 when it ends."""

    def __init__(self, settings: RunSettings, folder: str = "") -> None:
        if settings.backend is not None:
            use_backend()
        self._settings = settings
        self._process = os.getpid()
        # The script may change its folder.
        report, self._page, certify = (
            name and os.path.abspath(os.path.join(folder, name))
            for name in (settings.report, settings.html, settings.certify)
        )
        self._observation = observe(settings._replace(report=report, certify=certify))

    def finish(self, error: BaseException | None) -> int:
        """Write the verdict to standard error on rank 0; the exit status of a script that ended
        with 0. Nothing raises into the ended job.
        """
        # A forked child of the script runs this too, and has no verdict.
        if os.getpid() != self._process:
            return 0
        strict = self._settings.strict and error is None
        # A script that goes on after the error that stops it has not passed.
        requirement = self._observation.requirement if self._settings.require else None
        stopped = requirement is not None and error is None and requirement.refusal is not None
        status = 3 * (strict or stopped)
        try:
            report = self._observation.finish(error)
            if report is not None:
                text = self._format(report)
                status = find_status(report) if strict else 3 * stopped
            elif self._observation.rank or os.environ.get("RANK", "0") != "0":
                return 3 * stopped
            else:
                reasons = "; ".join(self._observation.notes)
                text = f"[meshplan] no verdict: {reasons or _NO_GROUP}\n"
        except Exception as fault:
            text = f"[meshplan] no verdict: {type(fault).__name__}: {fault}\n"
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
            sys.stderr.flush()
        return status

    def _format(self, report: Report) -> str:
        saved = filter(None, (self._settings.report, self._settings.html))
        text = format_verdict(report, ", ".join(saved))
        if self._page:
            try:
                write_verdict(self._page, report, text, *self._observation.judged)
            except Exception as fault:
                text += f"  the page could not be written: {fault}\n"
        return text


def observe_by_variable(text: str, folder: str) -> None:
    """Observe this process, which is about to create its first process group, until it exits;
    ``PolicyError`` for invalid settings in ``text``, the value of ``MESHPLAN_RUN``. The report is
    relative to ``folder``.
    """
    # Children inherit the environment, and are not ranks of this job.
    del os.environ["MESHPLAN_RUN"]
    settings = RunSettings.parse(text)
    if settings.strict:
        raise PolicyError(
            "MESHPLAN_RUN: nothing can change the exit status of a script from inside; use "
            "python -m meshplan run --strict, or remove strict"
        )
    for name, only in (("backend", "meshplan"), ("require", "bitwise")):
        if (value := getattr(settings, name)) not in (None, only):
            raise PolicyError(
                f"MESHPLAN_RUN: {name}={value!r} is not supported; use {only}, or leave it out"
            )
    job = ObservedJob(settings, folder)
    # Python keeps the exception that ends the process there.
    atexit.register(lambda: job.finish(getattr(sys, "last_value", None)))


def use_backend() -> None:
    """Let ``init_process_group`` and ``new_group`` create groups of the backend ``meshplan``, which
    move their data by the backend that the caller names.
    """
    for name in ("init_process_group", "new_group"):
        plain = getattr(dist, name)
        changed = _create_by_meshplan(plain)
        # Meshes and other libraries have imported the function, and so may the script have.
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is plain:
                setattr(module, name, changed)


def _create_by_meshplan(plain: Callable[..., Any]) -> Callable[..., Any]:
    from meshplan.backend import NAME, BackendOptions  # loads all of the backend

    signature = inspect.signature(plain)
    # mpi has a rendezvous of its own, fake no data.
    kept = {NAME, "fake", "mpi"}

    @wraps(plain)
    def create(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        inner = str(given.get("backend") or "").lower()
        parts = {part.rpartition(":")[2] for part in inner.split(",")}
        # A further group without a name is as the default group.
        if not kept & parts and (inner or "ranks" not in signature.parameters):
            given["backend"] = NAME
            # Options of NCCL go to the inner backend, which is then the default one.
            if inner and given.get("pg_options") is None:
                given["pg_options"] = BackendOptions(inner=inner)
        return plain(**given)

    return create
