"""The size of the repository is within budget.toml, whose rows rise for a reason only."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from tools.budget import find_excesses, measure, rewrite

BUDGET = """\
[limits]
"python lines" = [200]
"characters per line" = [41.0]
[features]
tickets = 9
[ships]
"meshplan/flatten" = [100, 900] # 80
"meshplan/lint" = [90, 700, "a reader"]
[repository]
tests = [500, 4000]
modules = [7]
"""


def sizes(flatten: int = 100, lint: int = 90, tests: int = 500) -> dict[str, list[float]]:
    """Figures with some lines each."""
    figures = {"python lines": [flatten + lint], "characters per line": [39.9], "modules": [7]}
    rows = {"meshplan/flatten": flatten, "meshplan/lint": lint, "tests": tests}
    return {**figures, **{row: [lines, 7 * lines] for row, lines in rows.items()}}


def test_every_file_that_ships_has_a_row(tmp_path: Path) -> None:
    files = {
        "meshplan/errors.py": "# a comment\nx = 1\n",
        "meshplan/flatten/_groups.py": "y = f(2)\n",
        "meshplan/lint/pages/MP101.md": "# MP101\n",
        "csrc/fold.h": "  // a comment\nint a;\n",
        "another/__init__.py": "",
        "setup.py": "",
        "docs/api.md": "a page\n",
        "CHANGELOG.md": "not counted\n",
        "tests/golden/v1.json": "{}\n",
        "build/ignored.py": "",
        ".gitignore": "build\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs/image.png").write_bytes(b"\x89PNG")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert measure(tmp_path) == {
        "modules": [2],
        "python lines": [3],
        "characters per line": [9.0],
        "another": [0, 0],
        "csrc": [2, 3],
        "data": [1, 2],
        "meshplan": [2, 3],
        "meshplan data": [1, 2],
        "meshplan/flatten": [1, 6],
        "pages": [1, 2],
        "root": [0, 0],
    }


def test_excess_names_the_row_the_figure_and_the_next_step() -> None:
    figures = {**sizes(flatten=130), "meshplan/run": [40, 300]}
    assert_expected_inline(
        "\n".join(find_excesses(BUDGET, figures)),
        """\
python lines: 220, 20 above budget.toml (200); remove code, or see 'Room for a feature' in CONTRIBUTING.md
meshplan/flatten: 130 lines, 30 above budget.toml (100); remove code, or see 'Room for a feature' in CONTRIBUTING.md
meshplan/flatten: 910 tokens, 10 above budget.toml (900); remove code, or see 'Room for a feature' in CONTRIBUTING.md
meshplan/run: no row of budget.toml; add [0, 0] there, and see 'Room for a feature' in CONTRIBUTING.md""",
    )


def test_write_lowers_rows_and_raises_none() -> None:
    assert '"meshplan/lint" = [60, 420, "a reader"]' in rewrite(BUDGET, sizes(lint=60), {})
    assert '"meshplan/flatten" = [100, 700] # 80' in rewrite(BUDGET, sizes(), {})
    with pytest.raises(ValueError, match=r"^tests: 501 lines, 1 above "):
        rewrite(BUDGET, sizes(lint=60, tests=501), {})


def test_feature_pays_for_the_rows_that_name_it() -> None:
    raised = rewrite(BUDGET, sizes(flatten=106), {"meshplan/flatten": "tickets"})
    assert '"meshplan/flatten" = [106, 742, "tickets"] # 80' in raised
    assert "tickets = 3" in raised
    with pytest.raises(ValueError, match="need 1 lines more than tickets has left"):
        rewrite(raised, sizes(flatten=110), {"meshplan/flatten": "tickets"})


def test_other_reasons_raise_what_ships_only_against_other_rows() -> None:
    reasons = {"meshplan/flatten": "from lint", "tests": "late ranks"}
    raised = rewrite(BUDGET, sizes(flatten=110, lint=80, tests=600), reasons)
    assert '"meshplan/flatten" = [110, 770, "from lint"] # 80' in raised
    assert 'tests = [600, 4200, "late ranks"]' in raised
    with pytest.raises(ValueError, match="rows that ship would grow by 1 lines together"):
        rewrite(BUDGET, sizes(flatten=110, lint=81), reasons)
    with pytest.raises(ValueError, match="no row characters per line that may rise"):
        rewrite(BUDGET, sizes(), {"characters per line": "long names"})


def test_total_stays_below_its_limit() -> None:
    budget = re.sub("tickets = 9", "tickets = 900", BUDGET)
    with pytest.raises(ValueError, match=r"^python lines: 210, 10 above "):
        rewrite(budget, sizes(flatten=120), {"meshplan/flatten": "tickets"})
