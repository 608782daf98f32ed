#!/usr/bin/env python3
"""Records a session with `mlx` in a terminal, and draws the terminal's last screen.

    tools/session.py record          runs mlx and writes docs/pictures/session.cast
    tools/session.py draw            docs/pictures/session.cast -> docs/pictures/session.svg

The recording has the format of asciinema (version 2), so that its player can show it. `record` needs
a built program (`--program`, else target/release/mlx) and the first model; `draw` needs pyte
(`pip install pyte==0.8.2`), which plays the recording on a screen in memory.
"""

import argparse
import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"
COLUMNS, LINES = 92, 24

QUESTION = "What is the capital of France?"
# What stands after the prompt, the arguments, and what is typed when the text before it is shown.
SESSION = [
    (f'mlx generate "{QUESTION}"', ["generate", QUESTION], []),
    (
        "mlx run smollm2",
        ["run", "smollm2"],
        [
            (">>> ", "Write one sentence about the sea."),
            (">>> ", "Now one about a lighthouse."),
            (">>> ", "/bye"),
        ],
    ),
]
PROMPT = "$ "
# Slower than any reply that is expected.
PATIENCE = 120.0

# A dark terminal; the eight colors of the standard palette, readable on it.
BACKGROUND, FOREGROUND, TITLE = "#16181d", "#d7dae0", "#8b919c"
COLORS = {
    "black": "#5c6370",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#d8b06a",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": "#d7dae0",
}
SIZE, ADVANCE, LEADING, MARGIN, BAR = 14, 8.43, 19, 16, 30


class Recorder:
    """A shell's line by hand: the prompt and the program's name are ours, the rest is the terminal's."""

    def __init__(self):
        self.began = time.monotonic()
        self.events = []

    def show(self, data):
        self.events.append([round(time.monotonic() - self.began, 3), "o", data])

    def type(self, text):
        for character in text:
            self.show(character)
            time.sleep(0.02)

    def run(self, program, arguments, inputs):
        """Runs the program in a terminal; types each input when the text before it is on the screen."""
        child, terminal = pty.fork()
        if child == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
            environment.pop("NO_COLOR", None)
            os.execve(program, ["mlx", *arguments], environment)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        pending, seen = list(inputs), ""
        while True:
            if not select.select([terminal], [], [], PATIENCE)[0]:
                sys.exit(f"nothing came for {PATIENCE} s")
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            text = data.decode("utf-8", "replace")
            self.show(text)
            seen += text
            if pending and pending[0][0] in seen:
                seen, (_, line) = "", pending.pop(0)
                time.sleep(0.5)
                os.write(terminal, f"{line}\r".encode())
        status = os.waitpid(child, 0)[1]
        if status != 0 or pending:
            sys.exit(f"mlx {' '.join(arguments)} ended with {status}, {len(pending)} lines were left")


def record(program, path):
    recorder = Recorder()
    for shown, arguments, inputs in SESSION:
        recorder.show(PROMPT)
        recorder.type(shown)
        recorder.show("\r\n")
        recorder.run(program, arguments, inputs)
    recorder.show(PROMPT)
    header = {"version": 2, "width": COLUMNS, "height": LINES, "title": "mlx"}
    lines = [json.dumps(part, ensure_ascii=False) for part in (header, *recorder.events)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def screen(path):
    """The rows of the last screen: for each, runs of text with a color and whether they are bold."""
    import pyte  # noqa: PLC0415, only for drawing

    header, *events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    display = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(display)
    for _, kind, data in events:
        if kind == "o":
            stream.feed(data)
    rows = []
    for y in range(header["height"]):
        runs = []
        for x in range(header["width"]):
            cell = display.buffer[y][x]
            color = COLORS.get(cell.fg.removeprefix("bright"), FOREGROUND)
            if len(cell.fg) == 6 and cell.fg not in COLORS and cell.fg != "default":
                color = f"#{cell.fg}"
            style = (color, cell.bold)
            if runs and runs[-1][1] == style:
                runs[-1][0] += cell.data
            else:
                runs.append([cell.data, style])
        rows.append(runs)
    while rows and not "".join(text for text, _ in rows[-1]).strip():
        rows.pop()
    return header["width"], rows


def draw(cast, path):
    columns, rows = screen(cast)
    width = round(columns * ADVANCE + 2 * MARGIN)
    height = BAR + len(rows) * LEADING + MARGIN
    font = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{font}" font-size="{SIZE}">',
        "<title>A terminal: mlx answers a question, then talks</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        *(
            f'<circle cx="{MARGIN + 4 + 18 * i}" cy="15" r="5" fill="{color}"/>'
            for i, color in enumerate(("#e06c75", "#d8b06a", "#98c379"))
        ),
        f'<text x="{width // 2}" y="20" fill="{TITLE}" font-size="12" text-anchor="middle">mlx</text>',
    ]
    for y, runs in enumerate(rows):
        x = 0
        for text, (color, bold) in runs:
            shown = text.rstrip()
            lead = len(shown) - len(shown.lstrip())
            if shown.strip():
                at = MARGIN + (x + lead) * ADVANCE
                line = BAR + y * LEADING + SIZE
                # The length keeps columns in place, whatever font there is.
                length = (len(shown) - lead) * ADVANCE
                weight = ' font-weight="bold"' if bold else ""
                parts.append(
                    f'<text x="{at:.1f}" y="{line}" fill="{color}"{weight} textLength="{length:.1f}" '
                    f'xml:space="preserve">{escape(shown[lead:])}</text>'
                )
            x += len(text)
    parts.append("</svg>")
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=["record", "draw"], nargs="+")
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/mlx")
    options = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    if "record" in options.what:
        record(options.program, PICTURES / "session.cast")
    if "draw" in options.what:
        draw(PICTURES / "session.cast", PICTURES / "session.svg")


if __name__ == "__main__":
    main()
