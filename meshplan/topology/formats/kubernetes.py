"""Output of ``kubectl get nodes -o json`` or ``-o yaml``: cliques of hosts that NVLink joins.

Source: labels of NVIDIA's GPU feature discovery. ``nvidia.com/gpu.clique`` is
``<ClusterUUID>.<CliqueID>``, on nodes with multi-node NVLink only; ``nvidia.com/gpu.count`` is the
number of GPUs of a node. Topograph has the same value in a label of its own (KEP-4962 too), AWS the
id of an UltraServer; its capacity blocks are no domains. No label has the GPUs joined inside a
host.
"""

from __future__ import annotations

import json
import re
from typing import Any

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import (
    Note,
    Reading,
    compose_yaml,
    format_count,
    group_values,
)

_CLIQUE = "nvidia.com/gpu.clique"
# The first that a node has names the GPUs that NVLink joins with its own.
_CLIQUES = (
    _CLIQUE,
    "network.topology.nvidia.com/accelerator",
    "network.topology.kubernetes.io/accelerator",  # KEP-4962
    "topology.k8s.aws/ultraserver-id",
)
_COUNT = "nvidia.com/gpu.count"
_LIST = re.compile(r'"kind"\s{0,20}:\s{0,20}"(?:NodeList|Node|List)"')
# YAML as kubectl writes it: keys of the list, or of its only item, are not indented.
_YAML_LIST = re.compile(
    r"^kind:[ \t]{1,20}[\"']?(?:NodeList|Node|List)[\"']?[ \t]*$",
    re.M,
)
_SHOWN = 64  # cliques in the notes before "... N more"
_LARGEST = 4096  # GPUs of one host
MAX_GPUS = 1 << 22
"""GPUs of all hosts, as many as a mesh may have ranks."""


def recognises(text: str) -> bool:
    start = text[:200].lstrip("\ufeff \t\r\n")
    if start.startswith("apiVersion:"):
        return _YAML_LIST.search(text) is not None
    return start.startswith("{") and '"apiVersion"' in text and _LIST.search(text) is not None


def read(text: str) -> Reading:
    """Names of hosts; GPUs, counted host after host, by clique. A host without a clique is a node
    of its own. If only the capacity of a host shows GPUs, nodes are unknown.
    """
    hosts = [_parse_host(item, index) for index, item in enumerate(_parse_items(text))]
    cliques = group_values((clique, index) for index, (_, clique, _) in enumerate(hosts) if clique)
    notes = []
    for clique, members in list(cliques.items())[:_SHOWN]:
        some = ", ".join(hosts[index][0][:63] for index in members[:4])
        rest = f", ... {len(members) - 4} more" if len(members) > 4 else ""
        count = format_count(len(members), "host")
        notes.append(Note(f"clique {clique[:80]}: {count}: {some}{rest}"))
    if len(cliques) > _SHOWN:
        notes.append(Note(f"... {len(cliques) - _SHOWN} more cliques"))
    gpu_hosts = [host for host in hosts if host[1] or host[2]]
    uncounted = sum(count < 0 for _, _, count in gpu_hosts)
    nodes = None
    if not cliques:
        notes.append(Note(f"no host has the label {_CLIQUE}: multi-node NVLink is unknown"))
    if uncounted:
        notes.append(
            Note(f"{uncounted} of {len(gpu_hosts)} hosts with GPUs have no label {_COUNT}")
        )
    elif gpu_hosts:
        if sum(count for _, _, count in gpu_hosts) > MAX_GPUS:
            raise TopologyInputError(f"more than {MAX_GPUS} GPUs by {_COUNT}; is a number wrong?")
        groups: dict[str, list[int]] = {}
        gpu = 0
        for index, (_, clique, gpus) in enumerate(hosts):
            if gpus:
                groups.setdefault(clique or f"host {index}", []).extend(range(gpu, gpu + gpus))
                gpu += gpus
        nodes = tuple(sorted(tuple(group) for group in groups.values()))
    return Reading(
        "kubectl get nodes",
        nodes=nodes,
        complete=True,
        notes=tuple(notes),
        names=tuple(name for name, _, _ in hosts),
        scope="cluster",
    )


def _parse_items(text: str) -> list[Any]:
    is_yaml = text.lstrip("\ufeff \t\r\n").startswith("apiVersion:")
    found = (_parse_yaml if is_yaml else _parse_json)(text.lstrip("\ufeff"))
    if isinstance(found, dict) and found.get("kind") == "Node":
        return [found]
    items = found.get("items") if isinstance(found, dict) else None
    if not isinstance(items, list):
        raise TopologyInputError("no items found; pass the output of kubectl get nodes -o json")
    return items


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TopologyInputError(f"not JSON: {error.msg}", line=error.lineno) from None
    except (RecursionError, ValueError):
        raise TopologyInputError("JSON that is nested too deep, or a number too long") from None


def _parse_yaml(text: str) -> Any:
    """The first document; every scalar is a text, as the values of labels are."""
    import yaml  # here, because few inputs are YAML

    try:
        return yaml.constructor.BaseConstructor().construct_document(compose_yaml(text)[0])
    except yaml.MarkedYAMLError as error:
        raise TopologyInputError(f"not YAML: {error.problem}") from None


def _parse_host(item: Any, index: int) -> tuple[str, str, int]:
    """Name, clique or nothing, and number of GPUs, of one item; -1 is an unknown number."""
    metadata = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(metadata, dict) or item.get("kind", "Node") != "Node":
        raise TopologyInputError(f"item {index} is not a node; pass kubectl get nodes -o json")
    labels = metadata.get("labels") or {}
    name = metadata.get("name")
    if not isinstance(name, str) or not name or not isinstance(labels, dict):
        raise TopologyInputError(f"item {index} has no name, or invalid labels")
    name = " ".join(name.split())
    label = next((one for one in _CLIQUES if labels.get(one)), _CLIQUE)
    clique, count = labels.get(label, ""), labels.get(_COUNT)
    form = r"[\w-]+\.[\w-]+" if label == _CLIQUE else r"[\w.-]+"
    if not isinstance(clique, str) or (clique and not re.fullmatch(form, clique)):
        expected = "<ClusterUUID>.<CliqueID>" if label == _CLIQUE else "a name"
        raise TopologyInputError(
            f"{label} of {name[:63]} is {str(clique)[:60]!r}; expected {expected}"
        )
    if count is None:
        status = item.get("status")
        capacity = status.get("capacity") if isinstance(status, dict) else None
        gpus = capacity.get("nvidia.com/gpu", "0") if isinstance(capacity, dict) else "0"
        return name, clique, -1 if clique or str(gpus) != "0" else 0
    count = str(count)
    if not count.isascii() or not count.isdigit() or len(count) > 4 or int(count) > _LARGEST:
        raise TopologyInputError(f"{_COUNT} of {name[:63]} is {count[:20]!r}; expected a number")
    return name, clique, int(count)
