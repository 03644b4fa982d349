"""The CPU kernels: numba, reading float32 and 16-bit blocks in place. Importing this compiles nothing yet."""

from pagekernels.cpu.threads import configure

__all__ = ["configure"]
