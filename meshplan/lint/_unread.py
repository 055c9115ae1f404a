"""Degrees of parallelism in a text of an unknown format, and how programs name them.

A text without degrees has no mesh. A text with degrees describes a mesh that was not judged, and
must not pass as one without a mesh.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from meshplan._message_text import shorten, suggest
from meshplan.errors import LayoutError
from meshplan.lint._finding import Source
from meshplan.lint._job import Skipped
from meshplan.lint._readers._frameworks import FRAMEWORKS
from meshplan.lint._readers._numbers import INSTEAD, find_line, is_whole

_UNIT = r"[-_]?(?:size|degree|world[-_]size)"
_AXIS = r"(?:tp|pp|dp|cp|sp|ep|mp|etp|edp|ddp|fsdp|hsdp)"
_PART = r"[-_]?(?:shard(?:s|ing)?|replicas?|replicate|shard[-_]cp)"
_PARALLEL = (
    r"(?:(?:tensor|pipeline|data|context|sequence|expert|model)(?:[-_]model|[-_]tensor)?"
    r"[-_]?parallel(?:ism)?|[a-z]+[-_]parallel(?=[-_](?:size|degree)))"
)
# The names that programs give to the sizes of axes, such as tensor_model_parallel_size,
# rollout.tp_size, dp_replicate, ici_mesh_shape or zero_hpz_partition_size.
SIZE = re.compile(
    rf"(?:[\w.-]+[-_.])?(?:{_PARALLEL}(?:{_PART})?(?:{_UNIT}|[-_]dim)?|(?:auto)?{_AXIS}(?:{_PART})?{_UNIT}"
    rf"|{_AXIS}{_PART}|(?:device|ici|dcn|logical)[-_]mesh(?:[-_](?:shape|sizes?))?"
    r"|mesh[-_]param"  # DeepSpeed's data and sequence axes
    r"|zero[-_]hpz[-_]partition[-_]size|mics[-_]shard[-_]size"
    r"|(?:dp[-_]config[._])?shard[-_]degree|dp[-_]config[._]num[-_]replicas"
    r"|(?:ring|ulysses)(?:[-_]attn)?[-_](?:size|degree))"
)
# Short names that other texts use too. They count alone or as the last part of a dotted path.
SHORT = re.compile(rf"(?:[\w-]+\.)*(?:{_AXIS}|(?!pretraining)[\w-]+[-_][tp]p)")
# Keys of one program often differ by a word, and a spelling mistake by a letter or two.
_NEAR = 0.92
_STEM = re.compile(r"para|pral|ral+el|llel|degr|gree|repl|shard|dp_")
_DEGREES = {key for one in FRAMEWORKS for mesh in one.meshes for key in mesh.keys if len(key) > 8}


def is_size(key: str) -> bool:
    """Whether a key is a name that programs use for the size of an axis."""
    return bool(SIZE.fullmatch(key.lower()) or SHORT.fullmatch(key.lower()))


def suggest_key(key: str, keys: Iterable[str]) -> str:
    """`` (did you mean ...)`` for a misspelt key of ``keys``; empty for a key of its own."""
    return suggest(key, keys, _NEAR) if _STEM.search(key) and key not in _DEGREES else ""


def suggest_degree(key: str) -> str:
    """`suggest_key` for the keys of all programs, as they are written in the table."""
    key = key.rpartition(".")[2].replace("-", "_").lower()
    return suggest_key(key, _DEGREES)


_NUMBER = (
    r"-?\d+(?![\w.])|auto\b|\$\{?\w+|\{\{|<\w|(?:[\[(][ \t]*|\n[ \t]{0,40}-[ \t])-?\d"
    r"|(?:choice|range)\("
)
# In YAML and JSON of a sweep: a table of the values that it tries.
_SWEEP = r"(?:\{?\s{0,40}[\"']?(?:values?|choices|min)[\"']?[ \t]*:\s{0,40}(?:-[ \t])?)?"
# Keys with values in TOML, YAML, JSON, Hydra's overrides and shells; options with values,
# which may be the next item of a list.
_PAIR = re.compile(
    rf"(?<![\w$.-])(?:\+{{1,2}})?[\"']?(?P<key>[A-Za-z][\w.-]*)[\"']?[ \t]*[=:][ \t]*"
    rf"{_SWEEP}[\"']?(?P<value>{_NUMBER})"
    rf"|(?<![\w-])--?(?P<option>[A-Za-z][\w.-]*)(?:=[\"']?|(?:[\"',\s]|-\s){{1,80}})"
    rf"(?P<given>{_NUMBER})"
)
# After a name in Python: the end of a key, an annotation, and the beginning of a degree.
_VALUE = r"[\"']?\]?+\s*+(?::[^=\n]{0,80})?[=:,]\s*+[(\[]*+\s*+-?+\s*+[(\[]*+\s*+\d"
# Hydra's and OmegaConf's ${trainer.parallelism.tensor_parallel_degree}.
_REFERENCE = re.compile(r"\$\{[\w.]*\.(\w+)\}")
# AReaL's sglang:d4p1t2+fsdp:d8t2, with a degree above 1.
_ALLOCATION = re.compile(
    r"\b(?:allocation_mode|backend)\b[\"']?[ \t]*(?::[ \t]*str[ \t]*)?[=:][ \t]*f?[\"']?"
    r"[\w.:+|()-]{0,200}?(?<=[.:+|(\d])[acdept](?:[2-9]|\d\d|[{$])[\w.:+|(){}$-]{0,200}"
)
COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#[^\n]*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_JOB = re.compile(r"parallel|mesh_shape|world_size|num_gpus|num_nodes|n_gpus|nnodes|num_processes")
_HYBRID = re.compile(r"\b_?HYBRID_SHARD(?:_ZERO2)?\b")
# A degree on a line of a text, such as a configuration in a string of Python.
_LINE = re.compile(
    rf"^[ \t]*+(?:-[ \t]+)?+[\"']?(?P<key>{SIZE.pattern})[\"']?"
    r"[ \t]*[=:][ \t]*(?P<size>\d{1,9})\b",
    re.M,
)
_MAKERS = {"initialize_model_parallel", "new_subgroups", "split_group"}


def find_unread_in_text(name: str, text: str) -> Skipped | None:
    """The first degree of parallelism in a text of any format; ``None`` if it has none."""
    if "\0" in text:
        return Skipped(Source(name), f"the file is not text; {INSTEAD}")
    bare = COMMENT.sub(lambda comment: " " * len(comment[0]), text)
    # The vocabulary of a tokenizer has all short words.
    is_vocabulary = name.endswith(".json") and not _JOB.search(text)
    pairs = [*_PAIR.finditer(bare)]
    keys = {(pair["key"] or "").rpartition(".")[2] for pair in pairs}
    for pair in pairs:
        key, value = (
            pair["key"] or pair["option"],
            pair["value"] or pair["given"],
        )
        reference = _REFERENCE.match(bare, pair.end() - len(value))
        if reference and is_size(reference[1]) and reference[1] in keys:
            continue  # the key that it names is among the pairs
        where = Source(name, find_line(text, pair.start()))
        if value in ("0", "1"):
            continue
        if near := suggest_degree(key):
            return Skipped(where, f"{shorten(key)} is not a key of any program{near}")
        if is_size(key) and not (is_vocabulary and len(key) < 5):
            shown = f"{key} = {value.strip()}" if pair["key"] else f"--{key} {value}"
            return _skip_degree(where, shown)
    if skipped := _find_allocation(name, bare):
        return skipped
    if hybrid := _HYBRID.search(bare):
        return _skip_hybrid(Source(name, find_line(text, hybrid.start())))
    return None


def _find_allocation(name: str, text: str) -> Skipped | None:
    found = _ALLOCATION.search(text)
    return found and _skip_degree(Source(name, find_line(text, found.start())), found[0])


def find_unread_in_python(name: str, text: str) -> Skipped | None:
    """The first degree of parallelism in Python whose meshes are not read, as the other.

    Comments and docstrings do not count, and neither do names that only pass a size on.
    """
    from meshplan.lint._readers._values import find_callee, parse, read_string

    words = set(_WORD.findall(text))
    if words & {"allocation_mode", "backend"} and (skipped := _find_allocation(name, text)):
        return skipped
    if not any(
        word.lower().strip("_") in _WANTED or word.endswith("ParallelConfig") for word in words
    ):
        # Parsing takes ten times as long as finding a number after one of these words.
        sizes = "|".join(word for word in words if is_size(word))
        if not sizes or not re.search(rf"\b(?:{sizes})\b{_VALUE}", text):
            return None
    try:
        tree = parse(name, text)
    except LayoutError:
        return find_unread_in_text(name, text)
    # A test has sizes of its own.
    pending: list[ast.AST] = [tree]
    for node in pending:
        is_docstring = isinstance(node, ast.Expr) and read_string(node.value)
        if is_docstring or str(getattr(node, "name", "")).startswith("test_"):
            continue
        pending += ast.iter_child_nodes(node)
        found = _find_named_values(node)
        # One short name alone may mean anything, such as the true positives of a metric.
        short = sum(bool(SHORT.fullmatch(key.lower())) for key, _ in found) > 1
        for key, value in found:
            known = SIZE.fullmatch(key.lower()) or (short and SHORT.fullmatch(key.lower()))
            if (known or key.startswith("parallel.")) and _is_degree(value):
                return _skip_degree(Source(name, value.lineno), f"{key} = {ast.unparse(value)}")
        if isinstance(node, ast.Attribute) and _HYBRID.fullmatch(node.attr):
            return _skip_hybrid(Source(name, node.lineno))
        if isinstance(node, ast.keyword) and getattr(node.value, "attr", "") == "hsdp":  # OLMo-core
            return _skip_degree(Source(name, node.value.lineno), ast.unparse(node))
        if isinstance(node, ast.Call) and (maker := find_callee(node)) in _MAKERS:
            why = f"{maker} makes groups that are not read; {INSTEAD}"
            return Skipped(Source(name, node.lineno), why)
    return None


_OLMO = {"degree", "num_replicas", "shard_degree"}
_WANTED = _MAKERS | {
    "hybrid_shard",
    "hybrid_shard_zero2",
    "hsdp",
    "shard_degree",
    "num_replicas",
    "zero1",
}
# InternEvo's parallel = dict(zero1=8, tensor=dict(size=4)).
_PARTS = ("zero1", "tensor", "pipeline", "weight", "expert")


def _skip_degree(where: Source, shown: str) -> Skipped:
    return Skipped(
        where,
        f"{shorten(shown)} is written in a format that is not read; {INSTEAD}",
    )


def _skip_hybrid(where: Source) -> Skipped:
    return Skipped(where, f"HYBRID_SHARD makes groups for each host, not read; {INSTEAD}")


def _find_named_values(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Names with their values: keyword arguments, keys of a dict, variables, lines of a string."""
    pairs: list[tuple[str, ast.expr]] = []
    match node:
        case ast.Constant(value=str(text)):
            lines = _LINE.finditer(text)
            at = node.lineno
            return [(one["key"], ast.Constant(int(one["size"]), lineno=at)) for one in lines]
        case ast.Call(
            func=ast.Name("setattr") | ast.Attribute(attr="__setattr__" | "__setitem__"),
            args=[*_, ast.Constant(str(key)), value],
        ):
            return [(key, value)]
        case ast.Call():
            pairs = [(one.arg, one.value) for one in node.keywords if one.arg]
            # OLMo-core's TransformerDataParallelConfig
            found = [(f"parallel.{key}", value) for key, value in pairs if key in _OLMO]
            pairs += found if found and "ParallelConfig" in ast.unparse(node.func) else []
        case ast.Dict():
            items = zip(node.keys, node.values, strict=True)
            keys = [(getattr(key, "value", None), value) for key, value in items]
            pairs = [(key, value) for key, value in keys if isinstance(key, str)]
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # An item, as config["tp_size"], has a slice.
            parts = [getattr(one, "slice", one) for one in targets]
            names = [
                getattr(part, "attr", getattr(part, "id", getattr(part, "value", None)))
                for part in parts
            ]
            return [(key, value) for key in names if isinstance(key, str)]
    if {"zero1", "tensor"} <= {key for key, _ in pairs}:
        for key, value in [one for one in pairs if one[0] in _PARTS]:
            inner = [*_find_named_values(value), ("size", value)]
            size = next(one for at, one in inner if at == "size")
            pairs += [(f"parallel.{key}", size)] if ast.unparse(size) != "-1" else []
    return pairs


def _is_degree(value: ast.expr) -> bool:
    """Whether it is an integer other than 0 and 1, or a shape."""
    try:
        found = ast.literal_eval(value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    if isinstance(found, tuple | list):
        return bool(found) and all(map(is_whole, found))
    return is_whole(found) and found not in (0, 1)
