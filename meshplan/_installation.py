"""Where the running meshplan comes from, and how to install it again.

It is in no package index. So each command names a folder, or the address it was installed from.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True)
class Installation:
    """The meshplan that this process has imported, in words."""

    about: str  # what it is, with its folder
    uncompiled: str  # why it has no compiled library, if it has none
    remedy: str  # the command that compiles the library, if there is a C++ compiler


def installation(package: Path | None = None) -> Installation:
    """The installation that ``package`` is in, read from its files; by default this one."""
    folder = (package or Path(__file__).parent).resolve().parent
    is_tree = (folder / "setup.py").is_file() and (folder / "csrc").is_dir()
    for found in distributions(name="meshplan"):
        try:
            direct = dict(json.loads(found.read_text("direct_url.json") or "{}"))
        except (ValueError, TypeError):
            direct = {}
        url = urlsplit(direct.get("url", ""))
        source = Path(unquote(url.path)) if url.scheme == "file" else None
        why = "meshplan was installed without a C++ compiler"
        if direct.get("dir_info", {}).get("editable") and source and source.resolve() == folder:
            again = f"pip install --no-deps --editable {shlex.quote(str(folder))}"
            return Installation(f"editable install of {folder}", why, again)
        # A build leaves metadata in the source tree, not an installation.
        if Path(str(found.locate_file(""))).resolve() == folder and not is_tree:
            again = "in a clone of the repository: pip install --force-reinstall --no-deps ."
            control, origin = direct.get("vcs_info", {}), ""
            if source and "dir_info" in direct and (source / "setup.py").is_file():
                origin = str(source)
            elif control.get("vcs") and control.get("commit_id"):
                origin = f"meshplan @ {control['vcs']}+{direct['url']}@{control['commit_id']}"
            if origin:
                again = f"pip install --force-reinstall --no-deps {shlex.quote(origin)}"
            return Installation(f"installed in {folder}", why, again)
    kind = "source tree" if is_tree else "copy"
    again = f"pip install --editable {shlex.quote(str(folder))}"
    return Installation(
        f"{kind} {folder}, not installed by pip",
        f"this {kind} of meshplan has no compiled library",
        again if is_tree else "in a clone of the repository: pip install --editable .",
    )
