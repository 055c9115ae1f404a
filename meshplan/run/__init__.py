"""A job observed from its start, without a change of its code.

``observe(settings)`` hooks torch in this process. Once a process group exists, each observed
optimizer step leaves digests of the replicas that this rank holds. A thread posts them to rank 0,
which compares them and writes the report. The job itself issues no collective for it, creates no
group, and waits for no rank before its end.
"""

from __future__ import annotations

from meshplan.run._settings import RunSettings as RunSettings
from meshplan.run._values import log_value as log_value
