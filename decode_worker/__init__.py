"""The decode role: owns the per-channel NPU buffers, their pool and leases, and decodes from them."""
