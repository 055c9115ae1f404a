"""A GPU of AMD that executes machine code: waves of lanes, registers, memory.

Instructions are decoded and described by the package tinygrad: AMD's encodings and pseudocode
(`tests.pseudocode`). Written by hand are branches, exchanges between lanes, addresses, the layout of
a launch, and `_CORRECTIONS`. Not modelled: caches and the order of accesses to memory, each of which
is complete before the next; clocks; the cost of anything. Waves take turns of a random length.
"""

from __future__ import annotations

import ctypes
import random
import re
import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from tests.pseudocode import Lanes, Value, compile_pseudocode, cut, to_bits, write

__all__ = ["Gpu", "Image"]

# High halves of addresses of a block's own memory and of a lane's.
LDS, PRIVATE = 0x7F010000, 0x7F020000
# Registers that have names, in the encoding of operands; the vectors are from 256 on.
VCC, NULL, EXEC, SCC, VECTORS = 106, 124, 126, 253, 256
_IGNORED = re.compile(
    "S_(NOP|CLAUSE|DELAY_ALU|WAITCNT\\w*|SENDMSG|SET_INST_PREFETCH_DISTANCE|CODE_END)"
    "|BUFFER_(WBL2|INV|GL0_INV|GL1_INV)"
)
_ARITHMETIC = re.compile(r"V_(ADD|SUB|SUBREV|MUL|FMA|FMAC|FMAMK|FMAAK|MIN|MAX)_F32")
# What the pseudocode leaves out: v_div_fmas undoes the scale of v_div_scale, up or down, and rounds a
# subnormal quotient once, without which divisions would not be exact. Not measured on a GPU.
_CORRECTIONS = {
    "V_DIV_FMAS_F32": (
        "2.0F ** 32 * fma(S0.f32, S1.f32, S2.f32)",
        "ldexp(fma_to_odd(S0.f32, S1.f32, S2.f32), 128 * (exponent(S2.f32) > 127) - 64)",
    ),
}
_CONSTANTS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}


Reader = Callable[["Wave"], Lanes]
Step = tuple[int, Callable[["Wave"], None]]  # the size of an instruction, and its execution


class Kernel(NamedTuple):
    """What a launch needs of a kernel: see the code object's descriptor in LLVM's AMDGPU guide."""

    entry: int
    lds: int
    private: int
    mode: int
    user: int  # scalar registers that the launch fills
    given: int  # bits: which


class Image:
    """A code object: its kernels by name, and what is at each address."""

    def __init__(self, data: bytes, architecture: str) -> None:
        from tinygrad.runtime.support.elf import elf_loader

        self.architecture = "cdna" if architecture == "gfx942" else "rdna3"
        self.wave = 64 if self.architecture == "cdna" else 32
        memory, sections, _ = elf_loader(data)
        self.memory = bytes(memory)
        named = {section.name: section for section in sections}
        header = named[".text"].header
        self.text = self.memory[header.sh_addr :][: header.sh_size]
        names = named[".strtab"].content
        self.kernels: dict[str, Kernel] = {}
        for label, _, _, _, at, _ in struct.iter_unpack("<IBBHQQ", named[".symtab"].content):
            name = names[label : names.index(b"\0", label)].decode()
            if name.endswith(".kd"):
                lds, private, _, _, offset = struct.unpack_from("<4Iq", self.memory, at)
                _, mode, user, given = struct.unpack_from("<3IH", self.memory, at + 44)
                # To nearest, and float64 with subnormals.
                assert mode >> 12 & 0xCF == 0xC0, hex(mode)
                self.kernels[name.removesuffix(".kd")] = Kernel(
                    at + offset, lds, private, mode, user >> 1 & 31, given
                )
        self.steps: dict[int, Step] = {}

    def step(self, pc: int) -> Step:
        if pc not in self.steps:
            self.steps[pc] = decode(self.memory[pc : pc + 24], self.architecture)
        return self.steps[pc]


class Wave:
    def __init__(self, gpu: Gpu, image: Image, kernel: Kernel, lds: Lanes, first: int) -> None:
        self.gpu, self.image, self.lds = gpu, image, lds
        self.lanes = lanes = image.wave
        # Garbage, as a launch leaves it, here and in LDS. A scalar register has its value in each lane.
        self.registers = np.full((VECTORS + 256, lanes), 0xDEADBEEF, np.uint32)
        self.registers[[NULL, EXEC, EXEC + 1, SCC, SCC + 1]] = 0
        self.registers[VECTORS] = np.arange(first, first + lanes)
        self.private = np.full((lanes, kernel.private), 0xAD, np.uint8)
        self.pc = kernel.entry
        self.state = "runs"
        self.flushes = kernel.mode >> 16 & 3 != 3

    def run(self, steps: int) -> None:
        """So many instructions, or fewer."""
        self.state = "runs"
        while steps and self.state == "runs":
            size, execute = self.image.step(self.pc)
            self.pc += size
            execute(self)
            steps -= 1

    # Registers.

    def read(self, register: int, bits: int = 32) -> Lanes:
        """Of each lane, in 64 bits, or Python integers where it is wider."""
        words = self.registers[register : register + max(bits // 32, 1)]
        wide = words.astype(np.uint64 if bits <= 64 else object)
        return sum(word << 32 * i for i, word in enumerate(wide)).view(Value)

    def write(self, register: int, bits: int, value: Lanes, live: Lanes = True) -> None:
        if register == NULL and self.lanes == 32:
            return
        for i in range(max(bits // 32, 1)):
            word = np.asarray(cut(to_bits(value) >> 32 * i, 32)).astype(np.uint32)
            if register < VECTORS:
                self.registers[register + i] = word.flat[0]
            else:
                np.copyto(self.registers[register + i], word, where=live)

    def mask(self, register: int) -> np.ndarray:
        """A register's bits as a truth per lane."""
        words = np.ascontiguousarray(self.registers[register : register + self.lanes // 32, 0])
        return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)

    def write_mask(self, register: int, lanes: Lanes) -> None:
        words = np.packbits(lanes, bitorder="little").view(np.uint32)
        self.registers[register : register + len(words)] = words[:, None]

    # Memory, for pseudocode.

    def find(self, address: Lanes, size: int, live: Any) -> Iterator[tuple[Any, np.ndarray, Any]]:
        """Lanes, the array with the memory that they access, and their bytes there."""
        lanes = np.flatnonzero(live)
        places = np.asarray(address).astype(np.int64)[lanes]
        own = places >> 32 == PRIVATE
        width = self.private.shape[1]
        assert ((places[own] & 0xFFFFFFFF) + size <= width).all(), "outside of a lane's memory"
        places[own] += lanes[own] * width
        near = [(LDS << 32, self.lds), (PRIVATE << 32, self.private.reshape(-1))]
        for base, array in (*near, *reversed(self.gpu.ranges)):
            offsets = places - base
            inside = (offsets >= 0) & (offsets + size <= len(array))
            if inside.any():
                # Compilers fill gaps of a block's own memory with words that are not aligned.
                aligned = not (places[inside] % min(size, 4)).any()
                assert aligned or array is self.lds, "not aligned"
                yield lanes[inside], array, offsets[inside, None] + np.arange(size)
                lanes, places = lanes[~inside], places[~inside]
            if not len(lanes):
                return
        raise AssertionError(f"no memory at {places[0]:#x}")

    def load(self, address: Lanes, size: int, live: Any) -> Lanes:
        found = np.zeros((self.lanes, size), np.uint8)
        for lanes, array, places in self.find(address, size, live):
            found[lanes] = array[places]
        return found.view(f"<u{size}").reshape(-1).view(Value)

    def store(self, address: Lanes, value: Lanes, size: int, live: Any) -> None:
        data = np.asarray(value).astype(f"<u{size}").view(np.uint8).reshape(self.lanes, size)
        for lanes, array, places in self.find(address, size, live):
            array[places] = data[lanes]


class Gpu:
    """Executes launches together, in turns, which ``clock`` counts."""

    def __init__(self, seed: int = 0) -> None:
        self.ranges: list[tuple[int, np.ndarray]] = []
        self.clock = 0
        self._draw = random.Random(seed)
        self._blocks: list[list[Wave]] = []
        self._kept: list[Any] = []

    def add(self, address: int, size: int) -> None:
        """Name memory that kernels may access; an access outside of it is an error."""
        array = (ctypes.c_uint8 * max(size, 1)).from_address(address)
        self.ranges.append((address, np.frombuffer(array, np.uint8)[:size]))

    def add_tensors(self, *tensors: Any) -> None:
        for tensor in tensors:
            self.add(tensor.data_ptr(), tensor.nbytes)

    def launch(self, image: Image, name: str, blocks: int, lanes: int, arguments: bytes) -> None:
        """Add a launch; ``run`` executes it."""
        kernel = image.kernels[name]
        arguments += b"\0" * (-len(arguments) % 8)
        hidden = struct.pack("<3I6H", blocks, 1, 1, lanes, 1, 1, 0, 0, 0) + bytes(232)
        packet = struct.pack("<6H3I", 0, 1, lanes, 1, 1, 0, blocks * lanes, 1, 1) + bytes(40)
        first = {1: self._keep(packet), 3: self._keep(arguments + hidden)}
        for index in range(blocks):
            lds, block = np.full(kernel.lds, 0xAD, np.uint8), []
            for start in range(0, lanes, image.wave):
                wave = Wave(self, image, kernel, lds, start)
                at = 0
                # The order of a descriptor's bits: a pair of registers each, but the first and last.
                for bit, size in enumerate((4, 2, 2, 2, 2, 2, 1)):
                    if kernel.given >> bit & 1:
                        wave.write(at, 32 * size, np.uint64(first[bit]))
                        at += size
                wave.registers[max(at, kernel.user)] = index
                wave.write_mask(EXEC, np.arange(image.wave) < lanes - start)
                block.append(wave)
            self._blocks.append(block)

    def _keep(self, data: bytes) -> int:
        kept = ctypes.create_string_buffer(data, len(data))
        self._kept.append(kept)
        self.add(ctypes.addressof(kept), len(data))
        return ctypes.addressof(kept)

    def run(self, turns: int = 200_000) -> None:
        """Until all waves have ended; an error after so many turns."""
        end = self.clock + turns
        with np.errstate(all="ignore"):
            while self._blocks:
                assert self.clock < end, "no end"
                for block in self._blocks:
                    together = all(wave.state == "waits" for wave in block)
                    for wave in block:
                        if together or wave.state != "waits":
                            wave.run(self._draw.randrange(1, 400))
                            self.clock += 1
                    block[:] = [wave for wave in block if wave.state != "ended"]
                self._blocks = [block for block in self._blocks if block]


# Decoding.


@cache
def _pseudocode(architecture: str) -> dict[str, str]:
    module = import_module(f"tinygrad.runtime.autogen.amd.{architecture}.str_pcode")
    return {op.name: text for op, text in module.PCODE.items()}


def decode(data: bytes, architecture: str) -> Step:
    from tinygrad.renderer.amd import decode_inst

    if architecture == "rdna3" and data[3] >> 2 == 0b111000:  # MUBUF, which tinygrad leaves out
        assert struct.unpack("<I", data[:4])[0] >> 18 & 0xFF in (0x2B, 0x2C), data[:8].hex()
        return 8, lambda wave: None
    inst = decode_inst(data, architecture)
    if type(inst).__name__.startswith("VOPD"):  # two instructions
        both = [_Operation(inst, architecture, part) for part in "xy"]
        return inst.size(), lambda wave: _run(wave, both)
    if _IGNORED.fullmatch(inst.op.name):
        return inst.size(), lambda wave: None
    by_hand = _BY_HAND.get(re.sub(r"_E(32|64)$|(?<=BRANCH)_.*", "", inst.op.name))
    if by_hand is not None:
        return inst.size(), lambda wave: by_hand(wave, inst)
    one = [_Operation(inst, architecture)]
    return inst.size(), lambda wave: _run(wave, one)


# Instructions by hand.


def _branch(wave: Wave, inst: Any) -> None:
    if found := re.fullmatch(r"S_CBRANCH_(SCC|VCC|EXEC)(0|1|Z|NZ)", inst.op.name):
        register = {"SCC": SCC, "VCC": VCC, "EXEC": EXEC}[found[1]]
        if wave.mask(register).any() != (found[2] in ("1", "NZ")):
            return
    wave.pc += 4 * ((inst.simm16 ^ 0x8000) - 0x8000)


def _stop(wave: Wave, inst: Any) -> None:
    wave.state = {"S_ENDPGM": "ended", "S_BARRIER": "waits", "S_SLEEP": "sleeps"}[inst.op.name]


def _denormal_mode(wave: Wave, inst: Any) -> None:
    wave.flushes = inst.simm16 & 3 != 3


def _read_lane(wave: Wave, inst: Any) -> None:
    lane = int(np.argmax(wave.mask(EXEC)))  # the first live one
    if "FIRST" not in inst.op.name:
        lane = int(np.asarray(_reader(inst, "src1")(wave))[0]) % wave.lanes
    value = np.asarray(_reader(inst, "src0")(wave))[lane]
    wave.write(inst.vdst.offset % VECTORS, 32, value)


def _write_lane(wave: Wave, inst: Any) -> None:
    lane = np.asarray(_reader(inst, "src1")(wave))[0] % wave.lanes
    value = _reader(inst, "src0")(wave)
    wave.write(inst.vdst.offset, 32, value, np.arange(wave.lanes) == lane)


def _permute(wave: Wave, inst: Any) -> None:
    """Bytes of two operands: 8 to 11 are the sign of every other one, 12 is 0, and 13 all ones."""
    a, b, choice = (np.asarray(_reader(inst, f"src{i}")(wave)) for i in range(3))
    table = np.full((wave.lanes, 14), 0xFF, np.uint8)
    table[:, :8] = (a << 32 | b).view(np.uint8).reshape(-1, 8)
    table[:, 8:12] = np.where(table[:, 1:8:2] >> 7, 0xFF, 0)
    table[:, 12] = 0
    indices = np.minimum(choice.view(np.uint8).reshape(-1, 8)[:, :4], 13)
    found = np.take_along_axis(table, indices, 1).view(np.uint32).reshape(-1)
    wave.write(inst.vdst.offset, 32, found.astype(np.uint64), wave.mask(EXEC))


_BY_HAND: dict[str, Callable[[Wave, Any], Any]] = {
    "S_BRANCH": _branch,
    "S_CBRANCH": _branch,
    "S_ENDPGM": _stop,
    "S_BARRIER": _stop,
    "S_SLEEP": _stop,
    "S_SENDMSG_RTN_B64": lambda wave, inst: wave.write(
        inst.sdst.offset, 64, np.uint64(wave.gpu.clock)
    ),
    "S_DENORM_MODE": _denormal_mode,
    "V_READFIRSTLANE_B32": _read_lane,
    "V_READLANE_B32": _read_lane,
    "V_WRITELANE_B32": _write_lane,
    "V_PERM_B32": _permute,
}


# Operands.


def _constant(register: int, bits: int, form: str, literal: int) -> int | None:
    """What is not a register."""
    wide = bits == 64
    if 128 <= register <= 208:
        value = register - 128 if register <= 192 else 192 - register
        return value & ((1 << max(bits, 32)) - 1)
    if register in _CONSTANTS:
        size = "d" if wide and "F64" in form else "e" if bits == 16 else "f"
        return int.from_bytes(struct.pack(f"<{size}", _CONSTANTS[register]), "little")
    if register == 255:
        if wide and "F64" in form:
            return literal << 32
        signed = wide and "I64" in form and literal >> 31
        return literal | (0xFFFFFFFF00000000 if signed else 0)
    if register in (235, 237):
        base = LDS if register == 235 else PRIVATE
        return base << 32 if wide else base
    assert register < 128 or register == SCC or register >= VECTORS, register
    return None


def _fixed(value: int) -> Reader:
    return lambda wave: np.full(wave.lanes, value, np.uint64).view(Value)


def _reader(inst: Any, field: str) -> Reader:
    register, bits = getattr(inst, field).offset, inst.op_bits.get(field, 32)
    form = str(inst.operands.get(field, ("",))[0])
    value = _constant(register, bits, form, getattr(inst, "literal", 0))
    return (lambda wave: wave.read(register, bits)) if value is None else _fixed(value)


def _source(inst: Any, field: str, key: str) -> Reader:
    """An operand; S0 to S2 may be without a sign, then with the other sign, or an upper half."""
    read = _reader(inst, field)
    if key not in ("S0", "S1", "S2"):
        return read
    i = int(key[1])
    if type(inst).__name__ == "VOP3P":
        return _packed(inst, i, read)
    bit = np.uint64(1 << max(inst.op_bits.get(field, 32), 16) - 1)
    # `opsel` chooses halves, which only instructions of 16 bits have.
    neg, absolute, high = (getattr(inst, name, 0) >> i & 1 for name in ("neg", "abs", "opsel"))

    def run(wave: Wave) -> Lanes:
        found = read(wave) >> 16 * high
        found = found & ~bit if absolute else found
        return found ^ bit if neg else found

    return run if neg or absolute or high else read


def _packed(inst: Any, i: int, read: Reader) -> Reader:
    """Two float32: the half of the operand that each of both results takes, and their signs."""
    upper = inst.opsel_hi | inst.opsel_hi2 << 2
    low, high = (32 * (choice >> i & 1) for choice in (inst.opsel, upper))
    signs = np.uint64((inst.neg >> i & 1) << 31 | (inst.neg_hi >> i & 1) << 63)
    return lambda wave: (cut(read(wave) >> low, 32) | cut(read(wave) >> high, 32) << 32) ^ signs


def _address(inst: Any, kind: str, names: frozenset[str]) -> Reader:
    none = (127,) if inst._is_cdna() else (NULL, NULL + 1)

    def signed(bits: int) -> int:
        return (inst.offset ^ 1 << bits - 1) - (1 << bits - 1)

    if kind == "SMEM":
        assert not inst._is_cdna() or (inst.imm and not inst.soffset_en), inst
        offset, parts = signed(21), [(inst.sbase.offset, 64)]
        if not inst._is_cdna() and inst.soffset.offset not in none:
            parts.append((inst.soffset.offset, 32))
    elif kind == "DS":
        offset, parts = LDS << 32, [(inst.addr.offset, 32)]
        if not names & {"OFFSET", "OFFSET0"}:
            offset += inst.offset0 | inst.offset1 << 8
    else:
        own, has_base = kind == "SCRATCH", kind != "FLAT" and inst.saddr.offset not in none
        offset = inst.offset if kind == "FLAT" else signed(13) + (PRIVATE << 32) * own
        parts = [(inst.saddr.offset, 32 if own else 64)] if has_base else []
        if not own or inst.sve:
            parts.append((inst.addr.offset, 32 if own or has_base else 64))
    start = _fixed(offset & (1 << 64) - 1)
    return lambda wave: sum((wave.read(*part) for part in parts), start(wave))


# Execution by pseudocode.

# Names in the pseudocode, and fields of encodings.
_OPERANDS = (
    ("S0", ("src{}0", "ssrc0")),
    ("S1", ("src{}1", "vsrc{}1", "ssrc1")),
    ("S2", ("src2",)),
    ("D0", ("vdst{}", "sdst")),
    ("SDATA", ("sdata",)),
    ("RETURN_DATA", ("vdst",)),
    ("VDATA", ("data",)),
    ("DATA", ("data", "data0")),
    ("DATA2", ("data1",)),
)


class _Operation:
    """An instruction's pseudocode, readers of its operands, and registers of its results."""

    def __init__(self, inst: Any, architecture: str, part: str = "") -> None:
        texts, kind = _pseudocode(architecture), type(inst).__name__.removesuffix("_LIT")
        name = getattr(inst, f"op{part}").name.replace("V_DUAL_", "V_")
        text = texts.get(f"{name}_E32" if part else name) or texts[name]
        before, after = _CORRECTIONS.get(re.sub(r"_E(32|64)$", "", name), ("", ""))
        assert before in text, text
        self.code = compile_pseudocode(text.replace(before or "\0", after))
        assert not kind.endswith(("DPP16", "DPP8", "SDWA")), inst
        assert kind != "VOP3P" or "_F32" in name, inst
        assert getattr(inst, "clmp", 0) == getattr(inst, "omod", 0) == 0, inst
        self.scalar = kind.startswith("SOP") or kind == "SMEM"
        self.memory = kind in ("SMEM", "DS", "FLAT", "GLOBAL", "SCRATCH")
        self.flushes = bool(_ARITHMETIC.match(name))
        # The upper half of a result of 16 bits.
        self.upper = kind != "VOP3P" and bool(getattr(inst, "opsel", 0) & 8)
        self.targets: dict[str, tuple[int, int]] = {}
        wide = 64 if inst._is_cdna() else 32
        reads = {"SIMM32": _fixed(getattr(inst, "literal", 0))}
        for key, register, bits in (("SCC", SCC, 32), ("EXEC", EXEC, wide)):
            reads[key] = partial(Wave.read, register=register, bits=bits)
            self.targets[key] = register, bits
        for key, fields in _OPERANDS:
            fields = ("vdst",) if key in self.code.writes and key == "VDATA" else fields
            named = (name.format(part) for name in fields)
            field = next((field for field in named if hasattr(inst, field)), "")
            if field and key in self.code.names:
                reads[key] = _source(inst, field, key)
                self.targets[key] = getattr(inst, field).offset, inst.op_bits.get(field, 32)
        if hasattr(inst, "simm16"):
            reads["SIMM16"] = _fixed(inst.simm16)
            reads.setdefault("S0", reads["SIMM16"])  # its name for CDNA
        if "DIV_SCALE" in name:  # returns what it does not scale
            reads["D0"] = reads["S0"]
        # Results and operands of one bit per lane.
        carries = hasattr(inst, "src2") and re.search("CNDMASK|_CO_CI_|_ADDC_|_SUBB", name)
        carry = inst.src2.offset if carries else VCC
        reads["VCC_LANE"] = lambda wave: wave.mask(carry).astype(np.uint64).view(Value)
        first, second = (getattr(getattr(inst, f, None), "offset", VCC) for f in ("vdst", "sdst"))
        masks = {"EXEC_LANE": EXEC, "D0_LANE": first, "VCC_LANE": second, "D1": second}
        self.masks = {key: at for key, at in masks.items() if key in self.code.writes}
        for key in self.masks:
            reads.setdefault(key, _fixed(0))
        if self.memory:
            reads["ADDR"] = _address(inst, kind, self.code.names)
            if kind == "DS":
                reads["OFFSET0"], reads["OFFSET1"] = _fixed(inst.offset0), _fixed(inst.offset1)
                reads["OFFSET"] = _fixed(inst.offset0 | inst.offset1 << 8)
            # An atomic operation without glc returns no value.
            if "ATOMIC" in name and not getattr(inst, "glc", getattr(inst, "sc0", 0)):
                self.targets.clear()
        names = self.code.names | self.code.writes
        self.reads = {key: read for key, read in reads.items() if key in names}

    def execute(self, wave: Wave) -> tuple[dict[str, Any], Lanes]:
        """Values by name, and the lanes that have them."""
        live = np.arange(wave.lanes) == 0 if self.scalar else wave.mask(EXEC)
        values = {key: read(wave) for key, read in self.reads.items()}
        flushed = [key for key in ("S0", "S1", "S2", "D0") if key in values]
        if self.flushes and wave.flushes:
            values |= {key: _flush(values[key]) for key in flushed}
        if self.memory:
            values["load"] = partial(wave.load, live=live)
            values["store"] = partial(wave.store, live=live)
        self.code.run(values, live)
        if self.flushes and wave.flushes:
            values["D0"] = _flush(values["D0"])
        return values, live

    def write(self, wave: Wave, values: dict[str, Any], live: Lanes) -> None:
        for key in self.code.writes & self.targets.keys():
            register, bits = self.targets[key]
            value = values[key]
            if self.upper:
                value = write(wave.read(register), 16, 16, "u", value)
            wave.write(register, bits, value, live)
        for key, register in self.masks.items():
            wave.write_mask(register, (np.asarray(values[key]) != 0) & live)


def _flush(bits: Lanes) -> Lanes:
    """Subnormals of float32 as zeros of their sign."""
    return np.where(bits & 0x7F800000 == 0, bits & 0x80000000, bits).view(Value)


def _run(wave: Wave, operations: list[_Operation]) -> None:
    """All read before any writes."""
    results = [(operation, *operation.execute(wave)) for operation in operations]
    for operation, values, live in results:
        operation.write(wave, values, live)
