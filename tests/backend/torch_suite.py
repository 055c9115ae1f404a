"""Torch's own ``distributed_test`` over gloo, with every group created as ``meshplan``.

    python -m tests.backend.torch_suite --backend meshplan --world-size 2 [-k WORD ...]

prints one line for each test: ``ok``, ``skip`` or ``fail``, and its name. The tests create groups
of gloo; the harness creates them of the backend instead, and leaves its inner groups as they are.
Ranks are forked from this process, which has imported all that they need.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import unittest
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

import meshplan.backend  # noqa: F401 - registers the backend


def replace_gloo() -> None:
    """Let every group of gloo be one of the backend, but for the groups inside of it."""
    create = c10d._new_process_group_helper
    depth = 0

    def create_replaced(
        size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **how: Any
    ) -> Any:
        nonlocal depth
        if depth == 0 and str(backend) == "gloo":
            backend = c10d.Backend("meshplan")
        depth += 1
        try:
            return create(size, rank, ranks, backend, *rest, **how)
        finally:
            depth -= 1

    c10d._new_process_group_helper = create_replaced


def load_suite(world_size: int, folder: str) -> type[unittest.TestCase]:
    """The suite, as torch's own runner makes it, on forked ranks."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        TEMP_DIR=folder,
        MASTER_ADDR="127.0.0.1",
    )
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    from torch.testing._internal.distributed import distributed_test as suite

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._fork_processes()

        def _fork_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchSuite


def run_suite(
    backend: str, world_size: int, words: Iterable[str] = (), skipped: Iterable[str] = ()
) -> dict[str, str]:
    """The result of each test of torch over ``backend`` whose name has one of ``words`` and is not
    in ``skipped``: ok, skip or fail, and why. Without ``words``, of all tests.
    """
    if backend == "meshplan":
        replace_gloo()
    words, results = list(words), {}
    with tempfile.TemporaryDirectory() as folder:
        case = load_suite(world_size, folder)
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(case):
            name = test._testMethodName  # type: ignore[union-attr]
            if (words and not any(word in name for word in words)) or name in skipped:
                continue
            result = unittest.TestResult()
            test.run(result)
            reasons = [text for _, text in (*result.errors, *result.failures)]
            how = "fail" if reasons else "skip" if result.skipped else "ok"
            why = reasons[0] if reasons else result.skipped[0][1] if result.skipped else ""
            results[name] = f"{how} {why}".strip()
            write(f"{how} {name}")
    return results


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "meshplan"], default="meshplan")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("-k", dest="words", action="append", default=[])
    found = parser.parse_args()
    results = run_suite(found.backend, found.world_size, found.words)
    for name, result in results.items():
        if result.startswith("fail"):
            write(f"==== {name}\n{result}")
    counts = {
        how: sum(r.startswith(how) for r in results.values()) for how in ("ok", "skip", "fail")
    }
    write(str(counts))
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
