"""The predicted times of path ``peer`` on GPUs, and their error."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan import kernel
from tools.peer_latency import (
    GIB,
    KIB,
    MIB,
    PUBLISHED,
    errors,
    peer_work,
    predict,
    rounds,
)


def test_model_explains_published_times() -> None:
    """Where it is off by more, its predictions are worth nothing."""
    off = np.abs([one for kernel in PUBLISHED for one in errors(kernel)])
    assert np.median(off) < 0.1
    assert off.max() < 0.25


def test_bars() -> None:
    assert predict(512 * KIB) <= 18
    # The link alone takes 317 of them.
    assert predict(64 * MIB) <= 330


@pytest.mark.parametrize(
    ("nbytes", "waits", "pieces"),
    [(64 * KIB, 1, 1), (512 * KIB, 2, 1), (64 * MIB, 1, 11), (GIB, 1, 171)],
)
def test_work_follows_the_plan_of_rounds(nbytes: int, waits: int, pieces: int) -> None:
    mode, work = peer_work(nbytes)
    assert work.barriers == waits
    # Seven eighths of the message, once for the summands and once for the results; or seven of it.
    assert work.link == (2 * 7 / 8 * nbytes if mode == "two_shot" else 7 * nbytes)
    assert mode == "one_shot" or rounds(nbytes) == pieces


@pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
def test_region_has_48_mib() -> None:
    assert 48 * MIB <= kernel.device_region_bytes(8, 32) < 49 * MIB
