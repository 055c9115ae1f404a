"""The rules of the linter, by family, and the pages that explain codes.

A code keeps its meaning for ever and is never reused. The errors that meshplan raises share the
numbering (`meshplan.errors`), and `meshplan rule` explains them too.
"""

from __future__ import annotations

from meshplan.lint._rules import cluster as cluster
from meshplan.lint._rules import environment as environment
from meshplan.lint._rules import mesh as mesh
from meshplan.lint._rules._rule import ERRORS as ERRORS
from meshplan.lint._rules._rule import RULES as RULES
from meshplan.lint._rules._rule import Rule as Rule
from meshplan.lint._rules._rule import find_code as find_code
from meshplan.lint._rules._rule import (
    find_near_codes as find_near_codes,
)
from meshplan.lint._rules._rule import (
    format_rule_page as format_rule_page,
)
from meshplan.lint._rules._rule import (
    list_codes_needing as list_codes_needing,
)
