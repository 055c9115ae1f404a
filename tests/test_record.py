"""Packed records: no field is lost or misread, and other versions are refused."""

from __future__ import annotations

import json

import pytest
from expecttest import assert_expected_inline

from meshplan import record
from meshplan.contract import OPS, Contract
from meshplan.record import (
    VERSION,
    WORDS,
    Record,
    UnreadableRecordError,
    differences,
    pack_words,
    read_words,
    unpack_words,
)

BASE = {
    "kind": "all_reduce",
    "path": "exchange",
    "dtype": "float32",
    "shape": (8, 4),
    "axes": (2, 3),
    "op": "sum",
    "contract": Contract(),
}
# Another value of each argument, and the fields that differ then.
OTHERS = {
    "kind": ("reduce_scatter", ["kind"]),
    "path": ("ring", ["path"]),
    "dtype": ("bfloat16", ["dtype"]),
    "shape": ((4, 8), ["shape"]),
    "axes": ((3, 2), ["axes"]),
    "op": ("max", ["op"]),
    "contract": (Contract("rank"), ["contract"]),
    "divisor": (6, ["divisor"]),
    "norm": (2.0, ["norm"]),
    "layout": ("0 (3, 5)", ["layout"]),
    "inner": (3, ["inner"]),
    "between": ("halving", ["between"]),
    "chunk": (2048, ["chunk"]),
}


def named(a: tuple[int, ...], b: tuple[int, ...]) -> list[str]:
    found = differences({0: unpack_words(a), 1: unpack_words(b)})
    return [part.split()[0] for part in found.split("; ")] if found else []


def test_each_field_that_differs_is_named() -> None:
    assert set(OTHERS) == set(pack_words.__annotations__) - {"return"}
    for name, (value, expected) in OTHERS.items():
        assert named(pack_words(**BASE), pack_words(**{**BASE, name: value})) == expected, name
    assert named(pack_words(**BASE), pack_words(**BASE)) == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"contract": None, "op": "", "kind": "all_gather"},
        {"shape": (2,) * 9, "dtype": "float4_e2m1fn_x2"},
        {"path": "ring"},
        {"shape": (), "axes": (1 << 40, 2), "op": "avg", "divisor": 7},
        {"shape": (0, 4), "norm": 2.0, "layout": "x", "inner": 2, "contract": Contract("rank")},
    ],
)
def test_every_bit_counts(more: dict) -> None:
    """A changed bit is another version, another field, or an error; it is never read as the same."""
    words = pack_words(**{**BASE, **more})
    assert len(words) == WORDS
    shown = unpack_words(words)
    errors = 0
    for index in range(WORDS):
        for bit in range(64):
            changed = list(words)
            changed[index] = (words[index] ^ (1 << bit)) % (1 << 64)
            try:
                found = unpack_words(changed)
            except UnreadableRecordError:
                errors += 1
                continue
            assert found != shown, (index, bit)
            assert found.version == VERSION or (index == 0 and bit < 16 and not found.fields)
            assert differences({0: shown, 1: found}), (index, bit)
    assert 48 <= errors < 64 * WORDS


def test_unsigned_words_and_trailing_data_are_read() -> None:
    words = pack_words(**BASE, layout="negative", norm=-1.0)
    assert min(words) < 0
    unsigned = [word % (1 << 64) for word in words]
    assert unpack_words([*unsigned, 0, 7]) == unpack_words(words)
    call = (0xFFAB0001 << 32 | 7) - (1 << 64)
    found = unpack_words([*words, call])
    assert found == unpack_words([*unsigned, call % (1 << 64), 5])
    assert found == unpack_words(words).adding(call=7, group="#ffab0001")


def test_contracts_are_read_back() -> None:
    for accumulate in ("wide", "float64"):
        for rounding in ("once", "node"):
            for order in ("tree", "rank"):
                contract = Contract(order, accumulate, rounding)
                found = unpack_words(pack_words(**{**BASE, "contract": contract}))
                assert found.get("contract") == contract.id
    for op in OPS:
        assert unpack_words(pack_words(**{**BASE, "op": op})).get("op") == op


def test_unknown_codes_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for byte, code in ((0, 9), (1, 99), (2, 77), (3, 6), (4, 7), (7, 9), (7, 0x41)):
        words = list(pack_words(**BASE))
        words[1] = words[1] & ~(0xFF << 8 * byte) | code << 8 * byte
        with pytest.raises(UnreadableRecordError):
            unpack_words(words)
        rows.append(str(read_words(words)))
    assert_expected_inline(
        "\n".join(rows),
        """\
an unreadable record (no kind of code 9)
an unreadable record (no path of code 99)
an unreadable record (no dtype of code 77)
an unreadable record (no op of code 6)
an unreadable record (no order of code 7)
an unreadable record (contract flags 9 with order 0)
an unreadable record (contract flags 65 with order 0)""",
    )
    # An order that only the other rank's code has.
    monkeypatch.setattr(record, "order_of_code", lambda code: None)
    with pytest.raises(UnreadableRecordError, match="no order of code 0"):
        unpack_words(pack_words(**BASE))


def test_another_version_is_reported_and_not_read() -> None:
    words = pack_words(**BASE)
    old = (words[0] - 1, *words[1:])
    text = Record.of(contract="x").pack()
    newer = json.dumps({"meshplan": VERSION + 1, "contract": 3, "more": [1]})
    found = {
        0: unpack_words(words),
        1: unpack_words(old),
        4: Record.unpack(text),
        5: Record.unpack(newer),
        6: Record.unpack("contract v1/tree/wide/once, path auto"),
    }
    assert [one.version for one in found.values()] == [
        VERSION,
        VERSION - 1,
        VERSION,
        VERSION + 1,
        1,
    ]
    assert [bool(one.fields) for one in found.values()] == [True, False, True, False, False]
    assert_expected_inline(
        differences(found),
        """version of meshplan's records 5 (ranks 0, 4), 4 (rank 1), 6 (rank 5), 1 (rank 6): install one release of meshplan on every rank""",
    )
    assert_expected_inline(str(found[1]), """a record of version 4""")


def test_text_is_read_back() -> None:
    mine = Record.of(policy="fast", path=None, contract=Contract().id, count=3)
    assert mine.fields == (("policy", "fast"), ("contract", "v1/tree/wide/once"), ("count", "3"))
    assert Record.unpack(mine.pack()) == mine
    assert mine.adding(group="new").get("group") == "new"
    assert mine.get("path") is None
    for text in ("", "[]", "3", "null", '{"a": 1}', '{"meshplan": "2"}', "{"):
        assert Record.unpack(text) == Record((), 1), text
    assert_expected_inline(
        differences({0: mine, 3: mine.adding(audit=5), 2: mine}),
        """audit none (ranks 0, 2), 5 (rank 3)""",
    )


def test_many_ranks_stay_readable() -> None:
    found = {rank: Record.of(shape=rank // 4) for rank in range(100)}
    assert_expected_inline(
        differences(found),
        """shape 0 (ranks 0, 1, 2, 3), 1 (ranks 4, 5, 6, 7), 2 (ranks 8, 9, 10, 11), 3 (ranks 12, 13, 14, 15), 4 (ranks 16, 17, 18, 19), 5 (ranks 20, 21, 22, 23), 6 (ranks 24, 25, 26, 27), 7 (ranks 28, 29, 30, 31), ...""",
    )
