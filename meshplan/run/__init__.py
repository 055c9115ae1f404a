"""A job observed from its start, without a change of its code.

``observe(settings)`` hooks torch in this process. Once a process group exists, each observed
optimizer step leaves digests of the replicas that this rank holds. A thread posts them to rank 0,
which compares them and writes the report. The job itself issues no collective for it, creates no
group, and waits for no rank before its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan.run._settings import RunSettings as RunSettings

if TYPE_CHECKING:
    from meshplan.run._observation import Observation


def observe(settings: RunSettings) -> Observation:
    """Observe this process from now on; a second call returns the first observation.

    Call it before you register a handler of ``atexit`` that calls ``finish``: the observation ends
    its thread in a handler of its own, which then runs later.
    """
    # The command line reads settings without torch.
    from meshplan.run._observation import observe_process

    return observe_process(settings)
