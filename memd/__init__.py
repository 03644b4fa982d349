"""The daemon that owns a host's KV-cache pool."""
