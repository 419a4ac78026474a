"""Benchmarks: each prints a table and, with --json, one JSON object; what is compared runs in one process run."""
