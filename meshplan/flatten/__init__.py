"""Process groups for steps: found or created, members only, kept until shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan._lazy_imports import make_lazy
from meshplan.flatten._agree import first_use as first_use
from meshplan.flatten._create import Sharing as Sharing
from meshplan.flatten._create import (
    default_timeout as default_timeout,
)
from meshplan.flatten._create import is_across_jobs as is_across_jobs
from meshplan.flatten._create import keep_store as keep_store
from meshplan.flatten._create import rank_in as rank_in
from meshplan.flatten._create import this_rank as this_rank
from meshplan.flatten._group_table import Block as Block
from meshplan.flatten._group_table import Group as Group
from meshplan.flatten._group_table import GroupHandle as GroupHandle
from meshplan.flatten._group_table import find_axis as find_axis
from meshplan.flatten._groups import GroupRegistry as GroupRegistry
from meshplan.flatten._groups import registry as registry
from meshplan.flatten._join import HOSTS as HOSTS
from meshplan.flatten._join import Hosts as Hosts
from meshplan.flatten._missing import RollCall as RollCall
from meshplan.flatten._missing import find_missing as find_missing
from meshplan.flatten._missing import format_failure as format_failure
from meshplan.flatten._threads import (
    is_worker_thread as is_worker_thread,
)

# The topology needs numpy, which a machine with a GPU may lack.
if TYPE_CHECKING:
    from meshplan.flatten._discover import discover as discover

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
