#!/usr/bin/env python3
"""Checks that every crate compiles without features, and with each of its features alone.

    tools/features.py                 all crates of the workspace
    tools/features.py rust-mlx        some of them

Warnings are errors. Nothing of MLX is built or downloaded: the committed bindings are used, which is
why `cuda` can be checked on any machine. Builds go to `target/features`. The crates' default features
together are what all other builds compile.
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


def main():
    env = os.environ | {
        "CARGO_TARGET_DIR": str(ROOT / "target/features"),
        "MLX_SYS_PREGENERATED": "1",
        "RUSTFLAGS": "-D warnings",
    }
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
            if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
                failed.append(shown)
    for shown in failed:
        print(f"error: {shown} does not compile", file=sys.stderr)
    print(f"{count - len(failed)} of {count} combinations compile")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
