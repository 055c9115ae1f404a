"""The comparison of replicas every so many steps of a training loop."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import PolicyError
from meshplan.replicas._divergence import ReplicaReport
from meshplan.replicas._tensors import TensorSource
from meshplan.replicas._verify import verify_replicas

__all__ = ["ReplicaCheck"]


class ReplicaCheck:
    """Calls ``verify_replicas`` at every ``every``-th step.

    In a loop: ``check = ReplicaCheck(model, mesh, every=100)`` and then, on every rank of the mesh,
    ``check(step)`` or ``check()`` after each step; or once
    ``optimizer.register_step_post_hook(check.hook)``.

    Args:
        source, mesh, grads, details: as for ``verify_replicas``; ``source`` is looked at anew each
            time, so that a module may change.
        every: steps from one comparison to the next.

    Attributes:
        step: the number of the last step; set it after loading a checkpoint.
        last: the last report; ``None`` before the first, and on ranks outside the mesh.

    Raises:
        PolicyError: ``every`` is less than 1.
    """

    def __init__(
        self,
        source: TensorSource,
        mesh: DeviceMesh | None = None,
        *,
        every: int = 100,
        grads: bool = False,
        details: int = 4,
    ) -> None:
        if every < 1:
            raise PolicyError(
                f"replicas cannot be compared every {every} steps; write every=1 for each step, or "
                "a larger number"
            )
        self.source = source
        self.mesh = mesh
        self.every = every
        self.grads = grads
        self.details = details
        self.step = 0
        self.last: ReplicaReport | None = None

    def __call__(self, step: int | None = None) -> ReplicaReport | None:
        """Compare, if it is time.

        Args:
            step: number of the step that was made; one more than the last if ``None``.

        Returns:
            The report, if this rank compared now; else ``None``.

        Raises:
            ReplicaDivergenceError and others: as ``verify_replicas``. The next step may be checked
                again.
        """
        self.step = self.step + 1 if step is None else step
        if self.step % self.every:
            return None
        self.last = verify_replicas(
            self.source, self.mesh, grads=self.grads, step=self.step, details=self.details
        )
        return self.last

    def hook(self, *_: object) -> None:
        """As ``check()``; for ``torch.optim.Optimizer.register_step_post_hook``.

        Args:
            *_: what the optimizer passes; not looked at.

        Raises:
            ReplicaDivergenceError: as ``check()``.
        """
        self()
