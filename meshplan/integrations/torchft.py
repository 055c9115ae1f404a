"""torchft over the backend ``meshplan``: replica groups of a quorum reduce under the contract."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from meshplan import _require_torch as _require_torch
from meshplan._torch import Store
from meshplan.backend import BackendOptions, create_group_across_jobs
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.errors import BackendError


class ProcessGroupMeshplan(ProcessGroupWrapper):  # type: ignore[misc] # has no type hints
    """A process group for ``torchft.Manager`` that reduces over all replica groups of a quorum.

    Every replica group has a default group of its own before the first quorum, of any backend.
    Ranks in reports and errors are replica ranks of the quorum.

    Args:
        timeout: to connect the members of a quorum, and of its collectives.
        options: of the backend; ``None``: those of the default group, if it is of the backend, or
            those of the environment.
    """

    # For ``meshplan.coverage``, which counts them inside.
    hands_on_reductions = True

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), options: BackendOptions | None = None
    ) -> None:
        super().__init__(timeout)
        self._options, self._wait = options, timeout
        self._group: MeshplanProcessGroup | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later quorums.

        Args:
            timeout: as for the class.
        """
        super().set_timeout(timeout)
        self._wait = timeout

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        return "torchft-meshplan"

    def abort(self, errored: bool = True) -> None:
        """End the reductions under way, and destroy the groups of this quorum.

        Args:
            errored: whether torchft logs it as an error.
        """
        super().abort(errored)
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def shutdown(self) -> None:
        """Destroy the groups of this quorum, without waiting for the other replicas."""
        self.abort(errored=False)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        if not dist.is_initialized():
            raise BackendError(
                "torchft's replica group has no default group; call init_process_group before the "
                "first quorum, also for a replica group of one rank"
            )
        self._group = create_group_across_jobs(store, rank, world_size, self._wait, self._options)
        return self._group
