"""What a program asks of Linux, answered: most calls go to the kernel below with their pointers translated.

Its own: memory, threads, waiting, signals (never delivered) and what would tell of the emulator. No processes, no networks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from machine import LIBC, PAGE, R8, R9, R10, RAX, RDI, RDX, RSI, SPAN, rounded

if TYPE_CHECKING:
    from process import Process

ARGUMENTS = (RDI, RSI, RDX, R10, R8, R9)
LIBC.syscall.restype = ctypes.c_long

# Calls that the kernel below answers: number -> the positions of arguments that are addresses
PASSED = {
    0: (1,),  # read
    1: (1,),  # write
    3: (),  # close
    4: (0, 1),  # stat
    5: (1,),  # fstat
    6: (0, 1),  # lstat
    7: (0,),  # poll
    8: (),  # lseek
    16: (2,),  # ioctl
    17: (1,),  # pread64
    18: (1,),  # pwrite64
    21: (0,),  # access
    32: (),  # dup
    33: (),  # dup2
    63: (0,),  # uname
    72: (),  # fcntl
    74: (),  # fsync
    75: (),  # fdatasync
    77: (),  # ftruncate
    79: (0,),  # getcwd
    80: (0,),  # chdir
    82: (0, 1),  # rename
    83: (0,),  # mkdir
    84: (0,),  # rmdir
    87: (0,),  # unlink
    89: (0, 1),  # readlink
    90: (0,),  # chmod
    91: (),  # fchmod
    96: (0, 1),  # gettimeofday
    98: (1,),  # getrusage
    99: (0,),  # sysinfo
    102: (),  # getuid
    104: (),  # getgid
    107: (),  # geteuid
    108: (),  # getegid
    110: (),  # getppid
    137: (0, 1),  # statfs
    138: (1,),  # fstatfs
    201: (0,),  # time
    217: (1,),  # getdents64
    228: (1,),  # clock_gettime
    229: (1,),  # clock_getres
    257: (1,),  # openat
    258: (1,),  # mkdirat
    262: (1, 2),  # newfstatat
    263: (1,),  # unlinkat
    264: (1, 3),  # renameat
    267: (1, 2),  # readlinkat
    269: (1,),  # faccessat
    285: (),  # fallocate
    290: (),  # eventfd2
    292: (),  # dup3
    293: (0,),  # pipe2
    302: (2, 3),  # prlimit64
    316: (1, 3),  # renameat2
    318: (0,),  # getrandom
    319: (0,),  # memfd_create
    332: (1, 4),  # statx
    439: (1,),  # faccessat2
}
# Calls that change nothing here: number -> the answer
ANSWERED = {
    13: 0,  # rt_sigaction, with the old action below
    141: 0,  # setpriority
    157: 0,  # prctl
    203: 0,  # sched_setaffinity
    221: 0,  # fadvise64
    273: 0,  # set_robust_list
    324: 0,  # membarrier: threads never run at once
    334: -errno.ENOSYS,  # rseq
    435: -errno.ENOSYS,  # clone3: the C library then calls clone
    326: -errno.ENOSYS,  # copy_file_range
}
FUTEX_WAIT, FUTEX_WAKE, FUTEX_REQUEUE, FUTEX_CMP_REQUEUE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET = 0, 1, 3, 4, 9, 10
CLONE_VM, CLONE_THREAD, CLONE_SETTLS, CLONE_PARENT_SETTID = 0x100, 0x10000, 0x80000, 0x100000
CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x200000, 0x1000000
BREAK_ROOM = 1 << 30


class Exited(Exception):
    """The program ended by itself."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Failed(Exception):
    """A call's error number."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number


class Stopped(Exception):
    """The program cannot go on: why, and the status to end with."""

    def __init__(self, why: str, status: int = 1) -> None:
        super().__init__(why)
        self.status = status


class Calls:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.machine = process.machine
        self.low = self.high = 0  # of the break, given when it is asked for
        self.own: dict[int, Callable[..., int]] = {
            9: self.mmap,
            10: self.mprotect,
            11: self.munmap,
            12: self.brk,
            14: self.signal_mask,
            19: self.vector,
            20: self.vector,
            24: self.sched_yield,
            25: self.mremap,
            28: self.madvise,
            35: self.nanosleep,
            39: lambda *_: self.process.number,  # getpid
            56: self.clone,
            60: self.exit,
            62: self.kill,
            131: self.sigaltstack,
            158: self.arch_prctl,
            186: lambda *_: self.process.current.number,  # gettid
            200: self.kill,
            202: self.futex,
            204: self.affinity,
            218: self.set_tid_address,
            230: self.nanosleep,
            231: self.exit_group,
            234: self.kill,
        }

    def answer(self) -> int:
        """Answers the call whose number and arguments are in the registers; what a wait will give is given now."""
        registers = self.machine.shared.registers
        number = registers[RAX]
        arguments = [registers[i] for i in ARGUMENTS]
        try:
            if number in self.own:
                return self.own[number](*arguments)
            if number in (89, 257, 267) and (special := self.about_itself(number, arguments)) is not None:
                return special
            if number in PASSED:
                return self.passed(number, arguments)
        except Failed as failed:
            return -failed.number
        except MemoryError:
            return -errno.ENOMEM
        except OSError as error:
            return -(error.errno or errno.EIO)
        if number == 13 and arguments[2]:
            self.put(arguments[2], bytes(32))
        if number in ANSWERED:
            return ANSWERED[number]
        raise Stopped(f"system call {number} ({', '.join(hex(value) for value in arguments)}) is not known here")

    # The guest's memory

    def get(self, at: int, size: int) -> bytes:
        if not self.machine.readable(at, size):
            raise Failed(errno.EFAULT)
        return self.machine.read(at, size)

    def put(self, at: int, data: bytes) -> None:
        if not self.machine.readable(at, len(data)):
            raise Failed(errno.EFAULT)
        self.machine.write(at, data)

    def text(self, at: int) -> bytes:
        found = b""
        while True:
            part = self.get(at, PAGE - at % PAGE)
            end = part.find(b"\0")
            if end >= 0:
                return found + part[:end]
            found, at = found + part, at + len(part)

    # The kernel's

    def passed(self, number: int, arguments: list[int]) -> int:
        values = []
        for i, value in enumerate(arguments):
            if i in PASSED[number] and value:
                if value >= SPAN and number == 16:  # some requests carry numbers
                    pass
                elif value >= SPAN:
                    raise Failed(errno.EFAULT)
                else:
                    value += self.machine.base
            values.append(ctypes.c_long(value))
        result: int = LIBC.syscall(ctypes.c_long(number), *values)
        return -ctypes.get_errno() if result == -1 else result

    def vector(self, file: int, at: int, count: int, *_: int) -> int:
        """readv and writev."""
        number = self.machine.shared.registers[RAX]
        pairs = struct.iter_unpack("<QQ", self.get(at, count * 16)) if count else ()
        total = 0
        for start, size in pairs:
            if not size:
                continue
            done = self.passed(0 if number == 19 else 1, [file, start, size, 0, 0, 0])
            if done < 0:
                return total or done
            total += done
            if done < size:
                break
        return total

    def about_itself(self, number: int, arguments: list[int]) -> int | None:
        """Files that would tell of this process instead of the program."""
        name = self.text(arguments[0] if number == 89 else arguments[1])
        if number == 257 and name == b"/proc/self/maps":
            first, last = self.process.stack
            edges = [0x10000, *(edge for span in self.machine.free for edge in span), SPAN]
            edges = sorted([*edges, first, first, last, last])
            spans = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
            lines = [f"{a:x}-{b:x} rw-p 00000000 00:00 0 {'[stack]' if a == first else ''}\n" for a, b in spans]
            file = os.memfd_create("maps", os.MFD_CLOEXEC)
            os.write(file, "".join(lines).encode())
            os.lseek(file, 0, os.SEEK_SET)
            return file
        if number != 257 and name == b"/proc/self/exe":
            at, size = arguments[1:3] if number == 89 else arguments[2:4]
            path = os.fsencode(self.process.program)[:size]
            self.put(at, path)
            return len(path)
        return None

    # Memory

    def mmap(self, at: int, size: int, access: int, flags: int, file: int, offset: int) -> int:
        fixed, fixed_if_free, anonymous = flags & 0x10, flags & 0x100000, flags & 0x20
        if not size or at % PAGE or offset % PAGE:
            raise Failed(errno.EINVAL)
        if (fixed or fixed_if_free) and (at < 0x10000 or at + rounded(size) > SPAN):
            raise Failed(errno.ENOMEM)
        if fixed_if_free and not self.machine.is_free(at, size):
            raise Failed(errno.EEXIST)
        wished = at if fixed or fixed_if_free or (at and self.machine.is_free(at, size)) else None
        number = -1 if anonymous else ctypes.c_int(file).value
        return self.machine.map(wished, size, access & 7, flags, number, offset)

    def mprotect(self, at: int, size: int, access: int, *_: int) -> int:
        if at % PAGE or at + size > SPAN:
            raise Failed(errno.EINVAL)
        if not self.machine.is_mapped(at, size):
            raise Failed(errno.ENOMEM)
        self.machine.protect(at, at + rounded(size), access & 7)
        return 0

    def munmap(self, at: int, size: int, *_: int) -> int:
        if at % PAGE or not size or at + size > SPAN:
            raise Failed(errno.EINVAL)
        self.machine.unmap(at, size)
        return 0

    def mremap(self, at: int, old: int, new: int, flags: int, *_: int) -> int:
        old, new = rounded(old), rounded(new)
        if flags & ~1 or at % PAGE or not new or not self.machine.is_mapped(at, old):
            raise Failed(errno.EINVAL)
        if new <= old:
            if new < old:
                self.machine.unmap(at + new, old - new)
            return at
        if self.machine.is_free(at + old, new - old):
            self.machine.map(at + old, new - old, 3)
            return at
        if not flags & 1:
            raise Failed(errno.ENOMEM)
        place = self.machine.map(None, new, 3)
        ctypes.memmove(self.machine.base + place, self.machine.base + at, old)
        self.machine.unmap(at, old)
        return place

    def madvise(self, at: int, size: int, advice: int, *_: int) -> int:
        if at % PAGE or at + size > SPAN:
            raise Failed(errno.EINVAL)
        if advice == 4 and self.machine.is_mapped(at, size):  # what is there is not needed, and zeros afterwards
            base = ctypes.c_void_p(self.machine.base + at)
            return -ctypes.get_errno() if LIBC.madvise(base, ctypes.c_size_t(size), 4) else 0
        return 0

    def brk(self, wanted: int, *_: int) -> int:
        if not self.low:
            self.low = self.high = self.machine.map(None, BREAK_ROOM, 0)
        if self.low <= wanted <= self.low + BREAK_ROOM:
            before, after = rounded(self.high), rounded(wanted)
            if after > before:
                self.machine.protect(before, after, 3)
            elif after < before:
                self.machine.map(after, before - after, 0)
            self.high = wanted
        return self.high

    # Signals

    def signal_mask(self, how: int, new: int, old: int, size: int, *_: int) -> int:
        if old:
            self.put(old, bytes(size))
        return 0

    def sigaltstack(self, new: int, old: int, *_: int) -> int:
        if old:
            self.put(old, struct.pack("<QQQ", 0, 2, 0))  # there is none
        return 0

    def kill(self, *arguments: int) -> int:
        """kill, tkill, tgkill: there are no handlers, so a signal ends the program."""
        number = self.machine.shared.registers[RAX]
        signal = arguments[2] if number == 234 else arguments[1]
        if signal == 0:
            return 0
        raise Stopped(f"the program sent itself signal {signal}", 128 + signal)

    # Threads and time

    def arch_prctl(self, code: int, value: int, *_: int) -> int:
        shared = self.machine.shared
        if code == 0x1002:
            shared.fs = value
        elif code == 0x1001:
            shared.gs = value
        elif code == 0x1003:
            self.put(value, struct.pack("<Q", shared.fs))
        else:
            raise Failed(errno.EINVAL)
        return 0

    def set_tid_address(self, at: int, *_: int) -> int:
        self.process.current.ended_at = at
        return self.process.current.number

    def affinity(self, thread: int, size: int, at: int, *_: int) -> int:
        if size < 8:
            raise Failed(errno.EINVAL)
        self.put(at, struct.pack("<Q", 1))
        return 8

    def clone(self, flags: int, stack: int, parent: int, child: int, local: int, *_: int) -> int:
        if not (flags & CLONE_VM and flags & CLONE_THREAD and stack):
            raise Stopped("the program starts another process")
        thread = self.process.add(stack, local if flags & CLONE_SETTLS else None, child if flags & CLONE_CHILD_CLEARTID else 0)
        for flag, at in ((CLONE_PARENT_SETTID, parent), (CLONE_CHILD_SETTID, child)):
            if flags & flag:
                self.put(at, struct.pack("<I", thread.number))
        return thread.number

    def exit(self, status: int, *_: int) -> int:
        if not self.process.end_thread():
            raise Exited(status & 255)
        return 0

    def exit_group(self, status: int, *_: int) -> int:
        raise Exited(status & 255)

    def sched_yield(self, *_: int) -> int:
        if len(self.process.threads) > 1:
            self.process.switch()
        return 0

    def nanosleep(self, *arguments: int) -> int:
        """nanosleep and clock_nanosleep."""
        if self.machine.shared.registers[RAX] == 35:
            until = time.monotonic() + self.seconds(arguments[0])
        else:
            clock, flags, at = arguments[:3]
            until = time.monotonic() + self.seconds(at) - (time.clock_gettime(clock) if flags & 1 else 0)
        self.process.current.until = until
        return 0

    def seconds(self, at: int) -> float:
        whole, nanoseconds = struct.unpack("<qq", self.get(at, 16))
        return float(whole + nanoseconds / 1e9)

    def futex(self, at: int, operation: int, value: int, timeout: int, second: int, mask: int) -> int:
        kind = operation & 127
        value &= 0xFFFFFFFF
        if kind in (FUTEX_WAIT, FUTEX_WAIT_BITSET):
            if struct.unpack("<I", self.get(at, 4))[0] != value:
                return -errno.EAGAIN
            thread = self.process.current
            if timeout:
                thread.until = time.monotonic() + self.seconds(timeout)
                if kind == FUTEX_WAIT_BITSET:  # until then, not for so long
                    thread.until -= time.time() if operation & 256 else time.monotonic()
            thread.waits_for = (at, mask & 0xFFFFFFFF if kind == FUTEX_WAIT_BITSET else 0xFFFFFFFF)
            return 0
        if kind in (FUTEX_WAKE, FUTEX_WAKE_BITSET):
            return self.process.wake(at, value, mask & 0xFFFFFFFF if kind == FUTEX_WAKE_BITSET else 0xFFFFFFFF)
        if kind in (FUTEX_REQUEUE, FUTEX_CMP_REQUEUE):
            if kind == FUTEX_CMP_REQUEUE and struct.unpack("<I", self.get(at, 4))[0] != mask & 0xFFFFFFFF:
                return -errno.EAGAIN
            woken = self.process.wake(at, value)
            return woken + self.process.wake(at, timeout & 0xFFFFFFFF, to=second)
        raise Stopped(f"futex operation {kind} is not known here")
