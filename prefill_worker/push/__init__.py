"""Pushing: KV blocks out of the engine's pages into leased windows of a decode worker's pool."""
