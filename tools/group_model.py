#!/usr/bin/env python3
"""Tokens per second of one request that several machines compute, by a model of what they send and
wait for. The model is checked against groups on this machine whose connections go through proxies.

    python3 tools/group_model.py                    the table for 8B, 70B and 671B
    python3 tools/group_model.py --check --program target/release/mlx

A proxy counts the bytes of MLX's connections, and holds each back for a while, as a network with
this latency does. `--check` compares the bytes of a token, and how the time of a token grows with
the latency, with the model. Only differences of runs count, so a busy machine changes little. Needs
Python alone. The exit code is 1 where the model is wrong.

The model, for N machines, L layers, a hidden size of H and numbers of B bytes:

- Tensor parallel: two sums a layer over all machines, each by a ring: 2 (N-1) messages one after
  another, of H B / N bytes. Each machine reads 1/N of the weights.
- Pipeline: a message of H B bytes to each next stage, and back to the first one: N one after another
  for a token. The machines read all weights, one after another.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Parameters read for a token, all parameters, layers, hidden size.
MODELS = {
    "8B": (8.0e9, 8.0e9, 32, 4096),
    "70B": (70.6e9, 70.6e9, 80, 8192),
    "671B (37B active)": (37e9, 671e9, 61, 7168),
}
# Gigabits a second, and the seconds from a program to the next one by TCP.
NETWORKS = {"1 Gb/s": (1e9, 60e-6), "10 Gb/s": (10e9, 30e-6), "40 Gb/s": (40e9, 20e-6)}
MACHINES = [1, 2, 4, 8, 16]


def hops(split, machines, layers):
    """Messages of a token that wait for each other."""
    if machines == 1:
        return 0
    return layers * 2 * 2 * (machines - 1) if split == "tensor" else machines


def message(split, machines, hidden, number):
    """Bytes of each of them."""
    return hidden * number / (machines if split == "tensor" else 1)


def sent(split, machines, layers, hidden, number):
    """Bytes of a token that all machines send together."""
    if split == "tensor":
        return machines * layers * 2 * 2 * (machines - 1) * message(split, machines, hidden, number)
    return 2 * (machines - 1) * hidden * number


def seconds(split, machines, model, network, options):
    """The time of a token."""
    active, _, layers, hidden = model
    bits, latency = network
    read = active * options.bytes_per_weight / (options.memory_bandwidth * 1e9)
    compute = read / machines if split == "tensor" else read
    one = latency + 8 * message(split, machines, hidden, 2) / bits
    return compute + hops(split, machines, layers) * one


def table(options):
    print(
        f"Tokens a second of one request; {options.bytes_per_weight} bytes a weight, "
        f"{options.memory_bandwidth:.0f} GB/s of memory and {options.memory:.0f} GB in each machine. "
        "A dash: it does not fit.\n"
    )
    print("| Model | Split | Network | " + " | ".join(str(n) for n in MACHINES) + " |")
    print("|---|---|---|" + "---|" * len(MACHINES))
    for name, model in MODELS.items():
        for split in ["tensor", "pipeline"]:
            for network, numbers in NETWORKS.items():
                cells = []
                for machines in MACHINES:
                    fits = model[1] * options.bytes_per_weight / machines < options.memory * 1e9
                    rate = 1 / seconds(split, machines, model, numbers, options)
                    cells.append(f"{rate:.1f}" if fits else "–")
                print(f"| {name} | {split} | {network} | " + " | ".join(cells) + " |")


class Proxy:
    """Stands before one process: each connection to it goes through here."""

    def __init__(self, target, delay):
        self.target, self.delay = target, delay
        self.counts, self.tasks = [], []
        self.server = None

    async def start(self):
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def accept(self, reader, writer):
        number = len(self.counts)
        self.counts.append(0)
        self.tasks.append(asyncio.current_task())
        for _ in range(600):
            try:
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
                break
            except OSError:
                await asyncio.sleep(0.05)
        else:
            writer.close()
            return
        for one in (writer, back):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.gather(self.pipe(reader, back, number), self.pipe(there, writer, number))
        except asyncio.CancelledError:
            # The group has ended; asyncio would report it as a fault of the connection.
            return

    async def pipe(self, reader, writer, number):
        queue = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def deliver():
            while (item := await queue.get()) is not None:
                when, data = item
                await asyncio.sleep(max(0, when - loop.time()))
                writer.write(data)
                await writer.drain()
            writer.close()

        task = asyncio.create_task(deliver())
        try:
            while data := await reader.read(1 << 16):
                self.counts[number] += len(data)
                queue.put_nowait((loop.time() + self.delay, data))
            queue.put_nowait(None)
            await task
        except (OSError, asyncio.CancelledError):
            task.cancel()


async def group(options, split, count, tokens, delay):
    """Bytes on MLX's connections, and seconds of all tokens but the first."""
    with tempfile.TemporaryDirectory() as folder:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        proxies = [Proxy(port, delay) for port in ports]
        before = [await one.start() for one in proxies]
        running = []
        for rank in range(count):
            # Its own address is the true one; those of others are their proxies'.
            seen = [ports[n] if n == rank else before[n] for n in range(count)]
            path = Path(folder) / f"{rank}.json"
            path.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in seen]))
            environment = dict(os.environ, MLX_RANK=str(rank), MLX_HOSTFILE=str(path))
            environment.update(MLX_SPLIT=split, MLX_NUM_THREADS="1")
            command = [str(options.program), "generate", "--model", str(options.model)]
            command += ["--tokens", "5,17,42", "--max-tokens", str(tokens), "--ignore-eos", "--json"]
            running.append(
                await asyncio.create_subprocess_exec(
                    *command,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
            )
        done = await asyncio.wait_for(asyncio.gather(*(one.communicate() for one in running)), 300)
        for proxy in proxies:
            proxy.server.close()
            for task in proxy.tasks:
                task.cancel()
            await asyncio.gather(*proxy.tasks, return_exceptions=True)
        for one, (_, err) in zip(running, done):
            if one.returncode != 0:
                sys.exit(f"a process failed: {err.decode()[-500:]}")
        metrics = json.loads(done[0][0])["metrics"]
        # The first connection to each process is the one on which members watch each other.
        return sum(sum(proxy.counts[1:]) for proxy in proxies), metrics["decode_time"]


def check(options):
    config = json.loads((Path(options.model) / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    # Long beside the system's own waits, such as delayed acknowledgements of up to 40 ms.
    few, many, delays = 2, 6, [0.1, 0.2, 0.3]
    wrong = 0
    print("| Split | Processes | Bytes a token | Model | Messages one after another | Model |")
    print("|---|---|---|---|---|---|")
    for split, count in [("tensor", 2), ("tensor", 4), ("pipeline", 2), ("pipeline", 3)]:
        run = lambda tokens, delay: asyncio.run(group(options, split, count, tokens, delay))
        bytes_ = (run(many, 0.0)[0] - run(few, 0.0)[0]) / (many - few)
        times = [run(many, delay)[1] / (many - 1) for delay in delays]
        grown = statistics.linear_regression(delays, times).slope
        expected = sent(split, count, layers, hidden, 4), hops(split, count, layers)
        good = abs(bytes_ / expected[0] - 1) < 0.02 and abs(grown / expected[1] - 1) < 0.15
        wrong += not good
        print(
            f"| {split} | {count} | {bytes_:.0f} | {expected[0]:.0f} | {grown:.1f} | {expected[1]} |"
            + ("" if good else " wrong"),
            flush=True,
        )
    sys.exit(1 if wrong else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/mlx")
    parser.add_argument("--model", type=Path, default=ROOT / "tests/fixtures/tiny/llama")
    parser.add_argument("--bytes-per-weight", type=float, default=0.5625, help="4 bits, groups of 64")
    parser.add_argument("--memory-bandwidth", type=float, default=100.0, help="GB/s that are reached")
    parser.add_argument("--memory", type=float, default=64.0, help="GB of each machine")
    options = parser.parse_args()
    check(options) if options.check else table(options)


if __name__ == "__main__":
    main()
