"""The contract's reductions, compiled: the same bits as ``meshplan.definition``, faster.

Digests of tensors and reductions over ranks that reach each other's memory are here too. Without
the compiled library, or for tensors that are not on a CPU, ``meshplan.definition`` computes.
"""

from __future__ import annotations

from meshplan.kernel._communicator import Arithmetic, CallKey, Communicator
from meshplan.kernel._device_code import CompileError, Device, device_of
from meshplan.kernel._device_peers import (
    DeviceCommunicator,
    TimedPaths,
    check,
    device_region_bytes,
    register_check,
    timed_paths,
)
from meshplan.kernel._digest import (
    DIGEST_VERSION,
    ROW_WORDS,
    byte_pieces,
    carry,
    digest_table,
    digest_words,
    divide_row,
    hash_words,
    integers,
    land,
    mixed,
    sum_squares,
    value_of_squares,
)
from meshplan.kernel._driver import DriverError, DriverKind
from meshplan.kernel._host_peers import (
    HostCommunicator,
    MemoryHandle,
    SharedMemory,
    host,
    large_pages,
    region_bytes,
)
from meshplan.kernel._library import MAX_BLOCKS, MAX_PEERS, available, library, why_not
from meshplan.kernel._operators import (
    OPERATORS,
    combine_leaves,
    finish_partials,
    reduce_into,
    reduce_leaves,
)
from meshplan.kernel._scaled_integers import (
    MAX_RANKS,
    find_codes,
    from_integers,
    to_integers,
    words_of,
)
from meshplan.kernel._transports import Ipc, Regions, Symmetric, Transport, TransportError
