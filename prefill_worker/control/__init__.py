"""The socket between the worker's two halves: the service, and the process that holds the KV cache."""
