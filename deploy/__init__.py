"""The `hawk` command, the local launcher, model preparation, doctor and benchmarks."""
