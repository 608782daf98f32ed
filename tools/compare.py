#!/usr/bin/env python3
"""Side by side: `mlx`, Python mlx-lm and llama.cpp on the same weights in the same precision, in interleaved rounds.

Prepares, once, below --work: environments with mlx-lm (the pins of tools/golden/requirements.txt) and with llama-cpp-python
(a pinned source archive, which pip compiles for this processor: it needs a C++ compiler and some minutes), the first
model's GGUF (or --model), and a lossless MLX conversion of it for mlx-lm. Each measurement is a process of its own.
Prints a Markdown table of medians and ratios; exit status 1 if a bar is missed. Needs only Python's standard library, pip
and, for llama.cpp, the compiler.

With --shape and --format the weights are random, of the sizes that people use, and llama.cpp's own quantizer makes the files;
`mlx` and llama.cpp run, and the table has a row for each file.
"""

from __future__ import annotations

import argparse
import hashlib
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
sys.path.insert(0, str(TOOLS / "golden"))

sys.path.insert(0, str(TOOLS / "compare"))

import first_model_file  # noqa: E402
import random_gguf  # noqa: E402

REQUIREMENTS = TOOLS / "golden" / "requirements.txt"
SIDE = TOOLS / "compare" / "mlx_lm_side.py"
CONVERT = TOOLS / "compare" / "convert_gguf.py"
RANDOM = TOOLS / "compare" / "random_gguf.py"
LLAMA_SIDE = TOOLS / "compare" / "llama_cpp_side.py"
LLAMA_PINS = TOOLS / "compare" / "requirements-llama.txt"
GGUF_PACKAGES = ["gguf==0.19.0", "PyYAML==6.0.3", "tqdm==4.67.1", "requests==2.32.5"]
LLAMA_PACKAGES = ["numpy==2.4.6", "Jinja2==3.1.6", "MarkupSafe==3.0.4", "diskcache==5.6.3", "typing_extensions==4.16.0"]
MLX_LM, LLAMA = "mlx-lm", "llama.cpp"
START_PROMPT = "The capital of France is"
SAME_TOKENS = 16
BATCH_PROMPT = 16  # tokens of each prompt of a batch, on all sides

# What is measured: key -> (label, unit, divisor, digits)
MEASURES = {
    "prefill": ("Prefill", "tok/s", 1.0, 1),
    "decode": ("Decode", "tok/s", 1.0, 2),
    "batch": ("Batch decode, all rows", "tok/s", 1.0, 1),
    "load": ("Load", "s", 1.0, 3),
    "start": ("Start-up to first token", "s", 1.0, 3),
    "peak_rss": ("Peak resident memory", "MiB", 2.0**20, 0),
}
# (reference, key) -> (least, greatest) ratio of ours to it that passes
BARS = {
    (MLX_LM, "prefill"): (1.0, None),
    (MLX_LM, "decode"): (8.0, None),
    (MLX_LM, "start"): (None, 1.0),
    (MLX_LM, "peak_rss"): (None, 1.0),
    (LLAMA, "prefill"): (2.5, None),
    (LLAMA, "decode"): (1.5, None),
}
BATCH_OVER_DECODE = 4.0
# The bars of --shape: the same for every shape and format, but for the prefill.
SHAPE_BARS = {
    (LLAMA, "decode"): (1.05, None),
    (LLAMA, "batch"): (1.5, None),
    (LLAMA, "load"): (None, 1.3),
    (LLAMA, "start"): (None, 1.0),
    (LLAMA, "peak_rss"): (None, 1.0),
}
PREFILL_BARS = {"amx": 2.5, "avx512": 1.3, "avx2": 1.1}
BANDWIDTH_BAR = 0.85


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "target" / "release" / "mlx", help="the built `mlx`")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "compare", help="cache of what is prepared")
    parser.add_argument("--venv", type=Path, help="an environment with mlx-lm's pins; default: made below --work")
    parser.add_argument("--llama-venv", type=Path, help="an environment with llama-cpp-python; default: made below --work")
    parser.add_argument("--without", choices=[MLX_LM, LLAMA], action="append", default=[], help="leave one out")
    parser.add_argument("--model", type=Path, help="a GGUF of Q4_1, Q4_0, Q8_0 and F32; default: the first model")
    parser.add_argument("--ours", choices=["gguf", "dir", "both", "none"], default="gguf", help="what `mlx` runs")
    parser.add_argument("--prompt-tokens", type=positive, default=512, metavar="N")
    parser.add_argument("--generate-tokens", type=positive, default=128, metavar="M")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="0: only those of --earlier")
    parser.add_argument(
        "--earlier", type=Path, action="append", default=[], metavar="FILE", help="rounds that an earlier --json FILE holds count too"
    )
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="requests that decode together")
    parser.add_argument("--quick", action="store_true", help="one round of small sizes: shows that all works, not how fast it is")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="runs before the measured one, on both sides")
    parser.add_argument("--shape", choices=random_gguf.SHAPES, action="append", default=[], help="random weights of this shape (repeatable)")
    parser.add_argument("--format", choices=random_gguf.FILE_TYPES, action="append", default=[], help="of --shape: the file's type (repeatable)")
    parser.add_argument("--precision", choices=["exact", "fast"], help="of `mlx`'s prompts; default: its own")
    parser.add_argument("--backend", default="cpu", help="`mlx`'s backend; any but cpu gives mlx-lm MLX's default device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured (`-`: instead of the table)")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.prompt_tokens, args.generate_tokens, args.warmup = 1, 32, 8, 0
    if args.rounds < 0 or (args.rounds == 0 and not args.earlier):
        parser.error("--rounds must be 1 or more, or 0 with --earlier")
    if args.generate_tokens < 2:
        parser.error("--generate-tokens must be 2 or more: the first one belongs to the prefill")
    if bool(args.shape) != bool(args.format):
        parser.error("--shape and --format belong together")
    if args.shape and (args.model or args.earlier or args.ours != "gguf"):
        parser.error("--shape makes its own files: it goes without --model, --earlier and --ours")
    return args


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- preparation


def environment(args: argparse.Namespace) -> Path:
    """The Python of an environment that has the pins."""
    if args.venv:
        return args.venv / "bin" / "python"
    where = args.work / "venv"
    python, stamp = where / "bin" / "python", where / "requirements.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        note(f"installing the pins of {REQUIREMENTS.relative_to(ROOT)} into {where}")
        venv.create(where, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        stamp.write_text(wanted)
    return python


def processor() -> str:
    """What /proc/cpuinfo says of this processor."""
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


def instruction_set() -> str:
    """The set that both sides use: the best of this processor, or a lesser one that MLX_CPU_KERNELS names."""
    asked = os.environ.get("MLX_CPU_KERNELS", "")
    if asked in PREFILL_BARS:
        return asked
    if " amx_tile" in processor():
        return "amx"
    return "avx512" if " avx512_vnni" in processor() else "avx2"


def llama_flags() -> list[str]:
    """What llama.cpp is compiled for: this processor, but without AMX where there is one, and without AVX-512 where MLX_CPU_KERNELS is
    avx2. The pinned version's kernels for AMX ended with an illegal instruction (in a virtual machine on Emerald Rapids), so what else
    it uses there is named."""
    less = instruction_set() == "avx2" and " avx512f" in processor()
    if not less and " amx_tile" not in processor():
        return []
    sets = ["SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"]
    if " avx_vnni" in processor():
        sets.append("AVX_VNNI")
    if not less:
        sets += ["AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"]
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in sets)]


def llama_environment(args: argparse.Namespace) -> Path:
    """The Python of an environment that has llama-cpp-python."""
    if args.llama_venv:
        return args.llama_venv.resolve() / "bin" / "python"
    less = instruction_set() == "avx2" and " avx512f" in processor()
    where = args.work / ("venv-llama-avx2" if less else "venv-llama")
    python, stamp = where / "bin" / "python", where / "pins.txt"
    flags = llama_flags()
    wanted = "\n".join([*LLAMA_PACKAGES, *flags, LLAMA_PINS.read_text()])
    if not stamp.exists() or stamp.read_text() != wanted:
        note(f"compiling llama-cpp-python into {where}; this takes minutes")
        venv.create(where, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *LLAMA_PACKAGES], check=True, stdout=sys.stderr)
        # Not one that was compiled for another processor, or with other flags.
        hashed = ["--no-cache-dir", "--require-hashes", "--no-binary", "llama-cpp-python", "--requirement", str(LLAMA_PINS)]
        # The processor's own instructions are llama.cpp's default; no BLAS, as its own kernels are the faster ones here.
        environment = {**os.environ, **({"CMAKE_ARGS": " ".join(flags)} if flags else {})}
        subprocess.run([*pip, *hashed], check=True, stdout=sys.stderr, env=environment)
        stamp.write_text(wanted)
    return python


def random_file(args: argparse.Namespace, python: Path, shape: str, kind: str) -> Path:
    """The GGUF of a shape and a format, made once."""
    plain, out = args.work / f"{shape}-F16.gguf", args.work / f"{shape}-{kind}.gguf"
    program = [str(python), str(RANDOM)]
    if not out.exists() and not plain.exists():
        note(f"writing {plain.name}")
        command = [str(python), "-m", "pip", "install", "--quiet", "numpy==2.4.6", *GGUF_PACKAGES]
        subprocess.run(command, check=True, stdout=sys.stderr)
        vocabulary = str(first_model_file.fetch(args.work))
        subprocess.run([*program, "write", shape, str(plain), "--vocabulary", vocabulary], check=True)
    if not out.exists():
        note(f"writing {out.name}")
        subprocess.run([*program, "quantize", str(plain), str(out), kind], check=True, stderr=subprocess.DEVNULL)
    return out


def converted(args: argparse.Namespace, python: Path, source: Path) -> Path:
    """The MLX directory of a GGUF, made once per content of file and converter."""
    key = hashlib.sha256()
    for path in (CONVERT, TOOLS / "golden" / "gguf_model.py"):
        key.update(path.read_bytes())
    key.update(first_model_file.sha256(source).encode())
    out = args.work / f"{source.stem}-mlx-{key.hexdigest()[:12]}"
    if not out.exists():
        note(f"converting {source.name} for mlx-lm")
        subprocess.run([str(python), str(CONVERT), str(source), str(out)], check=True)
    return out


def prompt_ids(count: int, vocab: int, avoid: list[int]) -> list[int]:
    """The ids that `mlx bench` makes its prompt of (SplitMix64 from a fixed seed, end-of-text ids left out)."""
    mask = (1 << 64) - 1
    state = 0x6D6C_7862_656E_6368
    ids: list[int] = []
    while len(ids) < count:
        state = (state + 0x9E37_79B9_7F4A_7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & mask
        z ^= z >> 31
        if z % vocab not in avoid:
            ids.append(z % vocab)
    return ids


# ---- the two sides


def output_of(command: list[str], stdin: str | None = None) -> str:
    """Standard output of a program that must succeed."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=quiet_environment())
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:4])} ... failed with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout


def quiet_environment() -> dict[str, str]:
    """Neither side looks anything up in the network."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "MLX_OFFLINE": "1"}


def seconds_to_first_output(command: list[str]) -> float:
    """Wall-clock time from spawning a program to the first byte it prints."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=quiet_environment()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = os.read(process.stdout.fileno(), 1)
        took = time.perf_counter() - began
        process.stdout.read()
        errors = process.stderr.read()
    if process.returncode != 0 or not first:
        raise SystemExit(f"{' '.join(command[:4])} ... printed nothing or failed:\n{errors.decode()}")
    return took


class Ours:
    """`mlx` on one model."""

    def __init__(self, args: argparse.Namespace, name: str, model: Path):
        self.name = name
        self._args = args
        self._binary = str(args.binary)
        self._warmup = ["--warmup", str(args.warmup)]
        precision = ["--precision", args.precision] if args.precision else []
        self._common = ["--model", str(model), "--backend", args.backend, "--quiet", *precision]

    def bench(self) -> dict[str, Any]:
        sizes = ["--prompt-tokens", str(self._args.prompt_tokens), "--generate-tokens", str(self._args.generate_tokens)]
        command = [self._binary, "bench", *self._common, *sizes, "--repeat", "1", *self._warmup, "--bandwidth"]
        return json.loads(output_of(command))

    def batch(self) -> float:
        sizes = ["--prompt-tokens", "1", "--generate-tokens", str(self._args.generate_tokens), "--repeat", "1"]
        command = [self._binary, "bench", *self._common, *sizes, "--warmup", "0", "--batch", str(self._args.batch)]
        return json.loads(output_of(command))["batch_tokens_per_second"]

    def tokens(self, ids: str) -> list[int]:
        more = ["--raw", "--tokens", ids, "--max-tokens", str(SAME_TOKENS), "--ignore-eos", "--json"]
        return json.loads(output_of([self._binary, "generate", *self._common, *more]))["tokens"]

    def start(self, ids: str) -> float:
        more = ["--raw", "--tokens", ids, "--max-tokens", "1"]
        return seconds_to_first_output([self._binary, "generate", *self._common, *more])


class Other:
    """mlx-lm on the converted model, or llama.cpp on the GGUF: two scripts that take the same arguments."""

    def __init__(self, args: argparse.Namespace, name: str, command: list[str], prompt: str, batch_prompt: str):
        self.name = name
        self._args, self._command = args, command
        self._prompt, self._batch_prompt = prompt, batch_prompt

    def _of(self, action: str, *more: str) -> list[str]:
        return [*self._command[:2], action, *self._command[2:], *more]

    def bench(self) -> dict[str, Any]:
        sizes = ["--max-tokens", str(self._args.generate_tokens), "--warmup", str(self._args.warmup)]
        return json.loads(output_of(self._of("bench", "--tokens", "-", *sizes), self._prompt))

    def batch(self) -> float:
        sizes = ["--max-tokens", str(max(2, self._args.generate_tokens)), "--rows", str(self._args.batch)]
        result = json.loads(output_of(self._of("batch", "--tokens", "-", *sizes), self._batch_prompt))
        return result["batch_tokens_per_second"]

    def tokens(self, ids: str) -> list[int]:
        return json.loads(output_of(self._of("tokens", "--tokens", ids, "--max-tokens", str(SAME_TOKENS))))

    def start(self, ids: str) -> float:
        return seconds_to_first_output(self._of("start", "--tokens", ids))


# ---- measuring and reporting


def figures(args: argparse.Namespace, report: dict[str, Any], batch: float, start: float) -> dict[str, float]:
    """One round of one side. Rates come from the same two clocks on both sides, by the same formulas."""
    run = report["runs"][0]
    first, total = run["time_to_first_token_seconds"], run["total_seconds"]
    return {
        "prefill": args.prompt_tokens / first,
        "decode": (args.generate_tokens - 1) / (total - first),
        "batch": batch,
        "load": report["load_seconds"],
        "start": start,
        "peak_rss": report["peak_rss_bytes"] or report["peak_memory_bytes"],
        # Of `mlx` alone.
        "share": report.get("decode_share_of_bandwidth", 0.0),
    }


SIZES = ["model", "prompt_tokens", "generated_tokens", "batch_rows", "cpu", "cores"]


def earlier(args: argparse.Namespace, about: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Rounds that were measured before, with the same sizes on the same machine."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for path in args.earlier:
        before = json.loads(path.read_text())
        for key in SIZES:
            if before[key] != about[key]:
                raise SystemExit(f"{path} is of {key} {before[key]!r}, this run of {about[key]!r}")
        for name, measured in before["rounds"].items():
            rounds.setdefault(name, []).extend(measured)
        about["llama"] = about["llama"] or before["llama"]
    return rounds


def measure(
    args: argparse.Namespace, sides: list[Any], ids: str, rounds: dict[str, list[dict[str, float]]]
) -> dict[str, list[dict[str, float]]]:
    """Figures of every side and round, after those of `rounds`. The order of the sides turns by one each round."""
    for number in range(args.rounds):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            measured = figures(args, side.bench(), side.batch(), side.start(ids))
            rounds.setdefault(side.name, []).append(measured)
            shown = ", ".join(f"{key} {measured[key] / MEASURES[key][2]:.{MEASURES[key][3]}f}" for key in MEASURES)
            note(f"round {number + 1}, {side.name}: {shown}")
    return rounds


def passes(bar: tuple[float | None, float | None], ratio: float) -> bool:
    least, greatest = bar
    return (least is None or ratio >= least) and (greatest is None or ratio < greatest)


def wanted(bar: tuple[float | None, float | None]) -> str:
    return f"≥ {bar[0]}" if bar[0] is not None else f"< {bar[1]}"


def summarize(rounds: dict[str, list[dict[str, float]]], same: dict[str, int]) -> dict[str, Any]:
    """Medians, ratios of ours to the others and the bars missed."""
    medians = {name: {key: statistics.median(r[key] for r in measured) for key in MEASURES} for name, measured in rounds.items()}
    order = [name for name in medians if name not in (MLX_LM, LLAMA)] + [name for name in (MLX_LM, LLAMA) if name in medians]
    medians = {name: medians[name] for name in order}
    others = [name for name in (MLX_LM, LLAMA) if name in medians]
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    missed: list[str] = []
    for name, figure in medians.items():
        if name in others:
            continue
        ratios[name] = {other: {key: figure[key] / medians[other][key] for key in MEASURES} for other in others}
        for (other, key), bar in BARS.items():
            if other in others and not passes(bar, ratio := ratios[name][other][key]):
                missed.append(f"{name}: {MEASURES[key][0].lower()} is {ratio:.3f} of {other}'s, wanted {wanted(bar)}")
        if (ratio := figure["batch"] / figure["decode"]) < BATCH_OVER_DECODE:
            missed.append(f"{name}: the batch decodes {ratio:.2f} times as fast as one, wanted ≥ {BATCH_OVER_DECODE}")
        if same.get(name, SAME_TOKENS) < SAME_TOKENS:
            missed.append(f"{name}: only the first {same[name]} of {SAME_TOKENS} greedy tokens are mlx-lm's")
    return {"medians": medians, "ratios": ratios, "missed": missed}


def table(args: argparse.Namespace, summary: dict[str, Any], about: dict[str, Any]) -> str:
    """The Markdown report."""
    medians, ratios = summary["medians"], summary["ratios"]
    pairs = [(name, other) for name, against in ratios.items() for other in against]
    header = ["", *medians, *(f"{name} / {other} (bar)" for name, other in pairs)]
    lines = [" | ".join(header), " | ".join(["---"] + ["---:"] * (len(header) - 1))]
    for key, (label, unit, divisor, digits) in MEASURES.items():
        cells = [f"{label} ({unit})", *(f"{row[key] / divisor:.{digits}f}" for row in medians.values())]
        for name, other in pairs:
            bar = BARS.get((other, key))
            cells.append(f"{ratios[name][other][key]:.2f}" + (f" ({wanted(bar)})" if bar else ""))
        lines.append(" | ".join(cells))
    intro = (
        f"{about['model']}, prompt {args.prompt_tokens}, generated {args.generate_tokens}, batch {args.batch}, medians of "
        f"{about['rounds_of']} rounds; {about['cpu']}, {about['cores']} cores, load average {about['load_average_before']} before."
    )
    if about.get("llama"):
        intro += f" llama-cpp-python {about['llama']['version']}: {about['llama']['system']}"
    result = "All bars are met." if not summary["missed"] else "Missed:\n" + "\n".join(f"- {m}" for m in summary["missed"])
    if args.quick:
        result += "\n\nThis was --quick: the figures show that everything runs, not how fast it is."
    return "\n".join([intro, "", *(f"| {line} |" for line in lines), "", result])


def compare_shapes(args: argparse.Namespace) -> int:
    """`mlx` beside llama.cpp on random weights: a row for each file, ours / llama.cpp's, and the bars missed."""
    python = llama_environment(args)
    version = json.loads(output_of([str(python), str(LLAMA_SIDE), "version"]))
    bars = SHAPE_BARS | {(LLAMA, "prefill"): (PREFILL_BARS[instruction_set()], None)}
    rows, report = [], []
    for shape in args.shape:
        for kind in args.format:
            model = random_file(args, python, shape, kind)
            vocab = random_gguf.SHAPES[shape]["vocab"]
            prompts = [",".join(map(str, prompt_ids(n, vocab, [0, 1, 2]))) for n in (args.prompt_tokens, args.batch * BATCH_PROMPT, 5)]
            ours = Ours(args, "mlx", model)
            other = Other(args, LLAMA, [str(python), str(LLAMA_SIDE), "--model", str(model)], *prompts[:2])
            for side in (ours, other):
                side.start(prompts[2])  # fills the page cache
            rounds = measure(args, [ours, other], prompts[2], {})
            medians = {name: {key: statistics.median(r[key] for r in measured) for key in MEASURES} for name, measured in rounds.items()}
            cells, missed = [], []
            for key, (label, _, divisor, digits) in MEASURES.items():
                mlx_value, theirs = medians["mlx"][key], medians[LLAMA][key]
                good = passes(bars[LLAMA, key], mlx_value / theirs)
                cell = f"{mlx_value / divisor:.{digits}f} / {theirs / divisor:.{digits}f}"
                cells.append(cell if good else f"**{cell}**")
                if not good:
                    missed.append(f"{label.lower()} {mlx_value / theirs:.2f} (wanted {wanted(bars[LLAMA, key])})")
            # A mixture reads some experts only, so its share says nothing.
            if "experts" in random_gguf.SHAPES[shape]:
                cells.append("")
            else:
                share = statistics.median(measured["share"] for measured in rounds["mlx"])
                cells.append(f"{100 * share:.0f}" if share >= BANDWIDTH_BAR else f"**{100 * share:.0f}**")
                if share < BANDWIDTH_BAR:
                    missed.append(f"decode reads at {share:.2f} of the memory's rate (wanted ≥ {BANDWIDTH_BAR})")
            rows.append(f"| {shape} | {kind} | " + " | ".join(cells) + " |")
            report.append({"shape": shape, "format": kind, "rounds": rounds, "medians": medians, "missed": missed})
            note(rows[-1])
    header = ["shape", "format", *(f"{label} ({unit})" for label, unit, _, _ in MEASURES.values()), "Decode, of the memory's rate (%)"]
    intro = (
        f"`mlx` / llama.cpp, {instruction_set()}, prompts {args.precision or 'as by default'}, prompt {args.prompt_tokens}, generated {args.generate_tokens}, batch {args.batch}, medians of {args.rounds} "
        f"interleaved rounds; bold misses its bar. {cpu_name()}, {os.cpu_count()} cores. llama-cpp-python {version['version']}: {version['system']}"
    )
    lines = [intro, "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header), *rows]
    everything = {"about": intro, "prompt_tokens": args.prompt_tokens, "generated_tokens": args.generate_tokens, "files": report}
    if args.json and str(args.json) == "-":
        print(json.dumps(everything, indent=1))
    else:
        print("\n".join(lines))
        if args.json:
            args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if any(file["missed"] for file in report) else 0


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    args = parse()
    args.work = args.work.resolve()
    args.binary = args.binary.resolve()
    if args.ours != "none" and not args.binary.is_file():
        raise SystemExit(f"{args.binary} is not there: build it with `cargo build --release`, or name it with --binary")
    args.work.mkdir(parents=True, exist_ok=True)
    if args.shape:
        return compare_shapes(args)
    python = environment(args)
    source = args.model.resolve() if args.model else first_model_file.fetch(args.work)
    directory = converted(args, python, source)

    device = "cpu" if args.backend == "cpu" else "default"
    with_mlx_lm = [str(python), str(SIDE), "--model", str(directory), "--device", device]
    encoded = json.loads(output_of([*with_mlx_lm[:2], "encode", *with_mlx_lm[2:], "--text", START_PROMPT]))
    ids = ",".join(map(str, encoded["tokens"]))

    def prompt(count: int) -> str:
        return ",".join(map(str, prompt_ids(count, encoded["vocab"], encoded["eos"])))

    prompts = prompt(args.prompt_tokens), prompt(args.batch * BATCH_PROMPT)
    sides: list[Any] = []
    for kind, model in (("gguf", source), ("dir", directory)):
        if args.ours in (kind, "both"):
            sides.append(Ours(args, f"mlx ({kind})", model))
    if MLX_LM not in args.without:
        sides.append(Other(args, MLX_LM, with_mlx_lm, *prompts))
    llama = None
    if LLAMA not in args.without:
        command = [str(llama_environment(args)), str(LLAMA_SIDE)]
        llama = json.loads(output_of([*command, "version"]))
        sides.append(Other(args, LLAMA, [*command, "--model", str(source)], *prompts))

    # Not measured: the same tokens on all sides; also fills the page cache and mlx-lm's cache of compiled kernels.
    tokens = {side.name: side.tokens(ids) for side in sides}
    same = {}
    for name, replies in tokens.items():
        pairs = list(zip(replies, tokens.get(MLX_LM, replies)))
        same[name] = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))

    about = {
        "model": source.name,
        "prompt_tokens": args.prompt_tokens,
        "generated_tokens": args.generate_tokens,
        "batch_rows": args.batch,
        "llama": llama,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
        "pins": [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")],
    }
    rounds = measure(args, sides, ids, earlier(args, about))
    counts = sorted({len(replies) for replies in rounds.values()})
    about["rounds_of"] = " to ".join(map(str, counts[:: max(1, len(counts) - 1)]))
    summary = summarize(rounds, same)
    everything = about | {"same_greedy_tokens": same, "rounds": rounds} | summary
    if args.json and str(args.json) == "-":
        print(json.dumps(everything, indent=1))
    else:
        print(table(args, summary, about))
        if args.json:
            args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if summary["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
