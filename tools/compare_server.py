#!/usr/bin/env python3
"""Side by side under load: `mlx serve` and llama.cpp's server, on the same weights and prompts.

    cargo build --release
    cargo build --release -p rust-mlx-inference-server --example load
    tools/compare_server.py [--model FILE.gguf] [--peer target/compare/llama.cpp/build/bin/llama-server]
    tools/compare_server.py --build

`--build` makes llama-server of the source archive of llama-cpp-python, which pip fetches, below
--work; it takes an hour or so on two cores. Without it and without --peer only `mlx` runs. The load
comes from the example `load` of the server's crate, the same for both.

1, 8 and 32 clients stream replies of 128 tokens to prompts of 128 random tokens. Eight clients read
long replies while a prompt of 4,000 tokens is admitted. 32 clients share the first 1,000 tokens.
The last row compares eight clients with `mlx bench --batch 8`, which drives the same batch session
without HTTP. Servers take turns; medians of --rounds count. Prints a Markdown table; exit code 1 if
a bar is missed or a request failed. Needs only Python's standard library, pip, and a C++ compiler
for --build.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.3.36"
CMAKE = ["cmake==4.1.2", "ninja==1.13.0"]
PROMPT, REPLY, LONG, SHARED, OWN = 128, 128, 4000, 1000, 16
MLX, LLAMA = "mlx", "llama.cpp"


def note(text):
    print(text, file=sys.stderr, flush=True)


def build(work):
    """llama-server, made of the archive's sources."""
    source = work / "llama.cpp"
    program = source / "build" / "bin" / "llama-server"
    if program.exists():
        return program
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    pip += ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"]
    subprocess.run(pip, check=True)
    archive = work / f"llama_cpp_python-{VERSION}.tar.gz"
    inside = re.compile(r"[^/]+/vendor/llama\.cpp/(.+)")
    with tarfile.open(archive) as tar:
        for member in tar:
            match = inside.match(member.name)
            if match and (member.isfile() or member.isdir()):
                member.name = match[1]
                tar.extract(member, source)
    archive.unlink()
    venv.create(work / "cmake", with_pip=True)
    programs = work / "cmake" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", *CMAKE], check=True)
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF"]
    flags += ["-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    cmake = ["nice", "-n", "19", str(programs / "cmake")]
    configure = [*cmake, "-G", "Ninja", "-S", str(source), "-B", str(source / "build"), *flags]
    subprocess.run(configure, check=True, env=environment, stdout=sys.stderr)
    make = [*cmake, "--build", str(source / "build"), "--target", "llama-server"]
    subprocess.run(make, check=True, env=environment, stdout=sys.stderr)
    return program


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(name, options, clients, context):
    """A server's address. Each client has a place, and each place `context` tokens."""
    if name == MLX:
        command = [options.binary, "serve", options.model, "--port", "0", "--quiet", "--no-ui"]
        command += ["--parallel", clients, "--ctx-size", context]
        process = start(command, subprocess.PIPE)
        url = process.stdout.readline().strip()
    else:
        port, cores = free_port(), os.cpu_count()
        command = [options.peer, "-m", options.model, "--port", port, "--host", "127.0.0.1"]
        command += ["-np", clients, "-c", clients * context, "-t", cores, "-tb", cores]
        process = start([*command, "-cb", "-fa", "on"], subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} does not serve {options.model}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def start(command, output):
    command = [str(part) for part in command]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, text=True)


def healthy(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (OSError, urllib.error.URLError, ValueError):
        return False


def load(options, url, clients, *more):
    """What the clients saw, after a short run that warms the server up."""
    command = [str(options.load), "--url", url, "--clients", str(clients)]
    warm = ["--requests", "1", "--prompt-tokens", "16", "--reply-tokens", "8", "--seed", "99"]
    for flags in (warm, [str(flag) for flag in more]):
        done = subprocess.run([*command, *flags], stdout=subprocess.PIPE, text=True)
        if not done.stdout:
            raise SystemExit(f"the load generator ended with {done.returncode}")
    return json.loads(done.stdout)


def measure(name, options, seed):
    """Key -> what was seen."""
    seen = {}
    sizes = ["--prompt-tokens", PROMPT, "--reply-tokens", REPLY, "--seed", seed]
    for clients in options.clients:
        with serving(name, options, clients, PROMPT + REPLY + 64) as url:
            note(f"{name}: {clients} clients")
            flags = [*sizes, "--requests", options.requests]
            seen[clients] = load(options, url, clients, *flags)
    if options.long:
        with serving(name, options, 9, options.long + 256) as url:
            note(f"{name}: a prompt of {options.long} tokens beside 8 replies")
            reply = ["--requests", 2, "--prompt-tokens", OWN, "--reply-tokens", 256, "--seed", seed]
            seen["long"] = load(options, url, 8, *reply, "--long", options.long)
    if name == MLX:
        with serving(name, options, 32, SHARED + 128) as url:
            note(f"{name}: 32 clients share {SHARED} tokens")
            flags = ["--shared", SHARED, "--prompt-tokens", OWN, "--reply-tokens", 16]
            seen["shared"] = load(options, url, 32, "--requests", 1, *flags, "--seed", seed)
        with serving(name, options, 8, 512) as url:
            note(f"{name}: with and without HTTP")
            flags = ["--requests", 1, "--prompt-tokens", OWN, "--reply-tokens", REPLY]
            seen["http"] = load(options, url, 8, *flags, "--seed", seed)
        command = [options.binary, "bench", "--quiet", "--model", options.model, "--batch", 8]
        command += ["--prompt-tokens", OWN, "--generate-tokens", REPLY, "--repeat", 1]
        bench = subprocess.check_output([str(part) for part in command], text=True)
        seen["bench"] = json.loads(bench)["batch_tokens_per_second"]
    return seen


def table(rounds, options):
    """Prints the rows; returns what missed its bar."""
    missed = []
    amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    names = list(rounds)

    def row(label, of, unit, scale=1.0, bar=None, passes=None, higher=True, only=None):
        values = {}
        for name in names if only is None else [only]:
            values[name] = statistics.median(of(seen) for seen in rounds[name]) * scale
        ratio = ""
        if len(values) == 2 and all(values.values()):
            ours, theirs = values[MLX], values[LLAMA]
            ratio = ours / theirs
        cells = [f"{values[n]:.2f}" if n in values else "" for n in (MLX, LLAMA)]
        judged = values.get(MLX) if only else ratio
        if bar and judged != "":
            if not passes(judged):
                missed.append(label)
        shown = f"{ratio:.2f}" if ratio != "" else ""
        print(f"| {label} ({unit}) | {cells[0]} | {cells[1]} | {shown} | {bar or ''} |")

    print(f"| | {MLX} | {LLAMA} | ratio | bar |\n|---|---:|---:|---:|---|")
    for clients in options.clients:
        bar = {8: 3.0 if amx else 2.0, 32: 2.5}.get(clients)
        text = f"at least {bar}" if bar else None
        rate = lambda seen, c=clients: seen[c]["output_tokens_per_second"]
        row(f"{clients} clients", rate, "tok/s", 1, text, lambda r, b=bar: r >= b)
        first = lambda seen, c=clients: seen[c]["ttft"]["p50"]
        bar, half = "at most 0.5", lambda r: r <= 0.5
        row(f"{clients} clients, TTFT p50", first, "ms", 1e3, bar, half)
        gap = lambda seen, c=clients: seen[c]["itl"]["p99"]
        row(f"{clients} clients, ITL p99", gap, "ms", 1e3)
    if options.long:
        label = f"a prompt of {options.long} tokens beside 8 replies"
        during = lambda seen: seen["long"]["during_long_prompt"]
        row(f"ITL p99, {label}", lambda s: during(s)["itl"]["p99"] or 0.0, "ms", 1e3,
            "at most 1", lambda r: r <= 1)
        row(f"TTFT of it, {label}", lambda s: during(s)["ttft"], "ms", 1e3)
    computed = lambda s: s["shared"]["prompt_tokens"] - s["shared"]["cached_tokens"]
    # Once the beginning, and of each client its own tokens; blocks and last tokens are rounded.
    most = (SHARED + 32 * (OWN + 1)) * 1.1
    row(f"prompt tokens computed, 32 clients share {SHARED}", computed, "tokens", 1,
        f"at most {most:.0f}", lambda n: n <= most, only=MLX)
    over = lambda s: s["http"]["together_tokens_per_second"] / s["bench"]
    row("8 replies over HTTP / in a batch session", over, "times", 1, "at least 0.9",
        lambda r: r >= 0.9, only=MLX)
    failed = {n: sum(s["failed"] for seen in rounds[n] for s in seen.values()
                     if isinstance(s, dict)) for n in names}
    print(f"| failed requests | {failed[MLX]} | {failed.get(LLAMA, '')} | | 0 |")
    if failed[MLX]:
        missed.append("failed requests")
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    release = ROOT / "target" / "release"
    parser.add_argument("--binary", type=Path, default=release / "mlx")
    parser.add_argument("--load", type=Path, default=release / "examples" / "load")
    parser.add_argument("--model", type=Path, help="a GGUF; without it, the first model")
    parser.add_argument("--peer", type=Path, help="llama-server")
    parser.add_argument("--build", action="store_true", help="make llama-server, if it is not there")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "compare")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all that was seen to this file")
    options = parser.parse_args()
    if options.model is None:
        place = Path.home() / ".cache/rust-mlx/models/smollm2-135m-instruct"
        models = sorted(place.glob("*.gguf"))
        if not models:
            parser.error("the first model is not there; `mlx pull smollm2`, or give --model")
        options.model = models[0]
    if options.build:
        options.work.mkdir(parents=True, exist_ok=True)
        options.peer = build(options.work.resolve())
    names = [MLX, LLAMA] if options.peer else [MLX]
    rounds = {name: [] for name in names}
    busy = os.getloadavg()[0]
    for number in range(options.rounds):
        for name in names:
            rounds[name].append(measure(name, options, number + 1))
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))
    print(f"{options.model.name}, prompts of {PROMPT} and replies of {REPLY} tokens, medians of "
          f"{options.rounds} rounds; {os.cpu_count()} cores, load average {busy:.2f} before.\n")
    missed = table(rounds, options)
    if not options.peer:
        print("\nWithout llama.cpp's server, bars of ratios to it are not judged.")
    print("\nMissed: " + "; ".join(missed) if missed else "\nAll judged bars are met.")
    if any(s["failed"] for n in names for seen in rounds[n] for s in seen.values()
           if isinstance(s, dict)):
        first = [s["errors"] for n in names for seen in rounds[n] for s in seen.values()
                 if isinstance(s, dict) and s["errors"]]
        print(f"errors: {first[:3]}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
