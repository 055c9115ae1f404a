"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Time is for benchmarks: a machine with two cores and eight processes is slow now and then.
settings.register_profile("meshplan", deadline=None)
settings.load_profile("meshplan")
