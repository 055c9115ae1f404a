"""Reductions of several chunks side by side: while one travels on one level, others do on others.

A chunk is a generator. It yields what it waits for: a collective that is under way, or the messages
of a round between pairs of ranks. The rounds of all chunks in flight go out together, as one batch
of the backend, so that a chunk adds a round instead of all of its rounds.

The order of collectives and messages depends on the number of chunks and of their stages alone,
which all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from meshplan.execute._wire import Message

_Result = TypeVar("_Result")


Pending = Callable[[], Any]
"""Waits for a collective under way, and returns its result."""
Stages = Generator[Pending | Sequence[Message], Any, _Result]
"""One chunk: a ``Pending`` is answered with its result, a round with ``None`` after its end."""


class _Chunk:
    """A chunk in flight, and what it waits for."""

    __slots__ = ("number", "request", "stages")

    def __init__(self, number: int, stages: Stages[Any]) -> None:
        self.number = number
        self.stages = stages
        self.request: Pending | Sequence[Message] = ()


def run_stages(
    chunks: Iterable[Stages[_Result]], send_round: Callable[[Sequence[Message]], Pending]
) -> list[_Result]:
    """Run all chunks, and return their results in order. One more starts in each turn, before the
    older ones are waited for. Calling back what ``send_round`` returns waits for all messages of
    its round, also if one fails. Raises the first failure of a chunk.
    """
    waiting = enumerate(chunks)
    results: dict[int, _Result] = {}
    # Newest first: what it sends next is on its way while older chunks wait.
    live: list[_Chunk] = []
    while True:
        number, stages = next(waiting, (0, None))
        fresh = [] if stages is None else [_Chunk(number, stages)]
        fresh = [one for one in fresh if _advance(one, None, results)]
        rounds = [one.request for one in live if not callable(one.request)]
        # Also without messages: on some backends all ranks take part in a round.
        if rounds:
            # After a failure, collectives of other chunks may be under way. They keep their memory,
            # and end with the connections of their group.
            send_round([message for one in rounds for message in one])()
        live = fresh + [one for one in live if _advance(one, _answer(one), results)]
        if not live and stages is None:
            return [results[number] for number in sorted(results)]


def _answer(chunk: _Chunk) -> Any:
    return chunk.request() if callable(chunk.request) else None


def _advance(chunk: _Chunk, answer: Any, results: dict[int, Any]) -> bool:
    """Let ``chunk`` go on until it waits again; whether it does."""
    try:
        chunk.request = chunk.stages.send(answer)
    except StopIteration as end:
        results[chunk.number] = end.value
        return False
    return True
