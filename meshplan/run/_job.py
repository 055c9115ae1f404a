"""One observed process from its start to its verdict, for the command and for ``MESHPLAN_RUN``."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Any

from meshplan.errors import PolicyError
from meshplan.run import RunSettings
from meshplan.run._observation import observe
from meshplan.run._verdict import find_status, format_verdict


class ObservedJob:
    """What observes this process, and reports on rank 0 when it ends."""

    def __init__(self, settings: RunSettings, folder: str = "") -> None:
        if settings.backend is not None:
            from meshplan.run._backend import use_backend  # loads all of the backend

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
        with 0. Nothing here raises into the job, which is over.
        """
        # A forked child of the script comes here too, and has no verdict.
        if os.getpid() != self._process:
            return 0
        strict = self._settings.strict and error is None
        try:
            report = self._observation.finish(error)
            if report is None and (self._observation.rank or os.environ.get("RANK", "0") != "0"):
                return 0
            if report is None:
                reasons = self._observation.notes or ["the script created no process group"]
                raise ValueError("; ".join(reasons))
            saved = ", ".join(filter(None, (self._settings.report, self._settings.html)))
            text = format_verdict(report, saved)
            status = find_status(report) if strict else 0
            if self._page:
                text += self._save_page(self._page, report, text)
        except Exception as fault:
            text = f"[meshplan] no verdict: {type(fault).__name__}: {fault}\n"
            status = 3 if strict else 0
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
            sys.stderr.flush()
        return status

    def _save_page(self, path: str, report: dict[str, Any], text: str) -> str:
        """Write the page; a line about a failure."""
        from meshplan.run._page import save_page

        try:
            save_page(path, report, text, *self._observation.judged)
        except OSError as fault:
            return f"  the page could not be written: {fault}\n"
        return ""


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
    if settings.backend not in (None, "meshplan"):
        raise PolicyError(
            f"MESHPLAN_RUN: backend={settings.backend!r} is not supported; use meshplan, or leave "
            "it out"
        )
    job = ObservedJob(settings, folder)
    # Python keeps the exception that ends the process there.
    atexit.register(lambda: job.finish(getattr(sys, "last_value", None)))
