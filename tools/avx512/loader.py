"""A program in the machine's memory: its parts, its interpreter's, and the stack that it starts with.

Only ELF for x86-64 Linux; what the interpreter (ld.so) loads, it asks for itself.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from machine import EXECUTE, PAGE, READ, WRITE, Machine, rounded

STACK = 8 << 20
PT_LOAD, PT_INTERP, PT_PHDR = 1, 3, 6
FIXED, MOVABLE = 2, 3  # kinds of programs
X86_64 = 62
# Bits of CPUID's leaf 1 that Linux passes on, and room for a signal's frame with AVX-512 state
HWCAP, SIGNAL_STACK = 0xBFEBFBFF, 3632


class NotRunnable(Exception):
    """A file that is no program for this machine."""


@dataclass
class Image:
    """A loaded file."""

    base: int  # what is added to the addresses in it
    entry: int
    headers: int
    header_count: int
    interpreter: str | None


def load(machine: Machine, path: Path) -> Image:
    """Maps a file as its program headers say."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotRunnable(f"{path}: {error.strerror}") from error
    try:
        header = os.pread(file, 64, 0)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            raise NotRunnable(f"{path} is not a 64-bit ELF file")
        kind, target, _, entry, table, _, _, _, size, count = struct.unpack_from("<HHIQQQIHHH", header, 16)
        if target != X86_64 or kind not in (FIXED, MOVABLE) or size != 56:
            raise NotRunnable(f"{path} is not a program for x86-64")
        parts = [struct.unpack_from("<IIQQQQQQ", os.pread(file, 56, table + i * 56)) for i in range(count)]
        loads = [part for part in parts if part[0] == PT_LOAD]
        if not loads:
            raise NotRunnable(f"{path} has nothing to load")
        low = min(part[3] for part in loads) // PAGE * PAGE
        size = rounded(max(part[3] + part[6] for part in loads) - low)
        if kind == FIXED and not machine.is_free(low, size):
            raise NotRunnable(f"{path} wants addresses that cannot be mapped: {low:#x} and {size} bytes after it")
        base = 0 if kind == FIXED else machine.map(None, size, 0) - low
        for _, flags, offset, address, _, in_file, in_memory, _ in loads:
            access = READ * bool(flags & 4) | WRITE * bool(flags & 2) | EXECUTE * bool(flags & 1)
            start, extra = (base + address) // PAGE * PAGE, address % PAGE
            end = base + address + in_file
            if in_file:
                machine.map(start, in_file + extra, access, file=file, offset=offset - extra)
            if in_memory > in_file:
                rest = rounded(end) if in_file else start
                if in_file and rest > end:
                    machine.write(end, bytes(rest - end))
                if base + address + in_memory > rest:
                    machine.map(rest, base + address + in_memory - rest, access)
        headers = next((base + part[3] for part in parts if part[0] == PT_PHDR), 0)
        if not headers:
            headers = next((base + part[3] + table - part[2] for part in loads if part[2] <= table < part[2] + part[5]), 0)
        name = next((os.pread(file, part[5], part[2]) for part in parts if part[0] == PT_INTERP), None)
        interpreter = None if name is None else os.fsdecode(name.rstrip(b"\0"))
        return Image(base, base + entry, headers, count, interpreter)
    finally:
        os.close(file)


def start(machine: Machine, program: Path, arguments: list[str], environment: dict[str, str]) -> tuple[int, int, tuple[int, int]]:
    """Loads a program and its interpreter, and lays out its first stack: instruction pointer, stack pointer, the stack."""
    image = load(machine, program)
    interpreter = load(machine, Path(image.interpreter)) if image.interpreter else None
    bottom = machine.map(None, STACK, READ | WRITE)
    top = bottom + STACK

    def push(data: bytes) -> int:
        nonlocal top
        top -= len(data)
        machine.write(top, data)
        return top

    path = push(os.fsencode(program) + b"\0")
    platform = push(b"x86_64\0")
    random = push(os.urandom(16))
    variables = [push(os.fsencode(f"{name}={value}") + b"\0") for name, value in environment.items()]
    words = [push(os.fsencode(argument) + b"\0") for argument in arguments]
    auxiliary = [
        (3, image.headers),
        (4, 56),
        (5, image.header_count),
        (6, PAGE),
        (7, interpreter.base if interpreter else 0),
        (8, 0),
        (9, image.entry),
        (11, os.getuid()),
        (12, os.geteuid()),
        (13, os.getgid()),
        (14, os.getegid()),
        (15, platform),
        (16, HWCAP),
        (17, 100),  # clock ticks a second
        (23, 0),  # not privileged
        (25, random),
        (26, 0),
        (31, path),
        (51, SIGNAL_STACK),
        (0, 0),
    ]
    block = [len(words), *words, 0, *variables, 0, *(value for pair in auxiliary for value in pair)]
    top = (top - len(block) * 8) // 16 * 16
    machine.write(top, struct.pack(f"<{len(block)}Q", *block))
    return (interpreter or image).entry, top, (bottom, bottom + STACK)
