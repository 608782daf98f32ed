#!/usr/bin/env python3
"""Texts a second of all-MiniLM-L6-v2: `mlx` beside sentence-transformers on torch, llama.cpp and onnxruntime, on CPUs.

All have the same float32 weights and read the same texts, of 16, 128 and 512 tokens, one at a time and 64 together. Each
engine is a process that keeps its model. Rounds are interleaved: every round measures all engines with a shape, in
changing order. Figures are medians of the rounds. The vectors of all engines must agree.

Prepares, once, below --work: an environment by tools/compare/requirements-embed.txt (with the model's package), one with
llama-cpp-python, which pip compiles (tools/compare/requirements-llama.txt), the model as directory, GGUF and ONNX file.

    cargo build --release --example embed_speed
    python3 tools/compare_embed.py

Prints a Markdown table; exit status 1 if a bar is missed. `--cpu-time --threads 1` counts processor time instead of elapsed
time, for machines on which other programs run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
SIDE = TOOLS / "compare" / "embed_side.py"
PINS = TOOLS / "compare" / "requirements-embed.txt"
LLAMA_PINS = TOOLS / "compare" / "requirements-llama.txt"
LLAMA_PACKAGES = ["numpy==2.4.6", "Jinja2==3.1.6", "MarkupSafe==3.0.4", "diskcache==5.6.3", "typing_extensions==4.16.0"]
OURS = "mlx"
# Reference -> least ratio of our rate to its rate that passes
BARS = {"sentence-transformers": 1.5, "llama.cpp": 1.0, "onnxruntime": 1.0}
TOKENS = (16, 128, 512)
COUNTS = [1, 64]
WORDS = "the river carries water from mountains to sea and bread is baked with salt in every city of france".split()
LEAST_COSINE = 0.9999


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlx", type=Path, default=ROOT / "target/release/examples/embed_speed", help="the example embed_speed")
    parser.add_argument("--work", type=Path, default=ROOT / "target/compare-embed", help="where environments and files are")
    parser.add_argument("--venv", type=Path, help="an environment with the pins; default: made below --work")
    parser.add_argument("--llama-venv", type=Path, help="one with llama-cpp-python; default: made below --work")
    parser.add_argument("--without", action="append", default=[], choices=list(BARS), help="leaves an engine out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="texts per second of processor time, for busy machines; only Linux")
    parser.add_argument("--texts", type=int, action="append", help="texts at a time; default: 1 and 64")
    parser.add_argument("--limit", type=float, help="seconds within which rounds must end; no round begins that would not")
    parser.add_argument("--json", type=Path, help="writes all figures to a file")
    args = parser.parse_args()
    if args.rounds < 1 or args.seconds <= 0 or args.threads < 1:
        parser.error("--rounds, --seconds and --threads must be positive")
    return args


def environment(where: Path, packages: list[str]) -> Path:
    """The Python of an environment below --work, which is made if it is not complete."""
    python, done = where / "bin" / "python", where / "complete"
    if not done.exists():
        print(f"making {where}", file=sys.stderr)
        venv.create(where, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return python


def pythons(args: argparse.Namespace) -> dict[str, Path]:
    usual = args.venv.resolve() / "bin/python" if args.venv else environment(args.work / "venv", ["-r", str(PINS)])
    found = {"sentence-transformers": usual, "onnxruntime": usual}
    if "llama.cpp" not in args.without:
        if args.llama_venv:
            found["llama.cpp"] = args.llama_venv.resolve() / "bin/python"
        else:
            where = args.work / "venv-llama"
            python = environment(where, LLAMA_PACKAGES)
            if not (where / "llama").exists():
                pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
                subprocess.run([*pip, "--no-binary", "llama-cpp-python", "-r", LLAMA_PINS], check=True)
                (where / "llama").touch()
            found["llama.cpp"] = python
    return {name: python for name, python in found.items() if name not in args.without} | {"": usual}


def prepared(args: argparse.Namespace, python: Path) -> Path:
    model = args.work / "all-minilm"
    if not (model / "model.onnx").exists():
        model.mkdir(parents=True, exist_ok=True)
        locate = "import importlib.util as u; print(u.find_spec('all_minilm_l6_v2').submodule_search_locations[0])"
        package = subprocess.run([python, "-c", locate], check=True, capture_output=True, text=True).stdout.strip()
        subprocess.run([python, SIDE, "prepare", Path(package) / "model.zip", model], check=True)
    return model


def texts(tokens: int, count: int) -> list[str]:
    """Texts of `tokens` tokens, with the two around them; each word is one token."""
    return [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(tokens - 2)) for i in range(count)]


class Engine:
    """A process that answers questions."""

    def __init__(self, command: list[Any], threads: int) -> None:
        env = os.environ | {"MLX_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, inputs: list[str], seconds: float) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"texts": inputs, "seconds": seconds}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"an engine ended with status {self.process.wait()}")
        return json.loads(answer)

    def processor_seconds(self) -> float:
        """The processor time of the process until now."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b))
    return dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


Rates = dict[tuple[int, int], dict[str, list[float]]]


def measure(engines: dict[str, Engine], rates: Rates, turn: int, seconds: float, cpu_time: bool) -> float:
    """One round: adds a rate of each engine for each shape. Returns the least cosine of our vectors and those of others."""
    least, names = 1.0, list(engines)
    for tokens, count in rates:
        inputs, vectors = texts(tokens, count), {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if turn == 0:
                engines[name].ask(inputs, 0.0)
            before = engines[name].processor_seconds() if cpu_time else 0.0
            answer = engines[name].ask(inputs, seconds)
            rate = answer["rate"]
            if cpu_time:
                rate = answer["count"] / max(engines[name].processor_seconds() - before, 0.01)
            rates[tokens, count][name].append(rate)
            vectors[name] = answer["vector"]
        for name, vector in vectors.items():
            likeness = cosine(vectors[OURS], vector)
            least = min(least, likeness)
            if likeness < LEAST_COSINE:
                raise SystemExit(f"{tokens} tokens, {count} texts: the cosine of our vector and that of {name} is {likeness}")
    return least


def summary(rates: Rates) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """The missed bars, all figures, and the lines of the table."""
    missed, rows = [], []
    names = list(next(iter(rates.values())))
    table = ["| Tokens | Texts | " + " | ".join(names) + " |", "|--:|--:|" + "--:|" * len(names)]
    for (tokens, count), row in rates.items():
        medians = {name: statistics.median(values) for name, values in row.items()}
        ratios = {name: medians[OURS] / medians[name] for name in names if name != OURS}
        missed += [f"{tokens} tokens, {count} texts, {name}: {ratio:.2f}" for name, ratio in ratios.items() if ratio < BARS[name]]
        cells = [f"{medians[OURS]:.1f}"] + [f"{medians[name]:.1f} ({ratio:.2f})" for name, ratio in ratios.items()]
        table.append(f"| {tokens} | {count} | " + " | ".join(cells) + " |")
        rows.append({"tokens": tokens, "texts": count, "medians": medians, "ratios": ratios, "rounds": row})
    return missed, rows, table


def main() -> None:
    args = parse()
    side = pythons(args)
    model = prepared(args, side.pop(""))
    engines = {OURS: Engine([args.mlx.resolve(), model], args.threads)}
    for name, python in side.items():
        engines[name] = Engine([python, SIDE, name, model, "--threads", str(args.threads)], args.threads)
    rates: Rates = {
        (tokens, count): {name: [] for name in engines} for tokens in TOKENS for count in args.texts or COUNTS
    }
    least, begin = 1.0, time.monotonic()
    for turn in range(args.rounds):
        if turn and args.limit and time.monotonic() - begin > args.limit * turn / (turn + 1):
            break  # another round would end too late
        least = min(least, measure(engines, rates, turn, args.seconds, args.cpu_time))
        missed, rows, table = summary(rates)
        if args.json:
            about = {"processor": processor(), "threads": args.threads, "rounds": turn + 1, "seconds": args.seconds, "cpu_time": args.cpu_time}
            about |= {"least_cosine": least, "shapes": rows, "missed": missed}
            args.json.write_text(json.dumps(about, indent=1) + "\n")
    for engine in engines.values():
        engine.close()
    rounds = len(next(iter(rates.values()))[OURS])
    of = " of processor time" if args.cpu_time else ""
    print(f"{processor()}, {args.threads} threads, {rounds} rounds; texts a second{of}, medians; (mlx / other)\n")
    print("\n".join(table))
    print(f"\nleast cosine of vectors: {least:.7f}; bars: {BARS}")
    for line in missed:
        print(f"below its bar: {line}")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
