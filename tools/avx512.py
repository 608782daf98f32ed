#!/usr/bin/env python3
"""Runs tests of mlx-rs-core on an emulated processor with AVX-512, where none is at hand: those kernels against their
definitions. Says nothing about speed.

    tools/avx512.py                        the unit tests of the CPU kernels
    tools/avx512.py --lib cpu::tile        other arguments of `cargo test -p rust-mlx-core`
    tools/avx512.py --run PROGRAM ...      any program for Linux on x86-64
    tools/avx512.py --check                what the emulated processor has, and whether it computes

Prepares, once, below --work: an environment with bochscpu-python (the processor of Bochs) and a small library of C. Needs
Linux on x86-64, Python 3.10 or later with pip, and a C compiler. Not part of CI.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
PARTS = TOOLS / "avx512"
sys.path.insert(0, str(PARTS))

from calls import Stopped  # noqa: E402
from loader import NotRunnable  # noqa: E402
from machine import Machine  # noqa: E402
from process import Process, report  # noqa: E402

PACKAGE = "bochscpu-python==0.4.0"
# name -> Bochs' own name of it, and what check.s finds
MODELS = {
    "tigerlake": ("tigerlake", 0),
    "icelake": ("corei7_icelake_u", 0),
    "sapphire-rapids": ("sapphire_rapids", 0),
    "skylake-x": ("corei7_skylake_x", 0),  # AVX-512 without VNNI
    "haswell": ("corei7_haswell_4770", 3),  # AVX2 and no AVX-512
}
RUNNER = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER"


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, usage="%(prog)s [options] [argument ...]")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "avx512", help="cache of what is prepared")
    parser.add_argument("--model", choices=MODELS, default="tigerlake", help="the processor; default: %(default)s")
    parser.add_argument("--run", action="store_true", help="the arguments are a program and its arguments")
    parser.add_argument("--check", action="store_true", help="only check the processor")
    # The rest is for cargo or the program, and begins with the first word that is none of these.
    words, count = sys.argv[1:], 0
    lengths = {"--work": 2, "--model": 2, "--run": 1, "--check": 1, "--help": 1, "-h": 1}
    while count < len(words) and (length := lengths.get(words[count].partition("=")[0])):
        last = words[count] == "--run"
        count += 1 if "=" in words[count] else length
        if last:
            break
    options = parser.parse_args(words[:count])
    options.arguments = words[count:]
    return options


def prepare(work: Path) -> tuple[Path, Path]:
    """The library of core.c and that of Bochs."""
    place = work / f"venv-{sys.version_info.major}.{sys.version_info.minor}"
    found = sorted(place.glob("lib/python*/site-packages/bochscpu/_bochscpu*.so"))
    if not found:
        venv.create(place, with_pip=True, clear=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--no-deps", PACKAGE]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        found = sorted(place.glob("lib/python*/site-packages/bochscpu/_bochscpu*.so"))
    if not found:
        sys.exit(f"{PACKAGE} has no library for this Python")
    return build(PARTS / "core.c", work / "core.so", "-O2", "-fPIC", "-shared", "-ldl"), found[0]


def build(source: Path, to: Path, *options: str) -> Path:
    """Compiles where it is older than its source; programs that run at once may all do so."""
    if not to.exists() or to.stat().st_mtime < source.stat().st_mtime:
        new = to.with_name(f"{to.name}.{os.getpid()}")
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*compiler, "-o", new, source, *options], check=True)
        new.replace(to)
    return to


def ended(number: int, _: object) -> None:
    raise Stopped(f"ended by signal {number}", 128 + number)


def emulate(options: argparse.Namespace, program: Path, arguments: list[str]) -> int:
    core, library = prepare(options.work)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ended)
    machine = Machine(core, library, MODELS[options.model][0])
    begin = time.monotonic()
    try:
        status = Process(machine, program, arguments, dict(os.environ)).run()
    except (NotRunnable, Stopped) as error:
        print(f"avx512: {error}", file=sys.stderr)
        status = error.status if isinstance(error, Stopped) else 1
    report(machine, options.model, time.monotonic() - begin)
    return status


def main() -> int:
    options = parse()
    faulthandler.enable()
    options.work = options.work.resolve()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit("only Linux on x86-64 is emulated")
    if options.check:
        options.work.mkdir(parents=True, exist_ok=True)
        program = build(PARTS / "check.s", options.work / "check", "-nostdlib", "-static")
        return emulate(options, program, [str(program)])
    if options.run:
        if not options.arguments:
            sys.exit("--run needs a program")
        return emulate(options, Path(options.arguments[0]), options.arguments)
    own = [sys.executable, str(Path(__file__).resolve()), "--work", str(options.work), "--model", options.model]
    status = subprocess.run([*own, "--check"]).returncode
    if status != MODELS[options.model][1]:
        sys.exit(f"the emulated processor does not do as {PARTS / 'check.s'} expects: {status}")
    environment = dict(os.environ)
    environment[RUNNER] = shlex.join([*own, "--run"])
    environment["RUST_BACKTRACE"] = "0"  # to read the debug information takes minutes here
    environment["CARGO_PROFILE_DEV_OPT_LEVEL"] = "3"  # fewer instructions for what the kernels are compared with
    arguments = options.arguments or ["--lib", "cpu::"]
    return subprocess.run(["cargo", "test", "-p", "rust-mlx-core", *arguments], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
