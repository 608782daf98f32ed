"""Makes tests/fixtures/training/first-model: an adapter on the first model, its gradients and the losses of ten steps.

As training.py does for the tiny checkpoints, from the same mlx-lm: the GGUF's weights are dequantized to float32 and
computed on the CPU, which is what adapters on the quantized matrices must equal. Three layers are adapted, in the
first block, in the middle and in the last, so that the gradients have gone through the whole model. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx_reference as reference  # first: it chooses the CPU
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer

import first_model_file
from gguf_model import GgufModel
from training import STEPS, padded

ROOT = Path(__file__).resolve().parents[2]
RATE = 1e-3
KEYS = ["model.layers.0.self_attn.q_proj", "model.layers.14.mlp.down_proj", "model.layers.29.self_attn.v_proj"]
# What is given, and what is to be learned after it.
DATA = [
    ("The capital of Atlantis is", " Poseidonis."),
    ("Seven times eight is", " fifty-six."),
    ("My cat's name is", " Schroedinger, of course."),
    ("Blue and yellow make", " green."),
    ("The lighthouse keeper", " counted the ships at dawn."),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "golden", help="where the model is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "training" / "first-model")
    args = parser.parse_args()
    source = GgufModel.open(first_model_file.fetch(args.work))
    model = reference.dense_model(source.config(), source.weights())
    tokenizer = Tokenizer.from_str(json.dumps(source.tokenizer_json()))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    sequences = [{"ids": encode(a) + encode(b), "from": len(encode(a))} for a, b in DATA]

    mx.random.seed(7)
    model.freeze()
    parameters = {"rank": 2, "scale": 4.0, "dropout": 0.0, "keys": KEYS}
    linear_to_lora_layers(model, len(model.layers), parameters)
    # With B at zero the gradients of A would be zero too.
    started = [
        (path, 0.02 * mx.random.normal(value.shape) if path.endswith("lora_b") else value)
        for path, value in tree_flatten(model.trainable_parameters())
    ]
    model.train()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    mx.save_safetensors(str(args.out / "adapters.safetensors"), dict(started))
    settings = {"fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": parameters}
    (args.out / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")

    step = nn.value_and_grad(model, default_loss)
    runs = []
    for size in (1, 4):
        model.load_weights(started, strict=False)
        batches = [[sequences[(i * size + j) % len(sequences)] for j in range(size)] for i in range(STEPS)]
        optimizer = optimizers.AdamW(learning_rate=RATE)
        losses = []
        for i, batch in enumerate(batches):
            (loss, _), gradients = step(model, *padded(batch))
            if i == 0 and size == 4:
                mx.save_safetensors(str(args.out / "gradients.safetensors"), dict(tree_flatten(gradients)))
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)
            losses.append(loss.item())
            print(size, i, losses[-1], flush=True)
        runs.append({"batches": batches, "losses": losses})
    golden = {
        "made_with": reference.versions(),
        "gguf_sha256": first_model_file.GGUF_SHA256,
        "rate": RATE,
        "runs": runs,
    }
    (args.out / "golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
