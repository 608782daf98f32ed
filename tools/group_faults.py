#!/usr/bin/env python3
"""Kills one process of a group with SIGKILL at a random moment, again and again, and looks at the
others: all must end with an error, name the lost rank, and do so within a bound.

    python3 tools/group_faults.py --program target/release/mlx --rounds 200

It runs `generate`, `train` and `serve` with the tiny Llama in 2 to 4 processes of this machine, with
and without `mlx launch`, with parts of layers and with stages. Needs Linux (it finds what is left
over in /proc) and Python alone. The last line is a JSON object; the exit code is 1 after a fault.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/fixtures/tiny/llama"
DATA = ROOT / "examples/data/pirate"
# Longer than a round can last.
ENDLESS = "100000000"


def commands(folder):
    """What the processes run, each without an end."""
    model = ["--model", str(MODEL)]
    generate = ["generate", *model, "--tokens", "5,17,42", "--max-tokens", ENDLESS, "--ignore-eos"]
    train = ["train", "--train", *model, "--data", str(DATA), "--iters", ENDLESS]
    train += ["--batch-size", "4", "--val-batches", "0", "--adapter-path", str(folder / "adapter")]
    serve = ["serve", "--port", "0", str(MODEL)]
    return {"generate": generate, "train": train, "serve": serve}


def processes(mark):
    """The processes with a mark in their environment: their ids, and their ranks."""
    children = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(") ")[2][:1]
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if state in "ZX" or b"GROUP_FAULTS=" + mark.encode() not in environment:
            continue
        ranks = [int(e[9:]) for e in environment if e.startswith(b"MLX_RANK=")]
        children[int(entry.name)] = ranks[0] if ranks else None
    return children


def ring(folder, count):
    """A file with free ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    for one in sockets:
        one.close()
    path = folder / "ring.json"
    path.write_text(json.dumps(hosts))
    return path


class Round:
    """One group, one kill."""

    def __init__(self, options, chance, folder):
        self.options = options
        self.count = chance.choice([2, 3, 4])
        self.launched = chance.random() < 0.5
        self.what = chance.choice(["generate", "generate", "train", "serve"])
        stages = self.what != "train" and self.count <= 3 and chance.random() < 0.5
        self.split = "pipeline" if stages else "tensor"
        # The tiny Llama has four heads.
        if self.count == 3 and self.split == "tensor" and self.what != "train":
            self.count = 4
        self.victim = chance.randrange(self.count)
        # A third of the kills come while the processes still find each other.
        early = chance.random() < 1 / 3
        self.delay = chance.uniform(0, min(0.2, options.longest) if early else options.longest)
        self.folder = folder
        self.mark = uuid.uuid4().hex

    def name(self):
        how = "launch" if self.launched else "bare"
        return f"{self.what} {self.split} n={self.count} {how} rank {self.victim} at {self.delay:.2f} s"

    def start(self):
        command = [str(self.options.program)]
        environment = dict(os.environ, GROUP_FAULTS=self.mark, MLX_NUM_THREADS="1")
        environment.pop("MLX_RANK", None)
        limit = str(self.options.join)
        program = commands(self.folder)[self.what]
        if self.launched:
            flags = ["launch", "-n", str(self.count), "--join-timeout", limit]
            flags += ["--pipeline"] if self.split == "pipeline" else []
            return [self.open(command + flags + ["--"] + program, environment, "launcher")]
        environment.update(MLX_HOSTFILE=str(ring(self.folder, self.count)), MLX_SPLIT=self.split)
        environment.update(MLX_JOIN_TIMEOUT=limit)
        return [
            self.open(command + program, dict(environment, MLX_RANK=str(rank)), rank)
            for rank in range(self.count)
        ]

    def open(self, command, environment, label):
        err = open(self.folder / f"{label}.err", "wb")
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err
        )

    def run(self):
        """Seconds until all had ended, and what was wrong."""
        started = self.start()
        time.sleep(self.delay)
        until = time.monotonic() + 30
        victims = []
        while not victims and time.monotonic() < until:
            victims = [pid for pid, rank in processes(self.mark).items() if rank == self.victim]
            if not victims:
                time.sleep(0.005)
        faults = [] if victims else ["the rank was not started"]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        bound = self.options.bound
        codes = []
        for one in started:
            left = max(0.1, killed + bound - time.monotonic())
            try:
                codes.append(one.wait(left))
            except subprocess.TimeoutExpired:
                codes.append(None)
        took = time.monotonic() - killed
        if None in codes:
            faults.append(f"not all ended within {bound} s")
        # What a launcher has started ends with it, or right after it.
        time.sleep(0.2)
        orphans = processes(self.mark)
        if orphans:
            faults.append(f"left over: {orphans}")
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
        for one in started:
            one.wait()
        faults += self.told(codes)
        return took, faults

    def told(self, codes):
        """What is wrong with exit codes and messages of those that were not killed."""
        faults = []
        labels = ["launcher"] if self.launched else range(self.count)
        for label, code in zip(labels, codes):
            if label == self.victim:
                continue
            if code == 0:
                faults.append(f"{label} ended well")
            said = (self.folder / f"{label}.err").read_text(errors="replace")
            if f"rank {self.victim}" not in said:
                faults.append(f"{label} did not name the rank: {said.strip()[-300:]!r}")
            if "panicked" in said:
                faults.append(f"{label} panicked: {said.strip()[-300:]!r}")
        # An adapter is there whole, or not at all.
        for path in (self.folder / "adapter").glob("*.safetensors"):
            bytes_ = path.read_bytes()
            header = json.loads(bytes_[8 : 8 + int.from_bytes(bytes_[:8], "little")])
            ends = [t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"]
            if 8 + int.from_bytes(bytes_[:8], "little") + max(ends, default=0) != len(bytes_):
                faults.append(f"{path.name} is not whole")
        return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/mlx")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=3.0, help="seconds before a kill, at most")
    parser.add_argument("--join", type=int, default=10, help="the time to join, in seconds")
    parser.add_argument("--bound", type=float, default=20.0, help="seconds until all must have ended")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    times, faulty = [], 0
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one = Round(options, chance, Path(folder))
            took, faults = one.run()
        times.append(took)
        faulty += bool(faults)
        print(f"{number + 1:4} {took:6.2f} s  {one.name()}", *faults, sep="\n       ", flush=True)
    times.sort()
    result = {
        "rounds": len(times),
        "faulty": faulty,
        "median_s": round(times[len(times) // 2], 3),
        "longest_s": round(times[-1], 3),
    }
    print(json.dumps(result))
    sys.exit(1 if faulty else 0)


if __name__ == "__main__":
    main()
