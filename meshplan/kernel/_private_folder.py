"""A folder whose content no other user can choose: by its own mode, and by all folders above it.

A user who can write to a folder above can rename its entries and put another folder in their place.
So each folder on the path, symbolic links included, must belong to this user or to root, and must
not be writable for others. The exception is a sticky bit, as on ``/tmp``: with it, users can rename
their own entries only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path

# As many as the system follows.
_MAX_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make the folder and what is missing above it, for this user alone, and check it
    (`check_private`); ``OSError`` if it cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Check a folder that exists: ``PermissionError`` names the folder that another user can write
    to or replace, ``OSError`` if it cannot be read.
    """
    # Not only the target: a user who can replace a link can redirect it.
    for path, status in _components(folder.absolute()):
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} belongs to another user")
        # Linux ignores the mode of a link.
        shared = stat.S_ISDIR(status.st_mode) and status.st_mode & _OTHERS_WRITE
        if shared and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(f"others may write to {path}; chmod go-w it")
    # In the folder itself a sticky bit is not enough: others could still add files.
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"others may write to {folder}; chmod go-w it")


def _components(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and every link from the root to a path, in the order in which they are used."""
    current = Path(path.anchor)
    left = deque(path.parts[1:])
    links = 0
    yield current, os.lstat(current)
    while left:
        part = left.popleft()
        if part == "..":
            current = current.parent
            continue
        status = os.lstat(current / part)
        yield current / part, status
        if not stat.S_ISLNK(status.st_mode):
            current = current / part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(current / part))
        if target.is_absolute():
            current = Path(target.anchor)
        left.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
