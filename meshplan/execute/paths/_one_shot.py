"""Path ``one_shot``: every rank reads all summands in shared memory and folds all of them."""

from __future__ import annotations

from meshplan.execute.paths._shared_memory import SharedMemoryPath

PATH = SharedMemoryPath("one_shot")
