"""KV geometry: pure functions from logical K/V elements to bytes in GPU pages and NPU channels."""

from transport.geometry.kv import FACE, TILE, TILE_BYTES, KVDtype, KVGeometry, RopeOrder

__all__ = ["FACE", "TILE", "TILE_BYTES", "KVDtype", "KVGeometry", "RopeOrder"]
