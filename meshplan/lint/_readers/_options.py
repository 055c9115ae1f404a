"""Settings of a command: its options and Hydra's overrides, in a shell script, arguments, YAML.

A script is scanned, never run: a value that is a variable is followed to the one place that
defines it as a number, here or in a file that the script sources. Of a ``case`` or an ``if`` on
constants only the branch that runs is read (`_branches.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from itertools import islice
from pathlib import Path

from meshplan._message_text import shorten
from meshplan.lint._readers._documents import (
    LAUNCH,
    Document,
    Setting,
    Unknown,
    match,
)
from meshplan.lint._readers._frameworks import PLAIN
from meshplan.lint._readers._numbers import Edit, Number
from meshplan.lint._readers._script import Option, Script, Word

# Of torchrun, srun, sbatch, deepspeed and accelerate.
_LAUNCH: Mapping[str, str] = {
    "--nnodes": "hosts",
    "--num-nodes": "hosts",
    "--num-machines": "hosts",
    "--nodes": "hosts",
    "-N": "hosts",
    "--nproc-per-node": "ranks per host",
    "--gpus-per-node": "GPUs per host",
    "--gres": "GPUs per host",
    "--ntasks-per-node": "tasks per host",
    "--world-size": "world size",
    "--num-gpus": "GPUs",
    "--num-processes": "world size",
    # slime, slime/utils/arguments.py: the trainer's part of a Ray cluster.
    "--actor-num-nodes": "hosts",
    "--actor-num-gpus-per-node": "ranks per host",
}
# Of the commands of ms-swift and LLaMA-Factory, which start torchrun with them.
_ENVIRONMENT: Mapping[str, str] = {
    "NPROC_PER_NODE": "ranks per host",
    "NNODES": "hosts",
}
_FLAG = re.compile(r"(?:.*\.)?(?:use_\w+|(?:no_|enable_)?(?:enable_)?sequence_parallel|enable_\w+)")
_SOURCE = re.compile(r"^[ \t]*(?:source|\.)[ \t]+[\"']?(?:\$\{?\w+\}?/|\./)?([\w./-]+)", re.M)
# A converter's degrees are those of another job's checkpoint.
_PROGRAM = re.compile(r"\b(\w++)\.py\b")
# They change the meaning of a launcher's options.
_LAUNCH_WORDS = ("deepspeed", "srun", "#SBATCH")
_MAX_SOURCED = 1 << 16
_MAX_SOURCED_FILES = 32


def read_command(name: str, text: str) -> Document:
    """The settings of a command.

    Args:
        name: of the file.
        text: a script, arguments, or YAML and JSON that hold them.
    """
    script = Script(text, _read_sourced(name, text))
    settings: list[Setting] = []
    ends: dict[Setting, int | None] = {}
    launch: dict[str, set[int]] = {}
    conditional: dict[str, list[int]] = {}
    commands: set[int] = set()
    for command, options in script.list_commands():
        is_converter = any("convert" in one[1] for one in _PROGRAM.finditer(command))
        words = {one for one in _LAUNCH_WORDS if one in command}
        for option in options:
            dashes = len(option.text) - len(option.text.lstrip("-"))
            if key := _LAUNCH.get(option.text[:dashes] + option.text[dashes:].replace("_", "-")):
                _add_launch(launch, key, script, option, words)
                continue
            if is_converter:
                continue
            path = option.text[dashes:].replace("-", "_").lower()
            value, number = _read_value(script, option, path)
            line = script.find_line(option.start)
            settings.append(Setting(path, value, line, option.text, number))
            if not script.is_value(option.start):
                commands.add(line)
            if script.is_conditional(option.start):
                conditional.setdefault(path, []).append(len(settings) - 1)
            ends[settings[-1]] = _find_end(option, text)
    if not launch:
        launch = _read_environment(script)
    _doubt_conditional(settings, conditional)
    if {one.path for one in settings if match(PLAIN.mark, one.path)} == {"fsdp"}:
        settings = [one for one in settings if not _is_flat(one, text)]

    def insert(after: Setting, key: str, size: int) -> Edit | None:
        # Next to an option that has its value on the same line, and no quote or comma after it.
        end = ends.get(after)
        if end is None or text[end : end + 1] not in ("", " ", "\t", "\n", "\r"):
            return None
        before, _, last = after.key.lstrip("-").rpartition(".")
        if not after.key.startswith("-"):
            return Edit(end, end, f" {before}{'.' if before else ''}{key}={size}")
        key = key if "_" in last else key.replace("_", "-")
        return Edit(end, end, f" --{before}{'.' if before else ''}{key} {size}")

    return Document(name, text, "command", settings, insert, _count_ranks(launch), commands)


def _doubt_conditional(settings: list[Setting], conditional: Mapping[str, list[int]]) -> None:
    """Make the degrees unknown that only one branch of a condition has."""
    for places in conditional.values():
        one = settings[places[0]]
        if len(places) == 1 and type(one.value) is int:
            why = f"{one.key} depends on a condition; give the mesh with --mesh"
            settings[places[0]] = one._replace(value=Unknown(why), number=None)


def _find_end(option: Option, text: str) -> int | None:
    """The end of an option that has its value on the same line."""
    if option.value is None or "\n" in text[option.start : option.value.start]:
        return None
    return option.value.end


def _is_flat(one: Setting, text: str) -> bool:
    """Whether ``--fsdp``, ``--fsdp full_shard`` is torch's FSDP along all ranks, without a size."""
    known = not re.search(r"\d|\$", str(one.value))
    return one.path == "fsdp" and known and "hybrid" not in text.lower()


def _read_value(script: Script, option: Option, path: str) -> tuple[object, Number | None]:
    """The value of an option, and its place if it is a number."""
    word = option.value
    number = None if word is None else script.read_number(word)
    if _FLAG.fullmatch(path) and (word is None or word.text.lower() not in ("true", "false")):
        return True, None
    if number is not None:
        return number.value, number
    if word is None or (word.text.startswith("-") and option.text.startswith("-")):
        return Unknown(f"{option.text} has no value; pass an integer after it"), None
    found = script.read_text(word)
    if found is not None:
        return found, None
    return Unknown(
        f"{option.text} {shorten(word.text)} has no single value in this file; "
        "give the mesh with --mesh"
    ), None


def _add_launch(
    launch: dict[str, set[int]],
    key: str,
    script: Script,
    option: Option,
    words: Set[str],
) -> None:
    """Add the number of a launcher's option, if it is that of the job.

    ``words`` are those of `_LAUNCH_WORDS` in its command.
    """
    # Ray's --num-gpus are of a cluster, and a step of srun may be smaller than its job.
    if (key == "GPUs" and "deepspeed" not in words) or (
        "srun" in words and f"job's {key}" in launch
    ):
        return
    found = None if option.value is None else script.read_launch(option.value)
    launch.setdefault(key, set()).update([] if found is None else [found.value])
    if "#SBATCH" in words:
        launch[f"job's {key}"] = set()


def _read_environment(script: Script) -> dict[str, set[int]]:
    """The numbers of a launcher that the script passes as variables."""
    found = {}
    for variable, key in _ENVIRONMENT.items():
        if script.is_assigned(variable):
            number = script.read_number(Word(f"${variable}", 0))
            found[key] = set() if number is None else {number.value}
    return found


def _read_sourced(name: str, text: str) -> dict[str, str]:
    """The constants of the files next to a script that it sources, by variable."""
    found: dict[str, str] = {}
    files = dict.fromkeys(one[1] for one in _SOURCE.finditer(text))
    for file in islice(files, _MAX_SOURCED_FILES):
        path = Path(name).parent / file
        try:
            if not path.is_file() or path.stat().st_size > _MAX_SOURCED:
                continue
            script = Script(path.read_text(encoding="utf-8"), {})
        except (OSError, ValueError):
            continue
        found |= script.list_constants()
    return found


def _count_ranks(given: Mapping[str, set[int]]) -> dict[str, int]:
    """Hosts, ranks on each host and ranks that a command starts, if it specifies them."""
    # Several commands of one script may start different numbers.
    known = {key: min(values) for key, values in given.items() if len(values) == 1}
    found = {key: value for key, value in known.items() if 1 <= value <= 1 << 24}
    hosts = found.get("hosts")
    per_host = found.get("ranks per host") or found.get("GPUs per host")
    if per_host is None and hosts is not None:
        # The launcher of DeepSpeed counts GPUs of a host; one task may start a rank for each GPU.
        per_host = found.get("GPUs")
    if per_host is None and found.get("tasks per host", 1) > 1:
        per_host = found["tasks per host"]
    total, alone = found.get("world size"), None
    if total is None and hosts is None:
        alone = found.get("GPUs") or (None if "hosts" in given else found.get("ranks per host"))
    counts = dict(
        zip(
            (*LAUNCH, "ranks of one host"),
            (hosts, per_host, total, alone),
            strict=True,
        )
    )
    return {key: count for key, count in counts.items() if count is not None}
