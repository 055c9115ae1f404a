"""Settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Time is for benchmarks: a machine with two cores and eight processes is slow now and then.
settings.register_profile("meshplan", deadline=None)
settings.load_profile("meshplan")

# What takes longest, one file a worker: begun last, they would hold one worker up alone.
_FIRST = (
    "test_device_build",
    "test_every_path",
    "test_demo",
    "test_random_redistributions",
    "test_device_code",
    "test_protocol",
    "test_dtensor",
    "test_collectives",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first; the others stay as they are."""

    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    items.sort(key=place)
