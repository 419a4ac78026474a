"""The host-CPU engine: numba kernels that decode straight from, and append straight into, the tiled channels."""
