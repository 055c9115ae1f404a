"""Where the running meshplan comes from, and how to install it again where something is missing.

meshplan is in no package index, so that its name alone installs nothing, or what is not meshplan.
Each command here names a folder, or the address that this installation came from.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

_CLONE = "in a clone of the repository: "
_AGAIN = "pip install --force-reinstall --no-deps "


@dataclass(frozen=True, slots=True)
class Installation:
    """The meshplan that this process has imported.

    Attributes:
        kind: ``editable`` is a source tree that pip knows, ``source`` a folder that it does not.
        folder: what holds the folder ``meshplan``.
        origin: what pip can install it from again: a folder or an address; empty if neither is
            known.
        hidden: the folder of an installation that Python would import if a source tree did not
            come before it.
        hidden_compiled: whether that installation has the compiled library.
        named_by: what puts a folder before it.
        buildable: whether the folder has all that pip needs to install it.
    """

    kind: Literal["installed", "editable", "source"]
    folder: Path
    origin: str = ""
    hidden: Path | None = None
    hidden_compiled: bool = False
    named_by: Literal["current folder", "PYTHONPATH", "sys.path"] = "sys.path"
    buildable: bool = True

    def __str__(self) -> str:
        words = {
            "installed": f"installed in {self.folder}",
            "editable": f"editable install of {self.folder}",
            "source": f"{self._noun()} {self.folder}, found through {self._through()}",
        }[self.kind]
        return words if self.hidden is None else f"{words}; it hides the one in {self.hidden}"

    def why_uncompiled(self) -> str:
        """What it means that this meshplan has no compiled library."""
        if self.kind == "source":
            return f"this {self._noun()} of meshplan has no compiled library"
        return "meshplan was installed without a C++ compiler"

    def remedy(self) -> str:
        """What to do where the compiled library is missing, a C++ compiler given."""
        folder = shlex.quote(str(self.folder))
        if self.kind == "editable":
            return f"pip install --no-deps --editable {folder}"
        if self.kind == "source" and self.hidden is None and self.buildable:
            return f"pip install --editable {folder}"
        if self.hidden_compiled:
            return self.leave()
        origin = str(self.folder) if self.kind == "source" and self.buildable else self.origin
        again = _AGAIN + shlex.quote(origin) if origin else f"{_CLONE}{_AGAIN}."
        return f"{again} (then {self.leave()})" if self.kind == "source" else again

    def leave(self) -> str:
        """How to run the installation that this source tree hides."""
        if self.named_by == "PYTHONPATH":
            return f"take {self.folder} out of PYTHONPATH"
        if self.named_by == "current folder":
            return "run it from another folder, or as the command meshplan instead of python -m"
        return f"take {self.folder} out of sys.path"

    def _noun(self) -> str:
        return "source tree" if self.buildable else "copy"

    def _through(self) -> str:
        return f"the {self.named_by}" if self.named_by == "current folder" else self.named_by


def installation(package: Path | None = None) -> Installation:
    """Find it out, from the files that are there; nothing is imported for it.

    Args:
        package: the folder ``meshplan``; by default the one that this module is in.
    """
    folder = (package or Path(__file__).parent).resolve().parent
    # Only a source tree has the two beside the package.
    buildable = (folder / "setup.py").is_file() and (folder / "csrc").is_dir()
    known = list(_known())
    for where, direct in known:
        if where == folder and _is_editable(direct):
            return Installation("editable", folder)
        # A build leaves metadata in the source tree, which is no installation.
        if where == folder and not buildable:
            return Installation("installed", folder, _origin(direct))
    found = Installation("source", folder, named_by=_named_by(folder), buildable=buildable)
    for where, _ in known:
        if where != folder and (where / "meshplan" / "__init__.py").is_file():
            compiled = any((where / "meshplan" / "kernel").glob("_cpu*.so"))
            return replace(found, hidden=where, hidden_compiled=compiled)
    return found


def _known() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Where each meshplan is that has metadata on ``sys.path``, and what pip has noted of it."""
    for found in distributions(name="meshplan"):
        direct = _direct(found)
        if _is_editable(direct):
            yield Path(_path(direct)).resolve(), direct
        else:
            yield Path(str(found.locate_file(""))).resolve(), direct


def _direct(found: Distribution) -> dict[str, Any]:
    """What direct_url.json holds; pip writes none for what comes from an index."""
    try:
        direct = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return direct if isinstance(direct, dict) else {}


def _is_editable(direct: dict[str, Any]) -> bool:
    return bool(direct.get("dir_info", {}).get("editable")) and bool(_path(direct))


def _path(direct: dict[str, Any]) -> str:
    parts = urlsplit(direct.get("url", ""))
    return unquote(parts.path) if parts.scheme == "file" else ""


def _origin(direct: dict[str, Any]) -> str:
    """A folder that is still there, or an address of version control, for pip."""
    path = _path(direct)
    if path and "dir_info" in direct and (Path(path) / "setup.py").is_file():
        return path
    control = direct.get("vcs_info", {})
    if control.get("vcs") and control.get("commit_id"):
        return f"meshplan @ {control['vcs']}+{direct['url']}@{control['commit_id']}"
    return ""


def _named_by(folder: Path) -> Literal["current folder", "PYTHONPATH", "sys.path"]:
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(entry and Path(entry).resolve() == folder for entry in entries):
        return "PYTHONPATH"
    try:
        return "current folder" if Path.cwd().resolve() == folder else "sys.path"
    except OSError:  # the current folder was removed
        return "sys.path"
