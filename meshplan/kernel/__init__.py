"""The contract's reductions, compiled: the same bits as ``meshplan.contract``, faster.

Where the compiled library is not there, or the tensors are not on a CPU, the functions here are
those of ``meshplan.contract``.
"""

from __future__ import annotations

from meshplan.kernel._fold import combine_leaves as combine_leaves
from meshplan.kernel._fold import finish_partials as finish_partials
from meshplan.kernel._fold import reduce_into as reduce_into
from meshplan.kernel._fold import reduce_leaves as reduce_leaves
from meshplan.kernel._library import MAX_PEERS as MAX_PEERS
from meshplan.kernel._library import available as available
from meshplan.kernel._library import why_not as why_not
from meshplan.kernel._memory import Handle as Handle
from meshplan.kernel._memory import SharedMemory as SharedMemory
from meshplan.kernel._memory import host as host
from meshplan.kernel._pages import large_pages as large_pages
from meshplan.kernel._peers import PEER_MODES as PEER_MODES
from meshplan.kernel._peers import Communicator as Communicator
from meshplan.kernel._peers import PeerMode as PeerMode
from meshplan.kernel._peers import one_shot_bytes as one_shot_bytes
from meshplan.kernel._peers import peer_mode as peer_mode
from meshplan.kernel._peers import region_bytes as region_bytes

__all__ = [
    "MAX_PEERS",
    "PEER_MODES",
    "Communicator",
    "Handle",
    "PeerMode",
    "SharedMemory",
    "available",
    "combine_leaves",
    "finish_partials",
    "host",
    "large_pages",
    "one_shot_bytes",
    "peer_mode",
    "reduce_into",
    "reduce_leaves",
    "region_bytes",
    "why_not",
]
