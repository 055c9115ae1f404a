"""AMD's pseudocode of an instruction, executed as Python over the lanes of a wave.

A few rewritten spellings make it Python, whose own parser reads the operators. A `Value` has one
item per lane, of numpy's types; scalar instructions have one lane. Registers are unsigned: 64 bits,
or Python integers where they are wider. A code with an ``if`` runs for each lane alone. numpy rounds
each operation once and keeps subnormals, except `fma`, which is exact here: elsewhere it is often a
product and a sum, and could not show that a compiler has fused them.
"""

from __future__ import annotations

import re
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Lanes", "Value", "compile_pseudocode", "cut", "fma", "to_bits", "write"]

Lanes = Any  # an array with one item per lane


class Value(np.ndarray):
    """One item per lane. ``x.f32`` has its lowest bits as another type, ``x[4:0]`` some of them, and
    ``x[31]`` a single one.
    """

    def __getattr__(self, name: str) -> Lanes:
        found = re.fullmatch(r"([uifb])(\d+)", name)
        if found is None:
            raise AttributeError(name)
        return as_type(self, found[1], int(found[2]))

    def __getitem__(self, key: Any) -> Lanes:
        bits = to_bits(self)
        if not isinstance(key, slice):
            return bits >> np.uint64(key) & np.uint64(1)
        width = abs(key.start - key.stop) + 1
        if key.start >= key.stop:
            return cut(bits >> key.stop, width)
        places = range(key.start, key.stop + 1)
        return sum((bits >> i & 1) << (key.stop - i) for i in places)


def to_bits(value: Lanes) -> Lanes:
    """As a register holds them: a signed value has its sign in all upper bits."""
    value = np.asarray(value).view(Value)
    if value.dtype.kind == "f":
        value = value.view(f"u{value.dtype.itemsize}")
    return value if value.dtype == object else value.astype(np.uint64)


def cut(bits: Lanes, width: int) -> Lanes:
    """The lowest bits of a register, in 64 bits if they fit there."""
    found = bits if width == 64 and bits.dtype != object else bits & ((1 << width) - 1)
    return found if width > 64 else found.astype(np.uint64)


def as_type(value: Lanes, kind: str, width: int) -> Lanes:
    """A value's lowest bits as another type."""
    bits = cut(to_bits(value), width)
    if width in (8, 16, 32, 64):
        kind = "u" if kind == "b" else kind
        bits = bits.astype(f"u{width // 8}").view(f"{kind}{width // 8}")
    return bits


def convert(kind: str, width: int, value: Lanes) -> Lanes:
    """A value in another type: rounded, extended or cut. A literal has the bits of a float."""
    kind = {"F": "f", "I": "i"}.get(kind, "u")
    if isinstance(value, int):
        return as_type(value, kind, width)
    return value.astype(f"{kind}{width // 8}" if width <= 64 else object)


def join(high: Lanes, low: Lanes) -> Lanes:
    return to_bits(high) << 8 * low.dtype.itemsize | to_bits(low)


def write(old: Lanes, low: int, width: int, kind: str, new: Lanes) -> Lanes:
    """A register with another value in its bits from ``low`` on."""
    if kind == "f":
        new = np.asarray(new).astype(f"f{width // 8}")
    bits = cut(to_bits(new), width)
    if old.dtype == object:
        bits = bits.astype(object)
    elif width == 64:
        return np.broadcast_to(bits, old.shape).view(Value)
    return old & ~old.dtype.type((1 << width) - 1 << low) | bits << low


class Code(NamedTuple):
    """``names`` are those of registers, among others; ``writes`` are what the code changes."""

    code: CodeType
    names: frozenset[str]
    writes: frozenset[str]
    branches: bool

    def run(self, values: dict[str, Any], live: Lanes) -> None:
        """Change the registers ``values`` by name, on the lanes ``live`` at least."""
        if not self.branches:
            exec(self.code, _FUNCTIONS, values)
            return
        for lane in np.flatnonzero(live):
            own = {name: value.take([lane]) for name, value in values.items()}
            exec(self.code, _FUNCTIONS, own)
            for name in self.writes & values.keys():
                values[name].put(lane, own[name])


_SPELLINGS = (
    (r"//.*", ""),
    (r"addr = Calc\w+\([^)]*\)", "addr = ADDR"),
    (r"declare .*", ""),
    # The bit of each lane in a mask.
    (r"\.u64\[laneId\]", "_LANE"),
    (r"\bVCC =", "VCC_LANE ="),
    # A conversion would make each NaN a quiet one.
    (r"(is\w*NAN|cvtToQuietNAN)\(64'F\((S\d\.f32)\)\)", r"\1(\2)"),
    # Of 2 alone, exact in float64, so that the product is rounded once.
    (r"2\.0F? \*\* ([\w.]+)", r"ldexp(1.0, \1)"),
    (r"(\d+)'([UIBF])\(", r"convert('\2', \1, "),
    (r"[uif]\d+_to_f(\d+)\(", r"convert('F', \1, "),
    (r"\d+'(\d+)[UIB]?", r"\1"),
    (r"\b(0x[\da-f]+|[\d.]+)(ULL|LL|U|F)\b", r"\1"),
    (r"\b(INF|NAN|DENORM)\.f\d+", r"\1"),
    (r"\[(\d+) : (\d+)\]", r"[\1:\2]"),
    (r"<>", "!="),
    (r"!(?!=)", "~"),
    (r"&&", "&"),
    (r"\|\|", "|"),
)
# A statement, its Python, and the steps that it and what follows are indented by.
_BLOCKS = (
    (r"if (.*) then", r"if \1:", 0, 1),
    (r"elsif (.*) then", r"elif \1:", -1, 0),
    (r"else", "else:", -1, 0),
    (r"for (\w+) in (\d+) : (\d+) do", r"for \1 in range(\2, \3 + 1):", 0, 1),
    (r"endif|endfor", "", 0, -1),
    (r"break|", r"\g<0>", 0, 0),
)
_CHOICE = r"(.+) \? (.+) : (.+)"
_COMPARISON = r"(?:[=!]=|[<>]=?(?![<>]))"
_AMBIGUOUS = rf"{_COMPARISON} [^()]* [&|^] |[&|^] [^()]* {_COMPARISON} "


@cache
def compile_pseudocode(source: str) -> Code:
    """``AssertionError`` or ``SyntaxError`` if a construct is unknown."""
    for pattern, new in _SPELLINGS:
        source = re.sub(pattern, new, source)
    lines: list[str] = []
    writes: set[str] = set()
    depth = 0
    for text in map(str.strip, re.split(r"[;\n]", source)):
        # & binds closer in Python than in C.
        assert not re.search(_AMBIGUOUS, text), text
        for pattern, new, steps, then in _BLOCKS:
            if re.fullmatch(pattern, text):
                lines.append("    " * (depth + steps) + re.sub(f"^(?:{pattern})$", new, text))
                depth += then
                break
        else:
            lines += ["    " * depth + line for line in _assignment(text, writes)]
    code = compile("\n".join(lines), source, "exec")
    return Code(code, frozenset(code.co_names), frozenset(writes), "endif" in source)


def _assignment(text: str, writes: set[str]) -> list[str]:
    """One statement's Python. Adds the name that it writes to ``writes``."""
    target, value = text.split(" = ", 1)
    value = re.sub(r"MEM\[(.*?)\]\.\w(\d+)", r"load(\1, \2 // 8)", value)
    value = re.sub(r"\{ (.*), (.*) \}", r"join(\1, \2)", value)
    value = re.sub(rf"\[{_CHOICE}\]", r"[where(\1, \2, \3)]", value)
    value = re.sub(f"^{_CHOICE}$", r"where(\1, \2, \3)", value)
    if found := re.fullmatch(r"MEM\[(.*)\]\.\w(\d+)", target):
        return [f"store({found[1]}, {value}, {found[2]} // 8)"]
    if target[0] == "{":
        (high, _, top), (low, _, width) = re.findall(r"(\w+)\.([a-z])(\d+)", target)
        first = [f"both = {value}", *_assignment(f"{low}.u{width} = both", writes)]
        return [*first, *_assignment(f"{high}.u{top} = both >> {width}", writes)]
    found = re.fullmatch(r"(\w+)(\.\w+)?(?:\[(\d+):(\d+)\](\.\w+)?)?", target)
    assert found is not None, text
    name, first_type, top, low, last_type = found.groups()
    old = name if name[0].isupper() or name in writes else "ZERO"
    writes.add(name)
    if target == name:
        return [f"{name} = {value}"]
    kind = (last_type or first_type or ".u")[1:]
    width = int(top) - int(low) + 1 if top else kind[1:]
    return [f"{name} = write({old}, {low or 0}, {width}, {kind[0]!r}, {value})"]


# What the pseudocode calls.


def fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """The exact product and sum of float32, rounded once to nearest even."""
    assert a.dtype == b.dtype == c.dtype == np.float32
    return fma_to_odd(a, b, c).astype(np.float32)


def fma_to_odd(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """The product and sum of float32, in float64. Where it is not exact there, its last bit is made
    odd: it then says on which side of a tie of float32 it is.
    """
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    return np.where(inexact, bits + np.where(away, 1, -1), bits).view(np.float64)


def exponent(x: Lanes) -> Lanes:
    return x[30:23].astype(np.int32)


def to_integer(x: Lanes) -> Lanes:
    """uint32 towards zero; what is out of range becomes the nearest integer, and a NaN 0."""
    return np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), 0, (1 << 32) - 1).astype(np.uint32)


def signext_from_bit(value: Lanes, width: Lanes) -> Lanes:
    left = value.dtype.type(8 * value.dtype.itemsize) - width.astype(value.dtype)
    return where(width == 0, 0, value << left >> left)


def where(condition: Lanes, yes: Lanes, no: Lanes) -> Lanes:
    return np.where(condition, yes, no).view(Value)


class _Denormal:
    """``x == DENORM`` in the pseudocode."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: Any) -> Any:
        return (other != 0) & (abs(other) < np.finfo(other.dtype).tiny)


_FUNCTIONS: dict[str, Any] = {
    **{f.__name__: f for f in (convert, exponent, fma, fma_to_odd, join, where, write)},
    **{f.__name__: f for f in (np.ldexp, np.trunc, signext_from_bit)},
    **{"INF": np.inf, "OVERFLOW_F32": np.inf, "UNDERFLOW_F32": 0.0, "NAN": np.nan},
    "DENORM": _Denormal(),
    "ZERO": np.zeros(1, np.uint64).view(Value),
    "isNAN": np.isnan,
    "isQuietNAN": lambda x: np.isnan(x) & (x[22] == 1),
    "isSignalNAN": lambda x: np.isnan(x) & (x[22] == 0),
    "cvtToQuietNAN": lambda x: (x.u32 | 1 << 22).f32,
    "sign": lambda x: x[31],
    "signext": lambda x: x.astype(np.int64),
    "f32_to_u32": to_integer,
}
