"""The Python side of compare_cost.py: the cases of mlx-rs-core/benches/cost.rs with `mlx.core`, on the CPU.

Prints one JSON object of nanoseconds a call, the least of many short samples, as the Rust side does. The loop that
repeats a call is Python's own, as it is in a program.
"""

import json
import time

import mlx.core as mx
import numpy as np

GRAPH = 10_000
COPIED = 1 << 20
SAMPLES = 60
SAMPLE = 0.004

results = {}


def timed(name, parts, f):
    n = 1
    while f(n) < SAMPLE:
        n *= 2
    results[name] = min(f(n) for _ in range(SAMPLES)) * 1e9 / (n * parts)


def case(name, f):
    def repeat(n):
        start = time.perf_counter()
        for _ in range(n):
            f()
        return time.perf_counter() - start

    timed(name, 1, repeat)


def main():
    mx.set_default_device(mx.cpu)
    a = mx.array(1.0)
    m = mx.zeros((64, 64))
    mx.eval(a, m)

    def add(n):
        # Without a function call between, which would count against Python alone.
        start = time.perf_counter()
        for _ in range(n):
            a + a
        return time.perf_counter() - start

    timed("add", 1, add)
    case("matmul", lambda: m @ m)
    case("scalar", lambda: mx.array(1.0))
    case("operator_with_scalar", lambda: a * 2.0)
    case("index_row", lambda: m[3])
    case("index_ranges", lambda: m[1:9, ::2])
    case("reshape", lambda: m.reshape(32, 128))

    def graph(n):
        spent = 0.0
        for _ in range(n):
            start = time.perf_counter()
            x = a + a
            for _ in range(1, GRAPH):
                x = x + a
            spent += time.perf_counter() - start
            del x
        return spent

    timed("graph", GRAPH, graph)

    case("evaluate_scalar", lambda: (a + a).item())
    case("item", lambda: a.item())
    values = np.ones(COPIED, np.float32)
    case("copy_in_1m", lambda: mx.array(values))
    b = mx.array(values)
    mx.eval(b)
    case("copy_out_1m", lambda: np.array(b))
    case("borrow_1m", lambda: np.array(b, copy=False)[COPIED - 1])
    case("memory_active", mx.get_active_memory)
    print(json.dumps({"versions": {"mlx": mx.__version__, "numpy": np.__version__}, "results": results}))


if __name__ == "__main__":
    main()
