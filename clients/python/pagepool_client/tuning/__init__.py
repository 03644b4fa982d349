"""Finding the block size, pool size and batch budget that serve a workload best, by replaying it with each."""
