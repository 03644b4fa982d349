"""Text to token ids and back, chat templates, and what a stream of tokens may already show. Needs no torch."""
