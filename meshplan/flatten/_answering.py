"""A store whose every answer is waited for a bounded time.

Torch's client of a TCP store waits for most answers (``check``, ``add``, ``compare_set``, ``set``)
without a limit. Where the network to the store's host breaks without a notice, that is until
the kernel closes the connection: a quarter of an hour and more. So each question is put on a
thread that is left behind if no answer comes. (Where Python is older than 3.14, a process that is
just ending when a late answer comes after all is aborted.)
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from torch.distributed import DistNetworkError

from meshplan._aborts import check_aborted
from meshplan._torch import PrefixStore, Store, TCPStore
from meshplan.errors import GroupStateError

_Question = Callable[[], Any]
# A busy machine takes its time, however short the wait for other ranks should be.
_LEAST_SECONDS = 5.0


def _bounded(name: str) -> Any:
    def ask(self: AnsweringStore, *given: Any) -> Any:
        return self._ask(lambda: getattr(self._store, name)(*given))

    return ask


class AnsweringStore(Store):
    """A view of a store that answers each request within ``seconds``, at least 5. Else every method
    raises GroupStateError, also if the connection is lost or the group of this thread's reduction
    was aborted. The store may still carry out the last request then.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._store = store
        self._seconds = max(seconds, _LEAST_SECONDS)
        self._questions: SimpleQueue[tuple[_Question, SimpleQueue[Any]] | None] | None = None

    check = _bounded("check")
    get = _bounded("get")
    multi_get = _bounded("multi_get")
    set = _bounded("set")
    add = _bounded("add")
    compare_set = _bounded("compare_set")
    delete_key = _bounded("delete_key")

    def __del__(self) -> None:
        if self._questions is not None:
            self._questions.put(None)

    def _ask(self, question: _Question) -> Any:
        # Whoever waits for other ranks asks again and again.
        check_aborted("other ranks")
        if self._questions is None:
            self._questions = SimpleQueue()
            # Not to be waited for when the process ends.
            Thread(
                target=_answer,
                args=(self._questions,),
                name="meshplan store",
                daemon=True,
            ).start()
        answers: SimpleQueue[Any] = SimpleQueue()
        self._questions.put((question, answers))
        try:
            error, answer = answers.get(timeout=self._seconds)
        except Empty:
            # The thread is stuck; the next question gets another one.
            self._questions.put(None)
            self._questions = None
            raise GroupStateError(
                f"{_shown(self._store)} did not answer this rank within {self._seconds:g} s; look "
                "at the network between this host and that one, and whether that one is alive",
                unanswered=True,
            ) from None
        if isinstance(error, DistNetworkError):
            text = " ".join(str(error).split())[:200]
            raise GroupStateError(
                f"{_shown(self._store)} was lost: {text}; look whether the process that holds it "
                "(torchrun's agent on the first host, or rank 0) has ended",
                unanswered=True,
            ) from error
        if error is not None:
            raise error
        return answer


def _answer(
    questions: SimpleQueue[tuple[_Question, SimpleQueue[Any]] | None],
) -> None:
    while (found := questions.get()) is not None:
        question, answers = found
        # Its own name would keep the store, and with it this thread, alive.
        del found
        try:
            answers.put((None, question()))
        except Exception as error:
            answers.put((error, None))
        del question, answers


def _shown(store: Store) -> str:
    """The store in words, with its address where it has one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"the store of the default group at {store.host}:{store.port}"
    return "the store of the default group"
