"""Memory that is pinned by the driver, which is played here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from pagekernels.cuda.pinned import DEVICE_MAP, PORTABLE, PinError, PinnedMemory


class Library:
    """libcuda, as far as it is asked; a call with a code fails with it."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.calls = codes, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuMemHostRegister_v2":
                address, size, flags = args
                assert address.value % 4096 == 0
                assert (size.value, flags) == (8192, PORTABLE | DEVICE_MAP)
            if name == "cuMemHostGetDevicePointer_v2" and name not in self.codes:
                ctypes.cast(args[0], ctypes.POINTER(ctypes.c_uint64))[0] = 0x7F0000000000
            return self.codes.get(name, 0)

        return call


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "slab"
    path.write_bytes(bytes(8192))
    return path


def test_a_file_is_mapped_pinned_and_given_up(file: Path) -> None:
    library = Library()
    memory = PinnedMemory(file, 8192, lambda: library)
    assert memory.address == 0x7F0000000000
    memory.close()
    assert library.calls == ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuMemHostUnregister"]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [("cuMemHostRegister_v2", "ulimit -l"), ("cuMemHostGetDevicePointer_v2", "does not reach")],
)
def test_a_refusal_says_the_way_out_and_leaves_nothing(file: Path, call: str, complaint: str) -> None:
    library = Library(**{call: 2})
    with pytest.raises(PinError, match=complaint):
        PinnedMemory(file, 8192, lambda: library)
    assert ("cuMemHostUnregister" in library.calls) == (call != "cuMemHostRegister_v2")


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PinnedMemory(tmp_path / "none", 8192, Library)
