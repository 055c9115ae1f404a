"""Command lines: arguments, scripts that start jobs, and YAML or JSON that holds arguments."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import accumulate, pairwise

from meshplan.lint._job import JobFile
from meshplan.lint._readers._degrees import read_document
from meshplan.lint._readers._documents import find_framework
from meshplan.lint._readers._numbers import Edit, apply_edits
from meshplan.lint._readers._options import read_command
from meshplan.lint._readers._values import find_callee

# Part of each key in the table; a text without them has no degrees.
_MARK = re.compile(
    r"parallel|actor_rollout_ref|fsdp_size|autotp|(?<![\w-])--?(?:tp|pp|dp|cp|sp|ddp|fsdp)[\w-]*",
)
_MARK_IN_STRING = re.compile(
    r"--(?:[\w.-]*parallel|(?:[\w.]+[._-])?(?:tp|pp|dp|cp|ep|sp|ddp|fsdp)(?![a-z]))|actor_rollout_ref|\w_parallel_\w+="
)
# An option with a value, or Hydra's override, in a string.
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*[= ]+[^\s-]|(?<![\w.])[a-z]\w*(?:\.\w+)+=\S")
_QUOTE = re.compile(r"[rfbuRFBU]{0,2}(?:\"{3}|'{3}|[\"'])|\\[nt\"']")
_NO_COMMANDS = frozenset(
    {
        "add_argument",
        "add_option",
        "option",
        "Option",
        "print",
        "warn",
        "info",
        "error",
        "format_help",
    }
)


def recognises(name: str, text: str) -> bool:
    """Whether the text has an option for the size of an axis."""
    if name.endswith((".py", ".pyi", ".toml")) or not _MARK.search(text):
        return False
    return find_framework(read_command(name, text)) is not None


def read_strings(name: str, text: str, *, world_size: int | None) -> JobFile:
    """The meshes of the command lines in strings of Python, which a launcher of a job has.

    The file without all but these strings is read as one script, so that places stay the same.
    """
    if not _MARK_IN_STRING.search(text):
        return JobFile()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return JobFile()
    lines = text.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]

    def find_offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    edits = []
    for node in _list_arguments(tree):
        start = find_offset(node.lineno, node.col_offset)
        end = find_offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        words = _QUOTE.sub(lambda quote: " " * len(quote[0]), text[start:end])
        edits.append(Edit(start, end, words))
    script = apply_edits(re.sub(r"[^\n]", " ", text), edits) or ""
    document = replace(read_command(name, script), commands=frozenset())
    found = read_document(document, world_size)
    if not (found.is_read or found.skipped):
        from meshplan.lint._unread import find_unread_in_text

        unread = find_unread_in_text(name, script)
        return replace(found, skipped=() if unread is None else (unread,))
    # Only the strings would be written.
    return replace(found, jobs=tuple(replace(job, rewrite=None) for job in found.jobs))


def _list_arguments(tree: ast.Module) -> list[ast.expr]:
    """The strings with an option and its value, and the words of a list of arguments.

    Definitions of options (``add_argument``), help and docstrings are no commands.
    """
    found: list[ast.expr] = []
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, is_word in pending:
        if isinstance(node, ast.Constant | ast.JoinedStr):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = " ".join(str(getattr(one, "value", "")) for one in parts)
            if isinstance(getattr(node, "value", ""), str) and (is_word or _OPTION.search(text)):
                found.append(node)
        elif isinstance(node, ast.Call) and find_callee(node) in _NO_COMMANDS:
            continue
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            words = [str(getattr(one, "value", "")) for one in getattr(node, "elts", ())]
            pairs = pairwise(words)
            is_command = any(one[:2] == "--" and two[:1] != "-" for one, two in pairs)
            is_help = isinstance(node, ast.keyword) and node.arg in (
                "help",
                "description",
                "epilog",
            )
            pending += [(one, is_command) for one in ast.iter_child_nodes(node) if not is_help]
    return found


def read(name: str, text: str, *, world_size: int | None) -> JobFile:
    """The meshes of the options.

    Raises:
        LayoutError: sizes without a valid mesh; the message names file and line.
    """
    return read_document(read_command(name, text), world_size)
