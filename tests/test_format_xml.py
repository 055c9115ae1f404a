"""Safe reading of XML: refusals, their lines, and limits of size."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology.formats.nccl_topology import (
    find_root_tag,
    format_spans,
    parse,
    parse_number,
    parse_numbers,
)

LAUGHS = """<?xml version="1.0"?>
<!DOCTYPE system [
 <!ENTITY a "ha">
 <!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
 <!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;">
]>
<system version="1">&c;</system>
"""
EXTERNAL = '<!DOCTYPE system [<!ENTITY x SYSTEM "file:///etc/passwd">]><system version="&x;"/>'


def refused(text: str) -> str:
    with pytest.raises(TopologyInputError) as error:
        parse(text, ("system",))
    assert "\n" not in str(error.value)
    return str(error.value)


class TestRefusals(TestCase):
    def test_entities_and_dtds_are_refused(self) -> None:
        found = [
            refused(LAUGHS),
            refused(EXTERNAL),
            refused('\n<!DOCTYPE system SYSTEM "http://example.com/x.dtd">\n<system/>'),
            refused('<!DOCTYPE a SYSTEM "a.dtd">\n<a>&more;</a>'),
            refused("<!DOCTYPE a [<!ATTLIST a version CDATA '1'>]><a/>"),
            refused("<a>&more;</a>"),
        ]
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP212: line 2: refused: a DTD is never read; remove the <!DOCTYPE ...> from the file
MP212: line 1: refused: a DTD is never read; remove the <!DOCTYPE ...> from the file
MP212: line 2: refused: a DTD is never read; remove the <!DOCTYPE ...> from the file
MP212: line 1: refused: a DTD is never read; remove the <!DOCTYPE ...> from the file
MP212: line 1: refused: a DTD is never read; remove the <!DOCTYPE ...> from the file
MP212: line 1: not well-formed XML (undefined entity); is the file whole?""",
        )

    def test_malformed_xml_is_refused(self) -> None:
        texts = (
            "",
            "\n\n",
            "plain",
            "<a>\n<b>\n</a>",
            "<a>\n",
            "<a/>\n<a/>",
            "<a>\0</a>",
            "<a b/>",
        )
        self.assertExpectedInline(
            "\n".join(refused(text) for text in texts),
            """\
MP212: line 1: not well-formed XML (no element found); is the file whole?
MP212: line 3: not well-formed XML (no element found); is the file whole?
MP212: line 1: not well-formed XML (syntax error); is the file whole?
MP212: line 3: not well-formed XML (mismatched tag); is the file whole?
MP212: line 2: not well-formed XML (no element found); is the file whole?
MP212: line 2: not well-formed XML (junk after document element); is the file whole?
MP212: line 1: not well-formed XML (not well-formed (invalid token)); is the file whole?
MP212: line 1: not well-formed XML (not well-formed (invalid token)); is the file whole?""",
        )


def test_line_numbers_count_leading_blank_lines() -> None:
    found = parse('\n \r\n<?xml version="1.0"?>\n<a>\n  <c/><b/>\n</a>\n', ("b",))
    assert [(one.tag, one.line) for one in found] == [("a", 4), ("b", 5)]
    assert [one.line for one in parse("\ufeff\n<a/>", ())] == [2]


def test_unrequested_elements_are_skipped() -> None:
    root, inner, _ = parse('<a x="1"><b><c><d/></c></b><c>no</c></a>', ("c",))
    assert inner.parent is root
    assert inner.find_above("a", "x") == "1"
    assert inner.find_above("b", "x") is None


def test_depth_and_number_of_elements_are_bounded() -> None:
    assert len(parse("<a>" * 200 + "</a>" * 200, ("a",))) == 200
    assert "more than 200 inside each other" in refused("<a>" * 201 + "</a>" * 201)
    assert "more than 200000 elements" in refused("<a>" + "<b/>" * 200_000 + "</a>")


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("<a/>", "a"),
        ("\n\n<a b='1'>", "a"),
        ("\ufeff<?xml version='1.0'?><!-- <b> --><!-- two -->\n<a>", "a"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><a>", "a"),
        ("<!-- never closed", ""),
        ("<!-- -->" * 200 + "<a/>", ""),
        ("<?xml", ""),
        ("", ""),
        ("a <b>", ""),
        ("<!doctype html><html>", ""),
        ("< a>", ""),
        ("<", ""),
    ],
)
def test_root_tag_is_found(text: str, tag: str) -> None:
    assert find_root_tag(text) == tag


def test_numbers_are_parsed_strictly() -> None:
    told = (None, "", "0", "17", "-1", " 1", "1e3", "\u0663", "9" * 10)
    assert [parse_number(one) for one in told] == [None, None, 0, 17] + [None] * 5
    found = parse('<a><b i="2" j="1" k="1"/><b i="0" j="1"/></a>', ("b",))[1:]
    assert parse_numbers(found, "i") == [2, 0]
    assert parse_numbers(found, "j") is parse_numbers(found, "k") is None


def test_long_spans_are_abbreviated() -> None:
    assert format_spans([]) == ""
    assert format_spans([6, 0, 1, 2, 3, 4]) == "0-4, 6"
    assert format_spans(range(0, 100, 2)).endswith("36, 38, ... 30 more")


@given(st.text(alphabet="<>/!?ab-[]&;\"'= \n\ud800\0", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert isinstance(find_root_tag(text), str)
    try:
        assert parse(text, ("a",))
    except TopologyInputError as error:
        # An error is one of two good ends.
        assert (len(str(error).splitlines()), error.line is None) == (1, False)  # noqa: PT017
