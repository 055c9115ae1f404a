"""Environment profiles of NCCL. Every test leaves the environment as it was."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
from expecttest import TestCase

from meshplan.collectives import (
    NCCL_PROFILES,
    nccl_profile,
)
from meshplan.errors import PolicyError
from meshplan.layout import Layout
from meshplan.lint._facts import check_environment
from meshplan.lint._finding import Source
from meshplan.lint._job import Job
from tests.processes import run_ranks


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No variable of NCCL before a test, and what there was after it."""
    kept = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("NCCL_")}
    yield
    for key in [key for key in os.environ if key.startswith("NCCL_")]:
        del os.environ[key]
    os.environ.update(kept)


def test_profiles_list_their_variables() -> None:
    assert NCCL_PROFILES["ring"].env == {
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_MIN_NCHANNELS": "1",
        "NCCL_MAX_NCHANNELS": "1",
    }
    with pytest.raises(TypeError):
        NCCL_PROFILES["ring"] = NCCL_PROFILES["tree"]  # type: ignore[index]


class TestMessages(TestCase):
    def test_unknown_profile_is_refused(self) -> None:
        with pytest.raises(PolicyError) as error, nccl_profile("fast"):
            pass
        self.assertExpectedInline(
            str(error.value),
            """MP402: no NCCL profile 'fast'; write one of 'ring', 'tree', 'vllm', 'torchtitan', 'sglang', 'megatron'""",
        )

    def test_profile_describes_its_variables(self) -> None:
        self.assertExpectedInline(
            str(NCCL_PROFILES["ring"]),
            """\
ring (RL-Kernel, pull request 181): in one group, the same bits for the same inputs, run to run on one placement; never the same bits in groups that are placed on nodes differently
  NCCL_ALGO=Ring: all collectives go round a ring; the place of an element in the message decides its order
  NCCL_PROTO=Simple: one protocol for all sizes, hence one size of chunks
  NCCL_MIN_NCHANNELS=1: one channel for every size of message: the size decides nothing
  NCCL_MAX_NCHANNELS=1: one channel for every size of message: the size decides nothing""",
        )
        self.assertExpectedInline(
            str(NCCL_PROFILES["vllm"]),
            """\
vllm (vLLM, batch_invariant.py, pull request 58179, for what NCCL reduces; its tensor-parallel all-reduce is a kernel of its own and reads no variable): in one group, an element's all-reduce does not depend on the size of the message or its place in it; never the same bits in groups that are placed on nodes differently
  NCCL_LAUNCH_MODE=GROUP [without effect]: none where each process has one GPU; deprecated since NCCL 2.9
  NCCL_COLLNET_ENABLE=0: no reduction in the switches of the network, whose order is undocumented
  NCCL_NVLS_ENABLE=0: no reduction in NVSwitch, whose order is undocumented
  NCCL_P2P_NET_DISABLE=1 [without effect]: none: NCCL has no such variable, only RCCL has RCCL_P2P_NET_DISABLE
  NCCL_MIN_NCHANNELS=1: one channel for every size of message: the size decides nothing
  NCCL_MAX_NCHANNELS=1: one channel for every size of message: the size decides nothing
  NCCL_PROTO=Simple: one protocol for all sizes, hence one size of chunks
  NCCL_ALGO=ring,tree;allreduce:tree: all-reduce goes up and down one tree; the others, which are named since NCCL 2.31 leaves those without an algorithm that are not, take ring or tree
  NCCL_NTHREADS=1 [without effect]: none that is meant: not a multiple of 32, so NCCL takes its maximum
  NCCL_SOCKET_NTHREADS=1 [without effect]: none on the order: CPU threads of TCP connections""",
        )


@pytest.mark.processes
def test_late_profile_warns() -> None:
    def ranks(rank: int) -> list[tuple[str, str]]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with nccl_profile("tree"):
                pass
        return [(one.category.__name__, os.path.basename(one.filename)) for one in found]

    assert run_ranks(ranks, 1) == [[("RuntimeWarning", "test_nccl_profiles.py")]]


@pytest.mark.parametrize("name", list(NCCL_PROFILES))
def test_environment_is_restored_exactly(name: str) -> None:
    os.environ["NCCL_ALGO"] = "NVLS"
    os.environ["NCCL_DEBUG"] = "INFO"
    before = dict(os.environ)
    with nccl_profile(name) as profile:
        assert os.environ.items() >= profile.env.items()
        assert os.environ["NCCL_DEBUG"] == "INFO"
        os.environ["NCCL_ALGO"] = "LL128"
    assert dict(os.environ) == before


def test_environment_is_restored_after_an_error() -> None:
    before = dict(os.environ)

    def fail() -> None:
        with nccl_profile("tree"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(os.environ) == before


def test_nested_profiles_are_restored() -> None:
    with nccl_profile("ring"), nccl_profile("sglang"):
        assert os.environ["NCCL_MAX_NCHANNELS"] == "8"
        assert os.environ["NCCL_PROTO"] == "Simple"
    assert not any(key in os.environ for key in NCCL_PROFILES["ring"].env)


@pytest.mark.parametrize("name", list(NCCL_PROFILES))
@pytest.mark.parametrize("version", [(2, 27, 3), (2, 30, 7), (2, 31, 0)])
def test_linter_agrees_with_the_profile(name: str, version: tuple[int, int, int]) -> None:
    """Profile and linter name the same variables without effect, and no finding is an error."""
    profile = NCCL_PROFILES[name]
    job = Job(Layout.of(fsdp=8), Source(), framework="fsdp2")
    found = check_environment(profile.env, nccl_version=version, driver="580.65.06", jobs=[job])
    flagged = {f.source.option.partition("=")[0] for f in found if f.code == "MP301"}
    assert flagged == set(profile.without_effect)
    assert not {f.code for f in found} & {"MP302", "MP303", "MP305"}
    # A reduce-scatter that is not pinned is what all-reduce profiles leave open, or nothing is.
    assert {f.code for f in found} <= {"MP301", "MP304"}


def test_profile_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="meshplan"), nccl_profile("ring"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "NCCL profile ring: NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_MIN_NCHANNELS=1 "
        "NCCL_MAX_NCHANNELS=1"
    ]
