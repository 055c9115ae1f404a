"""What ranks agree on: named fields and a version, as text for a store or as words for collectives.

Ranks compare records before they trust each other's data. The text goes through the store, the
words in front of messages and into the memory that ranks share. Both start with the version: a
record of another release is reported as such, and none of its fields is read. A code or a bit that
this release does not know is an error, and never a default.

The words, 64 bits each:

* 0: magic and version.
* 1: codes, from the lowest byte: kind, path, dtype, op, order, dimensions, axes, and flags
  (1 a contract, 2 accumulate, 4 rounding).
* 2: elements. 3: divisor. 4: norm, as the bits of a float64.
* 5 to 7: axis sizes. 8 to 11: shape. Two numbers in a word, or a digest and then words of -1.
* 12: a digest of the layout of shards. 13, from the lowest bit: ranks in a block (32 bits), how
  blocks reduce (2), the unit of chunks in KiB (29).
* 14: a digest of the names of a dtype and a path that have no code.
* 15, which each call sets: a digest of the group whose calls are counted (upper half), and the
  number of the call (lower half, modulo 2 to the 32); 0 where none is counted.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshplan._message_text import format_first
from meshplan.contract import Accumulate, Contract, Rounding
from meshplan.orders import order_of_code

VERSION = 5
"""Counts up with a change of a table or a field below, of the contract's version, of the protocol
of a vote, or of what lies in memory that ranks share."""
WORDS = 15
"""Of a packed record."""
CALL_WORD = WORDS
"""The place of the word behind them, of the call that a record is of."""
WORD_FIELDS = (
    "version of meshplan's records", "kind, path, dtype, operation, contract or dimensions",
    "elements", "divisor", "norm", *["axes"] * 3, *["shape"] * 4, "layout", "blocks or chunks",
    "names of a dtype or a path", "call",
)  # fmt: skip
"""What each word holds, in the order of the words."""

_MAGIC = int.from_bytes(b"mplan", "little")
_KINDS = ("all_reduce", "reduce_scatter", "all_gather")
_PATHS = (
    "exchange", "reference", "native", "all_gather", "list", "one_shot", "two_shot", "scatter",
    "halving",
)  # fmt: skip
_BETWEEN = ("exchange", "halving")
_OPS = ("", "sum", "avg", "product", "max", "min")
_DTYPES = (
    "float32", "bfloat16", "float16", "float64", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_ACCUMULATES: tuple[Accumulate, ...] = ("wide", "float64")
_ROUNDINGS: tuple[Rounding, ...] = ("once", "node")
_OTHER = 255
_HALF = (1 << 32) - 1
_MOST_CHUNK = (1 << 29) - 1
_AXIS_WORDS, _SHAPE_WORDS = 3, 4
_MOST_SHOWN = 8


class UnreadableRecordError(ValueError):
    """Words of this version that no rank of it writes. Not raised to users."""


@dataclass(frozen=True, slots=True)
class Record:
    """Facts of one rank."""

    fields: tuple[tuple[str, str], ...]  # in order; empty for a record of another version
    version: int = VERSION  # of the release that wrote it

    @classmethod
    def of(cls, **fields: object) -> Record:
        """A record of this version, without the fields that are ``None``."""
        return cls(tuple((name, str(value)) for name, value in fields.items() if value is not None))

    def adding(self, **fields: object) -> Record:
        return Record(self.fields + Record.of(**fields).fields, self.version)

    def get(self, name: str) -> str | None:
        """The value of a field; ``None`` if there is none."""
        return dict(self.fields).get(name)

    def pack(self) -> str:
        """As text; equal records have equal texts."""
        return json.dumps({"meshplan": self.version, **dict(self.fields)})

    @classmethod
    def unpack(cls, text: str) -> Record:
        """What ``pack`` has packed; the releases before it wrote plain text, which is version 1."""
        try:
            found = json.loads(text)
            version = found.pop("meshplan")
        except (ValueError, AttributeError, TypeError, KeyError):
            return cls((), 1)
        if version != VERSION:
            return cls((), version if isinstance(version, int) else 1)
        return cls.of(**found)

    def __str__(self) -> str:
        if self.version != VERSION:
            return f"a record of version {self.version}"
        if self.get("unreadable") is not None:
            return f"an unreadable record ({self.get('unreadable')})"
        if self.get("kind") is not None:
            return _sentence(dict(self.fields))
        return ", ".join(f"{name} {value}" for name, value in self.fields)


def differences(records: Mapping[int, Record]) -> str:
    """Each field in which records differ, with its values by global rank; empty if they are equal.
    Only the versions, if these differ, or only why some cannot be read.
    """
    versions = _values(records, lambda record: str(record.version))
    if len(versions) > 1:
        return (
            f"version of meshplan's records {_by_value(versions)}: install one release of meshplan "
            "on every rank"
        )
    unreadable = {rank: record for rank, record in records.items() if record.get("unreadable")}
    if unreadable:
        return _by_value(_values(unreadable, str))
    names = dict.fromkeys(name for record in records.values() for name, _ in record.fields)
    shown = []
    for name in names:
        values = _values(records, lambda record, name=name: record.get(name) or "none")  # type: ignore[misc]
        if len(values) > 1:
            shown.append(f"{name} {_by_value(values)}")
    return "; ".join(shown)


def _values(records: Mapping[int, Record], of: Callable[[Record], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, record in records.items():
        found.setdefault(of(record), []).append(rank)
    return found


def _by_value(values: Mapping[str, Sequence[int]]) -> str:
    shown = [f"{value} ({ranks_text(who)})" for value, who in values.items()]
    return ", ".join(shown[:_MOST_SHOWN]) + (", ..." if len(shown) > _MOST_SHOWN else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """One or more ranks in words, the first 16 of them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_first(ranks, 16)}" + (
        f" ({len(ranks)} ranks)" if len(ranks) > 16 else ""
    )


def pack_words(
    *,
    kind: str,
    path: str,
    dtype: str,
    shape: Sequence[int],
    axes: Sequence[int],
    op: str = "",
    contract: Contract | None = None,
    divisor: int = 0,
    norm: float | None = None,
    layout: str = "",
    inner: int = 1,
    between: str = "exchange",
    chunk: int = 0,
) -> tuple[int, ...]:
    """A rank's part in a collective as signed numbers of 64 bits. ``axes`` are the sizes of the
    reduced ones. ``layout``: where parts of the result go, in any form that equal ranks have in
    common. The others are those of a step; 0 and ``None`` for none.
    """
    order = flags = 0
    if contract is not None:
        order = contract.ordering.code
        flags = 1 | _ACCUMULATES.index(contract.accumulate) << 1
        flags |= _ROUNDINGS.index(contract.rounding) << 2
    codes = (
        _KINDS.index(kind),
        _PATHS.index(path) if path in _PATHS else _OTHER,
        _DTYPES.index(dtype) if dtype in _DTYPES else _OTHER,
        _OPS.index(op),
        order,
        min(len(shape), _OTHER),
        min(len(axes), _OTHER),
        flags,
    )
    unknown = [dtype] * (dtype not in _DTYPES) + [path] * (path not in _PATHS)
    return (
        _MAGIC << 16 | VERSION,
        sum(code << 8 * i for i, code in enumerate(codes)),
        math.prod(shape),
        divisor,
        0 if norm is None else struct.unpack("<q", struct.pack("<d", norm))[0],
        *_packed(axes, _AXIS_WORDS),
        *_packed(shape, _SHAPE_WORDS),
        _digest(layout) if layout else 0,
        inner | _BETWEEN.index(between) << 32 | min(-(-chunk // 1024), _MOST_CHUNK) << 34,
        # What no table knows is compared by name.
        _digest(" ".join(unknown)) if unknown else 0,
    )


def read_words(words: Sequence[int]) -> Record:
    """As ``unpack_words``, where an error would leave other ranks waiting: its text is a field."""
    try:
        return unpack_words(words)
    except UnreadableRecordError as error:
        return Record.of(unreadable=error)


def unpack_words(words: Sequence[int]) -> Record:
    """The record in words, signed or not, with its call if that word is there. Raises
    UnreadableRecordError if this version writes no such words.
    """
    words = [(word + (1 << 63)) % (1 << 64) - (1 << 63) for word in words[: CALL_WORD + 1]]
    if words[0] >> 16 != _MAGIC:
        raise UnreadableRecordError("a message that is not meshplan's, or of another collective")
    version = words[0] & 0xFFFF
    if version != VERSION:
        return Record((), version)
    code, numel, divisor, norm = words[1:5]
    kind, path, dtype, op, order, ndim, axes, flags = (code >> 8 * i & 0xFF for i in range(8))
    digest, inner, name = words[12:WORDS]
    shape = _numbers("shape", words[8:12], ndim)
    inner, between, chunk = inner & _HALF, inner >> 32 & 3, inner >> 34
    if divisor < 0 or inner < 1 or chunk < 0:
        raise UnreadableRecordError(f"divisor {divisor}, blocks of {inner}, chunks of {chunk} KiB")
    if isinstance(shape, list) and math.prod(shape) != numel:
        raise UnreadableRecordError(f"{numel} elements in shape {shape}")
    sizes = _numbers("axes", words[5:8], axes)
    if (name != 0) != (_OTHER in (dtype, path)):
        raise UnreadableRecordError("a dtype or a path by code and by name")
    other = f"#{name % (1 << 64):016x}"
    call = words[CALL_WORD] if len(words) > CALL_WORD else 0
    return Record.of(
        dtype=f"dtype {other}" if dtype == _OTHER else _named("dtype", _DTYPES, dtype),
        shape=shape if isinstance(shape, list) else f"{numel} elements {shape}",
        kind=_named("kind", _KINDS, kind),
        op=_named("op", _OPS, op) or None,
        axes="x".join(map(str, sizes)) if isinstance(sizes, list) else sizes,
        divisor=divisor or None,
        norm=_norm(norm),
        inner=inner if inner > 1 else None,
        between=_named("method between blocks", _BETWEEN, between) if between else None,
        chunk=chunk or None,
        layout=f"#{digest % (1 << 64):016x}" if digest else None,
        contract=_contract(order, flags),
        path=other if path == _OTHER else _named("path", _PATHS, path),
        call=call & _HALF if call else None,
        group=f"#{call >> 32 & _HALF:08x}" if call else None,
    )


def _sentence(fields: Mapping[str, str]) -> str:
    dims = fields["shape"] if fields["shape"].startswith("[") else f"[{fields['shape']}]"
    op = f" {fields['op']}" if "op" in fields else ""
    ranks = f"{fields['axes']} ranks".lstrip()
    text = f"{fields['dtype']}{dims} for {fields['kind']}{op} over {ranks}"
    for name, before in (
        ("divisor", " with divisor "),
        ("norm", " of norm "),
        ("inner", " in blocks of "),
        ("between", " between which by "),
        ("chunk", " in chunks by KiB of "),
        ("layout", " in layout "),
        ("contract", ", contract "),
    ):
        if name in fields:
            text += before + fields[name]
    return f"{text}, path {fields['path']}"


def _norm(bits: int) -> float | None:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    if math.isnan(value):
        raise UnreadableRecordError("the norm is not a valid number")
    return value if bits else None


def _contract(code: int, flags: int) -> str | None:
    order = order_of_code(code)
    if flags >> 3 or (not flags & 1 and (flags or code)):
        raise UnreadableRecordError(f"contract flags {flags} with order {code}")
    if order is None:
        raise UnreadableRecordError(f"no order of code {code}")
    if not flags & 1:
        return None
    return Contract(order.name, _ACCUMULATES[flags >> 1 & 1], _ROUNDINGS[flags >> 2 & 1]).id


def _named(field: str, table: Sequence[str], code: int) -> str:
    if code >= len(table):
        raise UnreadableRecordError(f"no {field} of code {code}")
    return table[code]


def _packed(numbers: Sequence[int], words: int) -> list[int]:
    """Two numbers in each word; a digest, marked by words of -1, where they do not fit."""
    if len(numbers) > 2 * words or any(number >= _HALF >> 1 for number in numbers):
        return [_digest(repr(tuple(numbers)))] + [-1] * (words - 1)
    halves = [*numbers, *(0,) * (2 * words - len(numbers))]
    return [low | high << 32 for low, high in zip(halves[::2], halves[1::2], strict=True)]


def _numbers(field: str, words: Sequence[int], count: int) -> list[int] | str:
    """What ``_packed`` has packed; a digest as text."""
    if words[-1] == -1:
        if any(word != -1 for word in words[1:]):
            raise UnreadableRecordError(f"{field} is neither numbers nor a digest")
        return f"{count} of #{words[0] % (1 << 64):016x}"
    halves = [half for word in words for half in (word & _HALF, word >> 32)]
    if (
        count > len(halves)
        or any(halves[count:])
        or any(not 0 <= half < _HALF >> 1 for half in halves)
    ):
        raise UnreadableRecordError(f"{field} of {count} numbers: {halves}")
    return halves[:count]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:8], "little", signed=True)
