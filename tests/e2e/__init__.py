"""Tests that start the real role processes, with vLLM, an emulated NPU and a real model."""
