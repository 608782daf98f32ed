"""Invented roots in the patterns of Semitic words, as stimuli for `mlx probe`.

    python tools/probe_stimuli.py

writes `examples/data/probe/nonce_root_pattern.json`. A root has three consonants, a pattern says where
they stand, and neither is a word that a model has read. The template `en_zero` shows neither root nor
pattern. The others print one of them: they are positive controls, and a probe that reads that label
from them says nothing about what the model worked out.
"""

import json
import random
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[1] / "examples/data/probe/nonce_root_pattern.json"
PATTERNS = {
    "CaCiC": "{0}a{1}i{2}",
    "maCCuC": "ma{0}{1}u{2}",
    "CuCayC": "{0}u{1}ay{2}",
    "taCCiC": "ta{0}{1}i{2}",
    "iCtaCaC": "i{0}ta{1}a{2}",
    "CaCCaC": "{0}a{1}{1}a{2}",
}


def main():
    order = random.Random(20261123)
    roots = set()
    while len(roots) < 12:
        roots.add(tuple(order.sample("bdfgklmnprstvz", 3)))
    stimuli = []
    for root in sorted(roots):
        for pattern, form in PATTERNS.items():
            name, surface = "-".join(root), form.format(*root)
            stimuli.append({
                "root": name,
                "root_consonants": "".join(root),
                "pattern": pattern,
                "expected_surface": surface,
                "prompts": {
                    "en_zero": f"A new word of an old language: {surface}",
                    "en_root": f"The root {name} becomes the word {surface}",
                    "en_ask": f"The root {name} in the pattern {pattern} gives the word",
                },
            })
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(stimuli, indent=1) + "\n")


main()
