"""Models: finding and converting them, judging whether they can be served, and running them over a paged pool."""
