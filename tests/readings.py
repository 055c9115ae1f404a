"""What holds of every text that a format of clusters is given."""

from __future__ import annotations

import json
from importlib import import_module

from meshplan.errors import TopologyInputError


def read_or_refused(name: str, text: str) -> None:
    """The format reads the text, into groups that are disjoint and sorted, or refuses it in one line."""
    module = import_module(f"meshplan.topology.formats.{name}")
    module.recognises(text)
    try:
        reading = module.read(text)
    except TopologyInputError as error:
        lines = [str(error)]
    else:
        lines = [str(note) for note in reading.notes]
        for groups in (reading.domains, reading.nodes):
            members = [member for group in groups or () for member in group]
            assert len(members) == len(set(members))
            assert list(groups or ()) == sorted(tuple(sorted(group)) for group in groups or ())
        json.dumps(reading.to_json())
    assert [line for line in lines if len(line.splitlines()) != 1] == []
