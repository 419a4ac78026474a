"""Hawk's KV connector for vLLM: the scheduler side decides what to push, the worker side pushes it."""
