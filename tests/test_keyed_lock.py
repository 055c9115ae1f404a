"""``KeyedLock``: one thread at a time for each key."""

from __future__ import annotations

import threading

import pytest

from meshplan.flatten._group_table import KeyedLock


def test_one_at_a_time_for_each_key() -> None:
    turns, inside = KeyedLock(), threading.Event()
    order: list[str] = []

    def second() -> None:
        with turns.take("a"):
            order.append("second")

    with turns.take("a"):
        thread = threading.Thread(target=second)
        thread.start()
        # Another key is free meanwhile, and the same one is not.
        with turns.take("b"):
            inside.set()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("first")
    thread.join(100)
    assert order == ["first", "second"]
    assert inside.is_set()
    assert not turns._taken


def test_failure_releases_the_lock() -> None:
    turns = KeyedLock()
    for _ in range(2):
        with pytest.raises(ValueError, match="why"), turns.take("a"):
            raise ValueError("why")
    assert not turns._taken
