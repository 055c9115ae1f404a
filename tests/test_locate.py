"""What a process finds out about its own place."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from meshplan.topology import _locate
from meshplan.topology._locate import Gpu, RankLocation, _read_number, locate_rank
from tests.emulated_nvml import in_process, switched
from tests.test_kfd import mi300x

NVML_IS_SILENT = mock.patch.object(
    _locate, "find_nvidia_gpu", return_value="NVML: Driver Not Loaded"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with a boot id and nothing else."""
    boot = tmp_path / "proc/sys/kernel/random"
    boot.mkdir(parents=True)
    boot.joinpath("boot_id").write_text("0123-4567\n")
    return tmp_path


def test_host_without_gpus_has_a_location(root: Path) -> None:
    name = socket.gethostname()
    with NVML_IS_SILENT:
        found = locate_rank({"LOCAL_RANK": "3", "GROUP_RANK": "7"}, root)
    assert found == RankLocation(
        host=f"{name} 0123-4567",
        name=name,
        machine="0123-4567",
        agent=7,
        reason="this host shows no GPU",
    )


def test_host_name_may_be_given(root: Path) -> None:
    with NVML_IS_SILENT:
        named = locate_rank({"MESHPLAN_HOST": "a", "NCCL_HOSTID": "b"}, root)
        as_nccl = locate_rank({"NCCL_HOSTID": "b"}, root)
        neither = locate_rank({"MESHPLAN_HOST": "", "NCCL_HOSTID": ""}, root)
        no_boot_id = locate_rank({}, root / "nowhere")
    assert (named.host, named.name, named.machine) == ("a", "a", "")
    assert (as_nccl.host, as_nccl.machine) == ("b", "")
    assert neither.host.endswith(" 0123-4567")
    assert no_boot_id.host == socket.gethostname()


@pytest.mark.parametrize("text", ["", "-1", "x", "1e3", "²", "9" * 20])
def test_invalid_variables_are_ignored(text: str) -> None:
    environ = {"LOCAL_RANK": text, "SLURM_LOCALID": "2"}
    assert _read_number(environ, "LOCAL_RANK", "SLURM_LOCALID") == 2


def test_failure_of_a_present_driver_is_reported(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/nvidiactl").touch()
    with NVML_IS_SILENT:
        assert locate_rank({}, root).reason == "NVML: Driver Not Loaded"


def test_amd_gpu_is_located(root: Path) -> None:
    mi300x(root / "sys/class/kfd/kfd/topology")
    with NVML_IS_SILENT:
        found = locate_rank({"LOCAL_RANK": "7"}, root)
    assert found.gpu is not None
    assert (found.gpu.vendor, found.gpu.links) == ("amd", 7)
    assert found.reason == ""


def test_silent_driver_times_out(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/nvidiactl").touch()
    answer = threading.Event()
    with (
        mock.patch.object(_locate, "find_nvidia_gpu", side_effect=lambda *_: answer.wait()),
        mock.patch.object(_locate, "_DRIVER_SECONDS", 0.2),
    ):
        found = locate_rank({}, root)
    assert found.reason == "the driver did not answer within 0.2 s"
    answer.set()


def test_current_device_is_used_after_cuda_init(root: Path) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 2,
        get_device_properties=lambda _: SimpleNamespace(uuid="aaaa"),
    )
    with (
        mock.patch.dict(sys.modules, {"torch": SimpleNamespace(cuda=cuda)}),
        mock.patch.object(
            _locate, "find_nvidia_gpu", return_value=Gpu("1", "2", "nvidia")
        ) as asked,
    ):
        locate_rank({"LOCAL_RANK": "0"}, root)
    assert asked.call_args.args[1:] == (2, "aaaa")


@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({}, True),
        ({"NCCL_MNNVL_ENABLE": "2", "NCCL_P2P_LEVEL": "NVL", "NCCL_P2P_DISABLE": "0"}, True),
        ({"NCCL_MNNVL_ENABLE": "0"}, False),
        ({"NCCL_CUMEM_ENABLE": "0"}, False),
        ({"NCCL_P2P_DISABLE": "1"}, False),
        ({"NCCL_P2P_LEVEL": "LOC"}, False),
    ],
)
def test_multi_node_nvlink_follows_nccl_variables(
    root: Path, environ: dict[str, str], allowed: bool
) -> None:
    with NVML_IS_SILENT:
        assert locate_rank(environ, root).multi_node is allowed


def test_imex_channels_are_read(root: Path) -> None:
    folder = root / "dev/nvidia-caps-imex-channels"
    folder.mkdir(parents=True)
    with NVML_IS_SILENT:
        assert not locate_rank({}, root).imex
        (folder / "channel0").touch()
        assert locate_rank({}, root).imex


def test_location_is_read_through_the_real_binding() -> None:
    pytest.importorskip("pynvml")
    script = (
        "import json, os; from meshplan.topology._locate import _read_number, locate_rank; "
        "print(json.dumps(locate_rank(os.environ).to_json()))"
    )
    command = [sys.executable, "-c", script]
    out = in_process(
        switched(8), command, {"LOCAL_RANK": "6", "CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1"}
    )
    found = RankLocation.from_json(json.loads(out))
    assert found.gpu is not None
    assert found.gpu.id == "GPU-00000001-aaaa-bbbb"
