"""Draw the mesh of pytorch#171916 for the documents: ddp=8, fsdp=5 on hosts of eight GPUs.

Run it where ``meshplan`` can be imported (installed, or with ``PYTHONPATH=.``):

    python tools/draw_jagged_mesh.py            write docs/images/jagged-mesh.svg
    python tools/draw_jagged_mesh.py --check    exit with 1 if the file is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshplan.layout import Layout
from meshplan.lint._drawing import draw_meshes
from meshplan.lint._facts import JobFacts, check_facts
from meshplan.lint._finding import Source
from meshplan.lint._job import Job
from meshplan.topology import Cluster, Topology

DEFAULT_OUTPUT = Path(__file__).parent.parent / "docs" / "images" / "jagged-mesh.svg"


def picture() -> str:
    """The mesh with its findings."""
    job = Job(Layout.of(ddp=8, fsdp=5), Source(option="--mesh ddp=8,fsdp=5"))
    facts = [JobFacts(job, Cluster(Topology.uniform(40, node_size=8, domain_size=8)))]
    found = [one for one in check_facts(facts) if one.code == "MP101"]
    return draw_meshes(facts, found)


def main() -> int:
    parser = argparse.ArgumentParser(description="The picture of a jagged mesh, for the documents.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    given = parser.parse_args()
    text = picture()
    if not given.check:
        given.output.write_text(text, encoding="utf-8")
        print(f"{given.output}: {len(text)} characters")
        return 0
    if given.output.exists() and given.output.read_text(encoding="utf-8") == text:
        return 0
    print(f"{given.output} is not what {Path(__file__).name} writes; run it without --check")
    return 1


if __name__ == "__main__":
    sys.exit(main())
