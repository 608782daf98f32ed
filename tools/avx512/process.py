"""A running program: its threads take turns on the machine, and its system calls are answered (calls.py).

One processor, so threads never run at once; they change places when one waits, yields or has had its share.
"""

from __future__ import annotations

import collections
import os
import sys
import time
from pathlib import Path

import loader
from calls import Calls, Exited, Stopped
from machine import (
    BUDGET,
    EXCEPTION,
    EXECUTE,
    INVALID_OPCODE,
    PAGE,
    PAGE_FAULT,
    R11,
    RAX,
    RCX,
    RDI,
    RDX,
    READ,
    RSP,
    WRITE,
    Machine,
)

SHARE = 500_000  # instructions until another thread's turn
BREATH = 20_000_000  # instructions until Python looks whether it was interrupted
SYSCALL = b"\x0f\x05"
SAVE = b"\x48\x0f\xae\x27\x0f\x0b"  # xsave64 [rdi], then an invalid opcode
RESTORE = b"\x48\x0f\xae\x2f\x0f\x0b"  # xrstor64 [rdi]
VECTORS = {0: "division error", 3: "breakpoint", 6: "invalid opcode", 13: "general protection", 14: "page fault", 16: "x87 error"}
VECTORS |= {17: "misaligned access", 19: "SSE error"}
SIGNALS = {0: 8, 3: 5, 6: 4, 16: 8, 19: 8}  # what Linux would send; 11 else


class Thread:
    """What a thread needs to run again."""

    def __init__(self, number: int, vectors: int) -> None:
        self.number = number
        self.vectors = vectors  # where its vector registers are kept
        self.registers: list[int] = []
        self.rip = self.flags = self.fs = self.gs = 0
        self.ended_at = 0  # is cleared, and who waits for it woken, when the thread ends
        self.waits_for: tuple[int, int] | None = None  # an address and a mask of who may wake it
        self.until: float | None = None  # by the monotonic clock

    @property
    def runs(self) -> bool:
        return self.waits_for is None and self.until is None


class Process:
    def __init__(self, machine: Machine, program: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.machine = machine
        self.program = program.resolve()
        self.stub = machine.map(None, PAGE, READ | EXECUTE)
        machine.write(self.stub, SAVE + RESTORE)
        entry, stack, self.stack = loader.start(machine, self.program, arguments, environment)
        self.number = os.getpid()
        self.last_number = self.number
        self.current = Thread(self.number, machine.map(None, PAGE, READ | WRITE))
        self.threads = collections.deque([self.current])  # the current one first
        self.calls = Calls(self)
        machine.shared.rip = entry
        machine.shared.registers[RSP] = stack

    def run(self) -> int:
        """Runs to the end: the exit status."""
        shared = self.machine.shared
        try:
            while True:
                others = any(thread is not self.current for thread in self.threads)
                stop = self.machine.run(SHARE if others else BREATH)
                if stop == BUDGET:
                    if others:
                        self.switch()
                elif stop == EXCEPTION and shared.vector == INVALID_OPCODE and self.machine.read(shared.start, 2) == SYSCALL:
                    self.system_call()
                elif stop == EXCEPTION:
                    raise Stopped(*self.fault())
                else:
                    raise Stopped("the processor stopped", 1)
        except Exited as exited:
            return exited.status

    def system_call(self) -> None:
        shared = self.machine.shared
        shared.rip = shared.start + len(SYSCALL)
        shared.registers[RCX], shared.registers[R11] = shared.rip, shared.flags
        thread = self.current
        result = self.calls.answer() & ((1 << 64) - 1)
        if self.current is thread:
            shared.registers[RAX] = result
        elif thread in self.threads:
            thread.registers[RAX] = result
        if not self.current.runs:
            self.switch()

    def fault(self) -> tuple[str, int]:
        shared = self.machine.shared
        name = VECTORS.get(shared.vector, f"exception {shared.vector}")
        where = f"at {self.machine.place(shared.start)} in thread {self.current.number}"
        code = self.machine.read(shared.start, 15).hex(" ") if self.machine.readable(shared.start, 15) else "not readable"
        what = ""
        if shared.vector == PAGE_FAULT:
            deed = "running" if shared.error & 16 else "writing" if shared.error & 2 else "reading"
            what = f" {deed} {shared.address:#x}"
        return f"{name}{what} {where}: {code}", 128 + SIGNALS.get(shared.vector, 11)

    # Threads

    def add(self, stack: int, local: int | None, ended_at: int) -> Thread:
        """A thread that goes on where the current one is, on another stack, with 0 as the result of its call."""
        self.keep(self.current)
        self.last_number += 1
        thread = Thread(self.last_number, self.machine.map(None, PAGE, READ | WRITE))
        source = self.current
        self.machine.write(thread.vectors, self.machine.read(source.vectors, PAGE))
        thread.registers = list(source.registers)
        thread.registers[RSP], thread.registers[RAX] = stack, 0
        thread.rip, thread.flags, thread.gs = source.rip, source.flags, source.gs
        thread.fs = source.fs if local is None else local
        thread.ended_at = ended_at
        self.threads.append(thread)
        return thread

    def end_thread(self) -> bool:
        """The current thread is gone; False if it was the last."""
        thread = self.threads.popleft()
        if thread.ended_at and self.machine.readable(thread.ended_at, 4):
            self.machine.write(thread.ended_at, bytes(4))
            self.wake(thread.ended_at, 1)
        self.machine.unmap(thread.vectors, PAGE)
        if not self.threads:
            return False
        self.next()
        return True

    def wake(self, address: int, count: int, mask: int = 0xFFFFFFFF, to: int | None = None) -> int:
        """Wakes those who wait for the address, at most so many; or lets them wait for another."""
        done = 0
        for thread in self.threads:
            if done < count and thread.waits_for and thread.waits_for[0] == address and thread.waits_for[1] & mask:
                if to is None:
                    thread.waits_for = thread.until = None
                else:
                    thread.waits_for = (to, thread.waits_for[1])
                done += 1
        return done

    def switch(self) -> None:
        """The turn of the next thread that can run; waits for one if all wait."""
        self.keep(self.current)
        self.threads.rotate(-1)
        self.next()

    def next(self) -> None:
        while True:
            now = time.monotonic()
            for thread in self.threads:
                if thread.until is not None and thread.until <= now:
                    if thread.waits_for:
                        thread.registers[RAX] = -110 & ((1 << 64) - 1)  # ETIMEDOUT
                    thread.waits_for = thread.until = None
            for _ in range(len(self.threads)):
                if self.threads[0].runs:
                    return self.resume(self.threads[0])
                self.threads.rotate(-1)
            ends = [thread.until for thread in self.threads if thread.until is not None]
            if not ends:
                waits = ", ".join(f"{thread.number} at {thread.rip:#x}" for thread in self.threads)
                raise Stopped(f"every thread waits for another: {waits}", 1)
            time.sleep(max(min(ends) - now, 0))

    def keep(self, thread: Thread) -> None:
        """Takes the state of the current thread out of the machine."""
        shared = self.machine.shared
        thread.registers = list(shared.registers)
        thread.rip, thread.flags, thread.fs, thread.gs = shared.rip, shared.flags, shared.fs, shared.gs
        self.vectors(thread, 0)

    def resume(self, thread: Thread) -> None:
        shared = self.machine.shared
        self.current = thread
        self.vectors(thread, len(SAVE))
        for i, value in enumerate(thread.registers):
            shared.registers[i] = value
        shared.rip, shared.flags, shared.fs, shared.gs = thread.rip, thread.flags, thread.fs, thread.gs

    def vectors(self, thread: Thread, code: int) -> None:
        """Stores or loads the vector, mask and x87 registers with the instruction that there is for it."""
        shared = self.machine.shared
        before = shared.rip, shared.flags, shared.registers[RDI], shared.registers[RAX], shared.registers[RDX]
        shared.rip = self.stub + code
        shared.registers[RDI] = thread.vectors
        shared.registers[RAX] = shared.registers[RDX] = 0xFFFFFFFF
        if self.machine.run() != EXCEPTION or shared.vector != INVALID_OPCODE:
            raise Stopped(f"a thread's registers cannot be kept: {self.fault()[0]}", 1)
        shared.rip, shared.flags, shared.registers[RDI], shared.registers[RAX], shared.registers[RDX] = before


def report(machine: Machine, model: str, seconds: float) -> None:
    """What ran; the rate is that of the time on a core, which other programs take from the whole."""
    own, count = time.process_time(), machine.shared.count / 1e6
    took = f"{seconds:.1f} s, {own:.1f} s of it on a core"
    print(f"avx512: {count:,.0f} million instructions in {took} ({count / own:.0f} million a second) as {model}", file=sys.stderr)
