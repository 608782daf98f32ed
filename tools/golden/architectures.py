"""Makes tests/fixtures/tiny/<architecture>: a tiny random checkpoint of each, with transformers' numbers.

The reference is Hugging Face transformers on torch, eager attention, float32 on the CPU: it shares no code with MLX, and
it is where the architectures come from. `save_pretrained` writes the checkpoint, so names and layouts are those that people
have. Weights are rounded to bfloat16, which halves the files; the numbers are those of the rounded weights in float32.

Prompts are longer than the sliding windows, and every greedy token must also be that of a pass without a cache. Where mlx-lm
has the architecture its greedy tokens are compared too, and the golden file says whether they agree.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx_reference  # first: it chooses the CPU
import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load as mlx_lm_load
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mistral4 import Mistral4ForCausalLM

import tiny_tokenizer
import xlstm_blocks
from architecture_specs import SPECS, Spec
from tiny_models import (
    DEFAULT_OUT,
    GREEDY_TOKENS,
    MIN_DISTINCT,
    MIN_MARGIN,
    PROMPT_LENGTHS,
    digits7,
    prompts,
    text_goldens,
    write_json,
)

def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], model_type: str, tied: bool) -> np.ndarray:
    """Values that keep activations near unit size and give logits a spread of a few units."""
    normal = rng.standard_normal(shape)
    gemma = model_type.startswith("gemma")
    plus_one = gemma and not model_type.startswith(("gemma4", "gemma3n"))
    if name.endswith(("layer_scalar", "per_expert_scale", "router.scale")):
        return 1.0 + 0.2 * normal
    if name.endswith("sinks"):
        return normal
    if name.endswith(("alpha_p", "alpha_n")):  # xIELU
        return 0.5 * normal
    if name.endswith("_recurrent_kernel_"):
        return 0.5 / np.sqrt(shape[-1]) * normal
    if name.endswith(("_bias_", "group_norm.weight")):  # the latter adds one
        return 0.3 * normal
    if name.endswith("fgate_preact.bias"):
        return 3.0 + 0.5 * normal  # a memory that reaches back
    if name.endswith("A_log"):  # decay rates around one
        return 0.5 * normal
    if name.endswith("dt_proj.bias"):
        return -1.0 + 0.5 * normal
    if name.endswith(("bias", "_bias")):
        return 0.3 * normal
    if len(shape) == 1:  # norms
        # Gemma scales its embedding up; it is drawn small, and the last norm makes up for it in the logits.
        last = 2.0 if gemma and name.endswith(("model.norm.weight", "language_model.norm.weight")) else 0.0
        return last + 0.2 * normal if plus_one else last + 1.0 + 0.2 * normal
    if any(part in name for part in ("embed_tokens", "wte", "wpe", "backbone.embeddings")):
        return (0.12 if gemma else 0.25 if tied else 0.5) * normal
    # The matrices of GPT-2 and the experts of gpt-oss and Llama 4 are stored as [.., in, out].
    transposed = model_type == "gpt2" or (model_type in ("gpt_oss", "llama4", "llama4_text") and ".experts." in name)
    fan_in = shape[-2] if transposed else shape[-1]
    return (2.0 if tied else 1.2) / np.sqrt(fan_in) * normal


def build(spec: Spec, seed: int) -> torch.nn.Module:
    """The model with weights of the seed, rounded to bfloat16 and held in float32."""
    config = AutoConfig.for_model(spec.model_type, **spec.config)
    config._attn_implementation = "eager"
    # AutoModelForCausalLM has Mistral 4 as the text part of a multimodal model only.
    make = Mistral4ForCausalLM._from_config if spec.model_type == "mistral4" else AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager").float().eval()
    xlstm_blocks.replace_blocks(model, spec.slstm)
    text = config.get_text_config()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        tensors = dict(model.named_parameters())
        tensors |= {name: value for name, value in model.named_buffers() if name.endswith("layer_scalar")}
        for name, value in sorted(tensors.items()):
            drawn = random_tensor(rng, name, tuple(value.shape), spec.model_type, bool(text.tie_word_embeddings))
            drawn = torch.from_numpy(drawn).to(torch.bfloat16).float().numpy()
            value.copy_(torch.from_numpy(as_stored(spec, name, drawn)))
    return model


def is_gpt_oss_expert(spec: Spec, name: str) -> bool:
    return spec.model_type == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj"))


def as_stored(spec: Spec, name: str, value: np.ndarray) -> np.ndarray:
    """What is left of a matrix when it is stored quantized: MLX's own rounding, along the inputs."""
    how = spec.format(name.removesuffix(".weight")) if value.ndim > 1 and "norm" not in name else None
    if how is None or (spec.model_type == "gpt_oss" and not is_gpt_oss_expert(spec, name)):
        return value
    turned = value.swapaxes(-1, -2) if is_gpt_oss_expert(spec, name) else value
    mode, bits, group = how
    back = turned
    # What is written is quantized from what is returned here, so that must not change it again.
    for _ in range(20):
        before = back
        parts = mx.quantize(mx.array(before), group_size=group, bits=bits, mode=mode)
        back = np.array(mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32))
        if np.array_equal(before, back):
            break
    else:
        raise ValueError(f"{name} does not settle when it is quantized again and again as {how}")
    return back.swapaxes(-1, -2) if is_gpt_oss_expert(spec, name) else back


def write_quantized(spec: Spec, out: Path) -> dict[str, tuple[str, int, int]]:
    """Quantizes what was saved, as MLX lays it out, or OpenAI for gpt-oss; returns the formats used."""
    path = out / "model.safetensors"
    arrays: dict[str, Any] = {}
    used: dict[str, tuple[str, int, int]] = {}
    for name, value in mx.load(str(path)).items():
        if is_gpt_oss_expert(spec, name):
            words, scales = mx.quantize(value.swapaxes(-1, -2), group_size=32, bits=4, mode="mxfp4")
            arrays[f"{name}_blocks"] = words.view(mx.uint8).reshape(*scales.shape, 16)
            arrays[f"{name}_scales"] = scales
            continue
        prefix = name.removesuffix(".weight")
        how = spec.format(prefix) if value.ndim > 1 and prefix != name and spec.model_type != "gpt_oss" else None
        if how is None:
            arrays[name] = value
            continue
        mode, bits, group = how
        parts = mx.quantize(value, group_size=group, bits=bits, mode=mode)
        arrays |= dict(zip((name, f"{prefix}.scales", f"{prefix}.biases"), parts))
        used[prefix] = how
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    return used


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    forget_length(model)
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def forget_length(model: torch.nn.Module) -> None:
    """Makes the rotation independent of earlier sequences: transformers keeps that of the longest one."""
    rope = model.config.get_text_config().rope_parameters if hasattr(model.config, "rope_parameters") else None
    if (rope or {}).get("rope_type") == "dynamic":
        model(input_ids=torch.tensor([[0]]), use_cache=False)


@torch.no_grad()
def greedy_of(
    model: torch.nn.Module, ids: list[int], cached: bool, gradual: bool = False
) -> tuple[list[int], float] | None:
    """Greedy tokens with a cache and the least margin, if a pass without one gives the same."""
    tokens: list[int] = []
    margins: list[float] = []
    while not cached and len(tokens) < GREEDY_TOKENS:
        row = np.sort(logits_of(model, ids + tokens)[-1])
        margins.append(float(row[-1] - row[-2]))
        tokens.append(int(logits_of(model, ids + tokens)[-1].argmax()))
    if not cached:
        return tokens, min(margins)
    forget_length(model)
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    while True:
        row = out.logits[0, -1]
        top = torch.topk(row, 2).values
        tokens.append(int(row.argmax()))
        margins.append(float(top[0] - top[1]))
        if len(tokens) == GREEDY_TOKENS:
            break
        # Recurrent models have a state in place of keys and values.
        cache_name = "cache_params" if hasattr(out, "cache_params") else "past_key_values"
        out = model(input_ids=torch.tensor([tokens[-1:]]), use_cache=True, **{cache_name: getattr(out, cache_name)})
    if gradual:
        return tokens, min(margins)
    one_pass = logits_of(model, ids + tokens[:-1])[len(ids) - 1 :]
    if one_pass.argmax(axis=-1).tolist() != tokens:
        return None
    return tokens, min(margins)


def numbers(model: torch.nn.Module, seed: int, cached: bool = True, gradual: bool = False) -> dict[str, Any] | None:
    """The golden numbers, or None if this seed gives no clear ones."""
    results = []
    for ids in prompts(seed):
        greedy = greedy_of(model, ids, cached, gradual)
        if greedy is None:
            return None
        tokens, margin = greedy
        clear = margin >= MIN_MARGIN and min(tokens) >= len(tiny_tokenizer.SPECIALS)
        if not clear or len(set(tokens)) < MIN_DISTINCT:
            return None
        every = logits_of(model, ids)
        result = {"tokens": ids, "logits": digits7(every[-1]), "greedy": tokens, "min_margin": float(f"{margin:.4g}")}
        if len(ids) == min(PROMPT_LENGTHS):
            result["logits_all"] = digits7(every)
        results.append(result)
    return {"min_margin": min(result["min_margin"] for result in results), "prompts": results}


def write_config(spec: Spec, out: Path, quantized_as: dict[str, tuple[str, int, int]]) -> None:
    """config.json as transformers wrote it, with what published checkpoints have otherwise."""
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "gemma4" in spec.model_type:
        # Published checkpoints name the sizes of full layers themselves.
        config.pop("per_layer_config", None)
        for name in ("global_head_dim", "num_global_key_value_heads"):
            if name in spec.config:
                config[name] = spec.config[name]
    if spec.model_type == "olmo3":
        # Published checkpoints scale with the one `rope_scaling`, which is for full layers only.
        config["rope_parameters"] = config["rope_parameters"]["full_attention"]
    if spec.model_type == "dbrx":
        # Published checkpoints have the base among the fields of attention only.
        del config["rope_parameters"]
    if spec.also_mlx_lm and "rope_theta" in config.get("rope_parameters", {}):
        # The older form, which mlx-lm reads.
        rope = config.pop("rope_parameters")
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                config[name] = rope.pop(name)
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = rope
    config |= spec.published
    if spec.model_type == "gpt_oss" and spec.quantize:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    elif spec.quantize:
        entries = {name: dict(zip(("mode", "bits", "group_size"), how)) for name, how in quantized_as.items()}
        common = Counter(json.dumps(entry) for entry in entries.values()).most_common(1)[0][0]
        table = json.loads(common) | {name: entry for name, entry in entries.items() if json.dumps(entry) != common}
        config["quantization"] = table
    write_json(path, config)


def agrees_with_mlx_lm(out: Path, golden: dict[str, Any]) -> bool:
    """Whether mlx-lm generates the same from the same files."""
    model, _ = mlx_lm_load(str(out))
    model.set_dtype(mx.float32)
    return all(
        mlx_reference.greedy(model, case["tokens"], GREEDY_TOKENS).tokens == case["greedy"] for case in golden["prompts"]
    )


def make(spec: Spec, out_root: Path, first_seed: int) -> int:
    """Writes one fixture; returns its size in bytes."""
    for seed in range(first_seed, first_seed + 500):
        model = build(spec, seed)
        result = numbers(model, seed, cached=not spec.slstm, gradual=spec.gradual)
        if result is None:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / spec.name
            if not spec.quantize:
                model.to(torch.bfloat16)
            model.save_pretrained(out, safe_serialization=True)
            write_config(spec, out, write_quantized(spec, out) if spec.quantize else {})
            (out / "generation_config.json").unlink(missing_ok=True)
            files = tiny_tokenizer.files(spec.pre)
            golden = {
                "made_by": "tools/golden/architectures.py",
                "reference": {
                    "transformers": version("transformers"),
                    "torch": version("torch"),
                    "device": "cpu",
                    "compute": "float32",
                },
                "seed": seed,
                **result,
                "text": text_goldens(spec, files["tokenizer.json"]),
            }
            write_json(out / "tokenizer.json", files["tokenizer.json"], compact=True)
            write_json(out / "tokenizer_config.json", files["tokenizer_config.json"])
            if spec.also_mlx_lm:
                if not agrees_with_mlx_lm(out, golden):
                    raise SystemExit(f"{spec.name}: mlx-lm generates something else")
                golden["reference"]["mlx_lm_agrees"] = version("mlx-lm")
            write_json(out / "golden.json", golden, compact=True)
            target = out_root / spec.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(out, target)
            size = sum(file.stat().st_size for file in target.iterdir())
            agreed = ", mlx-lm agrees" if spec.also_mlx_lm else ""
            print(f"{spec.name}: seed {seed}, min margin {golden['min_margin']}, {size / 1024:.0f} KiB{agreed}", flush=True)
            return size
    raise SystemExit(f"{spec.name}: no seed from {first_seed} on gives clear margins")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fixtures to make; default: all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: tests/fixtures/tiny")
    parser.add_argument("--seed", type=int, default=1, help="first seed to try")
    args = parser.parse_args()
    known = {spec.name: spec for spec in SPECS}
    if unknown := set(args.names) - set(known):
        parser.error(f"no fixture {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    total = sum(make(known[name], args.out, args.seed) for name in args.names or known)
    print(f"{total / 2**20:.2f} MiB in {args.out}")


if __name__ == "__main__":
    main()
