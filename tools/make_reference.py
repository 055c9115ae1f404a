"""Write docs/reference from the docstrings: a page for each public package.

Public is a module without a leading underscore in its path, and in it what ``__all__`` lists. The
sources are read and not imported, so that a page does not depend on the torch that is installed.

    python tools/make_reference.py            write docs/reference
    python tools/make_reference.py --check    exit with 1 if a page is not what would be written
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from textwrap import dedent

# The tree that the script lies in, whatever is installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from meshplan.lint._rules import ERRORS, RULES, rule_page  # noqa: E402

OUTPUT = ROOT / "docs" / "reference"
CODES = "errors-and-rules.md"
# Modules that stand together on one page.
TOGETHER = ("meshplan.topology.formats",)
_WIDTH = 88
_CODE_OF = {cls.__name__: code for code, cls in ERRORS.items()}
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_NAME = re.compile(r"((?:\*{0,2}[\w.]+)(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?: ?(.*)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file.

    Attributes:
        name: dotted, as it is imported.
        path: from the root of the repository.
    """

    name: str
    path: Path

    @cached_property
    def lines(self) -> list[bytes]:
        """The source, by lines, in the encoding in which ``ast`` counts columns."""
        return (ROOT / self.path).read_bytes().splitlines(keepends=True)

    @cached_property
    def body(self) -> list[ast.stmt]:
        return self.tree.body

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(b"".join(self.lines))

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Names that come from elsewhere in the package: module and name there."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshplan"):
                for alias in node.names:
                    found[alias.asname or alias.name] = (str(node.module), alias.name)
        return found

    @cached_property
    def public(self) -> list[str]:
        """What ``__all__`` lists, in its order."""
        value = self.assigned("__all__")
        if value is None:
            return []
        assert isinstance(value, ast.List)
        names: list[str] = []
        for item in value.elts:
            if isinstance(item, ast.Starred):
                assert isinstance(item.value, ast.Name)
                table = self.assigned(item.value.id)
                assert isinstance(table, ast.Dict)
                names += [ast.literal_eval(key) for key in table.keys if key]
            else:
                names.append(ast.literal_eval(item))
        return names

    def assigned(self, name: str) -> ast.expr | None:
        """The value of a name that is set at the top."""
        for node in self.body:
            if name in _targets(node):
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                return node.value
        return None

    def source(self, node: ast.AST | None) -> str:
        """The text of ``node``, on one line."""
        if node is None:
            return ""
        assert isinstance(node, ast.expr)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        rows = self.lines[node.lineno - 1 : node.end_lineno]
        rows = [*rows[:-1], rows[-1][: node.end_col_offset]]
        text = b"".join([rows[0][node.col_offset :], *rows[1:]]).decode()
        text = re.sub(r"#.*", "", text) if len(rows) > 1 else text
        text = re.sub(r"\s+", " ", text)
        return re.sub(r",? ([\])}])", r"\1", re.sub(r"([\[({]) ", r"\1", text))


@dataclass(frozen=True)
class Found:
    """What a public name stands for: where it is defined, and the statement.

    Attributes:
        module: that defines it.
        name: there.
        node: the statement; ``None`` if it is a module as a whole.
        text: the string after a constant.
    """

    module: Module
    name: str
    node: ast.stmt | None
    text: str = ""

    @property
    def doc(self) -> str:
        if isinstance(self.node, Function | ast.ClassDef):
            return ast.get_docstring(self.node) or ""
        return inspect.cleandoc(self.text)


@cache
def module(name: str) -> Module | None:
    """The module of that name; ``None`` if the package has none."""
    path = Path(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if (ROOT / file).exists():
            return Module(name, file)
    return None


@cache
def public_modules() -> tuple[Module, ...]:
    """All of them, the package itself first, then by name."""
    names = []
    for file in (ROOT / "meshplan").rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            names.append(".".join(parts))
    return tuple(found for name in sorted(names) if (found := module(name)))


@cache
def find(module_name: str, name: str) -> Found:
    """What ``name`` of a module stands for, through the imports of the package."""
    here = module(module_name)
    if here is None:
        raise LookupError(f"no module {module_name}")
    below = module(f"{module_name}.{name}")
    if name in here.imports and here.imports[name] != (module_name, name):
        return find(*here.imports[name])
    for i, node in enumerate(here.body):
        if (
            isinstance(node, Function | ast.ClassDef)
            and node.name == name
            and not _is_overload(node)
        ):
            return Found(here, name, node)
        if name in _targets(node):
            return Found(here, name, node, _string(here.body, i + 1))
    if below is not None:
        return Found(below, name, None, ast.get_docstring(below.tree) or "")
    raise LookupError(f"{module_name} has no {name}")


@cache
def homes() -> dict[tuple[str, str], str]:
    """The public module that documents each definition: not ``meshplan``, where another has it."""
    found: dict[tuple[str, str], str] = {}
    for one in sorted(public_modules(), key=lambda m: (m.name == "meshplan", m.name.count("."))):
        for name in one.public:
            what = find(one.name, name)
            found.setdefault((what.module.name, what.name), one.name)
    return found


def page_of(name: str) -> str:
    """The file of the module's page."""
    for prefix in TOGETHER:
        name = prefix if name.startswith(prefix) else name
    return f"{name}.md"


@cache
def pages() -> dict[str, str]:
    """All pages by file name."""
    parts: dict[str, list[str]] = {}
    for one in public_modules():
        parts.setdefault(page_of(one.name), []).append(_page(one))
    made = {file: "\n".join(texts) for file, texts in parts.items()}
    return {"index.md": _index(), CODES: _codes(), **made}


def _page(one: Module) -> str:
    lead = "#" if page_of(one.name) == f"{one.name}.md" else "##"
    out = [f"{lead} {one.name}", "", *_prose(ast.get_docstring(one.tree) or "", lead + "#"), ""]
    out += [f"Source: [{one.path}](../../{one.path})", ""]
    if lead == "#" and one.public:
        out += ["| name | |", "|---|---|"]
        out += [
            f"| {_linked(one, name)} | {_summary(find(one.name, name).doc)} |"
            for name in one.public
        ]
        out.append("")
    if one.name in TOGETHER:
        out += _contents(one)
    for name in one.public:
        what = find(one.name, name)
        if homes()[what.module.name, what.name] != one.name:
            continue
        if what.node is None:
            if what.module not in public_modules():
                out += _inner(what.module, name)
            continue
        shown = name if lead == "#" else f"{one.name.rpartition('.')[2]}.{name}"
        out += _entry(what, shown, lead + "#", one.name)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).rstrip() + "\n"


def _contents(package: Module) -> list[str]:
    """A table of the modules that stand on the page of ``package``."""
    out = ["| module | |", "|---|---|"]
    for one in public_modules():
        if page_of(one.name) == f"{package.name}.md" and one != package:
            anchor = one.name.replace(".", "")
            doc = ast.get_docstring(one.tree) or ""
            out.append(f"| [`{one.name.rpartition('.')[2]}`](#{anchor}) | {_summary(doc)} |")
    return [*out, ""]


def _inner(one: Module, name: str) -> list[str]:
    """A module that is public by its name in another only."""
    out = [f"## {name}", "", *_prose(ast.get_docstring(one.tree) or "", "###"), ""]
    out += [f"Source: [{one.path}](../../{one.path})", ""]
    for inner in one.public:
        out += _entry(find(one.name, inner), f"{name}.{inner}", "###", one.name)
    return out


def _entry(what: Found, name: str, lead: str, home: str, owner: str = "") -> list[str]:
    node = what.node
    out = [f"{lead} {name}", "", "```python", _signature(what, owner), "```", ""]
    out += [*_prose(what.doc, lead + "#"), ""]
    if not owner and what.module.name != home:
        out += [f"Defined in [{what.module.path}](../../{what.module.path}).", ""]
    if isinstance(node, ast.ClassDef):
        out += _bases(what.module, node)
        for member in node.body:
            if isinstance(member, Function) and not member.name.startswith("_"):
                inner = Found(what.module, member.name, member)
                if inner.doc:
                    out += _entry(inner, f"{name}.{member.name}", lead + "#", home, name)
    return out


def _bases(here: Module, node: ast.ClassDef) -> list[str]:
    """What the class is a kind of, and the code of an error."""
    out = []
    bases = [f"`{base}`" for base in map(here.source, node.bases) if not base.startswith("Generic")]
    if bases:
        out += [f"Bases: {', '.join(bases)}.", ""]
    if node.name in _CODE_OF:
        code = _CODE_OF[node.name]
        out += [f"Code: [{code}]({CODES}#{node.name.lower()}-{code.lower()}).", ""]
    return out


def _signature(what: Found, owner: str) -> str:
    node, here = what.node, what.module
    if isinstance(node, Function):
        marks = [here.source(d) for d in node.decorator_list]
        shown = [f"@{m}" for m in marks if m in ("property", "classmethod", "staticmethod")]
        shown += ["@contextmanager"] if "contextmanager" in marks else []
        args = _arguments(here, node.args)
        if owner and "staticmethod" not in marks:
            args = args[1:]
        returns = f" -> {here.source(node.returns)}" if node.returns else ""
        if "property" in marks:
            return "\n".join([*shown, f"{node.name}: {here.source(node.returns)}"])
        return "\n".join([*shown, _call(f"def {node.name}", args, returns)])
    if isinstance(node, ast.ClassDef):
        return _call(f"class {node.name}", _constructor(here, node), "")
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    kind = f": {here.source(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    value = here.source(node.value)
    words = re.fullmatch(r"get_args\((\w+)\)", value)
    if words and (alias := here.assigned(words[1])):
        value = here.source(alias).replace("Literal[", "(").replace("]", ")")
    return f"{what.name}{kind} = {value if len(value) <= 300 else '...'}"


def _constructor(here: Module, node: ast.ClassDef) -> list[str]:
    for member in node.body:
        if isinstance(member, Function) and member.name == "__init__":
            return _arguments(here, member.args)[1:]
    marks = [here.source(mark) for mark in node.decorator_list]
    made = next((mark for mark in marks if mark.startswith("dataclass")), None)
    if made is None and "NamedTuple" not in map(here.source, node.bases):
        return []
    found = ["*"] if made and "kw_only=True" in made else []
    for member in node.body:
        if not isinstance(member, ast.AnnAssign) or not isinstance(member.target, ast.Name):
            continue
        kind, value = here.source(member.annotation), here.source(member.value)
        if kind.startswith("ClassVar") or "init=False" in value or member.target.id[0] == "_":
            continue
        found.append(f"{member.target.id}: {kind}" + (f" = {_default(value)}" if value else ""))
    return found


def _default(value: str) -> str:
    made = re.fullmatch(r"field\(.*?default(_factory)?=([\w.\[\]{}()]+?)(?:, .*)?\)", value)
    if made is None:
        return value
    return (
        {"dict": "{}", "list": "[]", "tuple": "()"}.get(made[2], f"{made[2]}()")
        if made[1]
        else made[2]
    )


def _arguments(here: Module, given: ast.arguments) -> list[str]:
    def shown(arg: ast.arg, default: ast.expr | None = None) -> str:
        kind = f": {here.source(arg.annotation)}" if arg.annotation else ""
        equals = " = " if kind else "="
        return f"{arg.arg}{kind}" + (f"{equals}{here.source(default)}" if default else "")

    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    out = [shown(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if given.posonlyargs:
        out.insert(len(given.posonlyargs), "/")
    if given.vararg:
        out.append(f"*{shown(given.vararg)}")
    elif given.kwonlyargs:
        out.append("*")
    out += [shown(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*out, *([f"**{shown(given.kwarg)}"] if given.kwarg else [])]


def _call(head: str, args: list[str], tail: str) -> str:
    if not args and head.startswith("class"):
        return head
    line = f"{head}({', '.join(args)}){tail}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{head}(", *(f"    {arg}," for arg in args), f"){tail}"])


def _prose(doc: str, lead: str) -> list[str]:
    """A docstring as Markdown: sections as lists, indented text as code."""
    out: list[str] = []
    for section, lines in _sections(doc):
        if section:
            out += ["", f"**{section}**", "", *_items(lines)]
        else:
            out += _paragraphs(lines)
    return out


def _sections(doc: str) -> Iterator[tuple[str, list[str]]]:
    name = ""
    lines: list[str] = []
    for line in doc.splitlines():
        if line.removesuffix(":") in _SECTIONS and line.endswith(":"):
            yield name, lines
            name, lines = line[:-1], []
        elif name and line and not line.startswith(" "):
            # Text after a section belongs to no section.
            yield name, lines
            name, lines = "", [line]
        else:
            lines.append(line)
    yield name, lines


def _paragraphs(lines: list[str]) -> list[str]:
    out: list[str] = []
    code = False
    listed = False
    for i, line in enumerate(lines):
        before = lines[i - 1] if i else ""
        listed = line.startswith("* ") or (listed and (not line or line.startswith(" ")))
        indented = line.startswith("    ") and not listed
        if indented and not code and not before:
            out.append("```python")
            code = True
        elif code and line and not indented:
            out = [*out[:-1], "```", ""] if not out[-1] else [*out, "```"]
            code = False
        out.append(line[4:] if code else _inline(line))
    while out and not out[-1]:
        out.pop()
    return [*out, "```"] if code else out


def _items(lines: list[str]) -> list[str]:
    """``name: text`` entries as a list; other text as it stands."""
    text = dedent("\n".join(lines)).strip().splitlines()
    entries: list[list[str]] = []
    for line in text:
        if entries and (not line or line.startswith(" ")):
            entries[-1].append(line.strip())
        else:
            found = _NAME.match(line)
            if found is None and entries and entries[-1][0][:2] != "* ":
                entries[-1].append(line)
            elif found is None:
                entries.append([line])
            else:
                names = ", ".join(f"`{name}`" for name in found[1].split(", "))
                told = line[len(found[1]) : len(line) - len(found[2])].rstrip(": ")
                entries.append([f"* {names}{told}: {found[2]}"])
    out: list[str] = []
    for entry in entries:
        item = entry[0].startswith("* ")
        rows = [row for row in entry if row]
        out += [_inline(rows[0]), *(f"  {_inline(r)}" if item else _inline(r) for r in rows[1:])]
    return out


def _inline(line: str) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", line)


def _summary(doc: str) -> str:
    first = " ".join(doc.partition("\n\n")[0].split())
    sentence = re.match(r".*?\.(?= [A-Z`]|$)", first)
    return _inline(sentence[0] if sentence else first).replace("|", "\\|")


def _linked(one: Module, name: str) -> str:
    what = find(one.name, name)
    if what.node is None and what.module in public_modules():
        return f"[`{name}`]({page_of(what.module.name)})"
    home = homes()[what.module.name, what.name]
    file = "" if home == one.name else page_of(home)
    return f"[`{name}`]({file}#{name.lower()})"


def _index() -> str:
    out = [
        "# Reference",
        "",
        "Every public name, from its docstring. `tools/make_reference.py` writes these pages",
        "(`make reference`), and a test compares them with the sources. Public is what `__all__`",
        "of a module without a leading underscore lists; all else may change without notice.",
        "",
        "| module | |",
        "|---|---|",
    ]
    for one in public_modules():
        if page_of(one.name) == f"{one.name}.md":
            doc = ast.get_docstring(one.tree) or ""
            out.append(f"| [`{one.name}`]({page_of(one.name)}) | {_summary(doc)} |")
    out += [
        "",
        f"* [Errors and rules]({CODES}): every code, what it means, why, and what to do.",
        "* [Environment variables](../environment.md): those that are read, and those set.",
    ]
    return "\n".join(out) + "\n"


def _codes() -> str:
    out = [
        "# Errors and rules",
        "",
        "What `meshplan rule CODE` prints, for every code. A code keeps its meaning for ever.",
        "",
        "| code | name | |",
        "|---|---|---|",
    ]
    for code, rule in RULES.items():
        out.append(f"| [{code}](#{rule.name}-{code.lower()}) | {rule.name} | {rule.summary} |")
    for code, cls in ERRORS.items():
        told = _summary(inspect.cleandoc(cls.__doc__ or ""))
        name = cls.__name__
        out.append(f"| [{code}](#{name.lower()}-{code.lower()}) | `{name}` | {told} |")
    for code in (*RULES, *ERRORS):
        out += ["", *_lower(rule_page(code)).rstrip().splitlines()]
    return "\n".join(out) + "\n"


def _lower(page: str) -> str:
    """Headings one level further down, those of ``console`` blocks left alone."""
    parts = re.split(r"(^```.*?^```$)", page, flags=re.M | re.S)
    return "".join(p if p.startswith("```") else re.sub(r"^#", "##", p, flags=re.M) for p in parts)


def _is_overload(node: ast.stmt) -> bool:
    marks = node.decorator_list if isinstance(node, Function) else []
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in marks)


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        return [node.target.id]
    return []


def _string(body: list[ast.stmt], i: int) -> str:
    """The string that stands by itself at ``i``: what documents a constant."""
    if i < len(body):
        node = body[i]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="The reference, from the docstrings.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    given = parser.parse_args()
    made = pages()
    there = {path.name: path.read_text("utf-8") for path in OUTPUT.glob("*.md")}
    if given.check:
        wrong = sorted(n for n in {*made, *there} if made.get(n) != there.get(n))
        if wrong:
            print(f"make reference would change docs/reference: {', '.join(wrong)}")
        return bool(wrong)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in there.keys() - made.keys():
        (OUTPUT / name).unlink()
    for name, text in made.items():
        (OUTPUT / name).write_text(text, encoding="utf-8")
    print(f"{OUTPUT}: {len(made)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
