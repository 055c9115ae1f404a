"""The process group of the backend ``meshplan``: what torch calls in place of gloo or NCCL.

Torch 2.13 puts a Python process group in the place of the whole group, for all its devices. Its
methods are called by Python, by DDP's reducer and by functional collectives in C++. Those that add
are here; ``WrappingProcessGroup`` passes the others on to a plain group of the inner backend.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from meshplan._calls import GroupCalls, Ticket, keep_calls
from meshplan._observing import OBSERVING
from meshplan._torch import (
    REDUCE_SCATTER_SINGLE,
    WORLD,
    DistributedBackendOptions,
    PrefixStore,
    Store,
    dispatch_modes,
)
from meshplan._uncompiled import never_compiled
from meshplan.backend._derived import DerivingProcessGroup, describe_group
from meshplan.backend._options import NAME, BackendOptions, check_inner_options
from meshplan.backend._reductions import (
    EXCHANGE,
    LEFT_OUT,
    BoundTable,
    Operation,
    PartialSum,
    agree_on_policy,
    check_blocks,
    check_equal_blocks,
    continues_partial_sum,
    keep_partial_sum,
    keeps_partial_sum,
    read_operation,
    reduce_inside,
    reduce_partial_sums,
    scatter_partial_sum,
    take_partial_sum,
)
from meshplan.backend._work import (
    DeviceLane,
    in_caller_mode,
    mark_written,
    writable,
)
from meshplan.collectives._lanes import OrderedThread, Work
from meshplan.collectives._options import check_destination
from meshplan.collectives._reduction import Kind, list_kinds
from meshplan.errors import BackendError, ContractError, GroupStateError
from meshplan.execute._announce import is_counted, run_as_one
from meshplan.execute._wire import check_data
from meshplan.flatten import first_use, keep_store, registry
from meshplan.flatten._create import (
    attempt_store,
    create_uncounted,
    descriptor_objection,
    peer_timeout,
    rest_at_end,
)
from meshplan.flatten._join import create_beside
from meshplan.flatten._threads import is_forked, refuse_forked
from meshplan.record import Record

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Tensors = list[Tensor]
_Run = Callable[[dist.ProcessGroup, Ticket], object]
# Functions and redistributions over a group count apart, in the order of their callers.
_LANE = " of the backend"


def _counts_refused(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a call that its arguments end use up a ticket: its peers may go on with theirs."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "used_ticket", False):
                error.used_ticket = True  # type: ignore[attr-defined]
                args[0].count_refused(args[1])  # type: ignore[attr-defined]
            raise

    return call


@never_compiled
class MeshplanProcessGroup(DerivingProcessGroup):
    """A group whose reductions run under a contract; see ``BackendOptions``. ``made`` holds
    torch's options. Without ``BackendOptions``, ``defaults`` apply, or those of the default group.
    ``origin``: the group that torch has created, if this one is derived from it. Raises
    BackendError if torch does not know the inner backend, BackendTypeError for options of another
    type or backend.
    """

    def __init__(
        self,
        made: DistributedBackendOptions,
        options: Any = None,
        defaults: BackendOptions | None = None,
        origin: MeshplanProcessGroup | None = None,
        across_jobs: bool = False,
    ) -> None:
        of_inner = None
        if not isinstance(options, BackendOptions):
            options, of_inner = defaults or _default_options(), options
        backend = options.inner or default_inner()
        check_inner_options(of_inner, backend)
        self.options: BackendOptions = options
        create = partial(
            create_inner_group,
            name=made.group_id,
            store=made.store,
            rank=made.group_rank,
            # Torch has no global ranks for several jobs: a rank of the group stands for one.
            ranks=[] if across_jobs else made.global_ranks_in_group,
            size=made.group_size,
            across_jobs=across_jobs,
        )
        inner = create("data", backend=backend, timeout=made.timeout, options=of_inner)
        super().__init__(inner, made.timeout, backend, across_jobs)
        inside = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
        timeout = options.timeout or made.timeout
        # Of the reductions on CPUs: their group, once there is one, and what creates it.
        self._lane: dist.ProcessGroup | None = None
        self._create_lane: Callable[..., dist.ProcessGroup] | None = None
        self._lane_timeout = timeout
        if "cpu" in inside:
            self._create_lane = partial(create, "reductions", backend=str(inside["cpu"]))
        # Devices that the backend was named for. Torch does not know groups of torchft.
        self._checked = set(inside) if across_jobs and origin is None else set[str]()
        # The group that torch has created; not this one, which would keep itself alive.
        self._origin = origin
        described = f"group {made.group_id} of {made.group_size} ranks"
        self._thread = OrderedThread(f"{NAME} {made.group_id}", described)
        self._calls = GroupCalls(made.group_id)
        keep_calls(self, self._calls)
        self._has_agreed = False
        self._followed = self.inner_timeout
        self._bound = BoundTable(options)
        self._device_lane: DeviceLane | None = None
        if "cuda" in inside:
            create_lane = partial(create, "reductions on cuda", backend=str(inside["cuda"]))
            self._device_lane = DeviceLane(create_lane, timeout, self._calls)

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        return NAME

    @_counts_refused
    def allreduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = dist.AllreduceOptions() if opts is None else opts
        if len(tensors) != 1:
            raise ContractError(
                f"allreduce got {len(tensors)} tensors of one rank; pass one, or call "
                "allreduce_coalesced"
            )
        if tensors[0].__dict__.pop(LEFT_OUT, False):
            return Work(tensors)
        partial_sum = take_partial_sum(tensors[0])
        if partial_sum is not None and self.size() > 1:
            operation = self._operation(opts, tensors)
            if continues_partial_sum(partial_sum, operation, self.options):
                args = tensors[0].detach(), partial_sum, operation, self.options
                run = partial(reduce_partial_sums, *args)
                return self._start(in_caller_mode(run, tensors), tensors, opts)
        return self._all_reduce(tensors, opts, "allreduce")

    @_counts_refused
    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> dist.Work:
        """All-reduce each tensor in place, with the bits of one ``allreduce`` each."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        return self._all_reduce(tensors, opts, "allreduce_coalesced")

    def _all_reduce(self, tensors: _Tensors, opts: Any, kind: str) -> dist.Work:
        if len(tensors) == 1:
            repeated = self._bound.find("all_reduce", tensors[0], tensors[0], opts.reduceOp)
            if repeated is not None:
                return self._begin(repeated, tensors, opts)
        operation = self._operation(opts, tensors)
        if operation.op is None:
            return self._reduce_inside(kind, operation, tensors, tensors, opts)
        outs = [*map(writable, tensors)]
        return self._reduce("all_reduce", outs, outs, [], operation, tensors, opts)

    @_counts_refused
    def reduce(self, tensors: _Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce in place at the root; other ranks' tensors stay as they are."""
        opts = dist.ReduceOptions() if opts is None else opts
        operation = self._operation(opts, tensors)
        if operation.op is None:
            return self._reduce_inside("reduce", operation, tensors, tensors, opts)
        mine = opts.rootRank == self.rank()
        lengths = [0] * self.size()
        lengths[opts.rootRank] = tensors[0].numel()
        found = writable(tensors[0])
        flat = found.reshape(-1)
        output = found if mine else flat[:0]
        args = [output], [flat], [lengths], operation, tensors, opts
        return self._reduce("reduce_scatter", *args, writes=mine)

    @_counts_refused
    def reduce_scatter(  # type: ignore[override]
        self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None
    ) -> dist.Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        operation = self._operation(opts, [*outputs, *(one for row in inputs for one in row)])
        if operation.op is None:
            return self._reduce_inside("reduce_scatter", operation, outputs, outputs, inputs, opts)
        lengths = [[block.numel() for block in row] for row in inputs]
        flat = [torch.cat([one.reshape(-1) for one in map(writable, row)]) for row in inputs]
        outs = [*map(writable, outputs)]
        return self._reduce("reduce_scatter", outs, flat, lengths, operation, outputs, opts)

    @_counts_refused
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._scatter_equally(REDUCE_SCATTER_SINGLE, [output], [input], opts)

    @_counts_refused
    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> dist.Work:
        # The name that every version of torch has.
        kind = "reduce_scatter_tensor_coalesced"
        return self._scatter_equally(kind, outputs, inputs, opts)

    @_counts_refused
    def scatter_partial_sum(self, output: Tensor, input: Tensor, op: Any) -> None:
        """``reduce_scatter_single``, with whose sum an all-reduce of ``output`` can go on."""
        opts = dist.ReduceScatterOptions()
        opts.reduceOp, opts.asyncOp = op, False
        operation = self._operation(opts, [output, input])
        if self.size() == 1 or not keeps_partial_sum(operation, output, self.options.contract):
            self.reduce_scatter_single(output, input, opts).wait()
            return
        check_equal_blocks(output, input, self.size())
        found: list[PartialSum] = []
        args = input.detach().reshape(-1), operation, self.options, found
        run = partial(scatter_partial_sum, output.detach(), *args)
        self._start(in_caller_mode(run, [output]), [output], opts)
        keep_partial_sum(output, found[0])

    @_counts_refused
    def exchange_rows(self, rows: Tensor) -> Tensor:
        """Send row r to rank r; the rows for this rank, in the order of ranks. They overwrite
        ``rows`` if that is contiguous.
        """
        if self.size() == 1:
            return rows
        found = rows.detach().contiguous()
        flat = found.view(-1)
        opts = dist.ReduceScatterOptions()
        opts.asyncOp = False
        again = self._bound.find(EXCHANGE, flat, flat, opts.reduceOp)
        first = in_caller_mode(partial(self._bound.exchange, flat), [found])
        self._begin(again or first, [found[0]], opts)
        return found

    def _find_lane(self, call: int) -> dist.ProcessGroup:
        """The inner group for reductions of CPU tensors, which all ranks create in ``call``."""
        inner: dist.ProcessGroup = self.inner
        if self._lane is None and self.size() > 1:
            assert self._create_lane is not None
            self._lane = create_beside(
                inner,
                partial(self._create_lane, timeout=self._lane_timeout),
                token=Record.of(policy=self.options.policy),
                timeout=self._lane_timeout.total_seconds(),
                call=call,
            )
            self._lane._set_group_desc(self.group_desc)  # with the axis of a mesh, for reports
        return self._lane or inner

    def _find_device_lane(self, kind: str) -> DeviceLane:
        if self._device_lane is None or kind != "cuda":
            raise BackendError(
                f"the inner backend {self.options.inner or default_inner()!r} does not "
                f"reduce {kind} tensors; pass e.g. inner='cpu:gloo,cuda:nccl'"
            )
        return self._device_lane

    def _derive(
        self,
        made: Any,
        options: Any,
        timeout: timedelta | None,
        inner: str | None,
        across_jobs: bool,
    ) -> MeshplanProcessGroup:
        defaults = self.options.replace(timeout=timeout, inner=inner)
        return MeshplanProcessGroup(made, options, defaults, self._origin or self, across_jobs)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the inner groups, for calls that begin later."""
        super().set_timeout(timeout)
        self._lane_timeout = timeout
        if self._device_lane is not None:
            self._device_lane.timeout = timeout
        for group in self._groups():
            group.set_timeout(timeout)
            for memory in registry().memory_of(group):
                memory.set_timeout(peer_timeout(memory.device_type, group))
        self._followed = self.inner_timeout

    def _follow_timeout(self) -> None:
        self.lent = False
        found = self.inner_timeout
        if found is not None and found != self._followed:
            self.set_timeout(found)

    def abort(self) -> None:
        """Abort the inner groups; the reduction under way and those behind it fail."""
        # First the request, then the memory: a reduction that maps memory meanwhile sees either.
        self._thread.abort()
        for group in self._groups():
            for memory in registry().memory_of(group):
                memory.abort()
            group.abort()

    def shutdown(self) -> None:
        """Destroy the inner groups, after the reductions that were issued."""
        if not is_forked():
            self._thread.join()
        self._bound.clear()
        everything = dist.group.WORLD in (self, None)
        # Functions of meshplan reduce over this group itself. One that hangs there holds its
        # memory, and no caller waits for it after ``abort``.
        if not self._thread.is_aborted:
            registry().release(self)
        for group in self._groups():
            registry().release(group)
            destroy_inner_group(group, all_are_destroyed=everything)
        self._lane = None

    def _groups(self) -> list[Any]:
        on_devices = None if self._device_lane is None else self._device_lane.group
        return [
            self.inner,
            *(one for one in (self._lane, on_devices) if one is not None),
        ]

    def _operation(self, opts: Any, tensors: Sequence[Tensor]) -> Operation:
        """The operation, the same for all tensors of the call. Raises BackendError for a device
        whose reductions the backend does not have, ContractError for no tensors, or several dtypes
        or devices.
        """
        if not tensors:
            raise ContractError("a reduction got no tensors; pass one or more")
        first = tensors[0]
        if len({(one.dtype, one.device, one.layout) for one in tensors}) > 1:
            kinds = sorted({f"{one.dtype} on {one.device}" for one in tensors})
            raise ContractError(
                f"the tensors of one reduction are {', '.join(kinds)}; pass tensors of one dtype "
                "on one device"
            )
        check_data(first)
        self._check_device(first.device.type)
        return read_operation(opts.reduceOp, first, self.options.contract, self.options.policy)

    def _check_device(self, kind: str) -> None:
        if kind not in self._checked:
            check_device(kind, c10d.get_backend_config(self._origin or self))
            self._checked.add(kind)

    def _scatter_equally(
        self, kind: str, outputs: _Tensors, inputs: _Tensors, opts: Any
    ) -> dist.Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if len(outputs) == len(inputs) == 1:
            output, tensor = outputs[0], inputs[0]
            if tensor.numel() == output.numel() * self.size():
                repeated = self._bound.find("reduce_scatter", tensor, output, opts.reduceOp)
                if repeated is not None:
                    return self._begin(repeated, outputs, opts)
        operation = self._operation(opts, [*outputs, *inputs])
        if operation.op is None:
            single = kind == REDUCE_SCATTER_SINGLE
            given = (outputs[0], inputs[0]) if single else (outputs, inputs)
            return self._reduce_inside(kind, operation, outputs, *given, opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_equal_blocks(output, tensor, self.size())
        lengths = [[output.numel()] * self.size() for output in outputs]
        found, outs = [*map(writable, inputs)], [*map(writable, outputs)]
        return self._reduce("reduce_scatter", outs, found, lengths, operation, outputs, opts)

    def _reduce(
        self,
        kind: Kind,
        outputs: _Tensors,
        inputs: _Tensors,
        lengths: list[list[int]],
        operation: Operation,
        tensors: _Tensors,
        opts: Any,
        writes: bool = True,
    ) -> dist.Work:
        for output, sizes in zip(outputs, lengths, strict=kind == "reduce_scatter"):
            check_blocks(output, sizes, self.rank(), self.size())
        run = partial(self._bound.reduce, kind, outputs, inputs, lengths, operation)
        return self._start(in_caller_mode(run, tensors), tensors, opts, writes)

    def count_refused(self, written: Tensor | _Tensors) -> None:
        # In its turn, and before this call returns: after ``shutdown`` it would count for another.
        with suppress(GroupStateError):
            for kind in list_kinds(written, self):
                self._thread.run(partial(self._calls.take, kind + _LANE))

    def _start(self, run: _Run, tensors: _Tensors, opts: Any, writes: bool = True) -> dist.Work:
        for tensor in map(writable, tensors):
            check_destination(tensor)
        return self._begin(run, tensors, opts, writes)

    def _begin(self, run: _Run, written: _Tensors, opts: Any, writes: bool = True) -> dist.Work:
        if dispatch_modes() and is_counted():
            again = partial(self._begin, run, written, opts, writes)
            first, op = written[0], opts.reduceOp.op.name.lower()
            collective, shape = "all_reduce", tuple(first.shape)
            if isinstance(opts, dist.ReduceScatterOptions):
                collective, shape = "reduce_scatter", (self.size(), *shape)
            return run_as_one(again, collective, op, shape, first.dtype, lambda: self)
        refuse_forked()
        if OBSERVING.before is not None:
            OBSERVING.before(self, written[0].device)
        first, lane = written[0], None
        # Reading the name of a device takes longer.
        kind = "cpu" if first.is_cpu else first.device.type
        if kind != "cpu" or self._create_lane is None:
            lane = self._find_device_lane(kind)
        on_device = None if lane is None else lane.find_group()
        if writes:
            mark_written(written)
        if self.lent:
            self._follow_timeout()
        self.issued += 1
        is_async = bool(getattr(opts, "asyncOp", True))

        def guarded() -> _Tensors:
            # In the order in which calls run, which is that of all ranks: a callback of a future
            # reduces before what the caller has issued meanwhile.
            with self._calls.take(kind + _LANE) as ticket:
                if (known := on_device or self._lane) is not None:
                    run(known, ticket)
                else:
                    with first_use(self._lane_timeout.total_seconds()):
                        run(self._find_lane(ticket.number), ticket)
            return written

        def start() -> dist.Work:
            if lane is None:
                return self._thread.start(guarded, is_async)
            return lane.start(partial(self._thread.call, guarded), written, is_async)

        return start() if self._coalescing is None else self._coalescing.interrupt(start)

    def _reduce_inside(
        self,
        method: str,
        operation: Operation,
        tensors: Sequence[Tensor],
        *given: Any,
    ) -> dist.Work:
        self._calls.refuse_stopped()
        if self.options.policy == "fast" and self._create_lane and not self._has_agreed:
            # A rank of another policy would reduce on another group, which is of one policy.
            self._thread.run(partial(agree_on_policy, self.inner, self.options.policy))
            self._has_agreed = True
        try:
            work = reduce_inside(operation, tensors, method, self.options, self, *given)
        except RuntimeError as error:
            self._calls.stop_inside(error)
            raise
        # Gloo's work of a reduce-scatter never reports its end.
        if tensors[0].is_cpu and "scatter" not in method:
            self._calls.watch(work)
        return work


def _default_options() -> BackendOptions:
    world = dist.group.WORLD
    return world.options if isinstance(world, MeshplanProcessGroup) else BackendOptions()


def create_group(made: Any, options: Any = None) -> MeshplanProcessGroup:
    """A group of the backend, for torch's ``register_backend``; ``options``: ``pg_options``."""
    return MeshplanProcessGroup(made, options)


def create_group_across_jobs(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: BackendOptions | None,
) -> MeshplanProcessGroup:
    """A group of ranks that each have a default group of their own. The members agree through
    ``store`` for the lifetime of the group. Without ``options``, those of the default group apply
    if it is of the backend. Raises RuntimeError, from torch, if members are missing.
    """
    # Each job has used other names before.
    if rank == 0:
        store.set("meshplan/name", f"meshplan/jobs/{uuid.uuid4().hex}")
    name = store.get("meshplan/name").decode()
    made = describe_group(name, store, rank, list(range(size)), timeout)
    group = MeshplanProcessGroup(made, options, across_jobs=True)
    group._set_group_name(name)
    return group


def register() -> None:
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_group, True, ["cpu", "cuda"])


# The groups of the inner backend that a group of the backend ``meshplan`` consists of. One carries
# the calls that move data. The other one carries reductions and nothing else: they run on a thread
# of their own, and two threads may not order one group's messages. It is created in the first
# reduction: many groups of a job never reduce, and each one takes descriptors and threads.


def default_inner() -> str:
    """The backends that torch takes for CPUs and, where there are some, for GPUs."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def create_inner_group(
    use: str,
    attempt: str = "",
    *,
    name: str,
    backend: str,
    store: Any,
    rank: int,
    ranks: Sequence[int],
    size: int,
    timeout: timedelta,
    options: Any = None,
    across_jobs: bool = False,
) -> ProcessGroup:
    """Create a plain group of the same ranks; every member calls it at the same time. ``use``
    separates the groups of one group of the backend, which has the ``name``, ``attempt`` those that
    its members have agreed on; ``ranks`` is empty for the default group and across jobs. Raises
    BackendError if torch does not have the backend, GroupStateError if this process may not open as
    many descriptors, and torch's RuntimeError if the backend cannot connect the members.
    """
    for part in backend.split(","):
        one = part.rpartition(":")[2]
        if not dist.is_backend_available(one):
            raise BackendError(
                f"torch has no backend {one!r} for inner={backend!r}; register it, or pass one "
                "that torch has, such as inner='gloo'"
            )
    objection = descriptor_objection(backend, size)
    if objection is not None:
        raise GroupStateError(f"group {name} of {size} ranks cannot be created: {objection}")
    group = create_uncounted(
        size,
        rank,
        ranks,
        backend,
        PrefixStore(use, attempt_store(attempt, backend, store) if attempt else store),
        name=f"{name}/{use}",
        timeout=timeout,
        options=options,
        use=use,
    )
    if across_jobs:
        keep_store(group, PrefixStore(f"agreements/{use}", store))
    if "gloo" in backend:
        rest_at_end()
    return group


def destroy_inner_group(group: ProcessGroup, *, all_are_destroyed: bool) -> None:
    """Destroy an inner group that still exists. If ``all_are_destroyed``, torch forgets it."""
    if group not in getattr(c10d, WORLD).pg_map:
        return
    if all_are_destroyed:
        group.shutdown()
    else:
        dist.destroy_process_group(group)


def check_device(kind: str, config: str) -> None:
    """Refuse tensors of a device for which a group was created with another backend: raises
    BackendError if torch put the group in the place of that backend's.
    """
    named = dict(part.split(":") for part in config.split(","))
    if named.get(kind, NAME) != NAME:
        raise BackendError(
            f"the group has backend {config!r}, and torch uses one group for all devices if "
            f"one of them has '{NAME}'; pass '{NAME}' for each device, and name other backends "
            "in BackendOptions(inner=...)"
        )
