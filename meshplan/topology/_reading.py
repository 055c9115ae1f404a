"""The location of GPUs or ranks in one input: the common result of all parsers.

Unknown facts are ``None``: a GPU without listed links is not a domain of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from meshplan.errors import TopologyInputError

MAX_DEPTH = 32  # of YAML
# GPU or rank indices as in the input, each group ascending, groups by their first index.
Groups = tuple[tuple[int, ...], ...]
_Member = TypeVar("_Member", bound=Any)  # can be sorted
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Note:
    message: str  # one line
    code: str = ""  # of the rule that reports it, e.g. ``MP202``; or empty
    line: int | None = None  # of the input, from 1 up; or ``None``

    def __post_init__(self) -> None:
        # Names in an input may contain line ends, such as a carriage return.
        object.__setattr__(self, "message", " ".join(self.message.splitlines()))

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{f'{self.code}: ' if self.code else ''}{self.message}"


@dataclass(frozen=True, slots=True)
class Reading:
    kind: str  # of the input, e.g. ``nvidia-smi topo -m``
    # GPUs or ranks that NVLink or xGMI joins, through a switch too; ``None`` if unknown.
    # Every listed GPU is in one of them.
    domains: Groups | None = None
    # GPUs or ranks of one host, or of one clique of hosts that multi-node NVLink joins;
    # ``None`` if unknown.
    nodes: Groups | None = None
    complete: bool = False  # whether no part of the input is missing
    notes: tuple[Note, ...] = ()  # oddities, in order of lines
    # Of hosts by position in ``nodes``, or of other listed things; may be empty.
    names: tuple[str, ...] = ()
    # Name of each block of hosts that NVLink may join, and its hosts as a list of Slurm.
    blocks: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    # Whether indices are GPUs of one ``host`` (or of one clique of hosts), ``ranks`` of a
    # job, or GPUs of all the hosts of a ``cluster``, host after host.
    scope: Literal["host", "ranks", "cluster"] = "host"

    def to_json(self) -> dict[str, Any]:
        names = ("kind", "domains", "nodes", "complete")
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "notes": [str(note) for note in self.notes]}


def compose_yaml(text: str) -> list[Any]:
    """The nodes of all documents of a text. Offsets do not count a byte-order mark."""
    import yaml  # here, because few inputs are YAML

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text, depth = text.removeprefix("\ufeff"), 0
    try:
        # The C library recurses without a limit of its own, and would end the process.
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise TopologyInputError("YAML that is nested too deep")
        return [*yaml.compose_all(text, Loader=loader)]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise TopologyInputError(f"not YAML: {error.problem}", line=line) from None
    except (yaml.YAMLError, ValueError):
        raise TopologyInputError("not YAML: a character that it does not allow") from None


def find_components(
    members: Iterable[_Member],
    pairs: Iterable[tuple[_Member, _Member]],
) -> tuple[tuple[_Member, ...], ...]:
    """Connected components: ``members`` joined by ``pairs``, in the order of ``Groups``."""
    parent = {member: member for member in members}

    # Union-find with path halving: a log or a dump may have a hundred thousand ranks.
    def find_root(member: _Member) -> _Member:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for one, other in pairs:
        parent[find_root(one)] = find_root(other)
    groups = group_values((find_root(member), member) for member in sorted(parent))
    return tuple(sorted(tuple(group) for group in groups.values()))


def group_values(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, both in the order of their first appearance."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def format_count(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def parse_number(text: str | None) -> int | None:
    """A number of at most 9 digits; ``None`` for anything else."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return None
    return int(text)


def number_names(names: Iterable[Hashable]) -> list[int]:
    """Each name as a number, in order of its first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def freeze(value: Any) -> Any:
    """The value of JSON with tuples in place of its lists."""
    if isinstance(value, dict):
        return {name: freeze(one) for name, one in value.items()}
    return tuple(map(freeze, value)) if isinstance(value, list) else value
