"""Compiled kernels are kept only where no other user could have put a file, or another folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from meshplan.kernel import _device_code
from meshplan.kernel._device_code import check_private, make_private


def make_folder(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o702, 0o2770])
def test_folder_below_a_writable_one_is_refused(tmp_path: Path, mode: int) -> None:
    """They can rename the folder in it and put another one there."""
    open_to_all = make_folder(tmp_path / "a" / "b", mode)
    cache = make_folder(open_to_all / "c" / "cache", 0o700)
    with pytest.raises(PermissionError, match=f"others may write to {open_to_all}; chmod go-w it"):
        make_private(cache)
    # With a sticky bit, only the owner renames an entry.
    open_to_all.chmod(mode | stat.S_ISVTX)
    make_private(cache)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_folder_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    """A sticky bit does not keep others from putting files there."""
    cache = make_folder(tmp_path / "cache", mode)
    with pytest.raises(PermissionError, match=f"others may write to {cache}"):
        check_private(cache)


def test_created_folders_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "home" / ".cache" / "meshplan")
    finally:
        os.umask(before)
    for path in ("home", "home/.cache", "home/.cache/meshplan"):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o700


def test_folders_of_another_user_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another user's folder and of all above it: all here but root's are another's then."""
    cache = make_folder(tmp_path / "cache")
    check_private(cache)
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        check_private(cache)


def test_every_folder_behind_a_link_is_checked(tmp_path: Path) -> None:
    """A user who can replace a link, or a folder behind it, chooses the loaded code."""
    cache = make_folder(tmp_path / "real" / "cache", 0o700)
    shared = make_folder(tmp_path / "shared", 0o777)
    (shared / "link").symlink_to(cache.parent)
    with pytest.raises(PermissionError, match=f"others may write to {shared};"):
        check_private(shared / "link" / "cache")
    # The link's own folder is private, and the one that it leads through is not.
    moved = make_folder(shared / "cache", 0o700)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(moved)
    with pytest.raises(PermissionError, match=f"others may write to {shared};"):
        check_private(tmp_path / "first")
    shared.chmod(0o755)
    check_private(tmp_path / "first")
    check_private(tmp_path / "first" / ".." / "cache")


def test_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a link in ``/tmp`` can lead elsewhere at any time."""
    cache = make_folder(tmp_path / "cache", 0o700)
    link = tmp_path / "link"
    link.symlink_to(cache)
    way = _device_code._components

    def with_another(path: Path):  # type: ignore[no-untyped-def]
        for one, status in way(path):
            owner = os.geteuid() + 1 if one == link else status.st_uid
            yield one, os.stat_result((*status[:4], owner, *status[5:]))

    monkeypatch.setattr(_device_code, "_components", with_another)
    with pytest.raises(PermissionError, match=f"{link} belongs to another user"):
        check_private(link)
    check_private(cache)


def test_circular_links_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels"):
        check_private(tmp_path / "one")
