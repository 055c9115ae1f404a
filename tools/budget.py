"""Compare the size of the repository with budget.toml, row by row.

    python tools/budget.py                             print the table, fail above a row
    python tools/budget.py --write                     lower rows to the figures, raise none
    python tools/budget.py --write --raise ROW=REASON  raise this row: see CONTRIBUTING.md

A row has the lines of its files and their tokens: words, numbers and operators, without comments.
Tokens show code that is only denser.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

ROOT = Path(__file__).parents[1]
_COMMENTS = {".py": "#", ".h": "//", ".cpp": "//", ".cu": "//"}
_ROOM = "'Room for a feature' in CONTRIBUTING.md"
Figures = dict[str, list[Any]]


def find_row(path: PurePath) -> str | None:
    """The row of a file; ``None`` for settings of the repository, and for the changelog."""
    folder = path.parts[0] if path.parts[1:] else "root"
    if path.suffix in _COMMENTS:
        return f"meshplan/{path.parts[1]}" if folder == "meshplan" and path.parts[2:] else folder
    if folder in ("meshplan", "csrc"):
        return f"{folder} data"
    if path.suffix == ".md":
        return "pages" if path.name != "CHANGELOG.md" else None
    return None if folder == "root" or folder.startswith(".") else "data"


def measure(root: Path) -> Figures:
    """The figures of each row and limit, over the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    figures: Figures = {"modules": [0], "python lines": [0]}
    characters = 0
    for path in map(PurePath, sorted({*names.split("\0")} - {""})):
        row = find_row(path)
        if row is None or not (root / path).is_file():
            continue
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        mark = _COMMENTS.get(path.suffix)
        bare = re.sub(rf"^\s*{mark}.*", "", text, flags=re.M) if mark else text
        size = (len(text.splitlines()), len(re.findall(r"\w+|[^\w\s]", bare)))
        figures[row] = [a + b for a, b in zip(figures.get(row, (0, 0)), size, strict=True)]
        if row.split("/")[0] == "meshplan":
            figures["modules"][0] += 1
            figures["python lines"][0] += size[0]
            characters += len(text)
    average = characters / max(1, figures["python lines"][0])
    return {**figures, "characters per line": [round(average, 1)]}


def find_excesses(budget: str, figures: Figures) -> Iterator[str]:
    """A sentence for each figure above its row."""
    tables = tomllib.loads(budget)
    rows = {**tables["limits"], **tables["ships"], **tables["repository"]}
    for row, sizes in figures.items():
        if row not in rows:
            yield f"{row}: no row of budget.toml; add [0, 0] there, and see {_ROOM}"
        for unit, size, most in zip((" lines", " tokens"), sizes, rows.get(row, ()), strict=False):
            if size > most:
                what = f"{row}: {size:,}{unit if len(sizes) == 2 else ''}"
                more = f"{round(size - most, 1):,} above budget.toml ({most:,})"
                yield f"{what}, {more}; remove code, or see {_ROOM}"


def rewrite(budget: str, figures: Figures, reasons: Mapping[str, str]) -> str:
    """The file with rows lowered to the figures, and those that have a reason raised to them.

    Raises:
        ValueError: a reason does not allow a raise, or a row without one is too small.
    """
    tables = tomllib.loads(budget)
    ships, features = tables["ships"], tables["features"]
    rows: Figures = {**ships, **tables["repository"]}
    if unknown := sorted({*reasons} - {*rows}):
        raise ValueError(f"budget.toml has no row {', '.join(unknown)} that may rise")
    moved = 0
    for row, old in rows.items():
        sizes, reason = figures.get(row, [0, 0]), reasons.get(row)
        new = [*sizes, reason] if reason else [*map(min, sizes, old), *old[len(sizes) :]]
        if row in ships and reason in features:
            features[reason] -= max(0, new[0] - old[0])
        elif row in ships:
            moved += new[0] - old[0]
        line = rf'^("?{re.escape(row)}"? = )\[.*?\](?= *(#|$))'
        text = json.dumps(new, ensure_ascii=False)
        budget = re.sub(line, lambda found, text=text: found[1] + text, budget, flags=re.M)
    for feature, lines in features.items():
        if lines < 0:
            raise ValueError(
                f"the rows to raise need {-lines:,} lines more than {feature} has left"
            )
        budget = re.sub(rf"^{feature} = \d+", f"{feature} = {lines}", budget, flags=re.M)
    if moved > 0:
        raise ValueError(
            f"the rows that ship would grow by {moved:,} lines together: name a feature of "
            f"budget.toml as the reason ({', '.join(features)}), or remove as many lines elsewhere"
        )
    if excesses := [*find_excesses(budget, figures)]:
        raise ValueError("\n".join(excesses))
    return budget


def format_table(budget: str, figures: Figures) -> str:
    """Each row: what budget.toml allows, the figure and the difference."""
    tables = tomllib.loads(budget)
    lines = [f"{'':22}{'lines':>10}{'now':>10}{'tokens':>19}{'now':>10}"]
    for row, most in {**tables["ships"], **tables["repository"], **tables["limits"]}.items():
        sizes, line = figures.get(row, [0, 0]), f"{row:22}"
        for size, room in zip(sizes, most, strict=False):
            change = round(size - room, 1)
            line += f"{room:>10,}{size:>10,}{f'{change:+,}' if change else '=':>9}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="lower rows to the figures")
    parser.add_argument("--raise", action="append", default=[], dest="raises", metavar="ROW=REASON")
    options = parser.parse_args()
    file, figures = ROOT / "budget.toml", measure(ROOT)
    budget = file.read_text(encoding="utf-8")
    print(format_table(budget, figures))
    if not options.write:
        raise SystemExit("\n".join(find_excesses(budget, figures)) or None)
    reasons = {row: why for row, _, why in (one.partition("=") for one in options.raises)}
    try:
        file.write_text(rewrite(budget, figures, reasons), encoding="utf-8")
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
