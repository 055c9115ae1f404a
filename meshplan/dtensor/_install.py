"""Install meshplan in DTensor, and uninstall it without a trace.

One function of torch is replaced: ``torch.distributed.tensor._redistribute`` looks
``_optimize_transform_infos`` up as a module global on every redistribution. One setting keeps
compiled graphs on disk apart (``_graphs``), and reductions over other groups are watched, unless
their order was requested.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshplan._torch import (
    NAMES,
    SEAM,
    TESTED_TORCH,
    disable_current_modes,
    find_moved,
    redistribute_module,
    refuse_moved,
    tested_range,
)
from meshplan._torch.effects import effect_differences
from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan._variables import check_variables
from meshplan.contract import Contract
from meshplan.dtensor import _partial
from meshplan.dtensor._config import Config, PolicyChoice
from meshplan.dtensor._graphs import (
    begin_epoch,
    forget_graphs,
    remove_tag,
    set_tag,
)
from meshplan.dtensor._guards import follow_world
from meshplan.dtensor._partial import THREAD
from meshplan.dtensor._routes import gather_topology
from meshplan.dtensor._seam import (
    OVERRIDE,
    Active,
    activate,
    active,
    current_config,
    current_key,
    planned_transform_infos,
)
from meshplan.errors import (
    FallbackRefusedError,
    InstallError,
    UnsupportedTorchError,
)
from meshplan.execute import PathChoice, select_path
from meshplan.flatten import Block, Group, registry
from meshplan.layout import Layout
from meshplan.planner import find_groups
from meshplan.replicas._coverage import report_libraries
from meshplan.topology import Topology


def check_version(version: str, allow_untested: bool) -> None:
    """Check that this version of torch was tested with meshplan."""
    if allow_untested:
        return
    low, high = TESTED_TORCH
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not low <= tuple(map(int, numbers.groups())) <= high:
        raise UnsupportedTorchError(
            f"torch {version or repr(version)} is not tested with meshplan, which supports "
            f"{tested_range()}; install one of these, or call "
            "meshplan.install(allow_untested_torch=True) and compare replicas yourself"
        )


def check_seam() -> None:
    """Check the private names of torch that meshplan uses. Nothing is replaced or sent, and no
    process group is needed.
    """
    refuse_moved([*find_moved(NAMES), *effect_differences(_partial)])


class UncoveredReductionWarning(UserWarning):
    """A library reduces outside the contract while meshplan is installed.

    With ``strict=True`` that is a ``FallbackRefusedError``.
    """


# Libraries that have warned: once in each process, even if meshplan is installed again.
_warned: set[str] = set()


def _report(library: str, what: str) -> None:
    config = current_config()
    # As a whole, or in a block of ``policy``.
    if config is None or config.policy == "fast":
        return
    text = f"{what}: meshplan.install() covers redistributions of DTensors only"
    if config.strict:
        raise FallbackRefusedError(f"{text}; or pass strict=False to it")
    if config.path != "native" and library not in _warned:
        _warned.add(library)
        warnings.warn(f"meshplan: {text}", UncoveredReductionWarning, stacklevel=4)


_lock = threading.RLock()
# Whether a block of ``policy`` was ever entered: it may request the contract on its thread.
_is_overridden = False


@dataclass(eq=False)
class _InstalledBlock:
    before: Active | None


# In the order of entry. Blocks of several threads may end in another order.
_blocks: list[_InstalledBlock] = []


@never_compiled
def install(
    *,
    policy: PolicyChoice = "deterministic",
    contract: Contract | None = None,
    path: PathChoice = "auto",
    strict: bool = False,
    verify: Literal["checksum"] | None = None,
    timeout: float | None = None,
    topology: Topology | Literal["live"] | None = None,
    debug: bool = False,
    audit: int | None = None,
    allow_untested_torch: bool = False,
) -> None:
    """Plan every redistribution of this process that starts from ``Partial``.

    Needs no process group yet. Calling it again replaces the arguments. Pass the same arguments on
    every rank; the first reduction over each group checks all but ``strict`` and ``timeout``.

    Code of ``torch.compile`` is compiled again if the arguments change, and all of it if nothing
    was installed before.

    FSDP, DDP and spmd_types reduce without redistributions of DTensors. Over groups of another
    backend than ``meshplan``, the first such reduction of each library in this process warns
    (``UncoveredReductionWarning``), except of spmd_types in compiled code. ``meshplan.coverage``
    counts all of them, by call site.

    Args:
        policy: ``deterministic``: every such reduction runs under the contract, as one collective.
            ``consistent``: only reductions whose results must be identical in other groups and may
            differ; the rest as with ``fast``. Replicas are identical, but runs may differ.
            ``fast``: two or more ``P -> R`` axes become one all-reduce of the backend.
            A mapping such as ``{"tp": "fast"}`` chooses by axis. Axes that it does not name are
            ``deterministic``, and a reduction over several axes follows the strictest.
        contract: ``Contract()`` if not given.
        path: how contract reductions move their data. The bits do not depend on it. ``auto``:
            through shared memory if all ranks of a group are on one host and tensors on its CPUs,
            or on GPUs of which it was timed to be faster, else ``exchange``.
            ``one_shot``, ``two_shot``: through shared memory, for any size; if that is unavailable,
            ``exchange``, and the report shows a fallback.
            ``exchange``: all-to-all, reduce, all-gather. ``reference``: all-gather, reduce all.
            ``native``: the backend's own, outside the contract, for comparisons.
            The environment variable ``MESHPLAN_PATH`` overrides it.
        strict: raise ``FallbackRefusedError``, before anything is sent, instead of running a
            reduction below the requested policy or path; also if FSDP, DDP or spmd_types would
            reduce in the backend's own order.
        verify: with path ``integer``: ``"checksum"`` raises ``ChecksumError`` on every rank if a
            bit of a message changes. A reduction under the contract that cannot be verified so
            raises ``FallbackRefusedError``.
        timeout: seconds to wait for the other members before the first reduction of a group; the
            default group's own timeout if not given.
        topology: the placement of the job's ranks and the cost of links, the same on every rank.
            If a group spans nodes, its reduction runs inside nodes first where that costs less;
            same bits. Policies ignore it: it does not prove how sibling groups add.
            If it is not given, every rank reads its own placement. The ranks exchange it in
            ``prepare`` of a mesh that holds all ranks, or in the first redistribution that reduces
            over all ranks; until then it is unknown. ``"live"``: they exchange it now if the
            default group exists, and then every rank must call this.
            ``Topology.unknown(world_size)``: no exchange.
        debug: hold an agreement round over the store before every reduction. It reports missing
            members, different requests that lead to the same reduction, and different tensors
            before NCCL can hang on them. Slow. Over gloo and through shared memory, different
            tensors are an error on every rank without it.
        audit: compare the first and then every ``audit``-th call of each reduction with the
            reference, all elements on all ranks of the group: the contract in plain torch, over
            gathered summands. Different bits raise ``AuditError`` on every rank. An agreement round
            over the store comes first. It does not cover reductions outside the contract, nor
            graphs of torch.compile and CUDA: of the ranks that reduce together, all must run a
            graph or none. Pass a number without a common factor with the calls in a step, such as a
            prime, so that every call is compared in time.
        allow_untested_torch: accept a torch version outside the tested range.

    Raises:
        PolicyError, ContractError, TopologyError: an invalid argument. (A topology of another
            number of ranks than the job's raises in the first redistribution.)
        GroupAgreementError: with ``topology="live"``, ranks that did not arrive.
        UnsupportedTorchError: an untested torch version, or one whose private names have moved.
        InstallError: called where torch compiles.
    """
    refuse_in_graph("meshplan.install")
    check_variables(strict)
    config = Config(
        policy=Config.policy_of(policy),
        contract=Contract() if contract is None else contract,
        path=select_path(os.environ.get("MESHPLAN_PATH") or path, verify),
        strict=strict,
        timeout=timeout,
        topology=None if topology == "live" else topology,
        debug=debug,
        audit=audit,
    )
    check_version(torch.__version__, allow_untested_torch)
    if topology == "live" and dist.is_initialized():
        gather_topology(config, None, 'meshplan.install(topology="live")')
    with _lock:
        now = active()
        if now is not None:
            _activate((config, now[1]))
            return
        check_seam()
        _put_in_place(config)


def _activate(now: Active) -> None:
    activate(now)
    # Policy "fast" requests the backend's order, and pays for no look at its operators.
    report_libraries(None if now[0].policy == "fast" and not _is_overridden else _report)


def _put_in_place(config: Config) -> None:
    # The configuration comes before the function that reads it. A thread that calls the function
    # without a configuration runs torch's own.
    set_tag(current_key)
    _activate((config, getattr(redistribute_module, SEAM)))
    setattr(redistribute_module, SEAM, planned_transform_infos)
    forget_graphs()


@never_compiled
def uninstall() -> None:
    """Restore torch's own function, the very object. Nothing happens if not installed.

    Groups stay until ``shutdown``.

    Raises:
        InstallError: the function was replaced again after meshplan replaced it.
    """
    refuse_in_graph("meshplan.uninstall")
    with _lock:
        now = active()
        if now is None:
            return
        if getattr(redistribute_module, SEAM) is not planned_transform_infos:
            raise InstallError(
                f"{redistribute_module.__name__}.{SEAM} was replaced after meshplan.install by "
                f"{getattr(redistribute_module, SEAM)!r}; undo that first, then uninstall"
            )
        setattr(redistribute_module, SEAM, now[1])
        activate(None)
        report_libraries(None)
        remove_tag()


@contextmanager
@never_compiled
def installed(
    *,
    policy: PolicyChoice = "deterministic",
    contract: Contract | None = None,
    path: PathChoice = "auto",
    strict: bool = False,
    verify: Literal["checksum"] | None = None,
    timeout: float | None = None,
    topology: Topology | Literal["live"] | None = None,
    debug: bool = False,
    audit: int | None = None,
    allow_untested_torch: bool = False,
) -> Iterator[None]:
    """``install`` for a ``with`` block; then the installation before it, if any.

    For the whole process, not for one thread. Of blocks that overlap, the one that was entered
    last and has not ended applies.

    Args:
        policy, contract, path, strict, verify, timeout, topology, debug, audit,
            allow_untested_torch: as for ``install``.

    Raises:
        InstallError, UnsupportedTorchError, PolicyError, ContractError, TopologyError,
            GroupAgreementError: as ``install``.
    """
    refuse_in_graph("meshplan.installed")
    with _lock:
        block = _InstalledBlock(active())
        install(
            policy=policy,
            contract=contract,
            path=path,
            strict=strict,
            verify=verify,
            timeout=timeout,
            topology=topology,
            debug=debug,
            audit=audit,
            allow_untested_torch=allow_untested_torch,
        )
        _blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            above = _blocks.index(block) + 1
            _blocks.remove(block)
            if above <= len(_blocks):
                # A block that was entered later still applies; it restores what this one would.
                _blocks[above - 1].before = block.before
            elif block.before is None:
                uninstall()
            elif (now := active()) is None:
                # The block called ``uninstall``.
                _put_in_place(block.before[0])
            else:
                _activate((block.before[0], now[1]))


@contextmanager
@never_compiled
def policy(choice: PolicyChoice) -> Iterator[None]:
    """Another policy for the redistributions in a ``with`` block, on this thread.

    Every rank must do the same. The backward of the block's forward follows it only if it runs in
    the block as well (and on this thread, as it does for CPU tensors).

    Args:
        choice: as for ``install``.

    Raises:
        PolicyError: an unknown policy.
        InstallError: meshplan is not installed, so there is no policy to change.
    """
    global _is_overridden
    refuse_in_graph("meshplan.policy")
    config = current_config()
    if config is None:
        raise InstallError(
            "meshplan is not installed, there is no policy to change; call meshplan.install first"
        )
    overridden = replace(config, policy=Config.policy_of(choice)).policy
    with _lock:
        if overridden != "fast" and not _is_overridden:
            _is_overridden = True
            if (now := active()) is not None:
                _activate(now)
    token = OVERRIDE.set(overridden)
    try:
        yield
    finally:
        OVERRIDE.reset(token)


# Create groups before they are needed, and destroy them.


@never_compiled
def prepare(
    mesh: DeviceMesh,
    *axes: Iterable[str | int],
    timeout: float | None = None,
) -> tuple[Group, ...]:
    """Find or create the groups for reductions over ``mesh`` now instead of in the first step.

    Every rank of the mesh calls it with the same arguments, after ``init_process_group``. Ranks
    outside the mesh may call it too and do nothing. Call it before you capture a CUDA graph. If the
    mesh holds all ranks of the job and ``install`` got no topology, the ranks exchange their
    placement.

    Args:
        mesh: a device mesh or sub-mesh.
        *axes: each a set of axes, e.g. ``prepare(mesh, ("ddp", "fsdp"))``; if none is given, all
            sets of axes (2 ** n - 1 for n axes larger than 1). If the topology allows hierarchical
            reductions, their groups are created too.
        timeout: seconds to wait for the other members; as installed if not given.

    Returns:
        The groups of this rank, one per set, each followed by those of hierarchical reductions.

    Raises:
        AxisNameError, LayoutError: an axis that the mesh does not have, or no DeviceMesh.
        GroupAgreementError, GroupCreationError, GroupStateError: as for a first reduction.
        InstallError: called where torch compiles.
    """
    refuse_in_graph("meshplan.prepare")
    config = current_config() or Config()
    with disable_current_modes():
        layout = Layout.from_mesh(mesh)
    wide = [i for i, size in enumerate(layout.sizes) if size > 1]
    sets = [layout.axis_indices(names) for names in axes] or [
        chosen for count in range(1, len(wide) + 1) for chosen in combinations(wide, count)
    ]
    if active() is not None:
        # Operators may come before the first redistribution under this default group.
        follow_world(THREAD.state)
    if mesh.get_coordinate() is None:
        return ()
    config = gather_topology(config, layout, "meshplan.prepare", timeout)
    wait = config.timeout if timeout is None else timeout
    groups = []
    for chosen in sets:
        found = tuple(i for i in chosen if layout.sizes[i] > 1)
        if not found:
            continue
        sizes = find_groups(layout, config.topology).blocks(found)
        blocks = [Block(kind, size) for size in sizes for kind in ("inner", "outer")]
        for block in (None, *blocks):
            groups.append(
                registry().get(
                    mesh,
                    layout,
                    found,
                    token=config.token,
                    timeout=wait,
                    block=block,
                    peers=config.sharing(mesh.device_type) if block is None else "never",
                )
            )
        if blocks:
            registry().meet(mesh, layout, found, token=config.token, timeout=wait)
    return tuple(groups)


@never_compiled
def shutdown() -> int:
    """Destroy the groups that meshplan created, in name order; returns how many.

    Every rank calls it, before ``destroy_process_group()``. meshplan stays installed, and the next
    reduction creates its group again.

    Raises:
        InstallError: called where torch compiles.
    """
    refuse_in_graph("meshplan.shutdown")
    begin_epoch()
    if active() is not None:
        follow_world(THREAD.state, again=True)
    return registry().shutdown()
