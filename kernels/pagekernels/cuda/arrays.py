"""Arrays in device memory, for kernels and for whoever shares them without a copy (torch, by its CUDA interface)."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

ITEM_BYTES = {"uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "float32": 4}
_TYPESTR = {"uint8": "|u1", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "float32": "<f4"}


class DeviceTensor(Protocol):
    """What kernels need to know of an array: torch.Tensor and DeviceArray have it. The last dimension is contiguous."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    def stride(self) -> tuple[int, ...]:
        """Distances in elements."""

    def element_size(self) -> int:
        """Bytes of an element."""


class DeviceArray:
    """A contiguous array at an address; `owner` is kept alive with it.

    torch.as_tensor(array, device=...) is a view of the same memory.
    """

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str, owner: object = None) -> None:
        self.shape, self.dtype, self._address, self._owner = shape, dtype, address, owner

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._address

    def stride(self) -> tuple[int, ...]:
        """Distances in elements."""
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def element_size(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 2 of the interface: no stream to wait for is named."""
        return {"shape": self.shape, "typestr": _TYPESTR[self.dtype], "data": (self._address, False), "version": 2}


def check_tensor(name: str, tensor: DeviceTensor, letters: str, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Raises ValueError unless the tensor has this shape, a contiguous last dimension and one of the element sizes."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but must be {letters} = {shape}")
    if prod(shape) > 1 and shape[-1] > 1 and tensor.stride()[-1] != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, but its last dimension must be contiguous")
    if tensor.element_size() not in sizes:
        wanted = " or ".join(map(str, sizes))
        raise ValueError(f"{name} has elements of {tensor.element_size()} bytes, but must have {wanted}")
