"""Sessions: one authenticated WebSocket per (router, worker), msgpack frames, heartbeats, reconnect."""
