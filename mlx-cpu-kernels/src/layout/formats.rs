//! The table of packed formats. For each format of scales, it lists the widths and group sizes, and
//! which specialized kernels support them. The portable kernels support all formats. To add a
//! format, start with a row here.

use crate::layout::packed::{PackedMatrix, ScaleFormat};

/// The specialized kernels of a packed format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernels {
    /// Kernels for x86-64 that quantize inputs to integers: 16-bit integers for few rows, 16- or
    /// 8-bit ones for many rows. If false, inputs stay floats.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for x86-64"))]
    pub integers: bool,
    /// NEON kernels for few rows. Inputs are floats, or with dotprod 8-bit integers.
    #[cfg_attr(
        not(any(target_arch = "aarch64", test)),
        allow(dead_code, reason = "for aarch64")
    )]
    pub neon: bool,
    /// AMX kernels for many rows.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for x86-64"))]
    pub amx: bool,
}

/// Kernels for integer codes of 4 or 8 bits.
const ALL: Kernels = Kernels {
    integers: true,
    neon: true,
    amx: true,
};

/// Kernels for integer codes of other widths, and for codes that a table maps to integers.
const INTEGERS: Kernels = Kernels {
    integers: true,
    neon: false,
    amx: false,
};

/// Kernels for codes that are floats and that no small integers can represent.
const FLOATS: Kernels = Kernels {
    integers: false,
    neon: false,
    amx: false,
};

/// Group sizes of MLX's affine mode.
const AFFINE: &[usize] = &[32, 64, 128];

/// Calls a generic function with a matrix. The width and the kind of the matrix's codes become
/// const parameters of the function.
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

/// Passes the rows of the table to a macro. A row has the constant of the scale format, the bits of
/// a code, the group sizes, and the kernels. Few-row kernels of a row with `integers` quantize
/// their inputs.
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
                SUPER_AFFINE_ID, 2, &[16], INTEGERS;
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
        /// The group sizes and kernels of a scale format with codes of `bits` bits.
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
    /// The group sizes that kernels support with codes of `bits` bits; empty if there are none.
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
    /// The specialized kernels that support the matrix.
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

    /// The prepared inputs must have the form that the chosen kernels read. Otherwise results are
    /// wrong.
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
