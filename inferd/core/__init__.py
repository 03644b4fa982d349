"""Sequences and scheduling, pure."""
