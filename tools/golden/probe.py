"""Golden numbers for `inference-probe`: scikit-learn, scipy and numpy on small random activations.

    pip install -r tools/golden/requirements-probe.txt
    python tools/golden/probe.py

writes `inference-probe/tests/fixtures/probe.json`.
"""

import json
from pathlib import Path

import numpy as np
from scipy.spatial.distance import jensenshannon, pdist
from sklearn.cross_decomposition import CCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

OUTPUT = Path(__file__).resolve().parents[2] / "inference-probe/tests/fixtures/probe.json"


def logistic(rows, labels, folds):
    """Weights of the whole set, and accuracies of the folds."""
    exact = LogisticRegression(C=1.0, max_iter=10000, tol=1e-10)
    exact.fit(StandardScaler().fit_transform(rows), labels)
    accuracies = []
    for train, test in folds:
        scaler = StandardScaler().fit(rows[train])
        probe = LogisticRegression(C=1.0, max_iter=2000, tol=1e-4)
        probe.fit(scaler.transform(rows[train]), labels[train])
        accuracies.append(probe.score(scaler.transform(rows[test]), labels[test]))
    return {
        "labels": labels.tolist(),
        "folds": [{"train": a.tolist(), "test": b.tolist()} for a, b in folds],
        "weights": exact.coef_.tolist(),
        "intercepts": exact.intercept_.tolist(),
        "accuracies": accuracies,
    }


def components(rows):
    """Scores and variances of the principal components."""
    centered = rows - rows.mean(0)
    u, s, vt = np.linalg.svd(centered, full_matrices=False)
    keep = s > np.finfo(float).eps * max(rows.shape) * s[0]
    return rows.mean(0), vt[keep].T, u[:, keep] * s[keep], s[keep] ** 2 / (len(rows) - 1)


def cross(x, y, ridge):
    (_, _, sx, vx), (_, _, sy, vy) = x, y
    wx = 1 / np.sqrt(vx + ridge * vx.mean())
    wy = 1 / np.sqrt(vy + ridge * vy.mean())
    return wx, wy, (wx[:, None] * (sx.T @ sy / (len(sx) - 1))) * wy


def cca(a, b, ridge, k):
    _, _, m = cross(components(a), components(b), ridge)
    return np.clip(np.linalg.svd(m, compute_uv=False)[:k], 0, 1).tolist()


def cca_held_out(a, b, train, test, ridge, k):
    x, y = components(a[train]), components(b[train])
    wx, wy, m = cross(x, y, ridge)
    u, _, vt = np.linalg.svd(m)
    p = ((a[test] - x[0]) @ x[1] * wx) @ u[:, :k]
    q = ((b[test] - y[0]) @ y[1] * wy) @ vt[:k].T
    values = [np.corrcoef(p[:, i], q[:, i])[0, 1] for i in range(min(p.shape[1], q.shape[1], k))]
    return float(np.mean(np.clip(values, 0, 1)))


def main():
    random = np.random.default_rng(20261123)
    n, layers, width = 48, 3, 8
    three = np.arange(n) % 3
    base = random.normal(size=(n, layers, width))
    for layer in range(layers):
        base[:, layer, :3] += 0.6 * layer * np.eye(3)[three]
    base[:, 2] += 0.5 * base[:, 1]
    activations = base.astype(np.float32)
    rows = activations.astype(np.float64)
    two = (three == 1).astype(int)
    folder = StratifiedKFold(5, shuffle=True, random_state=0)
    folds = list(folder.split(rows[:, 0], three))

    # scikit-learn's own CCA for the case without a ridge.
    fitted = CCA(n_components=3, scale=False, max_iter=5000, tol=1e-12).fit(rows[:, 0], rows[:, 1])
    p, q = fitted.transform(rows[:, 0], rows[:, 1])
    sklearn_cca = [float(np.corrcoef(p[:, i], q[:, i])[0, 1]) for i in range(3)]

    def rsm(layer, metric):
        return 1 - pdist(rows[:, layer], metric)

    metrics = ["correlation", "cosine", "euclidean"]
    logits = random.normal(size=(4, 17)).astype(np.float32) * 3
    p = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    group = three == 0
    means = rows[group, 1].mean(0), rows[~group, 1].mean(0)
    golden = {
        "shape": [n, layers, width],
        "activations": activations.ravel().tolist(),
        "logistic": {
            "two": [logistic(rows[:, i], two, folds) for i in range(layers)],
            "three": [logistic(rows[:, i], three, folds) for i in range(layers)],
        },
        "cca": {
            "sklearn_0_1": sklearn_cca,
            "ridge_0_1": cca(rows[:, 0], rows[:, 1], 1e-4, 10),
            "ridge_1_2": cca(rows[:, 1], rows[:, 2], 1e-4, 10),
            "labels_2": cca(rows[:, 2], np.eye(3)[three], 1e-4, 10),
            "held_out_1_2": [cca_held_out(rows[:, 1], rows[:, 2], a, b, 1e-4, 4) for a, b in folds],
        },
        "rsa": {
            metric: {
                "first": rsm(0, metric)[:10].tolist(),
                "matrix": np.corrcoef([rsm(i, metric) for i in range(layers)]).tolist(),
            }
            for metric in metrics
        },
        "divergence": {
            "logits": logits.tolist(),
            # scipy gives the distance, the root of the divergence.
            "pairs": [float(jensenshannon(p[i], p[i + 1]) ** 2) for i in range(3)],
            "group": group.tolist(),
            "cosine": float(1 - means[0] @ means[1] / np.linalg.norm(means[0]) / np.linalg.norm(means[1])),
            "euclidean": float(np.linalg.norm(means[0] - means[1])),
        },
    }
    OUTPUT.write_text(json.dumps(golden) + "\n")


main()
