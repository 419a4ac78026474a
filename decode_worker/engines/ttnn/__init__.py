"""Decode of Llama-family models as a graph of ttnn's operations, computed by ttnn on a device or by numpy."""
