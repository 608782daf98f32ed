#!/usr/bin/env python3
"""Checks the server against its own description, `/openapi.json`, with schemathesis.

    python3 -m venv target/schema
    target/schema/bin/pip install schemathesis==4.32.5
    cargo build -p rust-mlx-inference-server --example scripted
    target/schema/bin/python tools/serve_schema.py target/debug/examples/scripted

Schemathesis makes requests of the description, valid and invalid ones. No answer may be a fault of
the server. Status, content type and type of each answer must be described, and a request that the
description does not admit must be refused. After the run the server must answer, and hold no
request.

One check is off: that each request that matches the description is accepted. A JSON schema cannot
say that a conversation has a message or that a token is in the vocabulary. `/rerank` may answer
with status 501, since no model for it can be loaded.

`--examples N` sets the number of random requests of each route, and `--seed` what they are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

CONFIG = """
[checks]
positive_data_acceptance.enabled = false

[[operations]]
include-name = "POST /rerank"
checks.not_a_server_error.enabled = false
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the example `scripted` of the server")
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    server = subprocess.Popen(
        [options.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    url = server.stdout.readline().strip()
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "schemathesis.toml"
        config.write_text(CONFIG)
        command = [str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(config)]
        command += ["run", f"{url}/openapi.json", "--phases", "examples,coverage,fuzzing"]
        command += ["--max-examples", str(options.examples), "--seed", str(options.seed)]
        command += ["--no-color", "--request-timeout", "20"]
        code = subprocess.run(command, cwd=place).returncode
    with urllib.request.urlopen(f"{url}/ready", timeout=30) as answer:
        ready = json.loads(answer.read())
    assert ready["requests"] == 0, ready
    server.stdin.close()
    assert server.wait(timeout=60) == 0, server.returncode
    sys.exit(code)


if __name__ == "__main__":
    main()
