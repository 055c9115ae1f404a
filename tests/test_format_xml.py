"""Safe reading of XML: refusals, their lines, and limits of size."""

from __future__ import annotations

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology.formats.nccl_topology import (
    format_spans,
    parse,
    parse_number,
    parse_numbers,
    recognises,
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
        parse(text)
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
    found = parse('\n \r\n<?xml version="1.0"?>\n<a>\n  <c/><gpu/>\n</a>\n')
    assert [(one.tag, one.line) for one in found] == [("a", 4), ("gpu", 5)]
    assert [one.line for one in parse("\ufeff\n<a/>")] == [2]


def test_unrequested_elements_are_skipped() -> None:
    root, inner, _ = parse('<a x="1"><b><cpu><d/></cpu></b><cpu>no</cpu></a>')
    assert inner.parent is root
    assert inner.find_above("a", "x") == "1"
    assert inner.find_above("b", "x") is None


def test_depth_and_number_of_elements_are_bounded() -> None:
    assert len(parse("<pci>" * 200 + "</pci>" * 200)) == 200
    assert "more than 200 inside each other" in refused("<a>" * 201 + "</a>" * 201)
    assert "more than 200000 elements" in refused("<a>" + "<b/>" * 200_000 + "</a>")


@pytest.mark.parametrize(
    ("text", "is_topology"),
    [
        ("<system/>", True),
        ("\n\n<system b='1'>", True),
        ("\ufeff<?xml version='1.0'?><!-- <b> --><!-- two -->\n<system>", True),
        ("<!DOCTYPE system [<!ENTITY b 'c'>]><system>", True),
        ("<!-- -->" * 100 + "<system>", True),
        ("<!-- -->" * 200 + "<system>", False),
        ("<!-- <system> never closed", False),
        ("<?xml", False),
        ("", False),
        ("a <system>", False),
        ("<a><system>", False),
        ("<systems>", False),
        ("<!doctype html><html>", False),
        ("< system>", False),
        ("<", False),
    ],
)
def test_root_tag_decides(text: str, is_topology: bool) -> None:
    assert recognises(text) is is_topology


def test_numbers_are_parsed_strictly() -> None:
    told = (None, "", "0", "17", "-1", " 1", "1e3", "\u0663", "9" * 10)
    assert [parse_number(one) for one in told] == [None, None, 0, 17] + [None] * 5
    found = parse('<a><gpu i="2" j="1" k="1"/><gpu i="0" j="1"/></a>')[1:]
    assert parse_numbers(found, "i") == [2, 0]
    assert parse_numbers(found, "j") is parse_numbers(found, "k") is None


def test_long_spans_are_abbreviated() -> None:
    assert format_spans([]) == ""
    assert format_spans([6, 0, 1, 2, 3, 4]) == "0-4, 6"
    assert format_spans(range(0, 100, 2)).endswith("36, 38, ... 30 more")


@given(st.text(alphabet="<>/!?ab-[]&;\"'= \n\ud800\0", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert recognises(text) in (True, False)
    try:
        assert parse(text)
    except TopologyInputError as error:
        # An error is one of two good ends.
        assert (len(str(error).splitlines()), error.line is None) == (1, False)  # noqa: PT017
