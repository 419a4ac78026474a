"""One-sided RDMA writes over a real NIC (or Soft-RoCE), through the distribution's pyverbs."""
