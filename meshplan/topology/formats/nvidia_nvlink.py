"""``nvidia-smi nvlink -s``: the state and speed of each NVLink of each GPU of one host.

Source: the command's help. It does not say what is at the other end of a link, so it tells no
domain; but it shows a GPU of which links are down, which a table of pairs may hide.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Note, Reading
from meshplan.topology.formats._clean import HEAD, lines, some
from meshplan.topology.formats._matrix import gpu_names

__all__ = ["recognises", "read"]

_KIND = "nvidia-smi nvlink -s"
_MOST_GPUS = 4096
_MOST_LINKS = 256
_MOST_NOTES = 8

_GPU = re.compile(r"\s{0,16}GPU (\d{1,7}): ?([^\n]{0,200})")
_LINK = re.compile(
    r"\s{0,16}Link (\d{1,7}): {0,8}(?:(\d{1,6}(?:\.\d{1,6})?) ?([GM]B/s)\s{0,16}$|<?(in)active>?)",
    re.IGNORECASE,
)
_NONE = re.compile(
    r"\s{0,16}NVML: Unable to retrieve NVLink information as all links are inactive", re.I
)


@dataclass(slots=True)
class _Gpu:
    number: int
    name: str
    line: int
    links: dict[int, str] = field(default_factory=dict)
    # All of its links are inactive; how many there are is not told then.
    silent: bool = False

    @property
    def active(self) -> int:
        return sum(bool(speed) for speed in self.links.values())

    @property
    def told(self) -> tuple[str, dict[int, str], bool]:
        return self.name, self.links, self.silent


def recognises(text: str) -> bool:
    """Whether there is a link of a GPU with its state near the beginning of ``text``."""
    gpu = False
    for _, line in lines(text[:HEAD]):
        if gpu and (_LINK.match(line) or _NONE.match(line)):
            return True
        gpu = gpu or _GPU.match(line) is not None
    return False


def read(text: str) -> Reading:
    """How many links of each GPU are active. Which GPUs they join is not told.

    Args:
        text: what ``nvidia-smi nvlink -s`` printed.

    Raises:
        TopologyInputError: no GPU with links, outputs of several hosts, or more than can be one
            host.
    """
    gpus = _gpus(text)
    if not any(gpu.links or gpu.silent for gpu in gpus.values()):
        raise TopologyInputError(
            "no NVLink of a GPU found; give all that nvidia-smi nvlink -s printed"
        )
    notes = [*_counts(gpus), *_each(gpus)]
    lacking = [gpu for gpu in range(max(gpus) + 1) if gpu not in gpus]
    if lacking:
        notes.append(Note(f"not listed: {gpu_names(lacking)}"))
    bare = [gpu for gpu in gpus.values() if not gpu.links and not gpu.silent]
    if bare:
        notes.append(Note(f"nothing is said about the links of {_names(bare)}", line=bare[0].line))
    sizes = {len(gpu.links) for gpu in gpus.values() if gpu.links}
    gaps = [gpu for gpu in gpus.values() if sorted(gpu.links) != list(range(len(gpu.links)))]
    if gaps or len(sizes) > 1:
        notes.append(Note("links are missing from the list of some GPUs, or models are mixed"))
    notes.append(Note("which GPUs these links join is not told; run nvidia-smi topo -m"))
    return Reading(
        _KIND,
        complete=not (lacking or bare or gaps or len(sizes) > 1),
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
    )


def _names(gpus: list[_Gpu]) -> str:
    return gpu_names(gpu.number for gpu in gpus)


def _counts(gpus: dict[int, _Gpu]) -> list[Note]:
    by_count: dict[int, list[_Gpu]] = {}
    for gpu in gpus.values():
        if gpu.links or gpu.silent:
            by_count.setdefault(gpu.active, []).append(gpu)
    told = sorted(by_count.items(), key=lambda item: (-len(item[1]), -item[0]))
    text = some([f"{count} on {_names(found)}" for count, found in told])
    if len(told) == 1:
        return [Note(f"active NVLinks: {text}")]
    return [Note(f"active NVLinks differ: {text}", "MP201", told[1][1][0].line)]


def _each(gpus: dict[int, _Gpu]) -> list[Note]:
    notes = []
    for gpu in gpus.values():
        down = [str(link) for link, speed in sorted(gpu.links.items()) if not speed]
        if gpu.silent:
            notes.append(Note(f"GPU{gpu.number}: all links are inactive", line=gpu.line))
        elif down:
            notes.append(Note(f"GPU{gpu.number}: inactive links {some(down)}", line=gpu.line))
        speeds = Counter(speed for speed in gpu.links.values() if speed)
        if len(speeds) > 1:
            text = some([f"{count} of {speed}" for speed, count in speeds.most_common()])
            notes.append(Note(f"GPU{gpu.number}: links differ: {text}", "MP201", gpu.line))
    models = Counter(speed for gpu in gpus.values() for speed in set(gpu.links.values()) - {""})
    if models:
        notes.append(Note(f"speed of a link: {some([speed for speed, _ in models.most_common()])}"))
    if len(notes) <= _MOST_NOTES:
        return notes
    return [*notes[:_MOST_NOTES], Note(f"{len(notes) - _MOST_NOTES} more such notes")]


def _gpus(text: str) -> dict[int, _Gpu]:
    gpus: dict[int, _Gpu] = {}
    again: list[_Gpu] = []
    now: _Gpu | None = None
    for number, line in lines(text):
        if found := _GPU.match(line):
            now = _Gpu(int(found[1]), found[2].strip(), number)
            if now.number >= _MOST_GPUS or len(again) > _MOST_GPUS:
                raise TopologyInputError(
                    f"more than {_MOST_GPUS} GPUs; give the output of one host", line=number
                )
            if now.number in gpus:
                again.append(now)
            else:
                gpus[now.number] = now
        elif now is not None and (found := _LINK.match(line)):
            link, speed = int(found[1]), f"{found[2]} {found[3]}" if found[2] else ""
            if link >= _MOST_LINKS or now.links.setdefault(link, speed) != speed:
                raise TopologyInputError(
                    f"link {link} of GPU{now.number} again with another state, or a GPU with more "
                    f"than {_MOST_LINKS} links; give the output of one host",
                    line=number,
                )
        elif now is not None and _NONE.match(line):
            now.silent = True
    for gpu in again:
        # Several ranks of one host may have printed the same.
        if gpu.told != gpus[gpu.number].told:
            raise TopologyInputError(
                f"GPU{gpu.number} again, and not as in line {gpus[gpu.number].line}; "
                "give the output of one host",
                line=gpu.line,
            )
    return gpus
