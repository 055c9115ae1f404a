"""Environment profiles of NCCL, as frameworks set them: each key with its effect and its source.

A profile affects one group: with one algorithm, one protocol and a fixed number of
channels, NCCL adds an element in an order that does not depend on the size of the message, or on
its place in it. No variable of NCCL makes groups agree that lie differently on nodes; that is what
the contract is for. NCCL reads these variables when a communicator is made.

Effects are those of NCCL 2.30.7 (src/graph/tuning.cc, src/enqueue.cc, src/init.cc) and 2.31.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch.distributed as dist

from meshplan.errors import PolicyError

_LOG = logging.getLogger("meshplan")

_RING = "all collectives go round a ring; the place of an element in the message decides its order"
_TREE = (
    "all-reduce goes up and down one tree; the others, which are named since NCCL 2.31 leaves "
    "those without an algorithm that are not, take ring or tree"
)
_SIMPLE = "one protocol for all sizes, hence one size of chunks"
_CHANNELS = "as many channels for every size of message, so that the size decides nothing"
_ONE_CHANNEL = "one channel for every size of message: the size decides nothing"
_COLLNET = "no reduction in the switches of the network, whose order is undocumented"
_NVLS = "no reduction in NVSwitch, whose order is undocumented"
_LAUNCH = "none where each process has one GPU; deprecated since NCCL 2.9"
_P2P_NET = "none: NCCL has no such variable, only RCCL has RCCL_P2P_NET_DISABLE"
_THREADS = "none that is meant: not a multiple of 32, so NCCL takes its maximum"
_SOCKET = "none on the order: CPU threads of TCP connections"


@dataclass(frozen=True, slots=True)
class NcclSetting:
    """One variable of a profile, with ``key`` and ``value`` as in the environment."""

    key: str
    value: str
    effect: str  # on the order of additions
    works: bool = True  # whether it has its intended effect; frameworks also set keys without one


@dataclass(frozen=True, slots=True)
class NcclProfile:
    """Variables that belong together."""

    name: str  # as `nccl_profile` accepts it
    settings: tuple[NcclSetting, ...]
    source: str  # the project or vendor that sets them so
    gives: str  # the property that users may rely on

    @property
    def env(self) -> dict[str, str]:
        """The variables and their values."""
        return {setting.key: setting.value for setting in self.settings}

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Keys that do not do what they are set for."""
        return tuple(setting.key for setting in self.settings if not setting.works)

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.source}): {self.gives}"]
        for setting in self.settings:
            flag = "" if setting.works else " [without effect]"
            lines.append(f"  {setting.key}={setting.value}{flag}: {setting.effect}")
        return "\n".join(lines)


_ONE_GROUP = (
    "in one group, the same bits for the same inputs, run to run on one placement; never the same "
    "bits in groups that are placed on nodes differently"
)
_ANY_SIZE = (
    "in one group, an element's all-reduce does not depend on the size of the message or its place "
    "in it; never the same bits in groups that are placed on nodes differently"
)
_BATCH_INVARIANT = (
    NcclSetting("NCCL_LAUNCH_MODE", "GROUP", _LAUNCH, works=False),
    NcclSetting("NCCL_COLLNET_ENABLE", "0", _COLLNET),
    NcclSetting("NCCL_NVLS_ENABLE", "0", _NVLS),
    NcclSetting("NCCL_P2P_NET_DISABLE", "1", _P2P_NET, works=False),
    NcclSetting("NCCL_MIN_NCHANNELS", "1", _ONE_CHANNEL),
    NcclSetting("NCCL_MAX_NCHANNELS", "1", _ONE_CHANNEL),
    NcclSetting("NCCL_PROTO", "Simple", _SIMPLE),
    NcclSetting("NCCL_ALGO", "ring,tree;allreduce:tree", _TREE),
    NcclSetting("NCCL_NTHREADS", "1", _THREADS, works=False),
    NcclSetting("NCCL_SOCKET_NTHREADS", "1", _SOCKET, works=False),
)

_ALL = (
    NcclProfile(
        "ring",
        (
            NcclSetting("NCCL_ALGO", "Ring", _RING),
            NcclSetting("NCCL_PROTO", "Simple", _SIMPLE),
            NcclSetting("NCCL_MIN_NCHANNELS", "1", _ONE_CHANNEL),
            NcclSetting("NCCL_MAX_NCHANNELS", "1", _ONE_CHANNEL),
        ),
        "RL-Kernel, pull request 181",
        _ONE_GROUP,
    ),
    NcclProfile(
        "tree",
        tuple(setting for setting in _BATCH_INVARIANT if setting.works),
        "what has an effect in the profile of vLLM",
        _ANY_SIZE,
    ),
    NcclProfile(
        "vllm",
        _BATCH_INVARIANT,
        "vLLM, batch_invariant.py, pull request 58179, for what NCCL reduces; its tensor-parallel "
        "all-reduce is a kernel of its own and reads no variable",
        _ANY_SIZE,
    ),
    NcclProfile(
        "torchtitan",
        _BATCH_INVARIANT,
        "torchtitan, set_batch_invariance, pull request 2994; its list of algorithms names "
        "all-reduce only",
        _ANY_SIZE,
    ),
    NcclProfile(
        "sglang",
        (
            NcclSetting("NCCL_ALGO", "ring,tree;allreduce:tree", _TREE),
            NcclSetting("NCCL_MIN_NCHANNELS", "8", _CHANNELS),
            NcclSetting("NCCL_MAX_NCHANNELS", "8", _CHANNELS),
        ),
        "SGLang, pull requests 10930 and 34159",
        _ONE_GROUP,
    ),
    NcclProfile(
        "megatron",
        (NcclSetting("NCCL_ALGO", "Ring", _RING),),
        "Megatron-LM, --deterministic-mode",
        _ONE_GROUP,
    ),
)
NCCL_PROFILES: Mapping[str, NcclProfile] = MappingProxyType({one.name: one for one in _ALL})
"""All profiles by name, read-only."""


@contextmanager
def nccl_profile(name: str) -> Iterator[NcclProfile]:
    """Set the variables of a profile for a ``with`` block; then all are as they were before.

    Make the process groups inside of the block: NCCL reads variables when a communicator is made.
    For the whole process, not for one thread.

    Args:
        name: of one of ``NCCL_PROFILES``; ``print`` one to see its variables and their effects.

    Raises:
        PolicyError: no such profile.

    Warns:
        RuntimeWarning: a process group exists already.
    """
    if name not in NCCL_PROFILES:
        words = ", ".join(map(repr, NCCL_PROFILES))
        raise PolicyError(f"no NCCL profile {name!r}; write one of {words}")
    profile = NCCL_PROFILES[name]
    if dist.is_available() and dist.is_initialized():
        warnings.warn(
            "a process group exists already, and its communicators may have read the variables of "
            "NCCL; set them before init_process_group",
            RuntimeWarning,
            stacklevel=3,
        )
    previous = {key: os.environ.get(key) for key in profile.env}
    os.environ.update(profile.env)
    shown = " ".join(f"{key}={value}" for key, value in profile.env.items())
    _LOG.info("NCCL profile %s: %s", name, shown)
    try:
        yield profile
    finally:
        for key, value in previous.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
