"""NCCL topology XML: dumps, inputs that say nothing about links, switches seen and hidden, hosts; and
safe reading of XML: refusals, their lines, and limits of size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology import Reading
from meshplan.topology.formats.nccl_topology import (
    parse,
    parse_number,
    parse_numbers,
    read,
    recognises,
)
from tests.refusals import refusal

Link = tuple[str, int, str]  # target, count, tclass
HIDDEN = ("fffffff:ff:ff.0", 18, "0x068000")
SWITCH = "0x068000"
GPU = "0x030200"


def bus(gpu: int) -> str:
    return f"0000:{gpu + 16:02x}:00.0"


def gpu(
    index: int,
    links: Iterable[Link] = (),
    *,
    more: str = 'sm="90" rank="{}"',
    tag: str = "nvlink",
    at: int | None = None,
) -> str:
    inner = "".join(f'<{tag} target="{t}" count="{n}" tclass="{c}"/>\n' for t, n, c in links)
    place = bus(index if at is None else at)
    return (
        f'<pci busid="{place}" class="0x030200">\n'
        f'<gpu dev="{index}" {more.format(index)}>\n{inner}</gpu>\n</pci>\n'
    )


def system(*cpus: str | Sequence[str], version: str = "1", hosts: Sequence[str] = ()) -> str:
    text = f'<system version="{version}">\n'
    for position, cpu in enumerate(cpus):
        told = f' host_hash="{hosts[position]}"' if hosts else ""
        text += f'<cpu numaid="{position}"{told}>\n{"".join(cpu)}</cpu>\n'
    return text + "</system>\n"


def format_reading(reading: Reading) -> str:
    lines = [
        f"{reading.kind}, {'complete' if reading.complete else 'not complete'}",
        f"domains {reading.domains}",
        f"nodes {reading.nodes}",
    ]
    return "\n".join([*lines, *map(str, reading.notes)])


class TestText(TestCase):
    def test_gpus_on_switches_are_one_domain(self) -> None:
        # Switches that differ by their bus and by their number of links are one switch, also
        # where no GPU is on two of them.
        left = [("0000:80:00.0", 5, SWITCH), ("0000:81:00.0", 4, SWITCH)]
        right = [("0000:90:00.0", 9, SWITCH)]
        text = "\n" + system([gpu(0, left), gpu(1, left)], [gpu(2, right)], hosts=("0x1", "0x1"))
        self.assertExpectedInline(
            format_reading(read(text)),
            """\
NCCL topology XML, complete
domains ((0, 1, 2),)
nodes ((0, 1, 2),)""",
        )

    def test_xgmi_islands_are_two_domains(self) -> None:
        pairs = {0: 3, 1: 2, 2: 1, 3: 0}
        gpus = [gpu(a, [(bus(b), 1, "0x038000")], tag="xgmi") for a, b in pairs.items()]
        self.assertExpectedInline(
            format_reading(read(system(gpus, version="2"))),
            """\
NCCL topology XML, complete
domains ((0, 3), (1, 2))
nodes None""",
        )

    def test_degraded_gpu_of_a_clique_is_reported(self) -> None:
        # Bus ids and dev come again on the second host; only rank tells GPUs apart.
        host = [
            [
                gpu(0, [HIDDEN], more='sm="103" rank="0"'),
                gpu(1, [HIDDEN], more='sm="103" rank="1"'),
            ],
            [gpu(0, [HIDDEN], more='sm="103" rank="2"'), gpu(1, more='sm="103" rank="3"')],
        ]
        self.assertExpectedInline(
            format_reading(read(system(*host, hosts=("0xa", "0xb")))),
            """\
NCCL topology XML, complete
domains ((0, 1, 2), (3,))
nodes ((0, 1, 2, 3),)
line 21: MP201: GPUs have different numbers of links: 18 on GPU 0-2; 0 on GPU 3""",
        )

    def test_inputs_without_links_leave_domains_unknown(self) -> None:
        pci = (
            f'<pci busid="{bus(0)}" class="0x030200"/>\n<pci busid="{bus(1)}" class="0x020700"/>\n'
        )
        bare = system([pci])
        unranked = system([gpu(0, more=""), gpu(1, [HIDDEN], more="")])
        looped = system([gpu(0, [(bus(0), 12, GPU)]), gpu(1, [(bus(1), 12, GPU)])])
        some = system([gpu(1, [HIDDEN]), pci])
        self.assertExpectedInline(
            "\n\n".join(format_reading(read(text)) for text in (bare, unranked, looped, some)),
            """\
NCCL topology XML, not complete
domains None
nodes None
line 1: MP202: no <gpu>: an input for NCCL that lists PCI only; links of GPUs are unknown: dump the topology of a running job with NCCL_TOPO_DUMP_FILE

NCCL topology XML, not complete
domains None
nodes None
line 4: not every <gpu> has a rank of its own; numbered by dev
line 4: MP202: the ends of the links of GPU 0 are unknown: an input for NCCL, or a virtual machine; so domains are unknown

NCCL topology XML, not complete
domains None
nodes None
line 4: MP202: the ends of the links of GPU 0-1 are unknown: an input for NCCL, or a virtual machine; so domains are unknown
line 5: links of GPU 0-1 to itself are ignored

NCCL topology XML, not complete
domains ((1,),)
nodes None
line 8: MP202: 1 more PCI devices look like GPUs and have no <gpu>""",
        )

    def test_odd_links_are_reported(self) -> None:
        gpus = [
            gpu(0, [(bus(0), 2, GPU), (bus(1).upper(), 2, GPU), (bus(2), 0, GPU)]),
            gpu(1, [(bus(0), 1, GPU), ("0000:99:00.0", 3, GPU)]),
            gpu(2, [("0004:04:00.0", 3, "0x068001")]),
            gpu(3, [("0004:04:00.0", 3, "0x068001")]),
        ]
        self.assertExpectedInline(
            format_reading(read(system(gpus, version="9"))),
            """\
NCCL topology XML, not complete
domains ((0, 1), (2,), (3,))
nodes None
line 1: version '9' is not known; read as 1
line 4: MP201: GPUs have different numbers of links: 0 on GPU 2-3; 2 on GPU 0; 4 on GPU 1
line 4: MP201: GPU 0 lists 2 links to GPU 1, which lists 1 back; 2 are assumed
line 5: links of GPU 0 to itself are ignored
line 13: MP202: links to devices that are not in this file are ignored: 1, the first to '0000:99:00.0'""",
        )

    def test_invalid_texts_are_refused(self) -> None:
        whole = system([gpu(0, [HIDDEN])])
        texts = (
            "",
            whole[:120],
            "<graphs/>",
            whole.replace('count="18"', 'count="many"'),
            whole.replace("fffffff:ff:ff.0", ""),
            '<!DOCTYPE system [<!ENTITY a "b">]>' + whole,
            system([gpu(0, [HIDDEN])], [gpu(1, [HIDDEN], at=0)]),
        )
        found = []
        for text in texts:
            found.append(refusal(TopologyInputError, read, text))
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP212: line 1: not well-formed XML (no element found); is the file whole?
MP212: line 5: not well-formed XML (unclosed token); is the file whole?
MP212: line 1: the root is <graphs>; pass an NCCL topology, which starts with <system>
MP212: line 5: <nvlink> of GPU 0 needs target= and count=, got target='fffffff:ff:ff.0' and count='many'; pass the original file of NCCL
MP212: line 5: <nvlink> of GPU 0 needs target= and count=, got target='' and count='18'; pass the original file of NCCL
MP212: line 1: refused: a DTD is never read; remove the <!DOCTYPE ...> from the file
MP212: line 11: GPUs 0 and 1 have one bus id, '0000:10:00.0'; pass a file for each host, or each <cpu> the host_hash= of its host""",
        )


def test_dump_without_links_has_single_gpu_domains() -> None:
    reading = read(system([gpu(0), gpu(1), gpu(2)]))
    assert reading.domains == ((0,), (1,), (2,))
    assert reading.complete
    assert not reading.notes


@pytest.mark.parametrize("lacking", ["dev", "sm", "rank"])
def test_input_without_links_has_unknown_domains(lacking: str) -> None:
    text = system([gpu(0), gpu(1)], hosts=("0x1",)).replace(f'{lacking}="', f'not{lacking}="')
    reading = read(text)
    assert reading.domains is None
    assert reading.nodes == ((0, 1),)
    assert not reading.complete
    assert "MP202" in {note.code for note in reading.notes}


def test_links_of_count_zero_mean_no_links() -> None:
    none = [(bus(7), 0, GPU)]
    assert read(system([gpu(0, none, more=""), gpu(1, none, more="")])).domains == ((0,), (1,))


def test_gpu_index_is_rank_or_dev_or_position() -> None:
    def indices(*ranks: str) -> object:
        gpus = [gpu(7 - i, [HIDDEN], more=f'sm="90" {rank}') for i, rank in enumerate(ranks)]
        return read(system(gpus)).domains

    assert indices('rank="5"', 'rank="3"') == ((3, 5),)
    assert indices('rank="5"', 'rank="5"') == ((6, 7),)
    assert indices('rank="-1"', "") == ((6, 7),)
    twice = system([gpu(0, [HIDDEN], more="")], [gpu(0, [HIDDEN], more="")], hosts=("0xa", "0xb"))
    assert read(twice).domains == ((0, 1),)


def test_unconnected_hosts_are_nodes() -> None:
    seen = [("0000:80:00.0", 18, SWITCH)]
    cpus = [[gpu(r % 2, seen, more=f'sm="90" rank="{r}"') for r in (h, h + 1)] for h in (0, 2)]
    reading = read(system(*cpus, hosts=("0xa", "0xb")))
    # One bus id is two switches on two hosts.
    assert reading.domains == reading.nodes == ((0, 1), (2, 3))
    # Without links, hosts of one file may be a clique or not.
    bare = [gpu(0, more='rank="0"'), gpu(0, more='rank="1"')]
    assert read(system(*bare, hosts=("0xa", "0xb"))).nodes is None


@pytest.mark.parametrize("target", ["fffffff:ff:ff.0", "FFFFFFFF:FF:FF.0", "fffffff:ffff:ff"])
def test_every_spelling_of_the_hidden_switch_is_read(target: str) -> None:
    text = system([gpu(0, [(target, 18, "")]), gpu(1, [(target, 18, "")])])
    assert read(text).domains == ((0, 1),)


def test_links_to_missing_devices_are_reported() -> None:
    def joined(tclass: str) -> Reading:
        return read(system([gpu(0, [(bus(9), 1, tclass)]), gpu(1, [(bus(9), 1, tclass)])]))

    # A GPU that the job does not use joins none of those that it does.
    assert joined(GPU).domains == ((0,), (1,))
    assert not joined(GPU).complete
    # A device of unknown kind may be a switch.
    assert joined("").domains is None


def test_partitions_of_one_gpu_are_one_domain() -> None:
    part = '<gpu dev="0" sm="107" mlopart="{0}" rank="{0}"/>'
    text = system([f'<pci busid="{bus(0)}">{part.format(0)}{part.format(1)}</pci>', gpu(2)])
    assert read(text).domains == ((0, 1), (2,))


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
        ("<graphs/>", False),
        ("GPU0 GPU1", False),
        ("system", False),
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


@given(st.text(alphabet="<>/!?ab-[]&;\"'= \n\ud800\0", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert recognises(text) in (True, False)
    try:
        assert parse(text)
    except TopologyInputError as error:
        # An error is one of two good ends.
        assert (len(str(error).splitlines()), error.line is None) == (1, False)  # noqa: PT017


# For tests/test_formats.py.
SAMPLES = (system([gpu(0, [HIDDEN]), gpu(1, [(bus(0), 1, GPU)])], [gpu(2)], hosts=("0x1", "0x2")),)
