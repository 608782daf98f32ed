#!/usr/bin/env python3
"""Runs groups of processes over a network with delay and loss, and compares their results and times
with those of one process and of a network without both.

    sudo python3 tools/group_network.py --program target/release/mlx

Each process is in a network namespace of its own (`ip netns`). Its only interface is a TUN device,
whose packets this script delivers to the others: after a delay, or not at all. So TCP sends what was
lost again, as on a real network. Needs Linux, root, `ip` and Python alone. The last line is a JSON
object; the exit code is 1 if a group fails or its text differs from that of one process.
"""

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORT = 32323
# Linux: TUNSETIFF, and a device of IP packets without headers of its own.
SET_DEVICE, TUN_WITHOUT_HEADERS = 0x400454CA, 0x1001


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True)


class Network:
    """Namespaces whose machines have the addresses 10.77.0.1, 10.77.0.2, ..."""

    def __init__(self, count, delay, loss, seed):
        self.delay, self.loss, self.random = delay, loss, random.Random(seed)
        self.mark = uuid.uuid4().hex[:6]
        self.spaces, self.devices = [], []
        self.sent = self.lost = 0
        self.stopped = False
        for n in range(count):
            space, device = f"mlx{self.mark}{n}", f"t{self.mark}{n}"
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self.devices.append(file)
            fcntl.ioctl(file, SET_DEVICE, struct.pack("16sH", device.encode(), TUN_WITHOUT_HEADERS))
            ip("netns", "add", space)
            self.spaces.append(space)
            ip("link", "set", device, "netns", space)
            ip("-n", space, "address", "add", f"10.77.0.{n + 1}/24", "dev", device)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", device, "up")
        self.thread = threading.Thread(target=self.deliver)
        self.thread.start()

    def deliver(self):
        waiting, number = [], 0
        while not self.stopped:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(waiting)
                try:
                    os.write(self.devices[target], packet)
                except BlockingIOError:
                    self.lost += 1
            pause = max(0.0, min(0.05, waiting[0][0] - now)) if waiting else 0.05
            for file in select.select(self.devices, [], [], pause)[0]:
                try:
                    packet = os.read(file, 1 << 16)
                except BlockingIOError:
                    continue
                # IPv4 to one of the namespaces; the system also sends IPv6 of its own.
                if packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x4d\x00":
                    continue
                target = packet[19] - 1
                if not 0 <= target < len(self.devices):
                    continue
                self.sent += 1
                if self.random.random() < self.loss:
                    self.lost += 1
                    continue
                number += 1
                heapq.heappush(waiting, (time.monotonic() + self.delay, number, target, packet))

    def close(self):
        self.stopped = True
        self.thread.join()
        for file in self.devices:
            os.close(file)
        for space in self.spaces:
            ip("netns", "delete", space)


def command(options):
    words = [str(options.program), "generate", "--model", str(options.model), "--tokens", "5,17,42"]
    return [*words, "--max-tokens", str(options.tokens), "--ignore-eos", "--json"]


def alone(options):
    done = subprocess.run(command(options), stdout=subprocess.PIPE, check=True, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout)


def together(options, split, count, delay, loss):
    """The result of a group, and the share of packets that were lost."""
    network = Network(count, delay, loss, options.seed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            hosts = Path(folder) / "hosts.json"
            hosts.write_text(json.dumps([[f"10.77.0.{n + 1}:{PORT}"] for n in range(count)]))
            running = []
            for rank, space in enumerate(network.spaces):
                environment = dict(os.environ, MLX_RANK=str(rank), MLX_HOSTFILE=str(hosts))
                environment.update(MLX_SPLIT=split, MLX_NUM_THREADS="1")
                running.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", space, *command(options)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
            done = [one.communicate(timeout=options.limit) for one in running]
            for rank, (one, (_, err)) in enumerate(zip(running, done, strict=True)):
                if one.returncode != 0:
                    raise RuntimeError(f"rank {rank} failed: {err.decode()[-300:]}")
            return json.loads(done[0][0]), network.lost / max(1, network.sent)
    finally:
        network.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/mlx", help="the built `mlx`")
    parser.add_argument("--model", type=Path, default=ROOT / "tests/fixtures/tiny/llama")
    parser.add_argument("--tokens", type=int, default=33, metavar="N")
    parser.add_argument("--seed", type=int, default=7, help="of the losses")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each group")
    options = parser.parse_args()
    expected = alone(options)
    print("| Split | Processes | Delay (ms) | Loss (%) | Lost (%) | ms a token |")
    print("|---|---|---|---|---|---|")
    failed, rows = 0, []
    for split, count in [("tensor", 2), ("tensor", 4), ("pipeline", 3)]:
        for delay, loss in [(0, 0), (1, 0), (10, 0), (1, 0.01), (1, 0.05)]:
            try:
                made, lost = together(options, split, count, delay / 1e3, loss)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{split}, {count} processes, {delay} ms, loss {loss}: {error}", file=sys.stderr)
                failed += 1
                continue
            if made["text"] != expected["text"]:
                print(f"{split}, {count} processes: the text differs", file=sys.stderr)
                failed += 1
            each = 1e3 * made["metrics"]["decode_time"] / (options.tokens - 1)
            rows.append({"split": split, "processes": count, "delay": delay, "loss": loss, "ms": each})
            print(f"| {split} | {count} | {delay} | {100 * loss:g} | {100 * lost:.1f} | {each:.1f} |", flush=True)
    print(json.dumps({"failed": failed, "rows": rows}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
