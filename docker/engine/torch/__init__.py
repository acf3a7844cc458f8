"""Stand-in for PyTorch in the container lab: one float tensor and a truthful `torch.cuda`.

What it says of the GPUs comes from the device nodes and from nvidia-smi, as seen here and now.
"""

from __future__ import annotations

from typing import Any

from torch import cuda, version

__version__ = version.__version__

float32 = "torch.float32"
bfloat16 = "torch.bfloat16"
float16 = "torch.float16"


class AcceleratorError(RuntimeError):
    """A CUDA error."""


class OutOfMemoryError(RuntimeError):
    """CUDA out of memory."""


class device:
    """`torch.device("cuda:1")`."""

    def __init__(self, name: str | device = "cpu") -> None:
        kind, _, index = str(name).partition(":")
        self.type = kind
        self.index = int(index) if index else None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Tensor:
    """A flat list of floats on a device."""

    def __init__(self, values: list[float], where: str | device = "cpu") -> None:
        self.device = device(where)
        if self.device.type == "cuda":
            cuda._lazy_init()
            if (self.device.index or 0) >= cuda.device_count():
                raise AcceleratorError("CUDA error: invalid device ordinal")
        self._values = values

    def _map(self, other: Any, work: Any) -> Tensor:
        if isinstance(other, Tensor):
            pairs = zip(self._values, other._values, strict=True)
            return Tensor([work(a, b) for a, b in pairs], self.device)
        return Tensor([work(a, other) for a in self._values], self.device)

    def __mul__(self, other: Any) -> Tensor:
        return self._map(other, lambda a, b: a * b)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Tensor:
        return self._map(other, lambda a, b: a + b)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self._map(other, lambda a, b: a - b)

    def sum(self) -> Tensor:
        return Tensor([sum(self._values)], self.device)

    def item(self) -> float:
        if len(self._values) != 1:
            raise RuntimeError("a Tensor with more than one element cannot be converted to Scalar")
        return self._values[0]

    def tolist(self) -> list[float]:
        return list(self._values)

    def to(self, where: str | device) -> Tensor:
        return Tensor(list(self._values), where)

    def cuda(self) -> Tensor:
        return self.to("cuda")

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def __len__(self) -> int:
        return len(self._values)


def ones(n: int, *, device: str | device = "cpu", dtype: object = None) -> Tensor:
    return Tensor([1.0] * n, device)


def zeros(n: int, *, device: str | device = "cpu", dtype: object = None) -> Tensor:
    return Tensor([0.0] * n, device)


def full(n: int, value: float, *, device: str | device = "cpu", dtype: object = None) -> Tensor:
    return Tensor([float(value)] * n, device)


def arange(n: int, *, device: str | device = "cpu", dtype: object = None) -> Tensor:
    return Tensor([float(i) for i in range(n)], device)


def tensor(values: list[float], *, device: str | device = "cpu", dtype: object = None) -> Tensor:
    return Tensor([float(v) for v in values], device)
