"""Kernels of csrc as code objects of AMD, and their launches on the GPU of `tests.amd_gpu`.

    python -m tests.machine_code      compile all again, after a change of a kernel

needs clang 19. The code objects are in ``golden/machine_code.json.xz``, so that tests on any machine
execute what a compiler has made of the kernels. ``source`` there has the hash of their source.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import lzma
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from meshplan.contract import Contract
from meshplan.kernel import _device_peers
from meshplan.kernel._communicator import Arithmetic, CallKey, prepare_call
from meshplan.kernel._device_code import kernel_name
from meshplan.kernel._device_peers import FoldCall, launch_fold
from meshplan.kernel._library import Failures, Peers
from tests.amd_gpu import Gpu, Image
from tests.devices import STAGED_BYTES

CSRC = Path(__file__).parents[1] / "csrc"
ARCHIVE = Path(__file__).parent / "golden" / "machine_code.json.xz"
FLAGS = ["-x", "hip", "-std=c++17", "-O3", "-ffp-contract=off", "--cuda-device-only"]
FLAGS += ["--no-gpu-bundle-output", "-nogpulib", "-nogpuinc"]
FAMILIES = r"^MP_(LINEAR|ROUNDED|EXTREMA|SUMS|FOLD_PARTS)\(.*\n"

SUM = "FOLD(mp_float32_sum_fold, float, float, float, float, Sum)"
BFLOAT_SUM = "FOLD(mp_bfloat16_sum_fold, Bfloat, float, float, Bfloat, Sum)"
NODE_SUM = "FOLD(mp_bfloat16_sum_node_fold, Bfloat, float, Bfloat, Bfloat, Sum)"
EXACT = "FOLD(mp_float32_exact_fold, float, float, float, float, ExactSum)"
PEERS = (
    "PEER(mp_float32_sum, float, float, float, Sum)",
    "PEER(mp_bfloat16_sum, Bfloat, float, float, Sum)",
    "PEER(mp_float32_exact, float, float, float, ExactSum)",
)
LEAF = "return Convert<Acc>::from(element(in[kFirst], index));"
ROUNDING = """rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {u16((bits & 0x7fffffffu) > 0x7f800000u ? u32("""


class Program(NamedTuple):
    """What one code object is compiled from: a few kernels, or one of an edited source."""

    kernels: tuple[str, ...] = (SUM,)
    architecture: str = "gfx1100"
    edit: tuple[str, str, str] = ("", "", "")  # a file, its text, and what replaces it
    flags: tuple[str, ...] = ()


TRIPLE = Program(edit=("element.h", LEAF, LEAF.replace(";", " * 3;")))
PROGRAMS = {
    "folds": Program((SUM, BFLOAT_SUM, NODE_SUM, EXACT)),
    "peers": Program(PEERS),
    "folds_gfx942": Program((SUM, BFLOAT_SUM), "gfx942"),
    # A product and a sum, which the kernels of sums do not have.
    "triple": TRIPLE,
    "triple_contracted": TRIPLE._replace(flags=("-ffp-contract=fast",)),
    # (a + c) + (b + d) in place of (a + b) + (c + d).
    "wrong_order": Program(
        edit=(
            "element.h",
            LEAF,
            LEAF.replace("[kFirst]", "[kFirst == 1 || kFirst == 2 ? 3 - kFirst : kFirst]"),
        )
    ),
    "flushed": Program(flags=("-fgpu-flush-denormals-to-zero",)),
    "truncated": Program(
        (BFLOAT_SUM,),
        edit=("dtype.h", ROUNDING, ROUNDING.replace("+ 0x7fffu + ((bits >> 16) & 1u)", "")),
    ),
    # Each lane reads the word of its neighbour.
    "wrong_lane": Program(
        edit=("fold.h", "dims == 0) return index", "dims == 0) return index ^ 4")
    ),
}


# Compiling.


def sources() -> dict[str, str]:
    """The files that the kernels are compiled from, by name."""
    found: dict[str, str] = {}
    names = ["device.cu"]
    while names:
        name = names.pop()
        if name not in found and (CSRC / name).exists():
            found[name] = (CSRC / name).read_text()
            names += re.findall(r'#include "(\w+\.h)"', found[name])
    return found


def source_hash() -> str:
    """Of all code without its comments, and of the programs made of it."""
    words = [re.sub(r"\s*//.*|\s+(?=\n)", "", f"{n}\n{t}") for n, t in sorted(sources().items())]
    words += [repr((FLAGS, PROGRAMS))]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def compile_program(program: Program, compiler: str) -> bytes:
    """The code object; ``AssertionError`` if the text to edit is not in the source once."""
    files = sources()
    files["device.cu"] = re.sub(FAMILIES, "", files["device.cu"], flags=re.M)
    files["device.cu"] += "".join(f"\nMP_{kernel}" for kernel in program.kernels) + "\n"
    name, before, after = program.edit
    if name:
        assert files[name].count(before) == 1, (name, before)
        files[name] = files[name].replace(before, after)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text)
        target = Path(folder, "image")
        command = [compiler, *FLAGS, *program.flags, f"--offload-arch={program.architecture}"]
        command += [str(Path(folder, "device.cu")), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True, timeout=500)
        return target.read_bytes()


@cache
def read_archive() -> dict[str, str]:
    """Hexadecimal code objects by name, and the hash of their source."""
    return dict(json.loads(lzma.decompress(ARCHIVE.read_bytes())))


@cache
def image(name: str) -> Image:
    return Image(bytes.fromhex(read_archive()[name]), PROGRAMS[name].architecture)


# Launching.


class MachineDevice:
    """What `launch_fold` needs of a device, for one code object."""

    processors = 4
    stream = staticmethod(lambda: 0)
    current = staticmethod(nullcontext)
    kernel = staticmethod(str)

    def __init__(self, name: str) -> None:
        self.gpu, self.image, self.driver = Gpu(), image(name), self

    def launch(self, name: str, blocks: int, lanes: int, stream: int, arguments: Any) -> None:
        call = ctypes.string_at(arguments[0], ctypes.sizeof(FoldCall))
        self.gpu.launch(self.image, name, blocks, lanes, call)
        self.gpu.run()

    def fold(
        self, leaves: Sequence[Tensor], op: str, contract: Contract = Contract(), **more: Any
    ) -> Tensor:
        """The leaves in memory of one GPU, folded; ``more`` are a shape and a divisor."""
        out, shape = torch.zeros_like(leaves[0]), more.get("shape", (len(leaves),))
        divisor = more.get("divisor") or (len(leaves) if op == "avg" else None)
        self.gpu.ranges.clear()
        self.gpu.add_tensors(*leaves, out)
        launch_fold(self, out, leaves, op, shape, contract, out.dtype, divisor, 0)  # type: ignore[arg-type]
        return out


def reduce_peers(
    leaves: Sequence[Tensor],
    op: str,
    contract: Contract,
    mode: str,
    *,
    seed: int = 0,
    shape: Sequence[int] = (),
    divisor: int | None = None,
    absent: int | None = None,
) -> tuple[list[Tensor], list[Failures]]:
    """One reduction by ranks whose kernels run together, in turns drawn from ``seed``. The kernel
    of the rank ``absent`` never starts."""
    gpu, world, blocks, lanes = Gpu(seed), len(leaves), 2, 64
    shape = tuple(shape) or (world,)
    with patch.object(_device_peers, "_STAGED_BYTES", STAGED_BYTES):
        tile = _device_peers.tile_bytes(world)
        nbytes = _device_peers.device_region_bytes(world, blocks)
    how = Arithmetic(op, shape, contract.order, contract.accumulate, contract.rounding, divisor)
    key = CallKey(mode, tuple(leaves[0].shape), (), leaves[0].dtype, how)
    # In nanoseconds of a clock that counts turns by ten.
    call = prepare_call(key, world, 1.0 if absent is None else 2e-5)
    parts = [end - start for start, end in pairwise(call.starts[: world + 1])]
    longest = call.starts[0] if mode == "one_shot" else max(parts)
    call.piece, used = _device_peers.share_out(longest, blocks, tile)
    plan = _device_peers.plan_of(contract.order, shape)
    words = _device_peers.device_call(call, plan)  # type: ignore[arg-type]
    regions = [torch.zeros(nbytes, dtype=torch.uint8) for _ in leaves]
    outs = [torch.zeros_like(leaf) for leaf in leaves]
    gpu.add_tensors(*leaves, *regions, *outs)
    failures = [Failures() for _ in leaves]
    for rank, failure in enumerate(failures):
        gpu.add(ctypes.addressof(failure), ctypes.sizeof(failure))
        peers = Peers(world=world, rank=rank, blocks=blocks, tile=tile)
        peers.region[:world] = [region.data_ptr() for region in regions]
        places = (leaves[rank].data_ptr(), outs[rank].data_ptr(), ctypes.addressof(failure))
        if rank != absent:
            name = kernel_name(leaves[0].dtype, op, contract)
            given = bytes(peers) + bytes(words) + struct.pack("<3Q", *places)
            gpu.launch(image("peers"), name, used, lanes, given)
    gpu.run()
    return outs, failures


if __name__ == "__main__":
    found = shutil.which("clang++-19")
    assert found is not None, "there is no clang++-19"
    words = {name: compile_program(program, found).hex() for name, program in PROGRAMS.items()}
    words["source"] = source_hash()
    ARCHIVE.write_bytes(lzma.compress(json.dumps(words).encode(), preset=9))
