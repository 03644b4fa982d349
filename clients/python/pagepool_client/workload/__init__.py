"""Workloads: which requests come when, as a file that can be replayed, and a generator of such files."""
