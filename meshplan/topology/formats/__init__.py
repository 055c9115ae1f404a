"""Parsers of what clusters print about themselves: one module for each format.

Each module has ``recognises(text)``, which is fast and never raises, and ``read(text)``, which
gives a ``Reading`` or raises ``TopologyInputError`` with the line. None imports torch.
"""
