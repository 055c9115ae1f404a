"""Path ``integer_checksum``: path ``integer`` with checksums over its messages."""

from __future__ import annotations

from meshplan.execute.paths._integer import IntegerPath

PATH = IntegerPath(verify=True)
