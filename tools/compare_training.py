#!/usr/bin/env python3
"""Side by side: LoRA training by `mlx train` and by Python mlx-lm, on the same weights, data and batches.

Prepares below --work, once, what compare.py prepares too (an environment with mlx-lm's pins, the first model's GGUF or
--model), and an MLX directory of it that `mlx convert` makes without loss, with floats in float32, which is what CPUs are
fast with. In each round both sides train the same number of steps from a fresh adapter, each in a process of its own: same
data, order of batches, lengths, layers, rank, optimizer. Prints a Markdown table of medians; exit status 1 if `mlx`
makes fewer steps a second than mlx-lm. Needs only Python's standard library and pip; mlx-lm, which compiles its step,
needs a C++ compiler on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compare import MLX_LM, ROOT, TOOLS, cpu_name, environment, note, output_of, positive, quiet_environment

import first_model_file

SIDE = TOOLS / "compare" / "mlx_lm_train_side.py"
OURS = "mlx"

# What is measured: key -> (label, unit, divisor, digits)
MEASURES = {
    "steps": ("Steps", "steps/s", 1.0, 3),
    "tokens": ("Learned tokens", "tok/s", 1.0, 1),
    "peak": ("Peak memory of MLX", "MiB", 2.0**20, 0),
    "peak_rss": ("Peak resident memory", "MiB", 2.0**20, 0),
    "wall": ("Whole process", "s", 1.0, 1),
    "first_loss": ("Loss of the first batch", "", 1.0, 3),
    "last_loss": ("Loss of the last batch", "", 1.0, 3),
}
COMPARED = ["steps", "tokens", "peak", "peak_rss", "wall"]
LEAST = 1.0  # of mlx-lm's steps a second
# Of the first batch, relative. mlx-lm's loss counts one token of the padding for each row, which is badly foreseen.
SAME_LOSS = 0.15


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "target" / "release" / "mlx", help="the built `mlx`")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "compare", help="cache of what is prepared")
    parser.add_argument("--venv", type=Path, help="an environment with mlx-lm's pins; default: made below --work")
    parser.add_argument("--model", type=Path, help="a GGUF, or a directory with safetensors; default: the first model")
    parser.add_argument("--ours", choices=["source", "dir"], default="source", help="what `mlx` trains: --model, or what mlx-lm gets")
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "data" / "pirate", help="a directory with train.jsonl")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="measured ones")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before the measured ones, on both sides")
    parser.add_argument("--batch-size", type=positive, default=4, metavar="N")
    parser.add_argument("--layers", type=int, default=16, metavar="N", help="blocks with adapters, from the last; -1 for all")
    parser.add_argument("--rank", type=positive, default=8, metavar="N")
    parser.add_argument("--keys", default="self_attn.q_proj,self_attn.v_proj", help="what is adapted in a block")
    parser.add_argument("--max-seq-length", type=positive, default=2048, metavar="N")
    parser.add_argument("--optimizer", choices=["adam", "adamw", "sgd", "adafactor", "muon"], default="adamw")
    parser.add_argument("--learning-rate", type=float, default=1e-4, metavar="X")
    parser.add_argument("--grad-checkpoint", action="store_true", help="on both sides")
    parser.add_argument("--compile", choices=["auto", "on", "off"], help="`mlx train --compile`; mlx-lm always compiles")
    parser.add_argument("--quick", action="store_true", help="one round of few steps: shows that all works, not how fast it is")
    parser.add_argument("--backend", default="cpu", help="`mlx`'s backend; any but cpu gives mlx-lm MLX's default device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured (`-`: instead of the table)")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.warmup = 1, 2, 1
    if args.warmup < 0:
        parser.error("--warmup must be 0 or more")
    return args


def converted(args: argparse.Namespace, source: Path) -> Path:
    """The same weights for mlx-lm, made once for a file by a version of the converter."""
    about = source.stat()
    version = output_of([str(args.binary), "--version"]).split()[-1]
    out = args.work / f"{source.stem}-train-{version}-{about.st_size}-{int(about.st_mtime)}"
    if not out.exists():
        note(f"converting {source.name} for mlx-lm")
        output_of([str(args.binary), "convert", "--model", str(source), "--output", str(out), "--dtype", "float32", "--quiet"])
    return out


def run(command: list[str]) -> tuple[str, float, float]:
    """Standard output of a program that must succeed, its seconds, and its largest resident size."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = os.times().elapsed
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=quiet_environment())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = os.times().elapsed - began
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            last = "\n".join(err.read().splitlines()[-20:])
            raise SystemExit(f"{' '.join(command[:3])} ... failed with {process.returncode}:\n{last}")
        return out.read(), seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ours(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """A run of `mlx train`: its log has each step."""
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        command = [str(args.binary), "train", "--quiet", "--json", "--model", str(model), "--backend", args.backend]
        command += ["--data", str(args.data), "--adapter-path", work, "--iters", str(args.warmup + args.steps)]
        command += ["--batch-size", str(args.batch_size), "--num-layers", str(args.layers), "--rank", str(args.rank)]
        command += ["--keys", args.keys, "--max-seq-length", str(args.max_seq_length), "--optimizer", args.optimizer]
        command += ["--learning-rate", str(args.learning_rate), "--val-batches", "0", "--steps-per-report", "1"]
        # mlx-lm 0.30.7 sorts lines by the number of their fields, not of their tokens: its batches are neighbors.
        command += ["--keep-order"]
        if args.optimizer == "adamw":
            command += ["--config", str(settings(Path(work)))]
        command += ["--grad-checkpoint"] if args.grad_checkpoint else []
        command += ["--compile", args.compile] if args.compile else []
        printed, wall, rss = run(command)
        log = [json.loads(line) for line in (Path(work) / "train_log.jsonl").read_text().splitlines()]
    counts = [0, *(line["trained_tokens"] for line in log)]
    steps = [
        {"seconds": 1 / line["steps_per_second"], "loss": line["loss"], "tokens": after - before}
        for line, before, after in zip(log, counts, counts[1:])
    ]
    return {"steps": steps, "peak": json.loads(printed)["peak_memory_bytes"], "wall": wall, "rss": rss}


def settings(work: Path) -> Path:
    """A config for what flags cannot say: AdamW with the settings of mlx-lm."""
    path = work / "optimizer.json.yaml"
    path.write_text(json.dumps({"optimizer_config": {"adamw": {"bias_correction": False, "weight_decay": 0.01}}}))
    return path


def theirs(args: argparse.Namespace, python: Path, model: Path) -> dict[str, Any]:
    """The same by mlx-lm."""
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        options = {
            "model": str(model),
            "data": str(args.data),
            "adapter_path": work,
            "iters": args.warmup + args.steps,
            "batch_size": args.batch_size,
            "num_layers": args.layers,
            "lora_parameters": {"rank": args.rank, "dropout": 0.0, "scale": 20.0, "keys": args.keys.split(",")},
            "max_seq_length": args.max_seq_length,
            "optimizer": args.optimizer,
            "learning_rate": args.learning_rate,
            "grad_checkpoint": args.grad_checkpoint,
        }
        device = "cpu" if args.backend == "cpu" else "default"
        printed, wall, rss = run([str(python), str(SIDE), "--device", device, json.dumps(options)])
    result = json.loads(printed)
    return {"steps": result["steps"], "peak": result["peak_memory_bytes"], "wall": wall, "rss": rss}


def figures(args: argparse.Namespace, result: dict[str, Any], tokens: int) -> dict[str, float]:
    """One round of one side; `tokens` are those of the measured batches, counted alike for both."""
    measured = result["steps"][args.warmup :]
    seconds = sum(step["seconds"] for step in measured)
    return {
        "steps": len(measured) / seconds,
        "tokens": tokens / seconds,
        "peak": result["peak"],
        "peak_rss": result["rss"],
        "wall": result["wall"],
        "first_loss": result["steps"][0]["loss"],
        "last_loss": result["steps"][-1]["loss"],
    }


def measure(args: argparse.Namespace, python: Path, source: Path, directory: Path) -> dict[str, list[dict[str, float]]]:
    """Figures of both sides in every round; who begins changes from round to round."""
    rounds: dict[str, list[dict[str, float]]] = {MLX_LM: [], OURS: []}
    for number in range(args.rounds):
        results: dict[str, dict[str, Any]] = {}
        for name in [OURS, MLX_LM][:: 1 if number % 2 == 0 else -1]:
            note(f"round {number + 1}, {name}")
            results[name] = ours(args, source if args.ours == "source" else directory) if name == OURS else theirs(args, python, directory)
            if (steps := len(results[name]["steps"])) != args.warmup + args.steps:
                raise SystemExit(f"{name} made {steps} steps of {args.warmup + args.steps}")
        for at, (mine, other) in enumerate(zip(results[OURS]["steps"], results[MLX_LM]["steps"])):
            # mlx-lm counts one token of the padding of each row that has some.
            if not 0 <= other["tokens"] - mine["tokens"] <= args.batch_size:
                raise SystemExit(f"batch {at + 1} has {mine['tokens']} tokens here and {other['tokens']} in mlx-lm: not the same work")
        tokens = sum(step["tokens"] for step in results[OURS]["steps"][args.warmup :])
        for name in rounds:
            rounds[name].append(figures(args, results[name], tokens))
            last = rounds[name][-1]
            note(f"  {name}: " + ", ".join(f"{label.lower()} {last[key] / by:.{n}f}" for key, (label, _, by, n) in MEASURES.items()))
    return rounds


def summarize(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, ratios of ours to mlx-lm's, and the bars missed."""
    medians = {name: {key: statistics.median(r[key] for r in measured) for key in MEASURES} for name, measured in rounds.items()}
    a, b = medians[MLX_LM], medians[OURS]
    ratios = {key: b[key] / a[key] for key in COMPARED}
    missed = []
    if ratios["steps"] < LEAST:
        missed.append(f"{ratios['steps']:.3f} of mlx-lm's steps a second, wanted ≥ {LEAST}")
    if abs(b["first_loss"] - a["first_loss"]) > SAME_LOSS * a["first_loss"]:
        missed.append(f"the first batch has loss {b['first_loss']:.3f} and {a['first_loss']:.3f}: it is not the same work")
    return {"medians": medians, "ratios": ratios, "missed": missed}


def table(args: argparse.Namespace, summary: dict[str, Any], about: dict[str, Any]) -> str:
    """The Markdown report."""
    medians, ratios = summary["medians"], summary["ratios"]
    lines = ["| | mlx-lm | mlx | mlx / mlx-lm (bar) |", "|---|---:|---:|---:|"]
    for key, (label, unit, divisor, digits) in MEASURES.items():
        cells = [label + (f" ({unit})" if unit else "")]
        cells += [f"{medians[name][key] / divisor:.{digits}f}" for name in (MLX_LM, OURS)]
        cells.append((f"{ratios[key]:.2f}" if key in ratios else "") + (f" (≥ {LEAST})" if key == "steps" else ""))
        lines.append(f"| {' | '.join(cells)} |")
    blocks = "all" if args.layers < 0 else f"the last {args.layers}"
    intro = (
        f"{about['model']}, {args.data.name}: {args.steps} steps after {args.warmup}, batches of {args.batch_size}, rank {args.rank} at "
        f"{args.keys} of {blocks} blocks, {args.optimizer}{', checkpoints' if args.grad_checkpoint else ''}, medians of {args.rounds} rounds; "
        f"{about['cpu']}, {about['cores']} cores, load average {about['load_average_before']} before."
    )
    result = "All bars are met." if not summary["missed"] else "Missed:\n" + "\n".join(f"- {m}" for m in summary["missed"])
    if args.quick:
        result += "\n\nThis was --quick: the figures show that everything runs, not how fast it is."
    return "\n".join([intro, "", *lines, "", result])


def main() -> int:
    args = parse()
    args.work, args.binary, args.data = args.work.resolve(), args.binary.resolve(), args.data.resolve()
    if not args.binary.is_file():
        raise SystemExit(f"{args.binary} is not there: build it with `cargo build --release`, or name it with --binary")
    args.work.mkdir(parents=True, exist_ok=True)
    python = environment(args)
    source = args.model.resolve() if args.model else first_model_file.fetch(args.work)
    directory = converted(args, source)
    about = {
        "model": source.name,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
    }
    rounds = measure(args, python, source, directory)
    summary = summarize(rounds)
    everything = about | {"rounds": rounds} | summary
    if args.json and str(args.json) == "-":
        print(json.dumps(everything, indent=1))
    else:
        print(table(args, summary, about))
        if args.json:
            args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if summary["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
