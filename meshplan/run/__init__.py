"""A job observed from its start, without a change of its code.

``observe(settings)`` hooks torch in this process. After observed optimizer steps digests of
replicas go to rank 0, which compares them and writes the report. The job issues no collective
for it, creates no group, and waits for no rank before its end.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from meshplan.errors import ReplicaInputError
from meshplan.run._settings import RunSettings as RunSettings

if TYPE_CHECKING:
    from torch import Tensor


def log_value(name: str, value: Tensor | float) -> None:
    """Add a value, such as the loss, to the next link of the certificate of ``meshplan run``.

    A DTensor counts as a whole; for shards that are no DTensor, pass
    ``DTensor.from_local(shard, mesh, placements)``. Any other value must have the same bits on all
    ranks that log it, else it is listed as not certified. Without ``--certify`` nothing happens.
    The value is copied, and no rank waits.

    Args:
        name: names the value in the certificate, the same on all ranks.
        value: a tensor of any shape and dtype, or a number, which counts as float64.

    Raises:
        ReplicaInputError: ``value`` is neither a tensor nor a number.
    """
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if not is_tensor and not isinstance(value, int | float):
        raise ReplicaInputError(
            f"{name} is of type {type(value).__name__}, and only tensors and numbers can be "
            "certified; pass one of these"
        )
    if (module := sys.modules.get("meshplan.run._observation")) is not None:
        module.log_value(name, value)
