"""The card's memory for a NIC: windows of tt-kmd, Tenstorrent's kernel driver, exported as dma-bufs."""
