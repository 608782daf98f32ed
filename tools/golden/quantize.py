"""Makes metal-backend/tests/fixtures/quantize.json: tiny matrices quantized by GPTQ and AWQ, computed with numpy in float64.

Nothing here is shared with the program: GPTQ updates the inverse Hessian by Gaussian elimination after each column
(Frantar et al. 2022, equation 3) instead of a Cholesky factor, and AWQ measures errors on the activations themselves
(Lin et al. 2023, section 3.2) instead of their second moments. The formulas of MLX's affine mode are those of
`mx.quantize`.

    pip install numpy==2.4.6
    python tools/golden/quantize.py
"""

import json
from pathlib import Path

import numpy as np

OUT = Path(__file__).resolve().parents[2] / "metal-backend" / "tests" / "fixtures" / "quantize.json"

SIZE = 32  # of a group
N_GRID = 10
DAMPING = 0.01


def affine(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases of the groups of `w` [out, in]."""
    groups = w.reshape(w.shape[0], -1, SIZE)
    low, high = groups.min(-1), groups.max(-1)
    most = 2**bits - 1
    scale = np.maximum((high - low) / most, 1e-7)
    is_low = np.abs(low) > np.abs(high)
    scale = np.where(is_low, scale, -scale)
    edge = np.where(is_low, low, high)
    code = np.round(edge / scale)
    scale = np.where(code != 0, edge / np.where(code == 0, 1, code), scale)
    return scale, np.where(code == 0, 0, edge)


def codes(w: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int) -> np.ndarray:
    exact = np.clip((w - bias) / scale, 0, 2**bits - 1)
    # A value near the middle of two codes would make the comparison depend on the last digits.
    margin = np.abs(exact - np.floor(exact) - 0.5).min()
    assert margin > 1e-4, margin
    return np.round(exact)


def rounded(w: np.ndarray, scale: np.ndarray, bias: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values of `w` [out, in] for the scales and biases of its groups."""
    scale, bias = np.repeat(scale, SIZE, -1), np.repeat(bias, SIZE, -1)
    code = codes(w, scale, bias, bits)
    return code, code * scale + bias


def gptq(w: np.ndarray, x: np.ndarray, bits: int) -> dict[str, list]:
    w = w.copy()
    hessian = 2 * x.T @ x
    hessian += np.eye(len(hessian)) * DAMPING * np.diag(hessian).mean()
    inverse = np.linalg.inv(hessian)
    scales, biases, all_codes = [], [], []
    for column in range(w.shape[1]):
        if column % SIZE == 0:
            scale, bias = affine(w[:, column : column + SIZE], bits)
            scales.append(scale[:, 0])
            biases.append(bias[:, 0])
        code = codes(w[:, column], scales[-1], biases[-1], bits)
        error = w[:, column] - (code * scales[-1] + biases[-1])
        all_codes.append(code)
        # The update that changes the outputs least, and the inverse without this column.
        w -= np.outer(error / inverse[column, column], inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        # Quantized columns must not change any more.
        inverse[column] = inverse[:, column] = 0
    return {
        "codes": np.array(all_codes).T.astype(int).tolist(),
        "scales": np.array(scales).T.tolist(),
        "biases": np.array(biases).T.tolist(),
    }


def awq_scales(ws: list[np.ndarray], x: np.ndarray, bits: int) -> tuple[list, float]:
    mean = np.maximum(np.abs(x).mean(0), 1e-4)
    losses = []
    for step in range(N_GRID):
        s = mean ** (step / N_GRID)
        s /= np.sqrt(s.max() * s.min())
        loss = 0.0
        for w in ws:
            scale, bias = affine(w * s, bits)
            _, value = rounded(w * s, scale, bias, bits)
            loss += ((x @ (value / s - w).T) ** 2).sum()
        losses.append((loss, s.tolist()))
    ordered = sorted(losses, key=lambda pair: pair[0])
    assert ordered[1][0] > ordered[0][0] * 1.001, "the two best exponents are too close"
    assert ordered[0][0] < losses[0][0] * 0.95, "scaling must help here"
    return ordered[0][1], ordered[0][0]


def awq_clipped(w: np.ndarray, x: np.ndarray, bits: int) -> dict[str, list]:
    groups = w.reshape(w.shape[0], -1, SIZE)
    inputs = x.reshape(len(x), -1, SIZE)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    losses, choices = [], []
    for step in range(N_GRID):
        share = 1 - 0.5 * step / N_GRID
        scale, bias = affine(np.clip(groups, low * share, high * share).reshape(w.shape), bits)
        _, value = rounded(w, scale, bias, bits)
        error = value.reshape(groups.shape) - groups
        losses.append((np.einsum("tgs,ogs->tog", inputs, error) ** 2).sum(0))
        choices.append((scale, bias))
    best = np.argmin(losses, 0)
    ordered = np.sort(losses, 0)
    assert (ordered[1] > ordered[0] * 1.0001).all(), "the two best ranges are too close"
    assert (best > 0).any(), "clipping must help here"
    pick = lambda part: np.take_along_axis(np.array([c[part] for c in choices]), best[None], 0)[0]
    scale, bias = pick(0), pick(1)
    code, _ = rounded(w, scale, bias, bits)
    return {"codes": code.astype(int).tolist(), "scales": scale.tolist(), "biases": bias.tolist()}


def case(seed: int, bits: int) -> dict:
    random = np.random.default_rng(seed)
    # Correlated inputs, some of them much greater than the others, as in language models.
    x = random.normal(size=(40, 64)) @ (np.eye(64) + 0.3 * random.normal(size=(64, 64)) / 8)
    x[:, random.choice(64, 6, replace=False)] *= 12
    x = x.round(2)
    w, v = (random.standard_t(4, size=(rows, 64)).round(3) for rows in (5, 3))
    scales, loss = awq_scales([w, v], x, bits)
    return {
        "bits": bits,
        "group_size": SIZE,
        "damping": DAMPING,
        "n_grid": N_GRID,
        "inputs": x.tolist(),
        "weights": [w.tolist(), v.tolist()],
        "gptq": gptq(w, x, bits),
        "awq_scales": scales,
        "awq_loss": loss,
        "awq_clipped": awq_clipped(w, x, bits),
    }


def first(bits: int, seeds: range) -> dict:
    """The case of the first seed without ambiguous roundings."""
    for seed in seeds:
        try:
            return case(seed, bits)
        except AssertionError:
            continue
    raise SystemExit("no seed gives a case without ambiguities")


def main() -> None:
    cases = [first(bits, range(bits * 1000, bits * 1000 + 1000)) for bits in (2, 3, 4)]
    # Nine digits are more than the float32 of the comparison has.
    short = lambda value: json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.9g}"))
    OUT.write_text(json.dumps(short(cases), separators=(",", ":")) + "\n", encoding="utf-8")


main()
