#!/usr/bin/env python3
"""Checks that the kernels compile on aarch64: without the code for x86-64, and with that for NEON.

    tools/other_processors.py

Rust has no standard library for another processor here, so the compiler's target stays that of this
machine. In a copy of the crate in target/other_processors, the conditions for aarch64 hold, those for
x86-64 do not, and the NEON instructions are emulated, as in tests.
Warnings are errors. The rest of the workspace has no condition on the processor, which the test
`platforms` checks. `tools/aarch64.sh` runs the kernels with the real instructions.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CRATE = "mlx-cpu-kernels"
WORK = ROOT / "target" / "other_processors"

# A processor that this machine surely is not.
NEVER = 'target_arch = "wasm32"'
X86 = 'target_arch = "x86_64"'
ARM = 'target_arch = "aarch64"'
# In these files, the condition chooses between the instructions and their emulation.
EMULATED = ("simd/neon/mod.rs", "simd/neon/intrinsics.rs")


def with_neon(name, text):
    """The source as aarch64 compiles it, with emulated instructions."""
    here = f'target_arch = "{platform.machine()}"'
    text = text.replace(X86, NEVER)
    # Attributes for the compiler's instruction sets are not valid for another processor.
    text = text.replace(f"cfg_attr({ARM}, target_feature", f"cfg_attr({NEVER}, target_feature")
    text = text.replace(ARM, NEVER if name.endswith(EMULATED) else here)
    for feature in ("neon", "dotprod"):
        text = text.replace(f'std::arch::is_aarch64_feature_detected!("{feature}")', "std::hint::black_box(true)")
    return text


def manifest():
    """The workspace's manifest with this crate alone."""
    text = (ROOT / "Cargo.toml").read_text()
    parts = text.split("\n[")
    wanted = ("workspace.package]", "workspace.dependencies]", "workspace.lints")
    kept = [part for part in parts if part.startswith(wanted)]
    return f'[workspace]\nresolver = "3"\nmembers = ["{CRATE}"]\n\n' + "\n".join(f"[{part}" for part in kept)


def check(name, change):
    """Checks a changed copy. False if it does not compile without warnings."""
    copy = WORK / name
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", CRATE], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for path in listed.stdout.decode().splitlines():
        source, to = ROOT / path, copy / path
        if path.startswith(f"{CRATE}/tests/") or not source.exists():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".rs") and path.startswith((f"{CRATE}/src/", f"{CRATE}/benches/")):
            to.write_text(change(path, source.read_text()))
        else:
            shutil.copy(source, to)
    (copy / "Cargo.toml").write_text(manifest())
    shutil.copy(ROOT / "Cargo.lock", copy)
    env = {**os.environ, "CARGO_TARGET_DIR": str(WORK / "target")}
    command = ["cargo", "clippy", "--quiet", "--all-targets", "--", "-D", "warnings"]
    good = subprocess.run(command, cwd=copy, env=env).returncode == 0
    print(f"{name}: {'compiles' if good else 'does not compile'}")
    return good


def main():
    if platform.machine() in ("aarch64", "arm64"):
        print("this machine is of that kind: clippy checks it")
        return
    sys.exit(0 if check("aarch64", with_neon) else 1)


if __name__ == "__main__":
    main()
