"""Settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Time is for benchmarks: a machine with two cores and eight processes is slow now and then.
settings.register_profile("meshplan", deadline=None)
settings.load_profile("meshplan")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files by name, and before them the one that starts 40 processes.

    Two workers take a file each. What follows it by name is light, and so are the last files.
    """
    items.sort(key=lambda item: item.path.stem != "test_demo")
