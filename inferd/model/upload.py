"""Host arrays on a device, all of them by one copy that nothing waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def upload(device: torch.device, **arrays: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
    """The arrays (int32, int64 or float32, of one dimension), by their names, aligned to 16 bytes; views of one tensor.

    For what is launched on the current stream from now on. The pinned memory in between is torch's, which takes it
    back when the copy is over.
    """
    total, places = 0, {}
    for name, array in arrays.items():
        places[name] = total
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = host.numpy()
    for name, array in arrays.items():
        staged[places[name] : places[name] + array.nbytes] = array.view(np.uint8)
    there = host.to(device, non_blocking=True)
    return {
        name: there[places[name] : places[name] + array.nbytes].view(_TORCH[array.dtype])
        for name, array in arrays.items()
    }
