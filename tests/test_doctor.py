"""``meshplan doctor``, as a user calls it and where things are missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from expecttest import TestCase

from meshplan import kernel
from meshplan.cli import main
from meshplan.cli._doctor import doctor


def plain(text: str) -> str:
    """Without what differs from machine to machine."""
    text = re.sub(r"\S+ on Python \S+", "TORCH on Python PYTHON", text)
    return re.sub(r"host [0-9a-f]{8},", "host ID,", text)


class TestDoctor(TestCase):
    @pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
    def test_all_is_well(self) -> None:
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            text, complete = doctor()
        assert complete
        self.assertExpectedInline(
            plain(text),
            """\
ok      torch: TORCH on Python PYTHON
ok      compiled reductions on CPUs: as fast as memory
ok      memory that the processes of this host share: host ID, up to 72 ranks
ok      GPUs: none that this torch can use""",
        )

    def test_without_a_compiler(self) -> None:
        with (
            mock.patch.object(kernel, "why_not", return_value="no library"),
            mock.patch("shutil.which", return_value=None),
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda, "device_count", return_value=8),
            mock.patch.object(kernel, "device_of", side_effect=kernel.CompileError("no compiler")),
        ):
            text, complete = doctor()
        assert not complete
        self.assertExpectedInline(
            plain(text),
            """\
ok      torch: TORCH on Python PYTHON
missing compiled reductions on CPUs: no library
        apt-get install g++, and then: pip install --force-reinstall --no-deps meshplan
missing memory that the processes of this host share: needs the compiled reductions
        see above
missing GPUs: 8, without kernels: no compiler
        reductions take the path exchange, over the backend; pip install nvidia-cuda-nvrtc, or install nvcc or hipcc""",
        )

    def test_gpus(self) -> None:
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda, "device_count", return_value=8),
            mock.patch.object(kernel, "device_of", return_value=mock.Mock(processors=132)),
        ):
            text, complete = doctor()
        assert complete
        self.assertExpectedInline(
            text.splitlines()[-1],
            """ok      GPUs: 8, with kernels of 32 blocks; path exchange unless asked""",
        )

    @pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
    def test_without_shared_memory(self) -> None:
        refused = OSError(1, "Operation not permitted")
        with (
            mock.patch.object(kernel.SharedMemory, "create", side_effect=refused),
            mock.patch.object(torch.cuda, "is_available", return_value=False),
        ):
            text, complete = doctor()
        assert not complete
        self.assertExpectedInline(
            plain(text),
            """\
ok      torch: TORCH on Python PYTHON
ok      compiled reductions on CPUs: as fast as memory
missing memory that the processes of this host share: [Errno 1] Operation not permitted
        reductions take the path exchange; mount /proc, and allow memfd_create
ok      GPUs: none that this torch can use""",
        )


@pytest.mark.timeout(100)
def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshplan", "doctor"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == (0 if kernel.available() else 1), done.stderr
    assert done.stdout.startswith("ok      torch: ")
    assert done.stderr == ""


def test_words_that_are_not_understood(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["docter"])
    assert caught.value.code == 2
    assert "invalid choice: 'docter'" in capsys.readouterr().err
