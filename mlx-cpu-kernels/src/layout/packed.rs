//! Quantized matrices in the layout of the kernels. Eight rows are interleaved word by word. So a
//! vector register contains one word of each row, and its lanes belong to separate outputs.
//! Multiplications need no sum across lanes and read memory sequentially. `simd` has the
//! multiplications and the dequantization.

use std::ops::Range;

use crate::layout::float_codes::{ByteScales, Codes, FP4_BIAS, FP4_SCALE};
use crate::layout::table::Table;

use half::f16;

use crate::work::Input;

/// The number of elements dequantized at once. A group may be smaller or larger.
pub(crate) const CHUNK: usize = 32;

/// The number of rows of a row block.
pub const INTERLEAVED_ROWS: usize = 8;

/// The number of codes after which a code starts at a word boundary again, for a width that does
/// not divide 32. It is a multiple of eight. So a chunk has whole words and whole runs of inputs
/// that share a scale.
#[cfg(target_arch = "x86_64")]
pub(crate) const fn codes_per_chunk(bits: u32) -> usize {
    match bits {
        2 | 6 => 16,
        _ => 32,
    }
}

/// The word in which code `i` of a bit stream starts, and its lowest bit there.
pub(crate) const fn code_position(i: usize, bits: u32) -> (usize, u32) {
    let at = i * bits as usize;
    (at / 32, (at % 32) as u32)
}

/// Code `i` of a bit stream with these words.
#[inline(always)]
pub(crate) fn code(i: usize, bits: u32, word: impl Fn(usize) -> u32) -> u32 {
    let (w, shift) = code_position(i, bits);
    let low = word(w) >> shift;
    let all = if shift + bits > 32 {
        low | word(w + 1) << (32 - shift)
    } else {
        low
    };
    all & (u32::MAX >> (32 - bits))
}

/// A row of a quantized matrix: `w = scale * q + bias`, with a scale and bias per group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedRow<'a> {
    /// Packed codes: two per byte with the first code in the lower half, or one per byte.
    pub packed: &'a [u8],
    /// The scale of each group.
    pub scales: &'a [f32],
    /// The bias of each group.
    pub biases: &'a [f32],
    /// The kind of codes.
    pub codes: Codes,
}

/// How a matrix stores its scales and biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleFormat {
    /// A float32 scale and bias for each group.
    F32,
    /// A float16 scale and bias for each group.
    F16,
    /// A float16 scale for each group. The bias is [`symmetric_bias`] times the scale. GGUF's types
    /// with a scale and no minimum, such as Q4_0, have this format.
    Symmetric,
    /// A signed byte per group, times a float16 shared by [`GROUPS_PER_SUPER`] groups. The bias is
    /// -32 times the scale. With 6 bits and groups of 16 this is GGUF's Q6_K.
    Super,
    /// Two bytes per group, for the scale and for the magnitude of the bias, which is negative.
    /// Each byte is multiplied by a float16 that [`GROUPS_PER_AFFINE_SUPER`] groups share. In a row
    /// block, the eight scale bytes of a group precede the eight bias bytes; the float16 values
    /// have the same order. With 4 or 5 bits and groups of 32 this is GGUF's Q4_K and Q5_K. With 2
    /// bits and groups of 16 this is Q2_K, whose two float16 values are stored twice.
    SuperAffine,
    /// A byte for each group: the exponent of a power of two (E8M0). Codes are floats: E2M1 (4
    /// bits) in MXFP4, E4M3 (8 bits) in MXFP8. There are no biases.
    E8m0,
    /// An 8-bit float (E4M3) per group. Codes are 4-bit floats (E2M1), as in NVFP4. There are no
    /// biases.
    E4m3,
    /// A float16 scale for each group. The 4-bit codes index a table. There are no biases. With
    /// groups of 32 this is GGUF's IQ4_NL.
    Table(Table),
    /// A signed byte per group, times a float16 shared by [`TABLE_SUPER_WEIGHTS`] codes. Codes are
    /// as in [`Self::Table`]. With groups of 32 or 16 this covers GGUF's IQ types and Q3_K. The
    /// magnitude of a byte times an integer of the table must be at most [`MAX_SCALED_CODE`].
    TableSuper(Table),
}

impl ScaleFormat {
    /// The code width that determines the prepared form of inputs. It equals `bits`, except for
    /// formats whose codes are looked up or are floats.
    pub(crate) fn input_bits(self, bits: u32) -> u32 {
        match (self, bits) {
            (Self::E8m0 | Self::E4m3, 4) | (Self::Table(_) | Self::TableSuper(_), _) => {
                LOOKUP_INPUTS
            }
            (Self::E8m0 | Self::E4m3, _) => FLOAT_INPUTS,
            _ => bits,
        }
    }
}

/// The formats as constants for generic functions, and for the table in `formats.rs`.
impl ScaleFormat {
    pub(crate) const F32_ID: u32 = 0;
    pub(crate) const F16_ID: u32 = 1;
    pub(crate) const SUPER_ID: u32 = 2;
    pub(crate) const E8M0_ID: u32 = 3;
    pub(crate) const E4M3_ID: u32 = 4;
    pub(crate) const TABLE_ID: u32 = 5;
    pub(crate) const TABLE_SUPER_ID: u32 = 6;
    pub(crate) const SUPER_AFFINE_ID: u32 = 7;
    pub(crate) const SYMMETRIC_ID: u32 = 8;

    /// The format's constant.
    pub(crate) const fn id(self) -> u32 {
        match self {
            Self::F32 => Self::F32_ID,
            Self::F16 => Self::F16_ID,
            Self::Symmetric => Self::SYMMETRIC_ID,
            Self::Super => Self::SUPER_ID,
            Self::SuperAffine => Self::SUPER_AFFINE_ID,
            Self::E8m0 => Self::E8M0_ID,
            Self::E4m3 => Self::E4M3_ID,
            Self::Table(_) => Self::TABLE_ID,
            Self::TableSuper(_) => Self::TABLE_SUPER_ID,
        }
    }

    /// Whether scales are bytes times a float that several groups share. Kernels with integer
    /// inputs then multiply sums, or codes, by the bytes in integers. Floats follow once per
    /// [`PackedMatrix::groups_per_super`] groups.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn has_byte_scales(format: u32) -> bool {
        matches!(
            format,
            Self::SUPER_ID | Self::TABLE_SUPER_ID | Self::SUPER_AFFINE_ID
        )
    }

    /// Whether groups have biases that are not zero.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn has_biases(format: u32) -> bool {
        !matches!(
            format,
            Self::SUPER_ID | Self::TABLE_SUPER_ID | Self::TABLE_ID
        )
    }

    /// The code that represents zero in a format with byte scales and no biases.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn zero_code(format: u32) -> i16 {
        match format {
            Self::SUPER_ID => -SUPER_BIAS as i16,
            _ => 0,
        }
    }

    /// The kind of the 4-bit codes in a format.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn nibbles(format: u32) -> u32 {
        match format {
            Self::E8M0_ID | Self::E4M3_ID => Codes::E2M1_ID,
            Self::TABLE_ID | Self::TABLE_SUPER_ID => Codes::TABLE_ID,
            _ => Codes::INTEGERS_ID,
        }
    }
}

/// The result of [`ScaleFormat::input_bits`] for codes that are looked up in a table. Inputs are
/// integers if lookup kernels exist, and floats otherwise (NEON).
const LOOKUP_INPUTS: u32 = 5;

/// The width that means float inputs.
pub(crate) const FLOAT_INPUTS: u32 = 32;

/// The maximum magnitude of a code's integer times the byte scale of its group. Sixteen products of
/// such integers with 16-bit inputs fit 32 bits.
pub const MAX_SCALED_CODE: i32 = 4096;

/// The number of groups that share a float16 in [`ScaleFormat::Super`].
pub const GROUPS_PER_SUPER: usize = 16;

/// The bias of [`ScaleFormat::Symmetric`] in units of the scale: the negative of the code that
/// represents zero.
///
/// ```
/// assert_eq!(mlx_cpu_kernels::symmetric_bias(8), -128.0);
/// assert_eq!(mlx_cpu_kernels::symmetric_bias(2), -1.0);
/// ```
pub const fn symmetric_bias(bits: u32) -> f32 {
    match bits {
        // The codes are 0, 1 and 2, and 1 represents zero.
        2 => -1.0,
        _ => -((1 << (bits - 1)) as f32),
    }
}

/// The number of groups that share a float16 in [`ScaleFormat::SuperAffine`].
pub const GROUPS_PER_AFFINE_SUPER: usize = 8;

/// The number of codes that share a float16 in [`ScaleFormat::TableSuper`].
pub const TABLE_SUPER_WEIGHTS: usize = 256;

/// The bias of [`ScaleFormat::Super`] in units of the scale: the negative of the code that
/// represents zero.
pub(crate) const SUPER_BIAS: f32 = -32.0;

/// The scales or the biases of a matrix, as stored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GroupParams<'a> {
    /// Scales or biases as float32.
    F32(&'a [f32]),
    /// Raw bits of float16.
    F16(&'a [u16]),
    /// Raw bits of float16, times a factor.
    Symmetric {
        /// A float16 per group.
        halves: &'a [u16],
        /// 1 for scales, [`symmetric_bias`] for biases.
        factor: f32,
    },
    /// Bytes times float16 (raw bits), times a factor.
    Super {
        /// The byte of each group.
        codes: &'a [i8],
        /// The float16 values of the whole matrix, one per `per` groups.
        supers: &'a [u16],
        /// The number of groups that share a float16.
        per: usize,
        /// The index of the group that contains `codes[0]`, counted from the start of the matrix.
        first: usize,
        /// The factor: for scales 1 or a table's unit, for biases [`SUPER_BIAS`], or 0 without
        /// biases.
        factor: f32,
        /// The table that codes index, if any.
        table: Option<Table>,
    },
    /// Bytes times float16 (raw bits), as in [`ScaleFormat::SuperAffine`].
    SuperAffine {
        /// Two bytes per group: for the scale and for the bias.
        codes: &'a [i8],
        /// The float16 values of the whole matrix, in the order of `codes`.
        supers: &'a [u16],
        /// The index in the whole matrix of the group to which `codes[0]` belongs.
        first: usize,
        /// Whether these are the biases.
        is_bias: bool,
    },
    /// Raw bits of float16, times a factor. Codes index a table.
    Table {
        /// A float16 per group.
        halves: &'a [u16],
        /// The table's unit for scales; 0 for biases.
        factor: f32,
        /// The table that codes index.
        table: Table,
    },
    /// Bytes that represent floats, times a factor. The codes of the matrix are also floats.
    Bytes {
        /// A byte per group.
        codes: &'a [u8],
        /// The type of the bytes.
        scales: ByteScales,
        /// The factor; for E2M1 see [`crate::layout::float_codes::FP4_SCALE`].
        factor: f32,
    },
}

impl<'a> GroupParams<'a> {
    /// Scales and biases from two inputs of an operation.
    ///
    /// # Safety
    /// The elements of both inputs must have the types that `format` stores.
    pub(crate) unsafe fn from_inputs(
        [one, other]: [&'a Input; 2],
        (format, bits): (ScaleFormat, u32),
    ) -> [Self; 2] {
        // SAFETY: the caller guarantees that the elements have the types that `format` stores.
        unsafe {
            match format {
                ScaleFormat::F32 => [one, other].map(|input| Self::F32(input.as_slice())),
                ScaleFormat::F16 => [one, other].map(|input| Self::F16(input.as_slice())),
                ScaleFormat::Symmetric => {
                    [1.0, symmetric_bias(bits)].map(|factor| Self::Symmetric {
                        halves: one.as_slice(),
                        factor,
                    })
                }
                ScaleFormat::Super => [1.0, SUPER_BIAS].map(|factor| Self::Super {
                    codes: one.as_slice(),
                    supers: other.as_slice(),
                    per: GROUPS_PER_SUPER,
                    first: 0,
                    factor,
                    table: None,
                }),
                ScaleFormat::SuperAffine => [false, true].map(|is_bias| Self::SuperAffine {
                    codes: one.as_slice(),
                    supers: other.as_slice(),
                    first: 0,
                    is_bias,
                }),
                ScaleFormat::TableSuper(table) => {
                    let (codes, supers): (&[i8], &[u16]) = (one.as_slice(), other.as_slice());
                    [table.unit(), 0.0].map(|factor| Self::Super {
                        codes,
                        supers,
                        per: (codes.len() / supers.len().max(1)).max(1),
                        first: 0,
                        factor,
                        table: Some(table),
                    })
                }
                ScaleFormat::Table(table) => [table.unit(), 0.0].map(|factor| Self::Table {
                    halves: one.as_slice(),
                    factor,
                    table,
                }),
                ScaleFormat::E8m0 | ScaleFormat::E4m3 => {
                    let factors = match bits {
                        4 => [FP4_SCALE, FP4_BIAS],
                        _ => [1.0, 0.0],
                    };
                    factors.map(|factor| Self::Bytes {
                        codes: one.as_slice(),
                        scales: match format {
                            ScaleFormat::E8m0 => ByteScales::E8m0,
                            _ => ByteScales::E4m3,
                        },
                        factor,
                    })
                }
            }
        }
    }

    /// The constant of the format; see [`ScaleFormat::id`].
    pub(crate) const fn format_id(self) -> u32 {
        match self {
            Self::F32(_) => ScaleFormat::F32_ID,
            Self::F16(_) => ScaleFormat::F16_ID,
            Self::Symmetric { .. } => ScaleFormat::SYMMETRIC_ID,
            Self::Super { table: None, .. } => ScaleFormat::SUPER_ID,
            Self::Super { table: Some(_), .. } => ScaleFormat::TABLE_SUPER_ID,
            Self::SuperAffine { .. } => ScaleFormat::SUPER_AFFINE_ID,
            Self::Table { .. } => ScaleFormat::TABLE_ID,
            Self::Bytes {
                scales: ByteScales::E8m0,
                ..
            } => ScaleFormat::E8M0_ID,
            Self::Bytes {
                scales: ByteScales::E4m3,
                ..
            } => ScaleFormat::E4M3_ID,
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::F16(all) => all.len(),
            Self::Super { codes, .. } => codes.len(),
            Self::SuperAffine { codes, .. } => codes.len() / 2,
            Self::Table { halves, .. } | Self::Symmetric { halves, .. } => halves.len(),
            Self::Bytes { codes, .. } => codes.len(),
        }
    }

    /// The address of the stored values, and the number of their bytes.
    pub(crate) fn raw_bytes(self) -> (*const u8, usize) {
        match self {
            Self::F32(all) => (all.as_ptr().cast(), size_of_val(all)),
            Self::F16(all) => (all.as_ptr().cast(), size_of_val(all)),
            Self::Super { codes, .. } | Self::SuperAffine { codes, .. } => {
                (codes.as_ptr().cast(), codes.len())
            }
            Self::Table { halves, .. } | Self::Symmetric { halves, .. } => {
                (halves.as_ptr().cast(), size_of_val(halves))
            }
            Self::Bytes { codes, .. } => (codes.as_ptr(), codes.len()),
        }
    }

    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[range]),
            Self::F16(all) => Self::F16(&all[range]),
            Self::Symmetric { halves, factor } => Self::Symmetric {
                halves: &halves[range],
                factor,
            },
            Self::Super {
                codes,
                supers,
                per,
                first,
                factor,
                table,
            } => Self::Super {
                first: first + range.start / INTERLEAVED_ROWS,
                codes: &codes[range],
                supers,
                per,
                factor,
                table,
            },
            Self::SuperAffine {
                codes,
                supers,
                first,
                is_bias,
            } => Self::SuperAffine {
                first: first + range.start / INTERLEAVED_ROWS,
                codes: &codes[2 * range.start..2 * range.end],
                supers,
                is_bias,
            },
            Self::Table {
                halves,
                factor,
                table,
            } => Self::Table {
                halves: &halves[range],
                factor,
                table,
            },
            Self::Bytes {
                codes,
                scales,
                factor,
            } => Self::Bytes {
                codes: &codes[range],
                scales,
                factor,
            },
        }
    }

    /// The values of one group for each row of a row block.
    pub(crate) fn group(self, group: usize) -> [f32; INTERLEAVED_ROWS] {
        let at = group * INTERLEAVED_ROWS..(group + 1) * INTERLEAVED_ROWS;
        let mut eight = [0.0; INTERLEAVED_ROWS];
        match self {
            Self::F32(all) => eight.copy_from_slice(&all[at]),
            Self::F16(all) => {
                for (to, from) in eight.iter_mut().zip(&all[at]) {
                    *to = f16::from_bits(*from).to_f32();
                }
            }
            Self::Table { halves, factor, .. } | Self::Symmetric { halves, factor } => {
                for (to, from) in eight.iter_mut().zip(&halves[at]) {
                    *to = f16::from_bits(*from).to_f32() * factor;
                }
            }
            Self::Super {
                codes,
                supers,
                per,
                first,
                factor,
                ..
            } => {
                let supers = &supers[(first + group) / per * INTERLEAVED_ROWS..];
                for ((to, code), half) in eight.iter_mut().zip(&codes[at]).zip(supers) {
                    *to = f32::from(*code) * f16::from_bits(*half).to_f32() * factor;
                }
            }
            Self::SuperAffine {
                codes,
                supers,
                first,
                is_bias,
            } => {
                let pair = |number: usize| (2 * number + usize::from(is_bias)) * INTERLEAVED_ROWS;
                let codes = &codes[pair(group)..];
                let supers = &supers[pair((first + group) / GROUPS_PER_AFFINE_SUPER)..];
                let sign = if is_bias { -1.0 } else { 1.0 };
                for ((to, code), half) in eight.iter_mut().zip(codes).zip(supers) {
                    *to = f32::from(*code) * f16::from_bits(*half).to_f32() * sign;
                }
            }
            Self::Bytes {
                codes,
                scales,
                factor,
            } => {
                for (to, code) in eight.iter_mut().zip(&codes[at]) {
                    *to = scales.decode(*code) * factor;
                }
            }
        }
        eight
    }
}

/// Row blocks of a quantized matrix, stored consecutively: `w = scale * q + bias`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedMatrix<'a> {
    /// Packed codes `[row blocks, words, INTERLEAVED_ROWS]`. The words of a row form a bit stream;
    /// the first code is in the lowest bits of the first word. A code may continue in the next
    /// word.
    pub words: &'a [u32],
    /// `[row blocks, groups, INTERLEAVED_ROWS]`.
    pub scales: GroupParams<'a>,
    /// `[row blocks, groups, INTERLEAVED_ROWS]`.
    pub biases: GroupParams<'a>,
    /// Groups per row.
    pub groups: usize,
    /// Bits per code: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
}

impl<'a> PackedMatrix<'a> {
    /// A matrix from the inputs of an operation: the arrays of a `QuantizedMatrix`, with `groups`
    /// groups of `bits`-bit codes per row. The matrix is empty if inputs are missing.
    ///
    /// # Safety
    /// The first input must consist of 32-bit words. The other inputs must have the types that the
    /// format stores.
    pub(crate) unsafe fn from_inputs(
        inputs: &'a [Input],
        (bits, groups, format): (u32, usize, ScaleFormat),
    ) -> Self {
        let [words, scales, biases] = inputs else {
            let nothing = GroupParams::F32(&[]);
            return Self {
                words: &[],
                scales: nothing,
                biases: nothing,
                groups,
                bits,
            };
        };
        // SAFETY: the caller guarantees words, and the types that the format stores.
        let (words, [scales, biases]) = unsafe {
            let params = GroupParams::from_inputs([scales, biases], (format, bits));
            (words.as_slice::<u32>(), params)
        };
        Self {
            words,
            scales,
            biases,
            groups,
            bits,
        }
    }

    /// The kind of the codes.
    pub(crate) fn codes(self) -> Codes {
        match (self.scales, self.bits) {
            (GroupParams::Bytes { .. }, 4) => Codes::E2m1,
            (GroupParams::Bytes { .. }, _) => Codes::E4m3,
            (GroupParams::Table { table, .. }, _)
            | (
                GroupParams::Super {
                    table: Some(table), ..
                },
                _,
            ) => Codes::Table(table),
            _ => Codes::Integers,
        }
    }

    pub(crate) fn row_blocks(self) -> usize {
        self.scales.len() / (self.groups * INTERLEAVED_ROWS).max(1)
    }

    /// The number of words per group of a row.
    pub(crate) fn words_per_group(self) -> usize {
        self.words.len() / self.scales.len().max(1)
    }

    /// The number of codes per group of a row.
    pub(crate) fn group_size(self) -> usize {
        self.words_per_group() * 32 / self.bits as usize
    }

    /// The number of groups that share a float, if scales are bytes times a float; else 1.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn groups_per_super(self) -> usize {
        match self.scales {
            GroupParams::Super { per, .. } => per,
            GroupParams::SuperAffine { .. } => GROUPS_PER_AFFINE_SUPER,
            _ => 1,
        }
    }

    /// The columns per scale, and the biases per scale, of the matrix as a
    /// [`CodePanel`](crate::layout::integer_panel::CodePanel).
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn panel_groups(self) -> (usize, usize) {
        let groups = self.groups_per_super();
        let has_biases = ScaleFormat::has_biases(self.scales.format_id());
        let biases = if has_biases { groups } else { 0 };
        (groups * self.group_size(), biases)
    }

    /// A range of row blocks.
    pub(crate) fn block_range(self, matrix: Range<usize>) -> Self {
        let per = |n: usize| matrix.start * n * INTERLEAVED_ROWS..matrix.end * n * INTERLEAVED_ROWS;
        let (words, factors) = (per(self.groups * self.words_per_group()), per(self.groups));
        Self {
            words: &self.words[words],
            scales: self.scales.slice(factors.clone()),
            biases: self.biases.slice(factors),
            ..self
        }
    }

    /// Dequantizes a row of the matrix. The elements are in column order.
    pub(crate) fn dequantize_row(self, row: usize, out: &mut [f32]) {
        let lane = row % INTERLEAVED_ROWS;
        let block = self.block_range(row / INTERLEAVED_ROWS..row / INTERLEAVED_ROWS + 1);
        let per = self.words_per_group();
        for (g, out) in out.chunks_exact_mut(self.group_size()).enumerate() {
            let (scale, bias) = (block.scales.group(g)[lane], block.biases.group(g)[lane]);
            let word = |w: usize| block.words[(g * per + w) * INTERLEAVED_ROWS + lane];
            for (i, out) in out.iter_mut().enumerate() {
                *out = self.codes().number(code(i, self.bits, word)) * scale + bias;
            }
        }
    }
}
