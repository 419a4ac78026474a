"""Data-plane backends: each moves bytes one-sided from a prefill worker into a decode worker's regions."""
