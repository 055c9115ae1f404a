"""XML by the standard library's expat, without the dangerous features of XML.

No file or address in the text is ever opened. Document types, which declare entities, are refused,
so that none can grow; depth and number of elements are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from xml.parsers import expat

from meshplan._message_text import format_runs
from meshplan.errors import TopologyInputError

MAX_DEPTH = 200
# Read in about a second; the largest machines print some ten thousand.
MAX_ELEMENTS = 200_000

_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.:-]*")
_DOCTYPE = re.compile(r"<!DOCTYPE\s+([A-Za-z_][\w.:-]*)")


@dataclass(slots=True, eq=False)
class Element:
    """One wanted element.

    Attributes:
        parent: the nearest wanted element around it.
    """

    tag: str
    attributes: dict[str, str]
    line: int
    parent: Element | None

    def find_above(self, tag: str, attribute: str) -> str | None:
        around = self.parent
        while around is not None and around.tag != tag:
            around = around.parent
        return None if around is None else around.attributes.get(attribute)


def find_root_tag(text: str) -> str:
    """Name of the root element, or of the DOCTYPE; empty if this is not XML."""
    at = 1 if text.startswith("\ufeff") else 0
    # Files start with a licence or two, not with a million comments.
    for _ in range(100):
        blank = _BLANK.match(text, at)
        at = blank.end() if blank else at
        if text.startswith("<?", at):
            at = text.find("?>", at) + 2
        elif text.startswith("<!--", at):
            at = text.find("-->", at) + 3
        else:
            break
        if at < 4:  # find() gave -1: never closed
            return ""
    doctype = _DOCTYPE.match(text, at)
    if doctype:
        return doctype[1]
    name = _NAME.match(text, at + 1) if text.startswith("<", at) else None
    return name[0] if name else ""


def parse(text: str, wanted: Iterable[str]) -> list[Element]:
    """The elements with the tags ``wanted``, in the order of the document; the root is first.
    ``text``: the document; blank lines before it are allowed, as files in the field have them.
    """
    body = text.removeprefix("\ufeff").lstrip()
    # An XML declaration must be the first thing expat sees, blank lines or not.
    above = text[: len(text) - len(body)].count("\n")
    handler = _Handler(frozenset(wanted), above)
    try:
        # A lone surrogate cannot be encoded; a question mark stands for it.
        handler.parser.Parse(body.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        raise TopologyInputError(
            f"not well-formed XML ({expat.ErrorString(error.code)}); is the file whole?",
            line=above + error.lineno,
        ) from None
    return handler.elements


class _Handler:
    def __init__(self, wanted: frozenset[str], above: int) -> None:
        self.wanted = wanted
        self.above = above
        self.elements: list[Element] = []
        self.seen = 0
        # One entry for each open element: itself, or the element kept around it.
        self.open: list[Element | None] = []
        parser = self.parser = expat.ParserCreate("utf-8")
        parser.StartElementHandler = self.start
        parser.EndElementHandler = self.end
        parser.StartDoctypeDeclHandler = self.doctype

    def line(self) -> int:
        return self.above + self.parser.CurrentLineNumber

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.seen += 1
        if self.seen > MAX_ELEMENTS or len(self.open) >= MAX_DEPTH:
            raise TopologyInputError(
                f"more than {MAX_ELEMENTS} elements, or more than {MAX_DEPTH} inside each other; "
                "no cluster prints this: pass the original file",
                line=self.line(),
            )
        around = self.open[-1] if self.open else None
        if tag in self.wanted or not self.open:
            around = Element(tag, attributes, self.line(), around)
            self.elements.append(around)
        self.open.append(around)

    def end(self, tag: str) -> None:
        self.open.pop()

    def doctype(self, *_: object) -> None:
        # Without a document type no entity can be declared: expat refuses their uses.
        raise TopologyInputError(
            "refused: a DTD is never read; remove the <!DOCTYPE ...> from the file",
            line=self.line(),
        )


def parse_number(text: str | None) -> int | None:
    """A whole number from 0 up; ``None`` for any other text."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return None
    return int(text)


def parse_numbers(elements: Iterable[Element], name: str) -> list[int] | None:
    """The attribute of all elements, if each has it as a number and all differ."""
    found = [parse_number(element.attributes.get(name)) for element in elements]
    known = [one for one in found if one is not None]
    return known if len(set(known)) == len(found) else None


def format_spans(indices: Iterable[int]) -> str:
    """For messages: ``0-4, 6`` for 0, 1, 2, 3, 4, 6."""
    runs = format_runs(indices)
    return ", ".join(runs[:20]) + (f", ... {len(runs) - 20} more" if len(runs) > 20 else "")
