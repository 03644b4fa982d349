"""Paged-attention kernels: the block layout, the operations, and their implementations. Knows nothing of services."""
