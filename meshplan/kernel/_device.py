"""A GPU with meshplan's kernels loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from meshplan.kernel._calls import Key
from meshplan.kernel._device_code import device_code, prebuilt
from meshplan.kernel._driver import Driver, DriverError, DriverKind

__all__ = ["Device", "device_of", "kernel_name"]


class Device:
    """One GPU of this process.

    Args:
        driver: for this GPU.
        processors: how many blocks run at once at least (multiprocessors, compute units).
        image: the kernels, as the driver loads them.
        stream: tells the handle of the stream that work is given to now.
        type: of the tensors that lie there, as torch calls it.

    Raises:
        DriverError: the image is not for this GPU.
    """

    def __init__(
        self,
        driver: Driver,
        processors: int,
        image: bytes,
        stream: Callable[[], int],
        type: str = "cuda",
    ) -> None:
        self.driver = driver
        self.processors = processors
        self.stream = stream
        self.type = type
        self._kernels: dict[str, int] = {}
        with driver.current():
            self._module = driver.load(image)

    def kernel(self, name: str) -> int:
        """The kernel of that name; the driver is current."""
        found = self._kernels.get(name)
        if found is None:
            found = self._kernels[name] = self.driver.function(self._module, name)
        return found


@lru_cache(maxsize=64)
def device_of(index: int) -> Device:
    """The GPU that torch calls ``cuda:index``. The first call may compile the kernels.

    Raises:
        DriverError: the driver is not there.
        CompileError: the kernels are not there and cannot be compiled.
    """
    properties = torch.cuda.get_device_properties(index)
    kind: DriverKind = "hip" if torch.version.hip else "cuda"
    driver = Driver(kind, index)

    def stream() -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    processors = properties.multi_processor_count
    installed = prebuilt() if kind == "cuda" else None
    if installed is not None:
        try:
            return Device(driver, processors, installed, stream)
        except DriverError:
            # Compiled for other architectures than this one.
            pass
    if kind == "hip":
        architecture = properties.gcnArchName.split(":")[0]
    else:
        architecture = f"sm_{properties.major}{properties.minor}"
    return Device(driver, processors, device_code(kind, architecture), stream)


def kernel_name(key: Key) -> str:
    """The kernel for the arithmetic of a call; csrc/device.cu lists them."""
    how = key.how
    name = str(key.dtype).removeprefix("torch.")
    op = "sum" if how.op == "avg" else how.op
    if op in ("max", "min"):
        return f"mp_{name}_{op}"
    wide = how.accumulate == "float64" and key.dtype is torch.float32
    # Where partial results are as wide as the elements there is nothing to round.
    node = how.rounding == "node" and (wide or key.dtype in (torch.bfloat16, torch.float16))
    return f"mp_{name}{'_wide' if wide else ''}_{op}{'_node' if node else ''}"
