#!/usr/bin/env python3
"""Draws `mlx` beside llama.cpp and mlx-lm, from the table in docs/results.md.

    tools/comparison.py          writes docs/pictures/comparison.svg
    tools/comparison.py --check  fails when the picture is not that of the table

The figures are those of one command, so that all three programs ran in the same rounds. A row names
`mlx`'s figure and another program's.
Needs Python's standard library.
"""

import argparse
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/results.md"
PICTURE = ROOT / "docs/pictures/comparison.svg"
COMMAND = "`compare-64`"
# How a figure's name begins in the table, and what the picture calls it.
FIGURES = {
    "Prefill": "Reading a prompt of 512 tokens",
    "Decode": "Generating, one request",
    "Batch of 8": "Generating, eight requests together",
}
PROGRAMS = {"mlx": "#2f6f9f", "llama.cpp": "#9aa4ad", "mlx-lm": "#c4cad0"}
WIDTH, NAME, VALUE, BAR, GAP, HEAD = 760, 90, 110, 20, 6, 26


def number(text):
    return float(text.strip().replace(",", ""))


def figures():
    """For each figure the rate of each program, in tokens a second."""
    medians = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 8 or cells[-1] != COMMAND:
            continue
        name = next((key for key in FIGURES if cells[0].startswith(key)), None)
        other = re.fullmatch(r"(llama\.cpp|mlx-lm) ([\d.,]+)", cells[2])
        if name is None or other is None or "tok/s" not in cells[0]:
            continue
        rates = medians.setdefault(name, {})
        rates.setdefault("mlx", number(cells[1]))
        if rates["mlx"] == number(cells[1]):
            rates.setdefault(other[1], number(other[2]))
    for name in FIGURES:
        if set(medians.get(name, ())) != set(PROGRAMS):
            sys.exit(f"{TABLE.name} lacks a figure of {COMMAND} for {name}: {medians.get(name)}")
    return medians


def rounded(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def picture():
    measured = figures()
    group = HEAD + len(PROGRAMS) * (BAR + GAP) + 14
    height = len(measured) * group + 10
    room = WIDTH - NAME - VALUE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, \'DejaVu Sans\', sans-serif" font-size="13">',
        "<title>Tokens a second: mlx, llama.cpp and mlx-lm</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for i, (name, title) in enumerate(FIGURES.items()):
        top = i * group + 10
        rates = measured[name]
        parts.append(
            f'<text x="12" y="{top + 16}" fill="#1f2328" font-weight="bold">{escape(title)}'
            '<tspan font-weight="normal" fill="#59636e">, tokens a second</tspan></text>'
        )
        for j, (program, color) in enumerate(PROGRAMS.items()):
            y = top + HEAD + j * (BAR + GAP)
            # Each figure has a scale of its own, from zero.
            length = max(1.0, room * rates[program] / max(rates.values()))
            weight = ' font-weight="bold"' if program == "mlx" else ""
            parts += [
                f'<text x="{NAME - 8}" y="{y + 15}" fill="#1f2328" text-anchor="end"{weight}>{program}</text>',
                f'<rect x="{NAME}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{color}"/>',
                f'<text x="{NAME + length + 8:.1f}" y="{y + 15}" fill="#1f2328"{weight}>'
                f"{rounded(rates[program])}</text>",
            ]
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    drawn = picture()
    if not options.check:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(drawn, encoding="utf-8")
    elif not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != drawn:
        sys.exit(f"{PICTURE.name} is not the picture of {TABLE.name}: run tools/comparison.py")


if __name__ == "__main__":
    main()
