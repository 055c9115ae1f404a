"""Variables of NCCL that do nothing, contradict, or break a job."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.layout import Layout
from meshplan.lint._facts import NO_AGREEMENT, check_environment
from meshplan.lint._finding import Finding, Source
from meshplan.lint._job import Job
from meshplan.lint._rules.environment import NcclVersion

FSDP = Job(Layout.of(ddp=8, fsdp=5, tp=1), Source("train.py", 4), framework="fsdp2")
DTENSOR = Job(Layout.of(ddp=8, fsdp=5), Source("train.py", 5))
SEQUENCE = Job(Layout.of(dp=2, tp=8), Source("train.py", 6), sequence_parallel=True)
# What vLLM and torchtitan set for batch invariance.
PROFILE = {
    "NCCL_LAUNCH_MODE": "GROUP",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "allreduce:tree",
    "NCCL_NTHREADS": "1",
    "NCCL_SOCKET_NTHREADS": "1",
}
NOW: NcclVersion = (2, 30, 7)
NEXT: NcclVersion = (2, 31, 2)


def check(
    *words: str,
    version: NcclVersion | None = NOW,
    driver: str | None = None,
    jobs: tuple[Job, ...] = (),
) -> tuple[Finding, ...]:
    environ = dict(word.partition("=")[::2] for word in words)
    return check_environment(environ, nccl_version=version, driver=driver, jobs=jobs)


def format_findings(found: tuple[Finding, ...]) -> str:
    return "".join(f"{one.severity} {one.code} {one.message}\n" for one in found) or "nothing\n"


class TestFindings(TestCase):
    def test_variables_without_effect_are_reported(self) -> None:
        found = "".join(
            format_findings(check(*words))
            for words in (
                ["NCCL_P2P_NET_DISABLE=1"],
                ["NCCL_DETERMINISTIC=1"],
                ["NCCL_NTHREADS=1"],
                ["NCCL_NTHREADS=0"],
                ["NCCL_NTHREADS=32"],
                ["NCCL_NTHREADS=1024"],
                ["NCCL_NTHREADS=many"],
                ["NCCL_SOCKET_NTHREADS=1"],
                ["NCCL_LAUNCH_MODE=GROUP"],
                ["NCCL_MAX_NCHANNELS=one"],
                ["NCCL_MIN_NRINGS=1", "NCCL_MIN_NCHANNELS=2"],
                ["NCCL_ALGORITHM=ring", "NCCL_MAX_CHANNELS=1", "NCCL_NVLS_ENABLED=0"],
            )
        )
        self.assertExpectedInline(
            found,
            """\
warning MP301 NCCL_P2P_NET_DISABLE=1 has no effect: NCCL has no such variable, only RCCL has RCCL_P2P_NET_DISABLE; remove it
warning MP301 NCCL_DETERMINISTIC=1 has no effect: NCCL has no such variable; NCCL_ALGO, NCCL_PROTO and the number of channels pin its order; remove it
warning MP301 NCCL_NTHREADS=1 has no effect: a number of threads is a multiple of 32 from 64 to 512, and NCCL uses its maximum, 512; remove it or use NCCL_NTHREADS=64
warning MP301 NCCL_NTHREADS=0 has no effect: a number of threads is a multiple of 32 from 64 to 512, and NCCL uses its default; remove it or use NCCL_NTHREADS=64
warning MP301 NCCL_NTHREADS=32 has no effect: a number of threads is a multiple of 32 from 64 to 512, and NCCL uses 64; remove it or use NCCL_NTHREADS=64
warning MP301 NCCL_NTHREADS=1024 has no effect: a number of threads is a multiple of 32 from 64 to 512, and NCCL uses 512; remove it or use NCCL_NTHREADS=64
warning MP301 NCCL_NTHREADS=many is not an integer, and NCCL reads 0; use an integer
info MP301 NCCL_SOCKET_NTHREADS=1 has no effect on the order of additions: it sets how many CPU threads serve a TCP connection
warning MP301 NCCL_LAUNCH_MODE=GROUP has no effect where each process has one GPU, and none on the order of additions: it is deprecated since NCCL 2.9; remove it
warning MP301 NCCL_MAX_NCHANNELS=one is not an integer, and NCCL reads 0; use an integer
warning MP301 NCCL_MIN_NRINGS=1 has no effect together with NCCL_MIN_NCHANNELS=2; remove it
warning MP301 NCCL_ALGORITHM=ring has no effect: NCCL has no such variable; did you mean NCCL_ALGO?
warning MP301 NCCL_MAX_CHANNELS=1 has no effect: NCCL has no such variable; did you mean NCCL_MAX_NCHANNELS?
warning MP301 NCCL_NVLS_ENABLED=0 has no effect: NCCL has no such variable; did you mean NCCL_NVLS_ENABLE?
""",
        )

    def test_driver_and_nccl_versions_are_checked(self) -> None:
        found = "".join(
            format_findings(check(*words, version=version, driver=driver))
            for words, version, driver in (
                ([], NOW, "550.90.07"),
                ([], (2, 26, 2), "565.57.01"),
                (["NCCL_NVLS_ENABLE=1"], None, "535.104.05"),
                (["NCCL_ALGO=NVLS,ring"], NOW, None),
            )
        )
        self.assertExpectedInline(
            found,
            """\
warning MP302 NVSwitch reductions (NVLS) are on, and their order depends on what was allocated before and differs between hosts with driver 550.90.07; NCCL 2.27 and later add in float32 there, which makes it rarer; set NCCL_NVLS_ENABLE=0, or use driver and fabric manager 550.144.03 or later of 550, or 570 or newer
warning MP302 NVSwitch reductions (NVLS) are on, and their order depends on what was allocated before and differs between hosts with driver 565.57.01; set NCCL_NVLS_ENABLE=0, or use driver and fabric manager 550.144.03 or later of 550, or 570 or newer
warning MP302 NVSwitch reductions (NVLS) are on, and their order depends on what was allocated before and differs between hosts with driver 535.104.05; NCCL 2.27 and later add in float32 there, which makes it rarer; set NCCL_NVLS_ENABLE=0, or use driver and fabric manager 550.144.03 or later of 550, or 570 or newer
info MP302 NVSwitch reductions (NVLS) are on, and their order depends on what was allocated before and differs between hosts with drivers before 550.144.03 and 551 to 569; this driver is unknown; NCCL 2.27 and later add in float32 there, which makes it rarer; set NCCL_NVLS_ENABLE=0, or use driver and fabric manager 550.144.03 or later of 550, or 570 or newer
""",
        )

    def test_unnamed_collectives_are_reported(self) -> None:
        simple = ["NCCL_ALGO=allreduce:tree", "NCCL_PROTO=Simple"]
        one = ["NCCL_ALGO=ring;allreduce:tree", "NCCL_PROTO=Simple"]
        found = "".join(
            format_findings(check(*words, version=version))
            for words, version in (
                (simple, NEXT),
                (simple, None),
                (simple, NOW),
                (simple[:1], NEXT),
                ([simple[0], "NCCL_PROTO=allreduce:Simple;reducescatter:LL"], NEXT),
                (one, NEXT),
            )
        )
        self.assertExpectedInline(
            found,
            """\
error MP303 NCCL_ALGO=allreduce:tree and NCCL_PROTO=Simple: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm left and fail with NCCL 2.31.2; use NCCL_ALGO='ring,tree;allreduce:tree'
warning MP303 NCCL_ALGO=allreduce:tree and NCCL_PROTO=Simple: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm left and fail, if NCCL is 2.31 or newer (its version is unknown); use NCCL_ALGO='ring,tree;allreduce:tree'
nothing
warning MP303 NCCL_ALGO=allreduce:tree: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm, and fail as soon as NCCL_PROTO is set for all with NCCL 2.31.2; use NCCL_ALGO='ring,tree;allreduce:tree'
error MP303 NCCL_ALGO=allreduce:tree and NCCL_PROTO=allreduce:Simple;reducescatter:LL: ReduceScatter has no algorithm left and fails with NCCL 2.31.2; use NCCL_ALGO='ring,tree;allreduce:tree'
nothing
""",
        )

    def test_unpinned_reduce_scatter_is_reported(self) -> None:
        every = (FSDP, DTENSOR, SEQUENCE)
        found = "".join(
            format_findings(check(*words, version=version, jobs=jobs))
            for words, version, jobs in (
                (["NCCL_ALGO=allreduce:tree"], NOW, every),
                (["NCCL_ALGO=allreduce:^NVLS"], None, (FSDP,)),
                (["NCCL_ALGO=allreduce:tree", "NCCL_PROTO=Simple"], NEXT, (SEQUENCE,)),
                (["NCCL_ALGO=Tree"], NOW, (FSDP,)),
            )
        )
        self.assertExpectedInline(
            found,
            """\
error MP304 NCCL_ALGO=allreduce:tree: all-reduce is pinned, and NCCL chooses the algorithm of reduce-scatter, but gradients along fsdp of (ddp=8, fsdp=5, tp=1) need it; pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'
error MP304 NCCL_ALGO=allreduce:tree: all-reduce is pinned, and NCCL chooses the algorithm of reduce-scatter, but activations along tp of (dp=2, tp=8) need it; pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'
warning MP303 NCCL_ALGO=allreduce:^NVLS: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm, and fail as soon as NCCL_PROTO is set for all, if NCCL is 2.31 or newer (its version is unknown); use NCCL_ALGO='ring,tree;allreduce:^NVLS'
error MP304 NCCL_ALGO=allreduce:^NVLS: all-reduce is pinned, and NCCL chooses the algorithm of reduce-scatter, but gradients along fsdp of (ddp=8, fsdp=5, tp=1) need it; pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'
error MP303 NCCL_ALGO=allreduce:tree and NCCL_PROTO=Simple: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm left and fail with NCCL 2.31.2; use NCCL_ALGO='ring,tree;allreduce:tree'
error MP304 NCCL_ALGO=allreduce:tree and NCCL_PROTO=Simple: reduce-scatter has no algorithm left, but activations along tp of (dp=2, tp=8) need it; pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'
error MP304 NCCL_ALGO=Tree: reduce-scatter has no algorithm left, but gradients along fsdp of (ddp=8, fsdp=5, tp=1) need it; pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'
error MP305 NCCL_ALGO=Tree: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm left and fail; allow ring too, e.g. NCCL_ALGO=ring,tree
""",
        )

    def test_contradictions_are_reported(self) -> None:
        found = "".join(
            format_findings(check(*words, version=version))
            for words, version in (
                (["NCCL_ALGO=treee"], NOW),
                (["NCCL_PROTO=simpel"], NOW),
                (["NCCL_ALGO=ring;tree"], None),
                (["NCCL_ALGO=allreduce:tree"], (2, 23, 4)),
                (["NCCL_ALGO=Tree"], NOW),
                (["NCCL_ALGO=Tree"], None),
                (["NCCL_ALGO=^ring"], NOW),
                (["NCCL_ALGO=ring;allreduce:NVLS", "NCCL_NVLS_ENABLE=0"], NOW),
                (["NCCL_ALGO=ring;allreduce:CollnetChain", "NCCL_COLLNET_ENABLE=0"], NOW),
                (["NCCL_ALGO=ring;allreduce:NVLS", "NCCL_PROTO=LL"], NOW),
                (["NCCL_MIN_NCHANNELS=8", "NCCL_MAX_NCHANNELS=4"], NOW),
                (["NCCL_MIN_CTAS=8", "NCCL_MAX_NCHANNELS=4"], NOW),
                (["NCCL_MAX_CTAS=8", "NCCL_MAX_NCHANNELS=4"], NOW),
            )
        )
        self.assertExpectedInline(
            found,
            """\
error MP305 NCCL_ALGO=treee cannot be read: NCCL knows no value 'treee'; did you mean Tree?
error MP305 NCCL_PROTO=simpel cannot be read: NCCL knows no value 'simpel'; did you mean Simple?
error MP305 NCCL_ALGO=ring;tree cannot be read: 'tree' names no collective, which only the first list may; use, for example, allreduce:tree
error MP305 NCCL_ALGO=allreduce:tree is not valid for NCCL 2.23.4: lists for single collectives need NCCL 2.24; use one list for all collectives
error MP305 NCCL_ALGO=Tree: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm left and fail; allow ring too, e.g. NCCL_ALGO=ring,tree
warning MP305 NCCL_ALGO=Tree: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm left and fail, if NCCL is 2.24 or newer (its version is unknown); allow ring too, e.g. NCCL_ALGO=ring,tree
error MP305 NCCL_ALGO=^ring: Broadcast and Reduce have no algorithm left and fail; allow ring too, e.g. NCCL_ALGO=ring,tree
error MP305 NCCL_ALGO=ring;allreduce:NVLS and NCCL_NVLS_ENABLE=0 contradict: NVLS alone may run AllReduce, and NCCL_NVLS_ENABLE=0 disables it; remove one of them
error MP305 NCCL_ALGO=ring;allreduce:CollnetChain and NCCL_COLLNET_ENABLE=0 contradict: CollNetChain alone may run AllReduce, and NCCL_COLLNET_ENABLE=0 disables it; remove one of them
error MP305 NCCL_ALGO=ring;allreduce:NVLS and NCCL_PROTO=LL: AllReduce has no algorithm left and fails; only tree and ring can do without NCCL_PROTO=Simple
error MP305 NCCL_MIN_NCHANNELS=8 and NCCL_MAX_NCHANNELS=4 contradict: at least 8 channels and at most 4; use the same number in both to pin it
error MP305 NCCL_MIN_CTAS=8 and NCCL_MAX_NCHANNELS=4 contradict: at least 8 channels and at most 4; use the same number in both to pin it
warning MP305 NCCL_MAX_NCHANNELS=4 and NCCL_MAX_CTAS=8 are two names of one number, and the smaller wins; set one of them
""",
        )

    def test_settings_of_frameworks_are_checked(self) -> None:
        found = check_environment(PROFILE, nccl_version=None, driver="550.90.07", jobs=[FSDP])
        self.assertExpectedInline(
            format_findings(found),
            """\
warning MP301 NCCL_P2P_NET_DISABLE=1 has no effect: NCCL has no such variable, only RCCL has RCCL_P2P_NET_DISABLE; remove it
warning MP301 NCCL_NTHREADS=1 has no effect: a number of threads is a multiple of 32 from 64 to 512, and NCCL uses its maximum, 512; remove it or use NCCL_NTHREADS=64
info MP301 NCCL_SOCKET_NTHREADS=1 has no effect on the order of additions: it sets how many CPU threads serve a TCP connection
warning MP301 NCCL_LAUNCH_MODE=GROUP has no effect where each process has one GPU, and none on the order of additions: it is deprecated since NCCL 2.9; remove it
warning MP303 NCCL_ALGO=allreduce:tree and NCCL_PROTO=Simple: Broadcast, Reduce, AllGather and ReduceScatter have no algorithm left and fail, if NCCL is 2.31 or newer (its version is unknown); use NCCL_ALGO='ring,tree;allreduce:tree'
error MP304 NCCL_ALGO=allreduce:tree and NCCL_PROTO=Simple: all-reduce is pinned, and NCCL chooses the algorithm of reduce-scatter, but gradients along fsdp of (ddp=8, fsdp=5, tp=1) need it; pin it too, e.g. NCCL_ALGO='ring,tree;allreduce:tree'
""",
        )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME=eth0", "PATH=/bin", "TORCH_NCCL_BLOCKING_WAIT=1"],
        ["NCCL_P2P_NET_DISABLE=", "NCCL_NTHREADS=", "NCCL_ALGO="],
        ["NCCL_NTHREADS=256", "NCCL_LAUNCH_MODE=parallel"],
        ["NCCL_MIN_NCHANNELS=1", "NCCL_MAX_NCHANNELS=1", "NCCL_PROTO=Simple", "NCCL_ALGO=Ring"],
        ["NCCL_MIN_NCHANNELS=4", "NCCL_MIN_CTAS=4", "NCCL_MAX_CTAS=0x10"],
        ["NCCL_ALGO=ring,tree;allreduce:tree", "NCCL_PROTO=Simple"],
        ["NCCL_ALGO=^NVLS,NVLSTree", "NCCL_NVLS_ENABLE=0"],
        ["NCCL_ALGO=ring;allreduce:NVLS,tree", "NCCL_NVLS_ENABLE=0"],
        ["NCCL_VERSION=2.30.7", "NCCL_IBEXT_DISABLE=1", "NCCL_FASTRAK_IFNAME=eth1"],
    ],
)
@pytest.mark.parametrize("version", [NOW, NEXT, None])
def test_valid_environments_have_no_finding(words: list[str], version: NcclVersion | None) -> None:
    assert format_findings(check(*words, version=version, jobs=(FSDP, SEQUENCE))) == "nothing\n"


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ("550.144.03", []),
        ("550.163.01", []),
        ("570.86.15", []),
        ("580", []),
        ("580.65.06\n", []),
        ("550.90.07", ["NCCL_NVLS_ENABLE=0"]),
        ("550.90.07", ["NCCL_ALGO=ring,tree"]),
        ("550.90.07", ["NCCL_ALGO=^NVLS,NVLSTree"]),
        (None, []),
        ("unknown", []),
    ],
)
def test_unaffected_drivers_have_no_finding(driver: str | None, words: list[str]) -> None:
    assert format_findings(check(*words, driver=driver)) == "nothing\n"


def test_versions_before_nvls_have_no_finding() -> None:
    assert format_findings(check(version=(2, 16, 5), driver="535.104.05")) == "nothing\n"


@pytest.mark.parametrize(
    "job",
    [
        DTENSOR,
        Job(Layout.of(ddp=8, fsdp=1), Source("train.py", 1), framework="fsdp2"),
        Job(Layout.of(dp=8, tp=1), Source("train.py", 1), sequence_parallel=True),
        Job(Layout.of(dp=8), Source("train.py", 1), framework="ddp"),
    ],
)
def test_jobs_without_reduce_scatter_have_no_finding(job: Job) -> None:
    assert format_findings(check("NCCL_ALGO=allreduce:tree", jobs=(job,))) == "nothing\n"


def test_one_finding_for_jobs_of_one_mesh() -> None:
    found = check("NCCL_ALGO=allreduce:tree", jobs=(FSDP, FSDP, SEQUENCE))
    assert [one.subject for one in found] == [str(FSDP.layout), str(SEQUENCE.layout)]


def test_source_names_the_variable() -> None:
    (found,) = check("NCCL_NTHREADS=1")
    assert found.source == Source(option="NCCL_NTHREADS=1")
    assert found.data["variables"] == {"NCCL_NTHREADS": "1"}
    (found,) = check("NCCL_ALGO=" + "x\n" * 100)
    assert len(found.source.option) < 80
    assert "\n" not in found.message


def test_limit_of_nccl_variables_is_stated_once() -> None:
    found = check_environment(PROFILE, nccl_version=NOW, driver=None, jobs=[FSDP])
    assert len(found) > 2
    assert [NO_AGREEMENT in one.details for one in found] == [True] + [False] * (len(found) - 1)


_values = st.text(max_size=20) | st.sampled_from(
    ["0", "1", "-1", "0x10", "010", "99999999999999999999", "ring", "allreduce:tree", "^NVLS", "LL"]
)
_names = st.sampled_from([*PROFILE, "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_ALGOO"])


@given(
    st.dictionaries(_names | st.text(max_size=8).map("NCCL_{}".format), _values, max_size=8),
    st.sampled_from([None, NOW, NEXT, (2, 18, 3)]),
    st.none() | st.text(max_size=12) | st.sampled_from(["550.90.07", "1.2"]),
)
def test_any_environment_is_checked(
    environ: dict[str, str], version: NcclVersion | None, driver: str | None
) -> None:
    jobs = [FSDP, DTENSOR, SEQUENCE]
    found = check_environment(environ, nccl_version=version, driver=driver, jobs=jobs)
    assert all("\n" not in one.message for one in found)
    assert found == check_environment(environ, nccl_version=version, driver=driver, jobs=jobs)
