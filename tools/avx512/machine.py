"""An emulated processor with AVX-512 and its memory: Bochs' (from `bochscpu-python`), driven through core.c.

Guest addresses are physical addresses and offsets into one range of this process; page tables say only what may be touched.
Knows nothing of programs or system calls.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15 = range(16)
PAGE = 4096
READ, WRITE, EXECUTE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC
EXCEPTION, BUDGET, HALT = 1, 2, 3  # why a run ended
INVALID_OPCODE, PAGE_FAULT = 6, 14

SPAN = 1 << 36  # addresses below it can be mapped
LOW = 1 << 32  # what the guest asks for without an address lies above
TABLES = SPAN  # one entry of 8 bytes for each page, then the tables that point to them
DIRECTORIES = TABLES + SPAN // PAGE * 8
POINTERS = DIRECTORIES + SPAN // (PAGE * 512) * 8
TOP = POINTERS + PAGE
END = TOP + PAGE
PRESENT, WRITABLE, USER, USED, NO_EXECUTE = 1, 2, 4, 0x60, 1 << 63

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
FAILED = ctypes.c_void_p(-1).value


class Shared(ctypes.Structure):
    """`struct machine` of core.c."""

    _fields_ = [
        ("registers", ctypes.c_uint64 * 16),
        ("rip", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("fs", ctypes.c_uint64),
        ("gs", ctypes.c_uint64),
        ("stop", ctypes.c_uint64),
        ("vector", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("budget", ctypes.c_uint64),
        ("memory", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
    ]


class Machine:
    """One processor in 64-bit user mode; `shared` holds its registers while it does not run."""

    def __init__(self, core: Path, library: Path, model: str) -> None:
        # Its functions must be found before the library's own of the same names.
        self.core = ctypes.CDLL(str(core), mode=ctypes.RTLD_GLOBAL)
        self.core.core_open.restype = ctypes.c_char_p
        self.core.core_symbol.restype = ctypes.c_void_p
        self.core.core_run.argtypes = []
        create = f"create_{model}_cpuid"
        if message := self.core.core_open(str(library).encode(), f"_Z{len(create)}{create}P8BX_CPU_C".encode()):
            raise OSError(message.decode())
        self.core.core_machine.restype = ctypes.POINTER(Shared)
        self.shared = self.core.core_machine().contents
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        base = LIBC.mmap(None, END, 0, flags, -1, 0)
        if base in (None, FAILED):
            raise MemoryError(f"{END >> 30} GiB of addresses cannot be reserved: is `ulimit -v` set?")
        self.base = base
        LIBC.mmap(base + SPAN, END - SPAN, READ | WRITE, flags | MAP_FIXED, -1, 0)
        self.shared.memory, self.shared.size = base, END
        self.free = [(0x10000, SPAN)]  # sorted, apart from each other
        self.code: list[tuple[int, int]] = []  # what may be executed
        self.files: list[tuple[int, int, int, str]] = []  # from where to where which part of which file was mapped
        self._start()

    def _start(self) -> None:
        entry = PRESENT | WRITABLE | USER | USED
        for at, to, step in ((DIRECTORIES, TABLES, PAGE), (POINTERS, DIRECTORIES, PAGE), (TOP, POINTERS, PAGE)):
            count = {DIRECTORIES: SPAN // (PAGE * 512), POINTERS: SPAN >> 30, TOP: 1}[at]
            self.write(at, array.array("Q", range(to | entry, (to | entry) + count * step, step)).tobytes())
        for name, value in (
            ("cr0", 0x80010033),  # paging, write protection, x87 errors as exceptions, protected mode
            ("cr3", TOP),
            ("cr4", 0x40620),  # XSAVE, SSE and its exceptions, long page tables
            ("efer", 0xD00),  # long mode and no-execute; without SCE, `syscall` is an invalid opcode, which stops a run
            ("xcr0", 0xE7),  # x87, SSE, AVX, opmasks, ZMM
            ("fp_cw", 0x37F),  # as a program finds it: full precision, no exceptions
            ("fp_tw", 0xFFFF),
        ):
            self.call(f"cpu_set_{name}", 0, value)
        for segment, selector, attributes in ((1, 0x33, 0xA0FB), (2, 0x2B, 0xC0F3), (3, 0x2B, 0xC0F3), (0, 0x2B, 0xC0F3)):
            self.call("cpu_set_seg", 0, segment, 1, selector, 0, 0xFFFFFFFF, attributes)
        self.shared.flags = 0x202
        self.shared.budget = (1 << 64) - 1
        self.core.core_flush(1)
        self.call("_ZN8BX_CPU_C19handleAvxModeChangeEv")

    def call(self, name: str, *values: int) -> None:
        """A function of the library without a result."""
        address = self.core.core_symbol(name.encode())
        if not address:
            raise OSError(f"the emulator's library has no {name}")
        ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * len(values))(address)(*values)

    def run(self, instructions: int | None = None) -> int:
        """Runs to the next exception or, at most, so many instructions; says which."""
        shared = self.shared
        shared.budget = (1 << 64) - 1 if instructions is None else shared.count + instructions
        self.core.core_run()
        return int(shared.stop)

    # Memory

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the guest, which must be readable: ask `readable` where the guest chose the address."""
        return ctypes.string_at(self.base + at, size)

    def write(self, at: int, data: bytes) -> None:
        ctypes.memmove(self.base + at, data, len(data))

    def text(self, at: int) -> bytes:
        """A string that ends in a zero."""
        return ctypes.string_at(self.base + at)

    def readable(self, at: int, size: int) -> bool:
        """Whether the guest may read all of it."""
        if at < 0 or at + size > SPAN:
            return False
        first, last = at // PAGE, (at + max(size, 1) - 1) // PAGE
        entries = array.array("Q", self.read(TABLES + first * 8, (last - first + 1) * 8))
        return all(entry & PRESENT for entry in entries)

    def protect(self, start: int, end: int, access: int) -> None:
        """What the guest may do with these pages from now on."""
        place = self.base + TABLES + start // PAGE * 8
        if access & (READ | WRITE | EXECUTE):
            entry = PRESENT | USER | USED | (WRITABLE if access & WRITE else 0) | (0 if access & EXECUTE else NO_EXECUTE)
            data = array.array("Q", range(start | entry, end | entry, PAGE)).tobytes()
            ctypes.memmove(place, data, len(data))
        else:
            ctypes.memset(place, 0, (end - start) // PAGE * 8)
        changed = any(start < last and first < end for first, last in self.code)
        if changed:
            self.code = [pair for pair in self.code if not (start <= pair[0] and pair[1] <= end)]
        if access & EXECUTE:
            self.code.append((start, end))
        self.core.core_flush(changed)

    def map(self, start: int | None, size: int, access: int, flags: int = 0, file: int = -1, offset: int = 0) -> int:
        """Maps zeros or part of a file at `start`, in place of what is there, or where there is room: the address."""
        size = rounded(size)
        if start is None:
            start = next((last - size for first, last in reversed(self.free) if last - size >= max(first, LOW)), 0)
            if not start:
                raise MemoryError
        shared = bool(flags & mmap.MAP_SHARED) and file >= 0
        kind = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | MAP_FIXED | MAP_NORESERVE
        kind |= mmap.MAP_ANONYMOUS if file < 0 else 0
        host = (access & (READ | WRITE)) if shared else READ | WRITE
        if LIBC.mmap(self.base + start, size, host, kind, file, offset) == FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        self.free = list(without(self.free, start, start + size))
        self.protect(start, start + size, access)
        if file >= 0:
            self.files.append((start, start + size, offset, os.readlink(f"/proc/self/fd/{file}")))
        return start

    def unmap(self, start: int, size: int) -> None:
        size = rounded(size)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        LIBC.mmap(self.base + start, size, 0, flags, -1, 0)
        self.protect(start, start + size, 0)
        spans = sorted([*without(self.free, start, start + size), (start, start + size)])
        joined: list[tuple[int, int]] = []
        for first, last in spans:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self.free = joined

    def place(self, at: int) -> str:
        """An address, and where in a mapped file it is."""
        for start, end, offset, name in reversed(self.files):
            if start <= at < end:
                return f"{at:#x} ({name} at {at - start + offset:#x})"
        return f"{at:#x}"

    def is_free(self, start: int, size: int) -> bool:
        return any(first <= start and start + rounded(size) <= last for first, last in self.free)

    def is_mapped(self, start: int, size: int) -> bool:
        return not any(first < start + rounded(size) and start < last for first, last in self.free)


def rounded(size: int) -> int:
    """Whole pages."""
    return -(-size // PAGE) * PAGE


def without(spans: list[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The spans less what lies from `start` to `end`."""
    for first, last in spans:
        if first < start:
            yield first, min(last, start)
        if last > end:
            yield max(first, end), last
