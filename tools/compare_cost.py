#!/usr/bin/env python3
"""What one call of mlx-rs-core costs beside the raw C call and beside Python `mlx.core`, in interleaved rounds.

Runs `cargo bench -p rust-mlx-core --bench cost` and compare/mlx_cost_side.py in turn, takes the least of each figure over
all rounds, and prints a Markdown table. Exit status 1 if a bar is missed: at most 60 ns more than the raw C call to build
an operation, and at most half of Python's time to build a graph of 10,000 operations. Needs only Python's standard
library and pip; prepares an environment with the pins of golden/requirements.txt for mlx and numpy below --work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
REQUIREMENTS = TOOLS / "golden" / "requirements.txt"
SIDE = TOOLS / "compare" / "mlx_cost_side.py"

ADDED_NS = 60.0
GRAPH_RATIO = 0.5

# case -> label
CASES = {
    "add": "build one lazy `add`",
    "graph": "build `add` in a graph of 10,000",
    "matmul": "build one lazy `matmul`",
    "reshape": "build one lazy `reshape`",
    "scalar": "make a scalar array",
    "operator_with_scalar": "`a * 2.0`",
    "index_row": "`a[3]`",
    "index_ranges": "`a[1:9, ::2]`",
    "evaluate_scalar": "build, evaluate and read a scalar",
    "item": "read a computed scalar",
    "copy_in_1m": "copy 1 Mi float32 in",
    "copy_out_1m": "copy 1 Mi float32 out",
    "borrow_1m": "borrow 1 Mi computed float32",
    "clone": "clone a handle",
    "lock": "the lock alone",
    "owning_thread": "ask an owning thread instead",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "compare-cost", help="cache of what is prepared")
    parser.add_argument("--venv", type=Path, help="an environment with mlx and numpy; default: made below --work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    return parser.parse_args()


def environment(args: argparse.Namespace) -> Path:
    if args.venv:
        return args.venv / "bin" / "python"
    where = args.work / "venv"
    python = where / "bin" / "python"
    wanted = [
        line
        for line in REQUIREMENTS.read_text().splitlines()
        if line.startswith(("mlx==", "mlx-cpu==", "numpy=="))
    ]
    stamp = where / "pins.txt"
    if not stamp.exists() or stamp.read_text().splitlines() != wanted:
        venv.create(where, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def run(command: list[str | Path]) -> dict:
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def least(into: dict[str, float], figures: dict[str, float]) -> None:
    for name, ns in figures.items():
        into[name] = min(ns, into.get(name, float("inf")))


def shown(ns: float | None) -> str:
    if ns is None:
        return "–"
    return f"{ns / 1000:.1f} µs" if ns >= 10_000 else f"{ns:.0f} ns"


def main() -> int:
    args = parse()
    python = environment(args)
    bench = ["cargo", "bench", "--quiet", "-p", "rust-mlx-core", "--bench", "cost"]
    subprocess.run([*bench, "--no-run"], check=True, cwd=ROOT)
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    versions = {}
    for round_ in range(args.rounds):
        sides = ["rust", "python"] if round_ % 2 == 0 else ["python", "rust"]
        for side in sides:
            print(f"round {round_ + 1} of {args.rounds}: {side}", file=sys.stderr)
            if side == "rust":
                least(ours, run([*bench, "--", "--json"]))
            else:
                answer = run([python, SIDE])
                versions = answer["versions"]
                least(theirs, answer["results"])

    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load} at the end; Python {platform.python_version()}, "
          f"mlx {versions['mlx']}, numpy {versions['numpy']}; least of {args.rounds} rounds\n")
    print("| | Rust | raw C | added | Python | Rust / Python |")
    print("|---|--:|--:|--:|--:|--:|")
    for case, label in CASES.items():
        a, c, p = ours[case], ours.get(f"{case}_raw"), theirs.get(case)
        added = "–" if c is None else f"{a - c:+.0f} ns"
        ratio = "–" if p is None else f"{a / p:.2f}"
        print(f"| {label} | {shown(a)} | {shown(c)} | {added} | {shown(p)} | {ratio} |")

    missed = []
    for case in ["add", "graph"]:
        added = ours[case] - ours[f"{case}_raw"]
        if added > ADDED_NS:
            missed.append(f"{case}: {added:.0f} ns more than the raw C call, bar {ADDED_NS:.0f}")
    ratio = ours["graph"] / theirs["graph"]
    if ratio > GRAPH_RATIO:
        missed.append(f"graph: {ratio:.2f} of Python's time, bar {GRAPH_RATIO}")
    print()
    print("\n".join(f"missed: {m}" for m in missed) or "every bar is met")
    if args.json:
        args.json.write_text(json.dumps({"rust": ours, "python": theirs, "versions": versions}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
