#!/usr/bin/env python3
"""The tables of GGUF's IQ types, as Rust source.

Groups of 8 (IQ1, IQ2) or 4 (IQ3) weights of these types are entries of a table that is a part of the format. The
independent Python package `gguf` has the tables; here they are written in the form that `quantization/codes.rs` reads:
an entry is a number with 2 bits (8 weights) or 3 bits (4 weights) for each weight, the first in the lowest bits. The
bits are an index into the few magnitudes that the table uses.

Pins: gguf==0.19.0, numpy.
Run: python tools/golden/gguf_grids.py > inference-formats/src/quantization/grids.rs && cargo fmt
"""

import gguf.quants as quants

TABLES = [
    ("IQ2_XXS", quants.IQ2_XXS), ("IQ2_XS", quants.IQ2_XS), ("IQ2_S", quants.IQ2_S),
    ("IQ3_XXS", quants.IQ3_XXS), ("IQ3_S", quants.IQ3_S), ("IQ1", quants.IQ1_S),
]


def main():
    print("//! Tables of the IQ types. Made by `tools/golden/gguf_grids.py`; not to be edited.")
    print("//!")
    print("//! An entry has 2 bits for each of 8 weights (IQ1, IQ2), or 3 bits for each of 4 (IQ3), the first")
    print("//! in the lowest bits. They index the magnitudes in `nibble_codes.rs`.")
    for name, kind in TABLES:
        kind.init_grid()
        grid = kind.grid.reshape(kind.grid_shape)
        bits = 2 if grid.shape[1] == 8 else 3
        index = {value: i for i, value in enumerate(kind.grid_map)}
        entries = [sum(index[int(v)] << (bits * i) for i, v in enumerate(row)) for row in grid]
        print(f"\npub(super) static {name}: [u16; {len(entries)}] = [")
        print(", ".join(str(e) for e in entries))
        print("];")


if __name__ == "__main__":
    main()
