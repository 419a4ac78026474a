"""The layout transform: a numpy reference and fast CPU kernels that give the same bytes."""
