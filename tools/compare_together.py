#!/usr/bin/env python3
"""Side by side: many requests together, `mlx` against Python mlx-lm, on the same weights and prompts.

8 requests together against the same 8 one after another; 16 short prompts classified likewise: without anything in common, after an
instruction that is the same for all, and in conversations; and the whole sampling chain against greedy. Prepares what it needs as
compare.py does and prints a Markdown table; exit status 1 if a bar is missed: a batch and a classification at least 3 times as fast
as one after another, the chain below 10 % of a token.
Needs only Python's standard library and pip.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from compare import ROOT, TOOLS, converted, cpu_name, environment, note, output_of, positive, prompt_ids, quiet_environment

import first_model_file

SIDE = TOOLS / "compare" / "mlx_lm_together.py"
PROMPT = 32  # tokens, as in `mlx bench --together`
SHORT = 16
INSTRUCTION = 64

# label -> (section, key, factor, digits, unit)
ROWS = {
    "one after another": ("batch", "sequential_tokens_per_second", 1, 1, "tok/s"),
    "together": ("batch", "together_tokens_per_second", 1, 1, "tok/s"),
    "together / one after another": ("batch", "speedup", 1, 2, "times"),
    "classify, one after another": ("classify", "sequential_seconds", 1e3, 1, "ms"),
    "classify, together": ("classify", "together_seconds", 1e3, 1, "ms"),
    "classify, ratio": ("classify", "speedup", 1, 2, "times"),
    "classify after an instruction, one after another": ("classify_alike", "sequential_seconds", 1e3, 1, "ms"),
    "classify after an instruction, together": ("classify_alike", "together_seconds", 1e3, 1, "ms"),
    "classify after an instruction, ratio": ("classify_alike", "speedup", 1, 2, "times"),
    "classify in conversations, one after another": ("classify_chats", "sequential_seconds", 1e3, 1, "ms"),
    "classify in conversations, together": ("classify_chats", "together_seconds", 1e3, 1, "ms"),
    "classify in conversations, ratio": ("classify_chats", "speedup", 1, 2, "times"),
    "a token, greedy": ("sampling", "greedy_seconds_per_token", 1e3, 2, "ms"),
    "a token, whole chain": ("sampling", "chain_seconds_per_token", 1e3, 2, "ms"),
    "the chain adds": ("sampling", "overhead", 100, 1, "%"),
}
BARS = {
    "together / one after another": ("at least 3", lambda value: value >= 3),
    "classify, ratio": ("at least 3", lambda value: value >= 3),
    "classify after an instruction, ratio": ("at least 3", lambda value: value >= 3),
    "classify in conversations, ratio": ("at least 3", lambda value: value >= 3),
    "the chain adds": ("below 10 %", lambda value: value < 0.1),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "target" / "release" / "mlx", help="the built `mlx`")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "compare-mlx-lm", help="cache of what is prepared")
    parser.add_argument("--venv", type=Path, help="an environment with the pins; default: made below --work")
    parser.add_argument("--model", type=Path, help="a GGUF of Q4_1, Q4_0, Q8_0 and F32; default: the first model")
    parser.add_argument("--requests", type=positive, default=8, metavar="N")
    parser.add_argument("--tokens", type=positive, default=32, metavar="N", help="of each of our replies")
    parser.add_argument("--rounds", type=positive, default=5, help="of ours; medians count")
    parser.add_argument("--reference-tokens", type=positive, default=8, metavar="N", help="of each of mlx-lm's, which is slow on CPUs")
    parser.add_argument("--reference-rounds", type=positive, default=1)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--prepare", action="store_true", help="fetch and convert what is needed, and measure nothing")
    args = parser.parse_args()
    if min(args.tokens, args.reference_tokens) < 2:
        parser.error("replies must have 2 tokens or more: the first one belongs to the prefill")
    return args


def ours(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    command = [str(args.binary.resolve()), "bench", "--quiet", "--model", str(model), "--backend", args.backend]
    command += ["--together", str(args.requests), "--generate-tokens", str(args.tokens), "--repeat", str(args.rounds)]
    return json.loads(output_of([*command, "--prompt-tokens", "16", "--warmup", "0"]))["together"]


def reference(
    args: argparse.Namespace, python: Path, model: Path, vocab: int, eos: list[int], chats: list[list[int]]
) -> dict[str, Any]:
    def cut(count: int, length: int) -> list[list[int]]:
        ids = prompt_ids(count * length, vocab, eos)
        return [ids[at : at + length] for at in range(0, len(ids), length)]

    prompts, short = cut(args.requests, PROMPT), cut(2 * args.requests, SHORT)
    instruction = prompt_ids(INSTRUCTION, vocab, eos)
    asked = json.dumps({"prompts": prompts, "short": short, "instruction": instruction, "chats": chats})
    command = [str(python), str(SIDE), "--model", str(model), "--max-tokens", str(args.reference_tokens)]
    command += ["--rounds", str(args.reference_rounds), "--device", "cpu" if args.backend == "cpu" else "default"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=quiet_environment())
    if done.returncode != 0:
        raise SystemExit(f"mlx-lm's side failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def about_chats(chats: dict[str, Any] | None) -> str:
    if not chats:
        return ", no conversations (the model has no template)"
    least, most = chats["prompt_tokens"]
    return f", {chats['prompts']} conversations of {least} to {most} tokens"


def main() -> int:
    args = parse()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    python = environment(args)
    source = args.model.resolve() if args.model else first_model_file.fetch(args.work)
    directory = converted(args, python, source)
    config = json.loads((directory / "config.json").read_text())
    eos = config.get("eos_token_id", [])
    if args.prepare:
        return 0
    load = os.getloadavg()[0]
    note("mlx")
    mine = ours(args, source)
    note("mlx-lm")
    # None where the model has no template for conversations.
    chats = mine["classify_chats"]
    eos = eos if isinstance(eos, list) else [eos]
    theirs = reference(args, python, directory, config["vocab_size"], eos, chats["tokens"] if chats else [])
    print(
        f"{source.name}, {args.requests} requests of {PROMPT} tokens, {2 * args.requests} classified of {SHORT} "
        f"(after an instruction of {INSTRUCTION}, and without){about_chats(chats)}; replies of "
        f"{args.tokens} tokens, medians of {args.rounds} rounds (mlx-lm: {args.reference_tokens} tokens, {args.reference_rounds} rounds); "
        f"{cpu_name()}, {os.cpu_count()} cores, load average {load:.2f} before.\n"
    )
    print("| | mlx-lm | mlx | times as fast | bar |\n|---|---:|---:|---:|---|")
    missed = []
    for label, (section, key, factor, digits, unit) in ROWS.items():
        if mine[section] is None:
            continue
        a, b = theirs[section][key], mine[section][key]
        faster = {"tok/s": lambda: b / a, "ms": lambda: a / b}.get(unit)
        ratio = f"{faster():.1f}" if faster else ""
        bar = ""
        if label in BARS:
            bar, passes = BARS[label]
            if not passes(b):
                missed.append(label)
        print(f"| {label} ({unit}) | {a * factor:.{digits}f} | {b * factor:.{digits}f} | {ratio} | {bar} |")
    print("\nAll bars are met." if not missed else "\nMissed: " + ", ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
