"""The texts of the errors that calls raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def refusal(
    kind: type[Exception] | tuple[type[Exception], ...],
    call: Callable[..., object],
    *arguments: Any,
    **options: Any,
) -> str:
    """The text of the error of a call, which is of this kind."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return str(caught.value)


def refusals(kind: type[Exception], calls: Iterable[Callable[[], object]]) -> str:
    """The texts of the errors of several calls, a line each."""
    return "\n".join(refusal(kind, call) for call in calls)
