//! Pieces of assembly that `steps.rs` and `tall.rs` have in common: packed numbers of two bands a tile, whose words are at `a` to
//! `d`, as tiles of a matrix at `to`. `zmm24` has the bits that count, `zmm25` and `zmm26` the bases of lower and upper numbers (`numbers.rs`).

/// A word of each of two bands, and its four vectors of numbers, as lines at the four places: four bits, and the others of a
/// base (`numbers.rs`).
macro_rules! word {
    ($low:literal, $high:literal, $at:literal, [$a:literal, $b:literal, $c:literal, $d:literal], $more:literal) => {
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
            "vpsllw zmm21, zmm20, 3\n",
            "vpsrlw zmm22, zmm20, 1\n",
            "vpsrlw zmm23, zmm20, 5\n",
            "vpsrlw zmm20, zmm20, 9\n",
            "vpternlogd zmm21, zmm24, zmm25, 0xea\n",
            "vmovdqa64 [{to} + ",
            $a,
            "], zmm21\n",
            "vpternlogd zmm22, zmm24, ",
            $more,
            ", 0xea\n",
            "vmovdqa64 [{to} + ",
            $b,
            "], zmm22\n",
            "vpternlogd zmm23, zmm24, zmm25, 0xea\n",
            "vmovdqa64 [{to} + ",
            $c,
            "], zmm23\n",
            "vpternlogd zmm20, zmm24, ",
            $more,
            ", 0xea\n",
            "vmovdqa64 [{to} + ",
            $d,
            "], zmm20\n",
        )
    };
}

/// Two words, which are in one line of the cache, and what is fetched ahead.
macro_rules! words {
    ($low:literal, $high:literal, $at:literal, $next:literal, $one:tt, $other:tt, $more:literal) => {
        concat!(
            "prefetcht1 [{",
            $low,
            "} + {ahead} + ",
            $at,
            "]\n",
            word!($low, $high, $at, $one, $more),
            "prefetcht1 [{",
            $high,
            "} + {ahead} + ",
            $at,
            "]\n",
            word!($low, $high, $next, $other, $more),
        )
    };
}

/// A block of inputs' numbers as tiles.
macro_rules! unpack {
    (4) => {
        concat!(
            words!(
                "a",
                "b",
                "0",
                "32",
                ["0", "64", "128", "192"],
                ["256", "320", "384", "448"],
                "zmm25"
            ),
            words!(
                "a",
                "b",
                "64",
                "96",
                ["512", "576", "640", "704"],
                ["768", "832", "896", "960"],
                "zmm25"
            ),
            words!(
                "c",
                "d",
                "0",
                "32",
                ["1024", "1088", "1152", "1216"],
                ["1280", "1344", "1408", "1472"],
                "zmm25"
            ),
            words!(
                "c",
                "d",
                "64",
                "96",
                ["1536", "1600", "1664", "1728"],
                ["1792", "1856", "1920", "1984"],
                "zmm25"
            ),
            "add {a}, 128\n",
            "add {b}, 128\n",
            "add {c}, 128\n",
            "add {d}, 128\n",
            "add {to}, 2048\n",
        )
    };
    (8) => {
        concat!(
            words!(
                "a",
                "b",
                "0",
                "32",
                ["0", "2048", "64", "2112"],
                ["128", "2176", "192", "2240"],
                "zmm26"
            ),
            words!(
                "a",
                "b",
                "64",
                "96",
                ["256", "2304", "320", "2368"],
                ["384", "2432", "448", "2496"],
                "zmm26"
            ),
            words!(
                "a",
                "b",
                "128",
                "160",
                ["512", "2560", "576", "2624"],
                ["640", "2688", "704", "2752"],
                "zmm26"
            ),
            words!(
                "a",
                "b",
                "192",
                "224",
                ["768", "2816", "832", "2880"],
                ["896", "2944", "960", "3008"],
                "zmm26"
            ),
            words!(
                "c",
                "d",
                "0",
                "32",
                ["1024", "3072", "1088", "3136"],
                ["1152", "3200", "1216", "3264"],
                "zmm26"
            ),
            words!(
                "c",
                "d",
                "64",
                "96",
                ["1280", "3328", "1344", "3392"],
                ["1408", "3456", "1472", "3520"],
                "zmm26"
            ),
            words!(
                "c",
                "d",
                "128",
                "160",
                ["1536", "3584", "1600", "3648"],
                ["1664", "3712", "1728", "3776"],
                "zmm26"
            ),
            words!(
                "c",
                "d",
                "192",
                "224",
                ["1792", "3840", "1856", "3904"],
                ["1920", "3968", "1984", "4032"],
                "zmm26"
            ),
            "add {a}, 256\n",
            "add {b}, 256\n",
            "add {c}, 256\n",
            "add {d}, 256\n",
            "add {to}, 4096\n",
        )
    };
}

/// Lines of assembly with what [`unpack`] needs in its registers, and their operands, among them `n`, which is anything. All vector
/// registers may be used; in the end they are as other code wants them: with their upper parts in use, its narrow instructions
/// wait for them.
macro_rules! with_numbers {
    ([$($line:expr),* $(,)?], $($operands:tt)*) => {
        ::std::arch::asm!(
            "mov {n:e}, {counting}",
            "vpbroadcastw zmm24, {n:e}",
            "mov {n:e}, {ones}",
            "vpbroadcastw zmm25, {n:e}",
            "mov {n:e}, {sixteens}",
            "vpbroadcastw zmm26, {n:e}",
            $($line,)*
            "vzeroupper",
            $($operands)*
            counting = const super::numbers::COUNTING,
            ones = const super::numbers::BASES[0],
            sixteens = const super::numbers::BASES[1],
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
