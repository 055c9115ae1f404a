"""NCCL's and RCCL's topology XML: what ``NCCL_TOPO_DUMP_FILE`` writes and ``NCCL_TOPO_FILE`` reads.

The format is that of NCCL's ``src/graph/xml.cc`` and ``topo.cc``; RCCL writes ``version="2"`` and
``<xgmi>`` for ``<nvlink>``. A GPU is a ``<gpu>`` inside the ``<pci>`` whose ``busid`` others point
to. Its links go to another GPU, to an NVSwitch, or to a CPU (POWER), which joins no GPUs. A dump
has all links; in an input, as clouds ship, NCCL detects the missing ones when it starts. A file is
a dump if every ``<gpu>`` has the attributes that NCCL adds: ``dev``, ``sm`` and ``rank``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from xml.parsers import expat

from meshplan._message_text import format_first, format_runs
from meshplan.errors import TopologyInputError
from meshplan.topology._reading import (
    Groups,
    Note,
    Reading,
    find_components,
    group_values,
    parse_number,
)

# XML by the standard library's expat, without the dangerous features of XML.
#
# No file or address in the text is ever opened. Document types, which declare entities, are
# refused, so that none can grow; depth and number of elements are bounded.

MAX_DEPTH = 200
# Read in about a second; the largest machines print some ten thousand.
MAX_ELEMENTS = 200_000

_LINKS = ("nvlink", "xgmi")
_TAGS = ("cpu", "pci", "gpu", *_LINKS)  # of the elements that are kept
# The root, or its name in a document type. Files start with a licence or two, not with a million
# comments.
_ROOT = re.compile(
    r"\ufeff?(?:\s*+(?><\?.{0,65536}?\?>|<!--.{0,65536}?-->)){0,100}+\s*+<(?:!DOCTYPE\s++)?"
    r"system(?![\w.:-])",
    re.DOTALL,
)


@dataclass(slots=True, eq=False)
class Element:
    tag: str
    attributes: dict[str, str]
    line: int
    parent: Element | None  # the nearest one around it

    def find_above(self, tag: str, attribute: str) -> str | None:
        around = self.parent
        while around is not None and around.tag != tag:
            around = around.parent
        return None if around is None else around.attributes.get(attribute)


def parse(text: str) -> list[Element]:
    """The elements in the order of the document. Files in the field begin with blank lines."""
    body = text.removeprefix("\ufeff").lstrip()
    # An XML declaration must be the first thing expat sees, blank lines or not.
    above = text[: len(text) - len(body)].count("\n")
    parser = expat.ParserCreate("utf-8")
    elements: list[Element] = []
    inside: list[Element] = []  # for each open element: itself, or the one kept around it
    seen = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal seen
        seen += 1
        line = above + parser.CurrentLineNumber
        if seen > MAX_ELEMENTS or len(inside) >= MAX_DEPTH:
            raise TopologyInputError(
                f"more than {MAX_ELEMENTS} elements, or more than {MAX_DEPTH} inside each other; "
                "no cluster prints this: pass the original file",
                line=line,
            )
        if tag in _TAGS or not inside:
            elements.append(Element(tag, attributes, line, inside[-1] if inside else None))
            inside.append(elements[-1])
        else:
            inside.append(inside[-1])

    def refuse(*_: object) -> None:
        # Without a document type no entity can be declared: expat refuses their uses.
        raise TopologyInputError(
            "refused: a DTD is never read; remove the <!DOCTYPE ...> from the file",
            line=above + parser.CurrentLineNumber,
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: inside.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        # A lone surrogate cannot be encoded; a question mark stands for it.
        parser.Parse(body.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        raise TopologyInputError(
            f"not well-formed XML ({expat.ErrorString(error.code)}); is the file whole?",
            line=above + error.lineno,
        ) from None
    return elements


def parse_numbers(elements: Iterable[Element], name: str) -> list[int] | None:
    """The attribute of all elements, if each has it as a number and all differ."""
    found = [parse_number(element.attributes.get(name)) for element in elements]
    known = [one for one in found if one is not None]
    return known if len(set(known)) == len(found) else None


_SWITCH_CLASS = "0x068000"
_CPU_CLASS = "0x068001"  # IBM's bridge from a GPU to its CPU; NCCL takes it for the CPU
# A switch that NCCL cannot see: in a virtual machine, and between hosts.
_HIDDEN = re.compile(r"f{7,8}:f+(:f+)?(\.\d)?")
_GPU_CLASS = re.compile(r"0x(03|12)", re.IGNORECASE)
_DUMPED = ("dev", "sm", "rank")
# An end of a link: a GPU with its host and bus id, the switch of a host, or the hidden one.
_End = tuple[str, ...]


def recognises(text: str) -> bool:
    return _ROOT.match(text) is not None


def read(text: str) -> Reading:
    """Domains and nodes; GPUs are numbered by ``rank``, else by ``dev``, else in file order. All
    switches of one host count as one, as for NCCL: the links between them are not listed. The
    hidden switch is one for the whole file, as only a clique of hosts is dumped into one file.
    """
    elements = parse(text)
    root = elements[0]
    if root.tag != "system":
        raise TopologyInputError(
            f"the root is <{root.tag[:40]}>; pass an NCCL topology, which starts with <system>",
            line=root.line,
        )
    system = _System(elements)
    notes = list(system.list_notes(root))
    known = bool(system.gpus) and not system.unknown
    domains = system.find_domains() if known else None
    if known:
        notes += system.list_degraded()
    return Reading(
        kind="NCCL topology XML",
        domains=domains,
        nodes=system.find_nodes(domains),
        complete=known and not (system.strangers or system.bare or system.selves),
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
    )


def _format_gpus(indices: Iterable[int]) -> str:
    return format_first(format_runs(indices), 20)


@dataclass(slots=True)
class _Gpu:
    element: Element
    host: str | None
    bus: str
    # Whether the ends of its links are known, also if there are none.
    known: bool
    index: int = -1
    links: int = 0
    to: dict[_End, int] = field(default_factory=dict)  # number of links to each end
    is_unclear: bool = False  # whether a link may lead to another GPU or to none

    @property
    def end(self) -> _End:
        # Bus ids repeat on every host. Parts of one GPU have one bus id.
        return "gpu", self.host or "", self.bus or f"number {self.index}"


class _System:
    def __init__(self, elements: Sequence[Element]) -> None:
        found = [element for element in elements if element.tag == "gpu"]
        dump = all(name in gpu.attributes for gpu in found for name in _DUMPED)
        self.gpus = [
            _Gpu(
                e,
                e.find_above("cpu", "host_hash"),
                (e.find_above("pci", "busid") or "").lower(),
                dump,
            )
            for e in found
        ]
        self.by = next(
            (name for name in ("rank", "dev") if parse_numbers(found, name)),
            "",
        )
        for index, gpu in zip(
            parse_numbers(found, self.by) or range(len(found)),
            self.gpus,
            strict=True,
        ):
            gpu.index = index
        # Two <gpu> of one <pci> are parts of one GPU; links point to the first.
        self.at: dict[_End, _Gpu] = {}
        for gpu in self.gpus:
            first = self.at.setdefault(gpu.end, gpu)
            if gpu.element.parent is not first.element.parent:
                raise TopologyInputError(
                    f"GPUs {first.index} and {gpu.index} have one bus id, {gpu.bus[:40]!r}; pass "
                    "a file for each host, or each <cpu> the host_hash= of its host",
                    line=gpu.element.line,
                )
        full = {gpu.element.parent for gpu in self.gpus}
        empty = (pci for pci in elements if pci.tag == "pci" and pci not in full)
        self.bare = [pci for pci in empty if _GPU_CLASS.match(pci.attributes.get("class", ""))]
        self.selves: list[Element] = []
        self.strangers: list[Element] = []
        owner: dict[Element | None, _Gpu] = {gpu.element: gpu for gpu in self.gpus}
        for element in elements:
            if element.tag in _LINKS and element.parent in owner:
                self._add(owner[element.parent], element)
        self.looped = {owner[link.parent].index for link in self.selves}
        for gpu in self.gpus:
            # A GPU with links to itself only has links to unknown ends.
            gpu.is_unclear |= gpu.index in self.looped and not gpu.links
        self.unknown = [gpu for gpu in self.gpus if not gpu.known or gpu.is_unclear]

    def _add(self, gpu: _Gpu, link: Element) -> None:
        target = link.attributes.get("target", "").strip().lower()
        tclass = link.attributes.get("tclass", "").strip().lower()
        count = parse_number(link.attributes.get("count", "").strip())
        if count is None or not target:
            raise TopologyInputError(
                f"<{link.tag}> of GPU {gpu.index} needs target= and count=, got target="
                f"{target[:40]!r} and count={link.attributes.get('count', '')[:20]!r}; "
                "pass the original file of NCCL",
                line=link.line,
            )
        if target == gpu.bus:
            self.selves.append(link)
            return
        gpu.known = True
        if not count or tclass == _CPU_CLASS:
            return
        gpu.links += count
        end: _End = ("gpu", gpu.host or "", target)
        if end not in self.at:
            if _HIDDEN.fullmatch(target):
                end = ("hidden switch",)
            elif tclass == _SWITCH_CLASS:
                end = ("switch", gpu.host or "")
            else:
                # A GPU that the job does not use, or a switch without the class of one.
                self.strangers.append(link)
                gpu.is_unclear |= not _GPU_CLASS.match(tclass)
                return
        gpu.to[end] = gpu.to.get(end, 0) + count

    def find_domains(self) -> Groups:
        joined = [(gpu.end, end) for gpu in self.gpus for end in gpu.to]
        ends = {gpu.end for gpu in self.gpus} | {end for _, end in joined}
        found = find_components(ends, joined)
        domain = {end: number for number, group in enumerate(found) for end in group}
        groups = group_values((domain[gpu.end], gpu.index) for gpu in self.gpus)
        return tuple(sorted(tuple(sorted(group)) for group in groups.values()))

    def find_nodes(self, domains: Groups | None) -> Groups | None:
        """Hosts, or cliques of hosts that one domain spans, which NCCL counts as one node."""
        hosts = {gpu.host for gpu in self.gpus}
        if not self.gpus or None in hosts or (domains is None and len(hosts) > 1):
            return None
        first = {gpu.host: gpu.index for gpu in reversed(self.gpus)}
        joined = [(gpu.index, first[gpu.host]) for gpu in self.gpus]
        joined += [(group[0], other) for group in domains or () for other in group]
        return find_components([gpu.index for gpu in self.gpus], joined)

    def list_notes(self, root: Element) -> Iterator[Note]:
        if (version := root.attributes.get("version", "")) not in ("1", "2"):
            yield Note(
                f"version {version[:20]!r} is not known; read as 1",
                line=root.line,
            )
        if not self.gpus:
            yield Note(
                "no <gpu>: an input for NCCL that lists PCI only; links of GPUs are unknown: dump "
                "the topology of a running job with NCCL_TOPO_DUMP_FILE",
                "MP202",
                root.line,
            )
            return
        if self.by != "rank":
            how = "by dev" if self.by else "in the order of the file"
            line = self.gpus[0].element.line
            yield Note(
                f"not every <gpu> has a rank of its own; numbered {how}",
                line=line,
            )
        if self.selves:
            found = f"links of GPU {_format_gpus(self.looped)} to itself are ignored"
            yield Note(found, line=self.selves[0].line)
        if self.unknown:
            unknown = _format_gpus(gpu.index for gpu in self.unknown)
            yield Note(
                f"the ends of the links of GPU {unknown} are unknown: an input for NCCL, or a "
                "virtual machine; so domains are unknown",
                "MP202",
                self.unknown[0].element.line,
            )
        if self.bare:
            found = f"{len(self.bare)} more PCI devices look like GPUs and have no <gpu>"
            yield Note(found, "MP202", self.bare[0].line)
        if self.strangers:
            first = self.strangers[0]
            yield Note(
                "links to devices that are not in this file are ignored: "
                f"{len(self.strangers)}, the first to {first.attributes['target'][:40]!r}",
                "MP202",
                first.line,
            )

    def list_degraded(self) -> Iterator[Note]:
        counts = group_values((gpu.links, gpu) for gpu in self.gpus)
        if len(counts) > 1:
            most = sorted(counts.items(), key=lambda item: -len(item[1]))
            found = "; ".join(
                f"{n} on GPU {_format_gpus(g.index for g in gs)}" for n, gs in most[:8]
            )
            few = min(most[1][1], key=lambda gpu: gpu.element.line)
            yield Note(
                f"GPUs have different numbers of links: {found}",
                "MP201",
                few.element.line,
            )
        # How many links a GPU lists to another one.
        to = Counter[tuple[int, int]]()
        for gpu in self.gpus:
            for end, count in gpu.to.items():
                if end in self.at:
                    to[gpu.index, self.at[end].index] = count
        uneven = [pair for pair in to if to[pair] != to[pair[::-1]]]
        if uneven:
            one, other = min(map(sorted, uneven))
            there = to[one, other]
            back = to[other, one]
            yield Note(
                f"GPU {one} lists {there} links to GPU {other}, which lists {back} back; "
                f"{max(there, back)} are assumed",
                "MP201",
                next(gpu.element.line for gpu in self.gpus if gpu.index == one),
            )
