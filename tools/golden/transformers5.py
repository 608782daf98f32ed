"""Makes tests/fixtures/transformers5.json: config.json of the tiny checkpoints as transformers 5 saves them.

Each checkpoint that transformers loads is saved again. transformers 5 names fields otherwise (`dtype`, `rope_parameters`),
adds some, and tags numbers that JSON does not have. Its tensors must be among those of the checkpoint, so that a
test can put the new configuration beside them; a checkpoint whose tensors change is left out and named.

    python tools/golden/transformers5.py            # needs requirements-transformers.txt
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny"


def shapes(file: Path) -> dict[str, list[int]]:
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}


def saved(source: Path) -> dict[str, Any] | str:
    """The configuration as transformers saves it and the tensors that it leaves out, or why there is none."""
    if "quantization" in json.loads((source / "config.json").read_text()):
        return "quantized by MLX"
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except ImportError as missing:
        return str(missing).splitlines()[0]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        model.save_pretrained(out)
        before, after = (shapes(at / "model.safetensors") for at in (source, out))
        if any(before.get(name) != shape for name, shape in after.items()):
            return "other tensors"
        dropped = sorted(before.keys() - after.keys())
        return {"config": json.loads((out / "config.json").read_text()), "dropped": dropped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/fixtures/transformers5.json")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    checkpoints: dict[str, Any] = {}
    for source in sorted(file.parent for file in TINY.glob("*/model.safetensors")):
        match saved(source):
            case str(reason):
                print(f"{source.name}: left out, {reason}")
            case keys:
                checkpoints[source.name] = keys
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(keys)}" for name, keys in checkpoints.items())
    reference = {"transformers": version("transformers"), "torch": version("torch")}
    args.out.write_text(f'{{"reference": {json.dumps(reference)}, "checkpoints": {{\n{lines}\n}}}}\n')
    print(f"{len(checkpoints)} configurations in {args.out}")


if __name__ == "__main__":
    main()
