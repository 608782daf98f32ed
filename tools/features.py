#!/usr/bin/env python3
"""Checks that every crate compiles without features, and with each of its features alone.

    tools/features.py                 all crates of the workspace
    tools/features.py rust-mlx        some of them

Warnings are errors. The feature `cuda` uses the committed bindings and downloads nothing of MLX, so it
can be checked on any machine. Dependencies are shared with clippy's builds: this is why warnings are
read from cargo's messages, and `RUSTFLAGS` stays as it is. The crates' default features together are
what all other builds compile.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def packages(names):
    """The crates of the workspace with their features."""
    command = ["cargo", "metadata", "--no-deps", "--locked", "--format-version", "1"]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    data = json.loads(text)
    members = set(data["workspace_members"])
    features = {p["name"]: p["features"] for p in data["packages"] if p["id"] in members}
    if unknown := set(names) - set(features):
        sys.exit(f"error: {', '.join(sorted(unknown))}: no such crate; there are {', '.join(features)}")
    return {name: features[name] for name in names or features}


def is_clean(command, env):
    """Runs a `cargo check`, and prints its warnings and errors. False if there is one."""
    command = [*command, "--message-format", "json"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE)
    clean = done.returncode == 0
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] != "compiler-message":
            continue
        # Cargo shows no warnings of packages from a registry.
        clean = False
        print(message["message"]["rendered"], file=sys.stderr)
    return clean


def main():
    failed, count = [], 0
    for name, features in packages(sys.argv[1:]).items():
        alone = [f for f in features if f != "default"]
        for feature in [None, *alone]:
            command = ["cargo", "check", "--quiet", "--locked", "-p", name]
            command += ["--no-default-features"]
            command += ["--features", feature] if feature else []
            shown = f"{name} with {feature or 'no feature'}"
            print(shown, flush=True)
            count += 1
            env = {"MLX_SYS_PREGENERATED": "1"} if feature == "cuda" else {}
            if not is_clean(command, os.environ | env):
                failed.append(shown)
    for shown in failed:
        print(f"error: {shown} does not compile", file=sys.stderr)
    print(f"{count - len(failed)} of {count} combinations compile")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
