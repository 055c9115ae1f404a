"""``meshplan doctor``, as a user calls it and where things are missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase

from meshplan import kernel
from meshplan._installation import Installation
from meshplan.cli import _doctor_run, main
from meshplan.cli._doctor import check_cache, check_host, check_links, check_shared_folder
from meshplan.cli._doctor_run import diagnose
from meshplan.topology._locate import Fabric, Gpu, RankLocation
from tests.programs import capture

INSTALLED = Installation(
    "installed in /site-packages",
    "meshplan was installed without a C++ compiler",
    "pip install --force-reinstall --no-deps /src",
)
HERE = RankLocation("node1 0123", "node1", "0123-4567", reason="this host shows no GPU")
H100 = Gpu(
    "GPU-1", "0000:1b:00.0", "nvidia", model="NVIDIA H100", links=18, switch=True, on_host=8, domain=8
)  # fmt: skip
RACK = "ab" * 16


@contextmanager
def machine(
    gpus: int = 0, place: RankLocation = HERE, nccl: bool = False, compilers: tuple[str, ...] = ()
) -> Iterator[None]:
    """All that differs from one machine to another, but for meshplan's own library."""
    found = [kernel._device_code.Program("cuda", path) for path in compilers]
    with ExitStack() as patches:

        def patch(where: Any, name: str, **how: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, **how))

        patch(torch, "__version__", new="2.13.0")
        patch(_doctor_run, "__version__", new="0.1.0")
        patch(_doctor_run, "installation", return_value=INSTALLED)
        patch(torch.cuda, "is_available", return_value=bool(gpus))
        patch(torch.cuda, "device_count", return_value=gpus)
        patch(torch.cuda.nccl, "version", return_value=(2, 29, 3))
        patch(dist, "is_nccl_available", return_value=nccl)
        patch(_doctor_run, "locate_rank", return_value=place)
        patch(_doctor_run, "compilers", return_value=found)
        patch(_doctor_run, "prebuilt", return_value=None)
        patch(_doctor_run.platform, "python_version", return_value="3.11.7")
        patches.enter_context(
            mock.patch("shutil.disk_usage", return_value=mock.Mock(total=64 << 20))
        )
        patches.enter_context(mock.patch.dict("os.environ", {"MESHPLAN_CACHE": "/tmp"}))
        yield


def run_doctor() -> tuple[str, bool]:
    """The text, and whether nothing is missing."""
    found = diagnose()
    return "\n".join(map(str, found)), not any(one.remedy for one in found)


def plain(text: str) -> str:
    """Without what differs from machine to machine."""
    return re.sub(r"host [0-9a-f]{8},", "host ID,", text)


def driver(**how: Any) -> mock.MagicMock:
    return mock.MagicMock(kind="cuda", library="libcuda.so.1", **how)


class TestDoctor(TestCase):
    @pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
    def test_complete_installation_is_reported(self) -> None:
        with machine():
            text, complete = run_doctor()
        assert complete
        self.assertExpectedInline(
            plain(text),
            """\
ok      meshplan: 0.1.0, installed in /site-packages
ok      torch: 2.13.0 on Python 3.11.7
ok      backends of torch.distributed: gloo
ok      compiled reductions on CPUs: as fast as memory
ok      memory that the processes of this host share: host ID, up to 72 ranks
ok      host, as ranks identify it: node1, boot id 0123-4567
ok      /dev/shm, for NCCL: 0.1 GiB
ok      links between GPUs: this host shows no GPU
ok      GPUs: none that this torch can use
ok      compilers of kernels for GPUs: none
ok      cache of compiled kernels: /tmp""",
        )

    def test_every_missing_part_is_reported(self) -> None:
        unknown = replace(HERE, reason="nvidia-ml-py is not installed: pip install it")
        with (
            machine(8, unknown),
            mock.patch.object(torch, "__version__", "2.9.1+cu128"),
            mock.patch.object(kernel, "why_not", return_value="no library"),
            mock.patch("shutil.which", return_value=None),
            mock.patch.object(kernel, "device_of", side_effect=kernel.CompileError("no compiler")),
            mock.patch.dict("os.environ", {"MESHPLAN_CACHE": "/dev/null/cache"}),
        ):
            text, complete = run_doctor()
        assert not complete
        self.assertExpectedInline(
            text,
            """\
ok      meshplan: 0.1.0, installed in /site-packages
missing torch: 2.9.1+cu128 on Python 3.11.7
        tested with 2.11 to 2.15; install one of these, or use meshplan.install(allow_untested_torch=True)
missing backends of torch.distributed: gloo
        none supports GPUs: install a torch with NCCL or RCCL
missing compiled reductions on CPUs: no library
        apt-get install g++, and then: pip install --force-reinstall --no-deps /src
missing memory that the processes of this host share: needs the compiled reductions
        see above
ok      host, as ranks identify it: node1, boot id 0123-4567
missing /dev/shm, for NCCL: 0.1 GiB
        docker run --shm-size=16g, or --ipc=host
missing links between GPUs: nvidia-ml-py is not installed: pip install it
        pip install 'nvidia-ml-py>=13'
missing GPUs: 8, without kernels: no compiler
        reductions take the path exchange, over the backend; pip install nvidia-cuda-nvrtc, or install nvcc or hipcc
missing compilers of kernels for GPUs: none
        pip install nvidia-cuda-nvrtc, or install nvcc or hipcc
missing cache of compiled kernels: /dev/null/cache cannot be written
        set MESHPLAN_CACHE to a directory that you can write""",
        )

    @pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
    def test_gpus_are_listed(self) -> None:
        here = replace(HERE, gpu=H100, reason="")
        one = mock.Mock(processors=132, driver=driver())
        with machine():
            without = run_doctor()[0].splitlines()
        with (
            machine(8, here, nccl=True, compilers=("/usr/local/cuda/bin/nvcc",)),
            mock.patch.object(kernel, "device_of", return_value=one),
            mock.patch("shutil.disk_usage", return_value=mock.Mock(total=64 << 30)),
        ):
            text, complete = run_doctor()
        assert complete
        one.driver.free.assert_called_once_with(one.driver.malloc.return_value)
        self.assertExpectedInline(
            "\n".join(line for line in text.splitlines() if line not in without),
            """\
ok      backends of torch.distributed: gloo, nccl 2.29.3
ok      /dev/shm, for NCCL: 64.0 GiB
ok      links between GPUs: NVIDIA H100 0000:1b:00.0: 18 links to a switch, 8 GPUs on this host
ok      GPUs: 8, with kernels of 32 blocks; path exchange by default
ok      driver of GPUs: libcuda.so.1
ok      GPU memory that processes share: by CUDA IPC
ok      compilers of kernels for GPUs: /usr/local/cuda/bin/nvcc""",
        )

    def test_unshareable_gpu_memory_is_reported(self) -> None:
        refusing = driver(share=mock.Mock(side_effect=kernel.DriverError("not supported")))
        found = _doctor_run._check_sharing(mock.Mock(driver=refusing))
        refusing.free.assert_called_once()
        self.assertExpectedInline(
            str(found),
            """\
missing GPU memory that processes share: not supported
        one_shot and two_shot fall back to exchange on GPUs; run the container with --ipc=host, and outside of MIG""",
        )

    @pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
    def test_missing_shared_memory_is_reported(self) -> None:
        refused = OSError(1, "Operation not permitted")
        with machine(), mock.patch.object(kernel.SharedMemory, "create", side_effect=refused):
            text, complete = run_doctor()
        assert not complete
        self.assertExpectedInline(
            "\n".join(text.splitlines()[4:6]),
            """\
missing memory that the processes of this host share: [Errno 1] Operation not permitted
        reductions take the path exchange; mount /proc, and allow memfd_create""",
        )

    def test_gpu_links_are_listed(self) -> None:
        pair = replace(H100, links=4, switch=False, peers=("0000:2b:00.0",), on_host=1)
        gpus = [
            pair,
            replace(pair, links=1, peers=("a", "b"), vendor="amd", model="", on_host=None),
            replace(H100, links=0, switch=False),
            replace(H100, unread=(3, 5), links=16),
            replace(H100, links=None, unread=(0,), switch=False, vendor="amd"),
            replace(H100, fabric=Fabric("0" * 32, 0, 3)),
            replace(H100, fabric=Fabric(RACK, 7, 3, 0, 0xAA)),
            replace(H100, fabric=Fabric(RACK, 7, 3, 0, 0xA9)),
            replace(H100, links=0, switch=False, fabric=Fabric(RACK, 7, 3)),
        ]
        found = [check_links(replace(HERE, gpu=gpu, imex=gpu is gpus[7])) for gpu in gpus]
        text = "\n".join(map(str, found)).replace(" 0000:1b:00.0", "").replace("links between", "")
        self.assertExpectedInline(
            text,
            """\
ok       GPUs: NVIDIA H100: 4 links to 1 GPU, 1 GPU on this host
ok       GPUs: amd: 1 link to 2 GPUs
ok       GPUs: NVIDIA H100: no links, 8 GPUs on this host
missing  GPUs: NVIDIA H100: 16 links to a switch, 8 GPUs on this host
        links 3, 5 did not answer: check nvidia-smi nvlink -s, the GPU may need a reset
missing  GPUs: NVIDIA H100: links unknown, 8 GPUs on this host
        links 0 did not answer: check rocm-smi --showtopo, the GPU may need a reset
ok       GPUs: NVIDIA H100: 18 links to a switch, 8 GPUs on this host; no multi-node NVLink
ok       GPUs: NVIDIA H100: 18 links to a switch, 8 GPUs on this host; multi-node NVLink, clique 7 of abababababababababababababababab, no IMEX channel, so not between hosts
missing  GPUs: NVIDIA H100: 18 links to a switch, 8 GPUs on this host; multi-node NVLink, clique 7 of abababababababababababababababab
        the fabric manager reports: bandwidth is degraded
missing  GPUs: NVIDIA H100: no links, 8 GPUs on this host; multi-node NVLink, clique 7 of abababababababababababababababab, no IMEX channel, so not between hosts
        the fabric is up and no link is: remove this host from the job""",
        )

    def test_reason_for_unknown_links_is_reported(self) -> None:
        reasons = [
            "NVML: RM has detected an NVML/RM version mismatch.",
            "NVML: Driver Not Loaded",
            "the driver did not answer within 10 s",
        ]
        text = "\n".join(str(check_links(replace(HERE, reason=reason))) for reason in reasons)
        self.assertExpectedInline(
            text,
            """\
missing links between GPUs: NVML: RM has detected an NVML/RM version mismatch.
        library and kernel module of the driver have different versions: reboot
missing links between GPUs: NVML: Driver Not Loaded
        check the output of nvidia-smi
missing links between GPUs: the driver did not answer within 10 s
        check the output of nvidia-smi""",
        )

    def test_host_and_folders_are_listed(self) -> None:
        with (
            mock.patch("shutil.disk_usage", side_effect=FileNotFoundError(2, "No such file")),
            mock.patch.dict("os.environ", {"MESHPLAN_CACHE": "/nowhere/at/all"}),
            mock.patch("os.access", return_value=False),
        ):
            found = [
                check_host(replace(HERE, host="a"), {"MESHPLAN_HOST": "a"}),
                check_host(replace(HERE, host="b"), {"NCCL_HOSTID": "b"}),
                check_host(replace(HERE, machine=""), {}),
                check_shared_folder(False),
                check_shared_folder(True),
                check_cache(),
            ]
        self.assertExpectedInline(
            "\n".join(map(str, found)),
            """\
ok      host, as ranks identify it: a, by MESHPLAN_HOST
ok      host, as ranks identify it: b, by NCCL_HOSTID
ok      host, as ranks identify it: node1, boot id unknown
ok      /dev/shm, for NCCL: No such file
missing /dev/shm, for NCCL: No such file
        mount it
missing cache of compiled kernels: /nowhere/at/all cannot be written
        set MESHPLAN_CACHE to a directory that you can write""",
        )


@pytest.mark.full
def test_command_exits_with_the_result() -> None:
    done = capture([sys.executable, "-m", "meshplan", "doctor"], cwd=Path(__file__).parents[1])
    assert done.returncode in (0, 1), done.stderr
    assert (done.returncode == 0) == ("missing " not in done.stdout)
    assert done.stdout.startswith("ok      meshplan: ")
    assert done.stderr == ""


def test_unknown_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["docter"])
    assert caught.value.code == 2
    assert "(did you mean 'doctor'?)" in capsys.readouterr().err
