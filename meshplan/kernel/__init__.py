"""The contract's reductions, compiled: the same bits as ``meshplan.definition``, faster.

Digests of tensors and reductions over ranks that reach each other's memory are here too. Without
the compiled library, or for tensors that are not on a CPU, ``meshplan.definition`` computes.
"""

from __future__ import annotations

from meshplan.kernel._communicator import Arithmetic as Arithmetic
from meshplan.kernel._communicator import CallKey as CallKey
from meshplan.kernel._communicator import Communicator as Communicator
from meshplan.kernel._device_code import CompileError as CompileError
from meshplan.kernel._device_code import Device as Device
from meshplan.kernel._device_code import device_of as device_of
from meshplan.kernel._device_peers import (
    DeviceCommunicator as DeviceCommunicator,
)
from meshplan.kernel._device_peers import TimedPaths as TimedPaths
from meshplan.kernel._device_peers import check as check
from meshplan.kernel._device_peers import (
    device_region_bytes as device_region_bytes,
)
from meshplan.kernel._device_peers import register_check as register_check
from meshplan.kernel._device_peers import timed_paths as timed_paths
from meshplan.kernel._digest import DIGEST_VERSION as DIGEST_VERSION
from meshplan.kernel._digest import ROW_WORDS as ROW_WORDS
from meshplan.kernel._digest import byte_pieces as byte_pieces
from meshplan.kernel._digest import carry as carry
from meshplan.kernel._digest import digest_table as digest_table
from meshplan.kernel._digest import digest_words as digest_words
from meshplan.kernel._digest import divide_row as divide_row
from meshplan.kernel._digest import integers as integers
from meshplan.kernel._digest import mixed as mixed
from meshplan.kernel._digest import sum_squares as sum_squares
from meshplan.kernel._digest import value_of_squares as value_of_squares
from meshplan.kernel._driver import DriverError as DriverError
from meshplan.kernel._driver import DriverKind as DriverKind
from meshplan.kernel._host_peers import HostCommunicator as HostCommunicator
from meshplan.kernel._host_peers import MemoryHandle as MemoryHandle
from meshplan.kernel._host_peers import SharedMemory as SharedMemory
from meshplan.kernel._host_peers import host as host
from meshplan.kernel._host_peers import large_pages as large_pages
from meshplan.kernel._host_peers import region_bytes as region_bytes
from meshplan.kernel._library import MAX_BLOCKS as MAX_BLOCKS
from meshplan.kernel._library import MAX_PEERS as MAX_PEERS
from meshplan.kernel._library import available as available
from meshplan.kernel._library import library as library
from meshplan.kernel._library import why_not as why_not
from meshplan.kernel._operators import OPERATORS as OPERATORS
from meshplan.kernel._operators import combine_leaves as combine_leaves
from meshplan.kernel._operators import finish_partials as finish_partials
from meshplan.kernel._operators import reduce_into as reduce_into
from meshplan.kernel._operators import reduce_leaves as reduce_leaves
from meshplan.kernel._scaled_integers import MAX_RANKS as MAX_RANKS
from meshplan.kernel._scaled_integers import find_codes as find_codes
from meshplan.kernel._scaled_integers import from_integers as from_integers
from meshplan.kernel._scaled_integers import to_integers as to_integers
from meshplan.kernel._scaled_integers import words_of as words_of
from meshplan.kernel._transports import Ipc as Ipc
from meshplan.kernel._transports import Regions as Regions
from meshplan.kernel._transports import Symmetric as Symmetric
from meshplan.kernel._transports import Transport as Transport
from meshplan.kernel._transports import TransportError as TransportError
