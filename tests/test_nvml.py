"""Facts of a GPU from NVML: the real binding, an emulated library."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from meshplan.topology import _locate
from meshplan.topology._locate import Fabric, Gpu
from tests.emulated_nvml import ROOT, TO_SWITCH, ask, bus_of, gpus, switched
from tests.programs import capture

pytest.importorskip("pynvml")

RACK = "0123456789abcdef0123456789abcdef"
# All four faults told, none there: what a healthy GB200 says.
HEALTHY = 0xAA


def gpu(
    lines: list[str], environ: dict[str, str] | None = None, index: int = 0, uuid: str = ""
) -> Gpu:
    found = ask(lines, environ, index, uuid)
    assert isinstance(found, Gpu), found
    return found


def test_gpus_on_a_switch_are_one_domain() -> None:
    assert gpu(switched(8), index=3) == Gpu(
        id="GPU-00000003-aaaa-bbbb",
        bus="0000:3b:00.0",
        vendor="nvidia",
        model="NVIDIA_H100",
        links=18,
        switch=True,
        on_host=8,
        domain=8,
    )


def test_linked_pairs_have_peers() -> None:
    pairs = [f"link {i} {k} 0 1 0 {bus_of(i ^ 1)}" for i in range(4) for k in range(12)]
    found = gpu(gpus(4) + pairs, index=2)
    assert (found.links, found.peers, found.switch, found.domain) == (
        12,
        ("0000:3b:00.0",),
        False,
        None,
    )


def test_unreadable_link_does_not_hide_the_others() -> None:
    lines = switched(2)
    lines += ["link 0 5 999 0 0 x", "link 0 7 -999 1 0 x"]  # the state; the other end
    found = gpu(lines)
    assert (found.links, found.unread, found.switch, found.links_known) == (17, (5, 7), True, True)


def test_unreadable_peer_link_leaves_peers_unknown() -> None:
    lines = [*gpus(2), f"link 0 0 0 1 0 {bus_of(1)}", "link 0 1 999 0 0 x"]
    found = gpu(lines)
    assert (found.peers, found.unread, found.links_known) == (("0000:1b:00.0",), (1,), False)


def test_all_unreadable_links_leave_links_unknown() -> None:
    found = gpu(gpus(1) + [f"link 0 {k} 15 0 0 x" for k in range(18)])
    assert (found.links, len(found.unread), found.links_known) == (None, 18, False)


def test_missing_links_are_read() -> None:
    found = gpu(gpus(2))
    assert (found.links, found.unread, found.domain, found.links_known) == (0, (), 1, True)


def test_down_links_do_not_count() -> None:
    down = [f"link 0 {k} 0 0 2 x" for k in range(4)]
    assert gpu(switched(2) + down).links == 14


def test_more_links_than_any_gpu_has_today() -> None:
    lines = gpus(1) + [f"link 0 {k} 0 {TO_SWITCH}" for k in range(36)]
    assert gpu(lines).links == 36


@pytest.mark.parametrize("kind", [255, "unsupported"])
def test_in_a_virtual_machine_the_switch_is_hidden(kind: object) -> None:
    hidden = f"0 1 {kind} ffffffff:ff:ff.0" if kind == 255 else "-3 1 0 ffffffff:ff:ff.0"
    found = gpu([*gpus(2), f"link 0 0 {hidden}"])
    assert (found.switch, found.peers) == (True, ())


def test_link_of_unknown_kind_to_a_local_gpu_is_a_peer() -> None:
    found = gpu([*gpus(2), f"link 0 0 0 1 255 {bus_of(1)}"])
    assert (found.switch, found.peers) == (False, ("0000:1b:00.0",))


def test_links_to_cpus_and_itself_are_no_peers() -> None:
    found = gpu([*gpus(2), "link 0 0 0 1 1 x", f"link 0 1 0 1 0 {bus_of(0)}"])
    assert (found.links, found.peers, found.switch) == (2, (), False)


@pytest.mark.parametrize("version", [1, 2])
def test_fabric_is_read_by_both_calls(version: int) -> None:
    """With the versioned call, and with the older one of older drivers."""
    found = gpu([*switched(4), f"fabric 0 {version} {RACK} 2786 3 0 {HEALTHY}"])
    health = HEALTHY if version == 2 else None
    assert found.fabric == Fabric(RACK, 2786, 3, 0, health)
    assert found.fabric.usable
    assert found.fabric.faults == ()


def test_missing_or_incomplete_fabric_is_unknown() -> None:
    assert gpu(switched(1)).fabric is None
    assert gpu([*switched(1), f"fabric 0 2 {'0' * 32} 0 0 0 0"]).fabric is None
    for state, cluster in ((1, RACK), (2, RACK), (3, "0" * 32)):
        fabric = gpu([*switched(1), f"fabric 0 2 {cluster} 0 {state} 0 0"]).fabric
        assert fabric is not None
        assert not fabric.usable


def test_nccl_variables_override_the_fabric() -> None:
    lines = [*switched(1), f"fabric 0 2 {RACK} 7 3 0 0", "rack 0 1820325190"]

    def fabric(**environ: str) -> tuple[str, int]:
        found = gpu(lines, environ).fabric
        assert found is not None
        return found.cluster, found.clique

    assert fabric(NCCL_MNNVL_UUID="0x11") == ("1100000000000000" * 2, 7)
    assert fabric(NCCL_MNNVL_CLIQUE_ID="3") == (RACK, 3)
    assert fabric(NCCL_MNNVL_CLIQUE_ID="-1", NCCL_MNNVL_UUID="none") == (RACK, 7)
    by_rack = fabric(NCCL_MNNVL_CLIQUE_ID="-2")
    assert by_rack != (RACK, 7)
    lines[-1] = "rack 0 1820325191"
    assert fabric(NCCL_MNNVL_CLIQUE_ID="-2") != by_rack
    lines.pop()  # NVML does not report the rack
    assert fabric(NCCL_MNNVL_CLIQUE_ID="-2") == (RACK, 7)


@pytest.mark.parametrize(
    ("visible", "index", "found"),
    [
        ("2,3", 0, 2),
        ("3,2", 1, 2),
        ("GPU-00000001", 0, 1),
        ("gpu-00000003-AAAA-bbbb,GPU-00000001", 1, 1),
        ("0,1,-1,2", 2, "no GPU 2 among 2 GPUs that are visible here, with CUDA_VISIBLE_DEVICES=0,1,-1,2"),
        ("", 0, "no GPU 0 among 0 GPUs that are visible here, with CUDA_VISIBLE_DEVICES="),
        ("1,1", 0, "no GPU 0 among 0 GPUs that are visible here, with CUDA_VISIBLE_DEVICES=1,1"),
        ("GPU-0000000", 0, "no GPU 0 among 0 GPUs that are visible here, with CUDA_VISIBLE_DEVICES=GPU-0000000"),
        ("7", 0, "no GPU 0 among 0 GPUs that are visible here, with CUDA_VISIBLE_DEVICES=7"),
        ("1", 3, 1),  # one GPU for each process
    ],
)  # fmt: skip
def test_cuda_visible_devices_selects_the_gpu(visible: str, index: int, found: object) -> None:
    answer = ask(switched(4), {"CUDA_VISIBLE_DEVICES": visible}, index)
    expected = f"GPU-{found:08x}-aaaa-bbbb" if isinstance(found, int) else found
    assert (answer.id if isinstance(answer, Gpu) else answer) == expected


def test_gpus_that_differ_have_no_known_order() -> None:
    lines = [*gpus(1), "gpu GPU-ffff 00000000:FF:00.0 OTHER 0"]
    assert ask(lines) == (
        "GPUs of this host differ, so that their order is not known without CUDA: set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )
    assert gpu(lines, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1).model == "OTHER"
    assert gpu(lines, {"CUDA_VISIBLE_DEVICES": "GPU-ffff"}).model == "OTHER"
    # CUDA was queried.
    assert gpu(lines, index=0, uuid="ffff").model == "OTHER"


def test_partitions_of_a_gpu_are_separate() -> None:
    lines = [*gpus(2, mig=1), "part MIG-1234 1", f"link 1 0 0 {TO_SWITCH}"]
    found = gpu(lines, {"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    assert (found.id, found.bus, found.links, found.links_known) == (
        "MIG-1234",
        "0000:1b:00.0",
        0,
        True,
    )
    assert gpu(lines, uuid="1234").id == "MIG-1234"
    assert ask(lines) == (
        "GPU 0 is split into parts (MIG): name the part in CUDA_VISIBLE_DEVICES=MIG-..."
    )
    assert ask(lines, {"CUDA_VISIBLE_DEVICES": "MIG-9"}) == "NVML has no device MIG-9"


def test_lost_gpu_keeps_the_numbers_of_the_others() -> None:
    lines = ["lost", *gpus(2)]
    assert ask(lines, index=0) == "the driver has lost GPU 0"
    assert gpu(lines, index=1).id == "GPU-00000000-aaaa-bbbb"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (18, "NVML: RM has detected an NVML/RM version mismatch."),
        (9, "NVML: Driver Not Loaded"),
        (4, "NVML: Insufficient Permissions"),
    ],
)
def test_failed_driver_is_reported(code: int, reason: str) -> None:
    assert ask([f"init {code}"]) == reason


def test_missing_gpu_is_reported() -> None:
    assert ask([]) == "NVML shows no GPU"


def test_missing_driver_library_is_reported() -> None:
    script = "from meshplan.topology._locate import find_nvidia_gpu; print(find_nvidia_gpu({}, 0))"
    done = capture([sys.executable, "-c", script], cwd=ROOT)
    # A machine with NVIDIA's driver answers.
    assert "NVML Shared Library Not Found" in done.stdout or done.stdout.startswith("Gpu(")


def test_missing_binding_is_reported() -> None:
    with mock.patch.dict(sys.modules, {"pynvml": None}):
        assert (
            _locate.find_nvidia_gpu({}, 0)
            == "nvidia-ml-py is not installed: pip install 'nvidia-ml-py>=13'"
        )


def test_foreign_binding_is_reported() -> None:
    with mock.patch.dict(sys.modules, {"pynvml": mock.Mock(spec=["nvmlInit", "nvmlShutdown"])}):
        assert str(_locate.find_nvidia_gpu({}, 0)).startswith("NVML: Mock object has no attribute")
