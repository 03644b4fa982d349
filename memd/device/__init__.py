"""The memory a pool is cut from."""
