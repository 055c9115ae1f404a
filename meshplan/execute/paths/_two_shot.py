"""Path ``two_shot``: every rank folds a part in shared memory and reads the other parts."""

from __future__ import annotations

from meshplan.execute.paths._shared_memory import SharedMemoryPath

PATH = SharedMemoryPath("two_shot")
