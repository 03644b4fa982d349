"""Every test here needs a GPU, torch with CUDA, and PyCUDA; without them it is skipped and says which is missing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pagekernels.cuda.device import CudaDevice, open_device
from pagekernels.cuda.identity import CudaUnavailableError


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    """The first GPU, as the engine opens it: torch first."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    torch.cuda.init()
    try:
        opened = open_device(0)
    except CudaUnavailableError as error:
        pytest.skip(str(error))
    yield opened
    gc.collect()  # what was made on the device goes before its context
    opened.close()
