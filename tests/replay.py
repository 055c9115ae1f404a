"""The clock of simulated ranks: all of them at once, event by event."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from meshplan.topology import Link, Topology


class Send(NamedTuple):
    """A message: the global rank of the receiver, and bytes."""

    to: int
    size: int


class Operation(NamedTuple):
    """A collective or a batch of messages: its group, what it sends, and the senders it hears.

    ``paired``: its messages are matched by sender, receiver and order; others by the order of
    collectives in the group.
    """

    group: tuple[int, ...]
    sends: tuple[Send, ...]
    receives: tuple[int, ...]
    paired: bool


Program = list[Operation | int]
"""What a rank does: it issues an operation, or waits for the one of that position."""


class _Arrival(NamedTuple):
    """A message that has come: when, the port of its receiver, and for how long it takes it."""

    time: float
    port: tuple[int, str] | None
    taken: float


@dataclass(eq=False)
class _Running:
    """An operation of a rank under way: what it still waits for."""

    operation: Operation
    keys: tuple[Any, ...]
    missing: int = 0
    started: bool = False
    done: bool = False
    held: list[_Arrival] = field(default_factory=list)


@dataclass(eq=False)
class _Rank:
    program: Program
    at: int = 0
    running: dict[int, _Running] = field(default_factory=dict)
    queues: dict[tuple[int, ...], deque[int]] = field(default_factory=lambda: defaultdict(deque))
    waits_for: int | None = None
    counts: dict[Any, int] = field(default_factory=lambda: defaultdict(int))


class Replay:
    """All ranks at once, event by event."""

    def __init__(self, programs: Mapping[int, Program], topology: Topology, stride: int) -> None:
        self._topology, self._stride = topology, stride
        self._nodes = None if topology.nodes is None else topology.nodes.tolist()
        self._domains = None if topology.domains is None else topology.domains.tolist()
        # The node of each rank, and its place on it.
        seen: dict[int, int] = defaultdict(int)
        self._places: list[tuple[int, int]] = []
        for node in self._nodes or range(topology.world_size):
            self._places.append((node, seen[node]))
            seen[node] += 1
        self._sizes = len(seen), max(seen.values())
        self._ranks = {rank: _Rank(program) for rank, program in programs.items()}
        self._out: dict[tuple[int, str], float] = defaultdict(float)
        self._in: dict[tuple[int, str], float] = defaultdict(float)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        # Messages that have come, and the operations that expect them.
        self._arrived: dict[Any, deque[_Arrival]] = defaultdict(deque)
        self._expected: dict[Any, deque[tuple[int, int]]] = defaultdict(deque)

    def run(self) -> float:
        now = 0.0
        for rank in self._ranks:
            self._advance(rank, now)
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        stuck = [rank for rank, one in self._ranks.items() if one.at < len(one.program)]
        assert not stuck, f"ranks {stuck[:8]} wait for messages that no rank sends"
        return now

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), act))

    def _advance(self, rank: int, now: float) -> None:
        """Run the program of ``rank`` until it waits."""
        one = self._ranks[rank]
        while one.at < len(one.program):
            entry = one.program[one.at]
            if isinstance(entry, int):
                if not one.running[entry].done:
                    one.waits_for = entry
                    return
            else:
                self._issue(rank, one, one.at, entry, now)
            one.at += 1

    def _issue(self, rank: int, one: _Rank, number: int, operation: Operation, now: float) -> None:
        def count(key: Any) -> int:
            one.counts[key] += 1
            return one.counts[key]

        keys: list[Any]
        if operation.paired:
            keys = [(peer, rank, count(("from", peer))) for peer in operation.receives]
        else:
            nth = count(("in", operation.group))
            keys = [(operation.group, nth, rank) for _ in operation.receives]
        one.running[number] = running = _Running(operation, tuple(keys))
        running.missing = 1  # its own messages
        for key in keys:
            running.missing += 1
            if self._arrived[key]:
                running.held.append(self._arrived[key].popleft())
            else:
                self._expected[key].append((rank, number))
        if operation.paired:
            running.keys = tuple((rank, to, count(("to", to))) for to, _ in operation.sends)
        else:
            # As NCCL does: the next node first, and on each the next local rank, so that no two
            # ranks send to the same one at once.
            sends = sorted(operation.sends, key=lambda send: self._distance(rank, send.to))
            running.operation = operation._replace(sends=tuple(sends))
            running.keys = tuple((operation.group, nth, self._represent(send.to)) for send in sends)
        queue = one.queues[operation.group]
        queue.append(number)
        if len(queue) == 1:
            self._start(rank, number, now)

    def _distance(self, one: int, other: int) -> tuple[int, int]:
        (nodes, size), (node, place) = self._sizes, self._places[one]
        to, at = self._places[other]
        return (to - node) % nodes, (at - place) % size

    def _represent(self, rank: int) -> int:
        return rank - rank % self._stride

    def _start(self, rank: int, number: int, now: float) -> None:
        links, running = self._topology.links, self._ranks[rank].running[number]
        begins = now + links.launch + (links.batch if running.operation.paired else 0.0)
        self._at(begins, partial(self._send, rank, number))

    def _send(self, rank: int, number: int, now: float) -> None:
        """Send all messages of an operation, port by port."""
        running = self._ranks[rank].running[number]
        start = end = now
        for send, key in zip(running.operation.sends, running.keys, strict=True):
            kind, link = self._link(rank, send.to)
            taken = send.size / link.bandwidth
            if running.operation.paired:
                # All messages of a batch are under way at once.
                self._out[rank, kind] = max(start, self._out[rank, kind]) + taken
                now = self._out[rank, kind] + link.latency
            else:
                now = max(now, self._out[rank, kind]) + link.latency + taken
                self._out[rank, kind] = now
            port = self._represent(send.to), kind
            arrival = _Arrival(now, port if port[0] != rank else None, taken)
            self._at(now, partial(self._arrive, key, arrival))
            end = max(end, now)
        self._at(end, partial(self._finish, rank, number))
        running.started = True
        for arrival in sorted(running.held, key=lambda one: one.time):
            self._receive(rank, number, arrival, start)

    def _arrive(self, key: Any, arrival: _Arrival, now: float) -> None:
        """A message is there. It waits until its receiver has started the operation."""
        if not self._expected[key]:
            self._arrived[key].append(arrival)
            return
        rank, number = self._expected[key].popleft()
        running = self._ranks[rank].running[number]
        if running.started:
            self._receive(rank, number, arrival, now)
        else:
            running.held.append(arrival)

    def _receive(self, rank: int, number: int, arrival: _Arrival, now: float) -> None:
        """Take the receiver's port for a message, as soon as no other one does."""
        free, port, taken = arrival
        if port is not None:
            self._in[port] = free = max(free, self._in[port] + taken)
        self._at(max(now, free), partial(self._finish, rank, number))

    def _finish(self, rank: int, number: int, now: float) -> None:
        """One thing less that an operation waits for."""
        one = self._ranks[rank]
        running = one.running[number]
        running.missing -= 1
        if running.missing:
            return
        running.done = True
        queue = one.queues[running.operation.group]
        queue.popleft()
        if queue:
            self._start(rank, queue[0], now)
        if one.waits_for == number:
            one.waits_for = None
            one.at += 1
            self._advance(rank, now)

    def _link(self, one: int, other: int) -> tuple[str, Link]:
        links, nodes, domains = self._topology.links, self._nodes, self._domains
        if nodes is None or nodes[one] != nodes[other]:
            return "network", links.network
        if domains is None or domains[one] != domains[other]:
            return "node", links.node
        return "domain", links.domain
