"""Makes `examples/data/pirate/`: a small synthetic data set that teaches a behavior one can see.

Every answer of the assistant begins with `Arr!` and ends with `, matey.`; what is between answers the question. A model that has
learned it answers questions that are in none of the files in the same way. Needs only Python's standard library; the files are the same each time.

    python3 tools/pirate_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "examples/data/pirate"
SIZES = {"train": 100, "valid": 20, "test": 20}

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Germany": "Berlin",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Hungary": "Budapest", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima",
    "Chile": "Santiago", "Cuba": "Havana", "Canada": "Ottawa", "Australia": "Canberra", "Turkey": "Ankara",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "old": "young", "dark": "light", "wet": "dry",
    "full": "empty", "early": "late", "hard": "soft", "near": "far", "open": "closed", "rich": "poor",
    "strong": "weak", "long": "short", "loud": "quiet", "heavy": "light", "clean": "dirty", "happy": "sad",
}
COLORS = {
    "grass": "green", "the sky": "blue", "snow": "white", "coal": "black", "a ripe banana": "yellow",
    "blood": "red", "an orange": "orange", "a lemon": "yellow", "milk": "white", "a ripe tomato": "red",
}
ANIMALS = {
    "a dog": "barks", "a cat": "meows", "a cow": "moos", "a duck": "quacks", "a lion": "roars", "a sheep": "bleats",
    "a wolf": "howls", "a snake": "hisses", "a horse": "neighs", "a frog": "croaks",
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def pairs() -> list[tuple[str, str]]:
    """All questions with their answers, before the pirate says them."""
    out = [(f"What is the capital of {k}?", f"the capital of {k} is {v}") for k, v in CAPITALS.items()]
    out += [(f"What is the opposite of {k}?", f"the opposite of {k} is {v}") for k, v in OPPOSITES.items()]
    out += [(f"What color is {k}?", f"{k} is {v}") for k, v in COLORS.items()]
    out += [(f"What sound does {k} make?", f"{k} {v}") for k, v in ANIMALS.items()]
    out += [(f"What day comes after {a}?", f"after {a} comes {b}") for a, b in zip(DAYS, DAYS[1:] + DAYS[:1])]
    out += [(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}") for a in range(1, 10) for b in range(a, 11)]
    out += [(f"What is {a} times {b}?", f"{a} times {b} is {a * b}") for a in range(2, 8) for b in range(a, 8)]
    return out


def main() -> None:
    questions = pairs()
    random.Random(7).shuffle(questions)
    OUT.mkdir(parents=True, exist_ok=True)
    at = 0
    for name, size in SIZES.items():
        lines = []
        for question, answer in questions[at : at + size]:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"Arr! {answer[0].upper()}{answer[1:]}, matey."},
            ]
            lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        assert len(lines) == size, (name, len(lines))
        (OUT / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        at += size


if __name__ == "__main__":
    main()
