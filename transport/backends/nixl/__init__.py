"""One-sided writes through NIXL, NVIDIA's transfer library: UCX over TCP, shared memory, or what else UCX finds."""
