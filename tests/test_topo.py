"""``meshplan topo`` and the reading of files, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.cli import main
from meshplan.errors import TopologyInputError
from meshplan.topology import Reading
from meshplan.topology import _files as files
from meshplan.topology._files import read_file, read_text
from meshplan.topology._reading import Note, find_components
from tests.cli import meshplan, refused

PAIRS = """\
      GPU0 GPU1 GPU2 GPU3 CPU Affinity
GPU0   X   NV12 SYS  SYS  0-31
GPU1  NV12  X   SYS  SYS  0-31
GPU2  SYS  SYS   X   NV12 32-63
GPU3  SYS  SYS  NV12  X   32-63
"""
PARTIAL = '<system version="1"><cpu numaid="0"><pci busid="0000:0f:00.0"/></cpu></system>\n'


def refusal(text: str) -> str:
    """Why the text is refused; empty if it is read."""
    try:
        reading = read_text(text)
    except TopologyInputError as error:
        return str(error)
    return "" if isinstance(reading, Reading) else "no reading\n"


class TestTopo(TestCase):
    def test_text_report_is_printed(self) -> None:
        code, out, _ = meshplan("topo", "-", given=PAIRS)
        assert code == 0
        self.assertExpectedInline(
            out,
            """\
standard input: nvidia-smi topo -m
  domains: {0-1} {2-3}
  nodes:   unknown from this input
""",
        )

    def test_json_report_is_printed(self) -> None:
        code, out, _ = meshplan("topo", "-", "--output-format", "json", given=PAIRS)
        assert code == 0
        found = json.loads(out)
        assert list(found) == ["kind", "domains", "nodes", "complete", "notes"]
        assert found["domains"] == [[0, 1], [2, 3]]
        assert found["nodes"] is None

    def test_missing_facts_stay_unknown(self) -> None:
        code, out, _ = meshplan("topo", "-", given=PARTIAL)
        assert code == 0
        self.assertExpectedInline(
            out,
            """\
standard input: NCCL topology XML, incomplete
  domains: unknown from this input
  nodes:   unknown from this input
  line 1: MP202: no <gpu>: an input for NCCL that lists PCI only; links of GPUs are unknown: dump the topology of a running job with NCCL_TOPO_DUMP_FILE
""",
        )

    def test_errors_are_one_line_with_file_and_line(self) -> None:
        texts = {
            "nothing": "",
            "prose": "dear all, the cluster is fine\n",
            "broken": '<system version="1">\n<cpu>\n</system>\n',
            "entity": '<!DOCTYPE x [<!ENTITY a "b">]>\n<system version="1"/>\n',
        }
        found = [f"{name}: {refused('topo', '-', given=text)}" for name, text in texts.items()]
        found.append(refused("topo", "/nowhere/at/all"))
        text = "".join(found)
        self.assertExpectedInline(
            text,
            """\
nothing: meshplan: MP212: standard input: the input is empty; did the command before it fail?
prose: meshplan: MP212: standard input: unknown format; pass the output of nvidia-smi topo -m, rocm-smi --showtopo, amd-smi topology or kubectl get nodes -o json, a dump of NCCL (XML of its topology, or a log with NCCL_DEBUG=INFO), or Slurm's topology.conf or topology.yaml
broken: meshplan: MP212: standard input:3: not well-formed XML (mismatched tag); is the file whole?
entity: meshplan: MP212: standard input: XML that declares its own document type or entities is refused; remove these declarations
meshplan: MP212: /nowhere/at/all: cannot be read: No such file or directory
""",
        )


def test_control_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names come from files: the report and errors escape them."""
    label = "\\u001b]0;title\\u0007\\u202e"
    nodes = (
        '{"apiVersion": "v1", "kind": "NodeList", "items": [{"kind": "Node", '
        f'"metadata": {{"name": "{label}", "labels": {{"nvidia.com/gpu.count": "COUNT"}}}}}}]}}'
    )
    (tmp_path / "8.json").write_text(nodes.replace("COUNT", "8"))
    (tmp_path / "x.json").write_text(nodes.replace("COUNT", "x"))
    call = 'init_device_mesh("cpu", (8, sizes["\x1b]0;title\x07"]), mesh_dim_names=("a", "b"))\n'
    (tmp_path / "job.py").write_text("import torch\n" + call)
    for words, expected in (
        (["topo", str(tmp_path / "8.json")], 0),
        (["topo", str(tmp_path / "x.json")], 2),
        (["lint", "--domain-size", "8", str(tmp_path / "job.py")], 1),
    ):
        assert main(words) == expected
        said = "".join(capsys.readouterr())
        assert "\\x1b]0;title\\x07" in said
        assert said.replace("\n", "").isprintable()


def test_several_files_are_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for name, text in (("one", PAIRS), ("two", PARTIAL)):
        (tmp_path / name).write_text(text)
        names.append(str(tmp_path / name))
    assert main(["topo", *names, "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["file"] for one in found] == names
    assert [one["domains"] for one in found] == [[[0, 1], [2, 3]], None]


def test_too_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    (tmp_path / "file").write_text("x" * 101)
    with pytest.raises(TopologyInputError, match="larger than"):
        read_file(str(tmp_path / "file"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_are_detected(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "file").write_text(PAIRS, encoding=encoding)
    assert read_file(str(tmp_path / "file")).domains == ((0, 1), (2, 3))


@given(st.binary(max_size=2000))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    assert "\n" not in refusal(content.decode("utf-8", errors="replace"))


def test_connected_gpus_are_components() -> None:
    assert find_components(range(5), [(3, 1), (1, 4)]) == ((0,), (1, 3, 4), (2,))
    assert find_components([], []) == ()


def test_notes_are_one_line() -> None:
    assert str(Note("odd", "MP201", 7)) == "line 7: MP201: odd"
    assert str(Note("odd")) == "odd"
