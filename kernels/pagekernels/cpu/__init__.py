"""The CPU kernels: numba, reading float32, 16-bit and FP8 blocks where they lie.

`configure` chooses the threads, `warm_up` compiles, `pagekernels.open_ops` gives the operations. Importing this package
compiles nothing.
"""

from pagekernels.cpu.threads import configure
from pagekernels.cpu.warm_up import warm_up

__all__ = ["configure", "warm_up"]
