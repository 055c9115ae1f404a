"""The thread that exchanges messages with rank 0, over sockets of its own.

Rank 0 publishes its address and a token in the store of the default group. The other ranks connect,
post their messages and answer questions. The job's threads only put messages into a queue.

A thread that the interpreter's end finds in C++ aborts the process: its exit status would be
another one, and launchers would end all ranks. So the thread works under a lock, which it
releases where it waits in Python alone, and the end of the process takes the lock for good.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from meshplan._torch import PrefixStore, Store, TCPStore
from meshplan.run import _signals
from meshplan.run._ledger import Ledger, Message

_KEY = "meshplan/run/address"
_LOOKUP_SECONDS = 120.0
_CONNECT_SECONDS = 5.0
# A busy machine is slow. From a device or store that hangs the thread does not return.
_LEAVE_SECONDS = 30.0
# In which a message that has begun is to end: half of one does not block rank 0.
_RECEIVE_TIME = struct.pack("ll", 5, 0)
# Rank 0 has a socket for each rank, and leaves three quarters of its descriptors to the job.
_DESCRIPTORS = 4


class Exchange(threading.Thread):
    """Sends what ``post`` gets to rank 0, whose thread reads it into ``ledger``, and calls
    ``changed`` at most once a second. ``answer`` answers questions about this rank's tensors, and
    ``note`` records what could not be observed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        answer: Callable[[Message], Message],
        changed: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(name="meshplan run", daemon=True)
        self.ledger, self.lock = Ledger(world_size), threading.RLock()
        self.rank, self.world_size = rank, world_size
        self._store: Any = store
        self._answer, self._changed, self._note = answer, changed, note
        self._queue: queue.SimpleQueue[tuple[Any, Callable[[], Message]]] = queue.SimpleQueue()
        self._working = threading.RLock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending, self._cleared = threading.Event(), threading.Event()
        self._peers: dict[Connection, int] = {}  # and the rank of each; -1 before it is known
        self._gone: set[int] = set()

    def post(self, make: Callable[[], Message]) -> None:
        """Send a message, which the thread makes, once the device has what it reads."""
        # A thread that has ended reads nothing any more.
        if not self._cleared.is_set():
            cuda: Any = torch.cuda
            done = None
            with _signals.suppress(RuntimeError):  # a device that has failed
                done = cuda.current_stream().record_event() if cuda.is_initialized() else None
            self._queue.put((done, make))
            os.eventfd_write(self._bell, 1)

    def finish(self, seconds: float) -> None:
        """Let the thread exchange the last messages and questions, and end it."""
        if self.is_alive():
            self._cleared.wait(seconds)
        self.stop()

    def stop(self) -> None:
        """End the thread; one that waits for the network is left behind there."""
        self._ending.set()
        os.eventfd_write(self._bell, 1)
        if self.is_alive():
            self.join(1.0)
        if self.is_alive():
            self._working.acquire(timeout=_LEAVE_SECONDS)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._working.release()
        try:
            yield
        finally:
            self._working.acquire()

    def run(self) -> None:
        self._working.acquire()
        try:
            if self.rank == 0:
                self._serve()
            else:
                self._visit()
        except Exception as error:
            self._note(f"replicas of other ranks: {type(error).__name__}: {str(error)[:200]}")
        finally:
            self._cleared.set()
            for one in self._peers:
                one.close()
            self._working.release()

    def _wait(self, found: list[Any], seconds: float | None = None) -> list[Any]:
        with self._waiting():
            return wait(found, seconds)

    def _send(self, peer: Connection, message: Message) -> None:
        data = json.dumps(message).encode()
        with self._waiting():
            peer.send_bytes(data)

    def _take(self) -> list[Message]:
        """The queued messages; a failure of one, such as that of a device, loses this one."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        found: list[Message] = []
        while not self._queue.empty():
            done, make = self._queue.get()
            try:
                while done is not None and not done.query():
                    with self._waiting():
                        if self._ending.wait(0.001):
                            return found
                found.append(make())
            except Exception as error:
                self._note(f"tensors of a step: {type(error).__name__}: {str(error)[:200]}")
        return found

    # Rank 0.

    def _serve(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and self.world_size > limit // _DESCRIPTORS:
            self._note(
                f"replicas: rank 0 needs {self.world_size} sockets, and may have {limit} files; "
                "raise ulimit -n"
            )
            return
        dual, token = socket.has_dualstack_ipv6(), secrets.token_hex(16)
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=dual
        ) as server:
            self._publish(server.getsockname()[1], token)
            changed, due = False, 0.0
            while not self._ending.is_set():
                ready = self._wait([server, self._bell, *self._peers], 1.0)
                if server in ready:
                    peer = server.accept()[0]
                    peer.settimeout(None)  # the job may have set a default
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECEIVE_TIME)
                    self._peers[Connection(peer.detach())] = -1
                messages = [(0, one) for one in self._take()]
                received = [(one, self._receive(one, token)) for one in ready if one in self._peers]
                messages += [(self._peers[one], json.loads(text)) for one, text in received if text]
                for rank, message in messages:
                    self._read(rank, message)
                changed = changed or bool(messages)
                if changed and time.monotonic() >= due:
                    self._changed()
                    changed, due = False, time.monotonic() + 1.0
                self._clear()

    def _publish(self, port: int, token: str) -> None:
        store, hosts = self._own_store(), [socket.gethostname()]
        if isinstance(_root(store), TCPStore):
            hosts.insert(0, _root(store).host)
        store.set(_KEY, json.dumps([hosts, port, token]))

    def _receive(self, one: Connection, token: str) -> bytes:
        """A message; empty if it was the first one, which shows that this is a rank of the job."""
        try:
            # Whoever connects may send a short text before it is known.
            with self._waiting():
                data = one.recv_bytes(200 if self._peers[one] == -1 else None)
            if self._peers[one] != -1:
                return data
            shown, _, rank = data.decode().partition(" ")
            if secrets.compare_digest(shown, token):
                self._peers[one] = int(rank)
                self._pass_on_refusal(one)
                return b""
        except (EOFError, OSError, ValueError, TypeError):
            self._gone.add(self._peers[one])
        del self._peers[one]
        one.close()
        return b""

    def _read(self, rank: int, message: Message) -> None:
        with self.lock:
            questions = self.ledger.add(rank, message)
        if "refused" in message:
            for one in [one for one, found in self._peers.items() if found != -1]:
                self._pass_on_refusal(one)
        for asked, question in questions:
            if asked == 0:
                self._read(0, self._answer(question))
            for one in [one for one, found in self._peers.items() if found == asked]:
                with suppress(OSError):  # reading from a peer notices that it has ended
                    self._send(one, question)

    def _pass_on_refusal(self, one: Connection) -> None:
        if self.ledger.refused is not None:
            with suppress(OSError):
                self._send(one, {"refused": self.ledger.refused})

    def _clear(self) -> None:
        """Let ranks go that have ended and of which nothing is needed any more."""
        clear = self.ledger.find_clear(self._gone)
        for one, rank in self._peers.items():
            if rank in clear - self._gone:
                self._gone.add(rank)
                with suppress(OSError):
                    self._send(one, {"clear": True})
        if set(range(self.world_size)) <= clear | self._gone:
            self._cleared.set()

    # The other ranks.

    def _visit(self) -> None:
        store, pause, deadline = (
            self._own_store(),
            0.02,
            time.monotonic() + _LOOKUP_SECONDS,
        )
        while not store.check([_KEY]):
            with self._waiting():
                if time.monotonic() > deadline or self._ending.wait(pause):
                    return
            pause = min(2 * pause, 1.0)
        hosts, port, token = json.loads(store.get(_KEY))
        del store
        with self._waiting():
            peer = _connect(hosts, port)
            peer.send_bytes(f"{token} {self.rank}".encode())
        self._peers[peer] = 0
        while not self._ending.is_set():
            for message in self._take():
                self._send(peer, message)
            if peer in self._wait([peer, self._bell]):
                with self._waiting():
                    question = json.loads(peer.recv_bytes())
                if "clear" in question:
                    return
                if "refused" in question:
                    self.ledger.refused = question["refused"]
                else:
                    self._send(peer, self._answer(question))

    def _own_store(self) -> Any:
        """The default group's store, over a connection that no request of the job blocks."""
        store, self._store = self._store, None
        return store.clone() if isinstance(_root(store), TCPStore) else store


def _root(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _connect(hosts: list[str], port: int) -> Connection:
    local = ["localhost"] if socket.gethostname() == hosts[-1] else []
    failure: OSError | None = None
    for host in local + hosts:
        try:
            client = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            client.settimeout(None)
            return Connection(client.detach())
        except OSError as error:
            failure = error
    raise ConnectionError(f"rank 0 at {', '.join(hosts)}, port {port}: {failure}")
