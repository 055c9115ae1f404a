"""Create groups before they are needed, and destroy them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from torch.distributed.device_mesh import DeviceMesh

from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan.dtensor._config import Config
from meshplan.dtensor._graphs import begin_epoch
from meshplan.dtensor._job_topology import gather_topology
from meshplan.dtensor._meshes import mesh_entry
from meshplan.dtensor._seam import current_config
from meshplan.flatten import Block, Group, registry
from meshplan.planner import intra_node_blocks


@never_compiled
def prepare(
    mesh: DeviceMesh, *axes: Iterable[str | int], timeout: float | None = None
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
        AxisNameError: an axis that the mesh does not have.
        GroupAgreementError, GroupCreationError, GroupStateError: as for a first reduction.
        InstallError: called where torch compiles.
    """
    refuse_in_graph("meshplan.prepare")
    config = current_config() or Config()
    layout = mesh_entry(mesh).layout
    wide = [i for i, size in enumerate(layout.sizes) if size > 1]
    sets = [layout.axis_indices(names) for names in axes] or [
        chosen for count in range(1, len(wide) + 1) for chosen in combinations(wide, count)
    ]
    if mesh.get_coordinate() is None:
        return ()
    config = gather_topology(config, layout, "meshplan.prepare", timeout)
    wait = config.timeout if timeout is None else timeout
    groups = []
    for chosen in sets:
        found = tuple(i for i in chosen if layout.sizes[i] > 1)
        if not found:
            continue
        sizes = intra_node_blocks(layout, config.topology, found)
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
    return registry().shutdown()
