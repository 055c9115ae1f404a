"""The environment variables of meshplan: one that does not exist is reported."""

from __future__ import annotations

import os
import warnings

from meshplan._message_text import suggest
from meshplan.errors import PolicyError

_NAMES = {
    "MESHPLAN_AUDIT",
    "MESHPLAN_BACKEND_AUTOLOAD",
    "MESHPLAN_BUILD_KERNELS",
    "MESHPLAN_CACHE",
    "MESHPLAN_CONTRACT",
    "MESHPLAN_CUDA_ARCHITECTURES",
    "MESHPLAN_HOST",
    "MESHPLAN_INNER",
    "MESHPLAN_LINKS",
    "MESHPLAN_PATH",
    "MESHPLAN_POLICY",
    "MESHPLAN_RUN",
    "MESHPLAN_SARIF_SCHEMA",
    "MESHPLAN_STRICT",
}


def check_variables(strict: bool) -> None:
    """Warn of each variable ``MESHPLAN_*`` that nothing reads, except those of the tests; with
    ``strict``, raise PolicyError.
    """
    for name in sorted(os.environ):
        if name.startswith("MESHPLAN_") and not name.startswith("MESHPLAN_TEST_"):
            if name in _NAMES:
                continue
            text = f"no variable {name}{suggest(name, _NAMES)}; unset it, or correct its name"
            if strict:
                raise PolicyError(text)
            warnings.warn(f"[meshplan] {text}", stacklevel=4)
