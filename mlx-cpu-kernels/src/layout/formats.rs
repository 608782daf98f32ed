//! The table of packed formats: which widths and groups exist for each format of scales, and which
//! kernels take them. The portable kernels take all. A format is added here first.

use crate::layout::packed::{PackedMatrix, ScaleFormat};

/// The specialized kernels of a packed format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernels {
    /// On x86-64, inputs become integers: 16 bits for few rows; 16 or 8 bits for many. Else they
    /// stay floats.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for x86-64"))]
    pub integers: bool,
    /// NEON with few rows, in floats or with dotprod.
    #[cfg_attr(
        not(any(target_arch = "aarch64", test)),
        allow(dead_code, reason = "for aarch64")
    )]
    pub neon: bool,
    /// AMX with many rows.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for x86-64"))]
    pub amx: bool,
}

/// Kernels of codes that are integers of 4 or 8 bits.
const ALL: Kernels = Kernels {
    integers: true,
    neon: true,
    amx: true,
};

/// Kernels of codes that are other integers, or stand for integers.
const INTEGERS: Kernels = Kernels {
    integers: true,
    neon: false,
    amx: false,
};

/// Kernels of codes that are floats beyond integers.
const FLOATS: Kernels = Kernels {
    integers: false,
    neon: false,
    amx: false,
};

/// Groups of MLX's affine mode.
const AFFINE: &[usize] = &[32, 64, 128];

/// Calls a function with the width and the kind of codes of a matrix as constants.
macro_rules! with_codes {
    ($function:ident($matrix:expr $(, $argument:expr)*)) => {{
        use $crate::layout::float_codes::Codes;
        match ($matrix.bits, $matrix.codes()) {
            (2, _) => $function::<2, { Codes::INTEGERS_ID }>($matrix $(, $argument)*),
            (3, _) => $function::<3, { Codes::INTEGERS_ID }>($matrix $(, $argument)*),
            (4, Codes::E2m1) => $function::<4, { Codes::E2M1_ID }>($matrix $(, $argument)*),
            (4, Codes::Table(_)) => $function::<4, { Codes::TABLE_ID }>($matrix $(, $argument)*),
            (4, _) => $function::<4, { Codes::INTEGERS_ID }>($matrix $(, $argument)*),
            (5, _) => $function::<5, { Codes::INTEGERS_ID }>($matrix $(, $argument)*),
            (6, _) => $function::<6, { Codes::INTEGERS_ID }>($matrix $(, $argument)*),
            (_, Codes::E4m3) => $function::<8, { Codes::E4M3_ID }>($matrix $(, $argument)*),
            _ => $function::<8, { Codes::INTEGERS_ID }>($matrix $(, $argument)*),
        }
    }};
}
pub(crate) use with_codes;

/// Calls a macro with the rows of the table: number of the format of scales, bits of a code, sizes
/// of groups, and kernels. The rows before `floats` have kernels in integers.
macro_rules! packed_formats {
    ($then:ident) => {
        $then! {
            integers {
                F32_ID, 2, AFFINE, INTEGERS;
                F32_ID, 3, AFFINE, INTEGERS;
                F32_ID, 4, AFFINE, ALL;
                F32_ID, 5, AFFINE, INTEGERS;
                F32_ID, 6, AFFINE, INTEGERS;
                F32_ID, 8, AFFINE, ALL;
                F16_ID, 2, AFFINE, INTEGERS;
                F16_ID, 3, AFFINE, INTEGERS;
                F16_ID, 4, AFFINE, ALL;
                F16_ID, 5, AFFINE, INTEGERS;
                F16_ID, 6, AFFINE, INTEGERS;
                F16_ID, 8, AFFINE, ALL;
                SYMMETRIC_ID, 2, &[32], INTEGERS;
                SYMMETRIC_ID, 4, &[32], ALL;
                SYMMETRIC_ID, 5, &[32], INTEGERS;
                SYMMETRIC_ID, 8, &[32], ALL;
                SUPER_ID, 6, &[16], INTEGERS;
                SUPER_AFFINE_ID, 4, &[32], ALL;
                SUPER_AFFINE_ID, 5, &[32], INTEGERS;
                E8M0_ID, 4, &[32], INTEGERS;
                E4M3_ID, 4, &[16], INTEGERS;
                TABLE_ID, 4, &[16, 32], INTEGERS;
                TABLE_SUPER_ID, 4, &[16, 32], INTEGERS;
            }
            floats {
                E8M0_ID, 8, &[32], FLOATS;
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use packed_formats;

macro_rules! find_row {
    (
        integers { $($id:ident, $bits:literal, $groups:expr, $kernels:expr;)* }
        floats { $($float_id:ident, $float_bits:literal, $float_groups:expr, $float_kernels:expr;)* }
    ) => {
        /// Sizes of groups, and kernels, of a format of scales and a width.
        const fn row(id: u32, bits: u32) -> Option<(&'static [usize], Kernels)> {
            match (id, bits) {
                $((ScaleFormat::$id, $bits) => Some(($groups, $kernels)),)*
                $((ScaleFormat::$float_id, $float_bits) => Some(($float_groups, $float_kernels)),)*
                _ => None,
            }
        }
    };
}
packed_formats!(find_row);

impl ScaleFormat {
    /// The sizes of groups that kernels take with codes of `bits` bits; empty for other widths.
    ///
    /// ```
    /// use mlx_cpu_kernels::ScaleFormat;
    /// assert_eq!(ScaleFormat::Symmetric.groups(5), [32]);
    /// assert!(ScaleFormat::Symmetric.groups(6).is_empty());
    /// ```
    pub const fn groups(self, bits: u32) -> &'static [usize] {
        match row(self.id(), bits) {
            Some((groups, _)) => groups,
            None => &[],
        }
    }
}

impl PackedMatrix<'_> {
    /// The kernels that take the matrix.
    pub(crate) fn kernels(self) -> Kernels {
        row(self.scales.format_id(), self.bits).map_or(FLOATS, |(_, kernels)| kernels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::layout::table::Table;
    use crate::simd::qgemv::quantizes_inputs;

    macro_rules! all_rows {
        (
            integers { $($id:ident, $bits:literal, $groups:expr, $kernels:expr;)* }
            floats { $($float_id:ident, $float_bits:literal, $($rest:expr),*;)* }
        ) => {
            vec![
                $((ScaleFormat::$id, $bits),)*
                $((ScaleFormat::$float_id, $float_bits),)*
            ]
        };
    }

    /// Inputs are prepared for the kernels that read them.
    #[test]
    fn inputs_have_the_form_that_the_kernels_read() {
        let formats = [
            ScaleFormat::F32,
            ScaleFormat::F16,
            ScaleFormat::Symmetric,
            ScaleFormat::Super,
            ScaleFormat::SuperAffine,
            ScaleFormat::E8m0,
            ScaleFormat::E4m3,
            ScaleFormat::Table(Table::Iq4),
            ScaleFormat::TableSuper(Table::Iq4),
        ];
        let mut seen = Vec::new();
        for (scales, bits) in formats.iter().flat_map(|s| (1..=8).map(move |b| (*s, b))) {
            let Some((groups, kernels)) = row(scales.id(), bits) else {
                assert!(scales.groups(bits).is_empty());
                continue;
            };
            assert_eq!(scales.groups(bits), groups);
            let input = scales.input_bits(bits);
            assert_eq!(
                quantizes_inputs(Isa::Dot, input),
                kernels.neon,
                "{scales:?} {bits}"
            );
            assert!(!quantizes_inputs(Isa::Neon, input));
            #[cfg(target_arch = "x86_64")]
            for isa in [Isa::Avx2, Isa::Avx512, Isa::Amx] {
                assert_eq!(
                    quantizes_inputs(isa, input),
                    kernels.integers,
                    "{scales:?} {bits}"
                );
            }
            seen.push((scales.id(), bits));
        }
        let mut rows: Vec<(u32, u32)> = packed_formats!(all_rows);
        rows.sort_unstable();
        seen.sort_unstable();
        assert_eq!(seen, rows);
    }
}
