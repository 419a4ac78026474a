"""The smallest file that tt-metal takes for a compiled kernel. It is loaded on the mock device, and never run."""

from __future__ import annotations

import struct

RETURN = 0x00008067  # jalr x0, 0(ra)
TEXT = 0x10000  # any word-aligned address: a kernel is relocated to where there is room

_EHDR, _PHDR, _SHDR = 52, 32, 40
_RISCV = 243


def kernel() -> bytes:
    """An ELF32 executable for RISC-V: one instruction in .text, and an empty .rela.text.

    tt-metal moves kernels and so refuses one without relocations, though there may be nothing to relocate.
    """
    text = struct.pack("<I", RETURN)
    symbols = bytes(16)  # the null symbol
    names = b"\0.text\0.rela.text\0.symtab\0.strtab\0"
    at_text = _EHDR + _PHDR
    at_symbols = at_text + len(text)
    at_names = at_symbols + len(symbols)
    at_sections = -(-(at_names + len(names)) // 4) * 4

    def section(name: bytes, kind: int, at: int, size: int, flags: int = 0, address: int = 0, *tail: int) -> bytes:
        link, info, entry = tail or (0, 0, 0)
        return struct.pack("<10I", names.index(name + b"\0"), kind, flags, address, at, size, link, info, 4, entry)

    sections = [
        bytes(_SHDR),
        section(b".text", 1, at_text, len(text), 0x6, TEXT),  # PROGBITS, allocated and executable
        section(b".rela.text", 4, at_symbols, 0, 0, 0, 3, 1, 12),  # RELA of section 1, symbols in section 3
        section(b".symtab", 2, at_symbols, len(symbols), 0, 0, 4, 1, 16),
        section(b".strtab", 3, at_names, len(names)),
    ]
    identity = b"\x7fELF" + bytes([1, 1, 1]) + bytes(9)  # 32 bits, little-endian
    header = identity + struct.pack(
        "<HHIIIIIHHHHHH", 2, _RISCV, 1, TEXT, _EHDR, at_sections, 0, _EHDR, _PHDR, 1, _SHDR, len(sections), 4
    )
    load = struct.pack("<8I", 1, at_text, TEXT, TEXT, len(text), len(text), 5, 4)
    body = header + load + text + symbols + names
    return body.ljust(at_sections, b"\0") + b"".join(sections)
