"""Tests that need a real RDMA stack: they run in QEMU guests whose kernel has Soft-RoCE (rdma_rxe)."""
