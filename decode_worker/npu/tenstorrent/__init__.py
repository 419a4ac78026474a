"""Tenstorrent Blackhole behind the NPU protocol. ttnn and tt-umd are imported only where they are used."""
