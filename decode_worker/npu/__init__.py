"""NPU devices behind one protocol: an emulated one with the true memory layout, later Tenstorrent's."""
