//! Assembly that `small_m_asm.rs` and `large_m_asm.rs` share. It decodes packed words of two row
//! blocks (at registers `a` to `d`) into tiles at `to`. The registers `zmm24` to `zmm27` contain
//! the constants of `encoding.rs`.

/// Loads a word of each row of two row blocks into one vector.
macro_rules! both {
    ($low:literal, $high:literal, $at:literal) => {
        concat!(
            "vmovups ymm20, [{",
            $low,
            "} + ",
            $at,
            "]\n",
            "vinserti64x4 zmm20, zmm20, [{",
            $high,
            "} + ",
            $at,
            "], 1\n",
        )
    };
}

/// Decodes a word of each row of two row blocks to lines of a tile (`encoding.rs`).
macro_rules! word {
    ($low:literal, $high:literal, $at:literal, [$a:literal, $b:literal, $c:literal, $d:literal]) => {
        concat!(
            both!($low, $high, $at),
            "vpsllw zmm21, zmm20, 3\n",
            "vpsrlw zmm22, zmm20, 1\n",
            "vpsrlw zmm23, zmm20, 5\n",
            "vpsrlw zmm20, zmm20, 9\n",
            "vpternlogd zmm21, zmm24, zmm25, 0xea\n",
            "vmovdqa64 [{to} + ",
            $a,
            "], zmm21\n",
            "vpternlogd zmm22, zmm24, zmm25, 0xea\n",
            "vmovdqa64 [{to} + ",
            $b,
            "], zmm22\n",
            "vpternlogd zmm23, zmm24, zmm25, 0xea\n",
            "vmovdqa64 [{to} + ",
            $c,
            "], zmm23\n",
            "vpternlogd zmm20, zmm24, zmm25, 0xea\n",
            "vmovdqa64 [{to} + ",
            $d,
            "], zmm20\n",
        )
    };
    ($low:literal, $high:literal, $at:literal, [$a:literal, $b:literal]) => {
        concat!(
            both!($low, $high, $at),
            "vpandd zmm21, zmm20, zmm26\n",
            "vpsrlw zmm20, zmm20, 8\n",
            "vcvtuw2ph zmm21, zmm21\n",
            "vcvtuw2ph zmm20, zmm20\n",
            "vpshldw zmm21, zmm27, zmm21, 13\n",
            "vmovdqa64 [{to} + ",
            $a,
            "], zmm21\n",
            "vpshldw zmm20, zmm27, zmm20, 13\n",
            "vmovdqa64 [{to} + ",
            $b,
            "], zmm20\n",
        )
    };
}

/// Decodes two words that are in one cache line, and prefetches later words.
macro_rules! words {
    ($low:literal, $high:literal, $at:literal, $next:literal, $one:tt, $other:tt) => {
        concat!(
            "prefetcht1 [{",
            $low,
            "} + {ahead} + ",
            $at,
            "]\n",
            word!($low, $high, $at, $one),
            "prefetcht1 [{",
            $high,
            "} + {ahead} + ",
            $at,
            "]\n",
            word!($low, $high, $next, $other),
        )
    };
}

/// Decodes a quarter of a block of inputs into tiles.
macro_rules! quarter {
    (4, 0) => {
        words!(
            "a",
            "b",
            "0",
            "32",
            ["0", "64", "128", "192"],
            ["256", "320", "384", "448"]
        )
    };
    (4, 1) => {
        words!(
            "a",
            "b",
            "64",
            "96",
            ["512", "576", "640", "704"],
            ["768", "832", "896", "960"]
        )
    };
    (4, 2) => {
        words!(
            "c",
            "d",
            "0",
            "32",
            ["1024", "1088", "1152", "1216"],
            ["1280", "1344", "1408", "1472"]
        )
    };
    (4, 3) => {
        words!(
            "c",
            "d",
            "64",
            "96",
            ["1536", "1600", "1664", "1728"],
            ["1792", "1856", "1920", "1984"]
        )
    };
    (8, 0) => {
        concat!(
            words!("a", "b", "0", "32", ["0", "64"], ["128", "192"]),
            words!("a", "b", "64", "96", ["256", "320"], ["384", "448"]),
        )
    };
    (8, 1) => {
        concat!(
            words!("a", "b", "128", "160", ["512", "576"], ["640", "704"]),
            words!("a", "b", "192", "224", ["768", "832"], ["896", "960"]),
        )
    };
    (8, 2) => {
        concat!(
            words!("c", "d", "0", "32", ["1024", "1088"], ["1152", "1216"]),
            words!("c", "d", "64", "96", ["1280", "1344"], ["1408", "1472"]),
        )
    };
    (8, 3) => {
        concat!(
            words!("c", "d", "128", "160", ["1536", "1600"], ["1664", "1728"]),
            words!("c", "d", "192", "224", ["1792", "1856"], ["1920", "1984"]),
        )
    };
}

/// Advances the addresses to the words of the next block.
macro_rules! next_words {
    (4) => {
        "add {a}, 128\nadd {b}, 128\nadd {c}, 128\nadd {d}, 128\n"
    };
    (8) => {
        "add {a}, 256\nadd {b}, 256\nadd {c}, 256\nadd {d}, 256\n"
    };
}

/// Decodes a block of inputs into tiles.
macro_rules! unpack {
    ($bits:tt) => {
        concat!(
            quarter!($bits, 0),
            quarter!($bits, 1),
            quarter!($bits, 2),
            quarter!($bits, 3),
            next_words!($bits),
            "add {to}, 2048\n",
        )
    };
}

/// An `asm!` block with these lines, and with the registers and operands that [`unpack`] needs. `n`
/// is an operand of the caller's choice. All vector registers may be clobbered. At the end their
/// upper parts are cleared, because narrow instructions of later code would otherwise stall.
macro_rules! asm_with_codes {
    ([$($line:expr),* $(,)?], $($operands:tt)*) => {
        ::std::arch::asm!(
            "mov {n:e}, {counting}",
            "vpbroadcastw zmm24, {n:e}",
            "mov {n:e}, {sixteen}",
            "vpbroadcastw zmm25, {n:e}",
            "mov {n:e}, {byte}",
            "vpbroadcastw zmm26, {n:e}",
            "mov {n:e}, {longer}",
            "vpbroadcastw zmm27, {n:e}",
            $($line,)*
            "vzeroupper",
            $($operands)*
            counting = const super::encoding::MANTISSA_NIBBLE,
            sixteen = const super::encoding::BF16_SIXTEEN,
            byte = const super::encoding::LOW_BYTE,
            longer = const super::encoding::BF16_EXPONENT_FILL,
            out("zmm0") _,
            out("zmm1") _,
            out("zmm2") _,
            out("zmm3") _,
            out("zmm4") _,
            out("zmm5") _,
            out("zmm6") _,
            out("zmm7") _,
            out("zmm8") _,
            out("zmm9") _,
            out("zmm10") _,
            out("zmm11") _,
            out("zmm12") _,
            out("zmm13") _,
            out("zmm14") _,
            out("zmm15") _,
            out("zmm16") _,
            out("zmm17") _,
            out("zmm18") _,
            out("zmm19") _,
            out("zmm20") _,
            out("zmm21") _,
            out("zmm22") _,
            out("zmm23") _,
            out("zmm24") _,
            out("zmm25") _,
            out("zmm26") _,
            out("zmm27") _,
            out("zmm28") _,
            out("zmm29") _,
            out("zmm30") _,
            out("zmm31") _,
            options(nostack),
        )
    };
}
