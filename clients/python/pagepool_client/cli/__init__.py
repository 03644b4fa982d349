"""The pagepool command."""
