#!/usr/bin/env python3
"""Compares the logits of each small model in several processes with those of one process.

    python3 tools/group_families.py --program target/debug/mlx
    python3 tools/group_families.py --pipeline --processes 2 tests/fixtures/gguf/*.gguf

Without paths it takes every model of tests/fixtures/tiny and every GGUF file of tests/fixtures. It
prints a line for each: the greatest difference, or the error of a model that cannot be divided. The
exit code is 1 if a difference exceeds the bound, or if one process fails. Needs Python alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures"
TOKENS = "5,17,42,7,30,3"


def logits(program, path, home, start=()):
    """The logits, or the first line of the error."""
    command = [program, *start, "logits", "--model", path, "--tokens", TOKENS, "--all"]
    # The kernels round inputs of quantized matrices to integers, which makes differences larger.
    environment = os.environ | {"HOME": home, "MLX_NUM_THREADS": "1", "MLX_CPU_KERNELS": "off"}
    done = subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error: " in line]
        return lines[0].split("error: ", 1)[1] if lines else f"exit code {done.returncode}"
    return json.loads(done.stdout)["logits"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="models; default: all small ones")
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/mlx", help="the built `mlx`")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--pipeline", action="store_true", help="divide the layers, not the tensors")
    parser.add_argument("--bound", type=float, default=1e-4, help="the greatest difference allowed")
    options = parser.parse_args()
    paths = options.paths or [
        *sorted(path for path in (FIXTURES / "tiny").iterdir() if path.is_dir()),
        *sorted(FIXTURES.glob("gguf*/*.gguf")),
    ]
    start = ["launch", "-n", options.processes, *(["--pipeline"] if options.pipeline else []), "--"]
    same, refused, wrong = 0, 0, 0
    with tempfile.TemporaryDirectory() as home:
        for path in paths:
            expected = logits(options.program, path, home)
            if isinstance(expected, str):
                print(f"{path.name}: alone: {expected}", file=sys.stderr)
                wrong += 1
                continue
            parts = logits(options.program, path, home, start)
            if isinstance(parts, str):
                print(f"{path.name}: refused: {parts}")
                refused += 1
                continue
            most = max((abs(a - b) for a, b in zip(parts, expected, strict=True)), default=0.0)
            print(f"{path.name}: {most:.1e}")
            if most < options.bound:
                same += 1
            else:
                wrong += 1
    print(json.dumps({"same": same, "refused": refused, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
