"""The process-group backend ``meshplan``: every reduction of a job under the contract.

Importing it registers the backend, for ``init_process_group("meshplan")``.
"""

from __future__ import annotations

from meshplan.backend._group import create_group as create_group
from meshplan.backend._group import (
    create_group_across_jobs as create_group_across_jobs,
)
from meshplan.backend._group import register as register
from meshplan.backend._options import NAME as NAME
from meshplan.backend._options import BackendOptions as BackendOptions

register()
