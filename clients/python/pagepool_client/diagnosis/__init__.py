"""What ails a pool, and what to change: pure functions over one observation of it."""
