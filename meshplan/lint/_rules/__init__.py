"""The rules of the linter, by family, and the pages that explain codes.

A code keeps its meaning for ever and is never reused. The errors that meshplan raises share the
numbering (`meshplan.errors`), and `meshplan rule` explains them too.
"""

from __future__ import annotations

from meshplan.lint._rules import cluster as cluster
from meshplan.lint._rules import environment as environment
from meshplan.lint._rules import mesh as mesh
