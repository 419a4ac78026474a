"""The name under which the decode role asks for its engine."""

from decode_worker.engines.cpu.engine import CpuEngine as TorchEngine

__all__ = ["TorchEngine"]
