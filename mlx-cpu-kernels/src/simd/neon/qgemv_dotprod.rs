//! Multiplication of quantized matrices with few input rows, for aarch64 with the dotprod
//! extension. Apple silicon, Neoverse, Cortex-A76 and later have dotprod. Its instruction `sdot`
//! adds four products of 8-bit integers to each lane. So inputs are quantized to 16 bits, as a high
//! and a low byte. Sums are exact integers until they are scaled. `avx2/qgemv.rs` is the x86-64
//! version.

use crate::layout::input_panel::{InputPanel, InputPanelMut};
use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS, PackedMatrix};
use crate::partition::OutputBlock;
use crate::simd::neon::intrinsics::{
    dot, float32x4_t, int8x16_t, int32x4_t, vabsq_f32, vaddq_f32, vaddvq_f32, vandq_u8, vandq_u32,
    vcgtq_f32, vcombine_s8, vcombine_s16, vcvtnq_s32_f32, vcvtq_f32_s32, vdivq_f32, vdupq_n_f32,
    vdupq_n_s32, vdupq_n_u8, veorq_u8, vfmaq_f32, vfmaq_n_f32, vfmsq_n_f32, vld1_u16, vld1q_f32,
    vld1q_s8, vld1q_u8, vmaxnmq_f32, vmovn_s16, vmulq_n_f32, vpmaxnmq_f32, vqmovn_s32,
    vreinterpret_s8_s32, vreinterpret_s32_s8, vreinterpretq_f32_u32, vreinterpretq_s8_u8,
    vreinterpretq_u32_f32, vrshrn_n_s16, vshlq_n_s32, vshrq_n_u8, vst1q_f32, vst1q_s8, vuzp1_s8,
    vuzp2_s8, vzip1_s32, vzip2_s32, wide,
};

/// The number of adjacent inputs that share a scale and a 16-byte vector. With 8-bit codes they
/// correspond to two words of a matrix.
pub(crate) const INPUTS_PER_SCALE: usize = 8;

/// The maximum integer of an input. The low byte is signed, and rounding the high byte to match
/// must not overflow it.
pub(crate) const MAX_QUANT: f32 = 127.0 * 256.0 + 127.0;

/// A run of adjacent inputs with at most this magnitude becomes zeros, because the inverse of its
/// scale would be infinite.
const MIN_MAGNITUDE: f32 = 1e-34;

/// The number of elements of a vector of floats.
const WIDTH: usize = 4;

/// The addresses of input rows.
#[derive(Clone, Copy)]
struct InputPtrs {
    bytes: *const i8,
    scales: *const f32,
    sums: *const f32,
}

/// The addresses of a row block. Scales and biases are float16 or float32, or in `others`.
#[derive(Clone, Copy)]
struct RowBlock<'a> {
    words: *const u32,
    scales: *const u8,
    biases: *const u8,
    half: bool,
    /// Scales and biases of the matrix, if they have another format than float16 or float32.
    others: Option<[GroupParams<'a>; 2]>,
    /// The number of groups before this row block.
    before: usize,
    /// The number of groups per row.
    groups: usize,
    /// The number of runs of [`INPUTS_PER_SCALE`] codes per group.
    per: usize,
}

/// Multiplies row blocks with each of the inputs; see [`crate::simd::qgemv::qgemv`].
///
/// # Safety
/// The processor must have neon and dotprod.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
pub(crate) unsafe fn qgemv<const BITS: u32>(
    matrix: PackedMatrix<'_>,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    const { assert!(BITS == 4 || BITS == 8) };
    assert!(matrix.bits == BITS);
    let (count, groups, per) = (matrix.row_blocks(), matrix.groups, matrix.words_per_group());
    let k = groups * matrix.group_size();
    // All reads and writes below are within these bounds.
    assert!(matrix.words.len() == count * groups * per * INTERLEAVED_ROWS);
    assert!(matrix.scales.len() == count * groups * INTERLEAVED_ROWS);
    assert!(matrix.biases.len() == count * groups * INTERLEAVED_ROWS);
    assert!(matrix.group_size().is_multiple_of(INPUTS_PER_SCALE));
    assert!(x.quants.len() == x.rows * k && out.dims() == (x.rows, count * INTERLEAVED_ROWS));
    assert!(x.scales.len() * INPUTS_PER_SCALE == x.rows * k);
    assert!(x.sums.len() == x.rows * groups);
    let nothing: *const u8 = std::ptr::null();
    let (scales, biases, half) = match (matrix.scales, matrix.biases) {
        (GroupParams::F16(scales), GroupParams::F16(biases)) => {
            (scales.as_ptr().cast(), biases.as_ptr().cast(), true)
        }
        (GroupParams::F32(scales), GroupParams::F32(biases)) => {
            (scales.as_ptr().cast(), biases.as_ptr().cast(), false)
        }
        _ => (nothing, nothing, false),
    };
    let first = RowBlock {
        others: scales.is_null().then_some([matrix.scales, matrix.biases]),
        before: 0,
        words: matrix.words.as_ptr(),
        scales,
        biases,
        half,
        groups,
        per: matrix.group_size() / INPUTS_PER_SCALE,
    };
    // SAFETY: the lengths are asserted for codes of this bit width.
    unsafe { rows::<BITS>(first, count, x, out) }
}

/// Multiplies all row blocks with all rows.
///
/// # Safety
/// The lengths must be those that [`qgemv`] asserts, for codes of `BITS`.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
unsafe fn rows<const BITS: u32>(
    first: RowBlock<'_>,
    count: usize,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    // SAFETY: the caller guarantees the asserted lengths. Each call gets the number of rows that it
    // processes.
    unsafe {
        match x.rows {
            1 => row_blocks::<1, BITS>(first, count, x, out),
            2 => row_blocks::<2, BITS>(first, count, x, out),
            3 => row_blocks::<3, BITS>(first, count, x, out),
            4 => row_blocks::<4, BITS>(first, count, x, out),
            5 => row_blocks::<5, BITS>(first, count, x, out),
            6 => row_blocks::<6, BITS>(first, count, x, out),
            7 => row_blocks::<7, BITS>(first, count, x, out),
            8 => row_blocks::<8, BITS>(first, count, x, out),
            _ => unreachable!("at most eight rows"),
        }
    }
}

/// Multiplies all row blocks with `M` rows.
///
/// # Safety
/// The obligations of [`rows`]. There must also be `M` rows.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
unsafe fn row_blocks<const M: usize, const BITS: u32>(
    first: RowBlock<'_>,
    count: usize,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    let x = InputPtrs {
        bytes: x.quants.as_ptr().cast(),
        scales: x.scales.as_ptr(),
        sums: x.sums.as_ptr(),
    };
    let words = first.groups * first.per * words_of::<BITS>();
    let factors = first.groups * INTERLEAVED_ROWS * if first.half { 2 } else { 4 };
    let (to, step) = out.raw_parts();
    for i in 0..count {
        // SAFETY: the caller guarantees that row block `i` is below `count` and has eight elements
        // in each row of the output.
        unsafe {
            let block = RowBlock {
                words: first.words.add(i * words),
                scales: first.scales.wrapping_add(i * factors),
                biases: first.biases.wrapping_add(i * factors),
                before: i * first.groups,
                ..first
            };
            let sums = tile::<M, BITS>(block, x);
            for (m, [low, high]) in sums.into_iter().enumerate() {
                let to = to.add(m * step + i * INTERLEAVED_ROWS);
                vst1q_f32(to, low);
                vst1q_f32(to.add(WIDTH), high);
            }
        }
    }
}

/// The number of words that contain [`INPUTS_PER_SCALE`] codes of each row of a row block.
const fn words_of<const BITS: u32>() -> usize {
    INPUTS_PER_SCALE * BITS as usize / 32 * INTERLEAVED_ROWS
}

/// Multiplies a row block with `M` input rows. Each input row has eight outputs.
///
/// # Safety
/// `block` and `x` must have the groups and codes that `block` states.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
unsafe fn tile<const M: usize, const BITS: u32>(
    block: RowBlock<'_>,
    x: InputPtrs,
) -> [[float32x4_t; 2]; M] {
    let zero = vdupq_n_f32(0.0);
    // With eight input rows, the registers have space only for the sums of a group. The totals are
    // in memory.
    let mut totals = [[zero; 2]; M];
    for g in 0..block.groups {
        let mut sums = [[zero; 2]; M];
        // SAFETY: offsets are below the words, inputs and groups that the caller guarantees.
        unsafe {
            for n in g * block.per..(g + 1) * block.per {
                let numbers = numbers::<BITS>(block.words.add(n * words_of::<BITS>()));
                // There are two loops because the compiler does not unroll a loop of eight, and
                // then keeps no sum in a register.
                let (low, high) = sums.split_at_mut(M.min(4));
                for (m, sum) in low.iter_mut().enumerate() {
                    add(sum, numbers, x, n * M + m);
                }
                for (m, sum) in high.iter_mut().enumerate() {
                    add(sum, numbers, x, n * M + 4 + m);
                }
            }
            let [scales, mut biases] = match block.others {
                Some(others) => others.map(|params| {
                    let eight = params.group(block.before + g);
                    [0, WIDTH].map(|at| vld1q_f32(eight[at..].as_ptr()))
                }),
                None => [block.scales, block.biases].map(|all| factors(all, g, block.half)),
            };
            if BITS == 8 {
                // The codes have an offset of -128 that makes them signed. The biases compensate
                // for it.
                biases[0] = vfmaq_n_f32(biases[0], scales[0], 128.0);
                biases[1] = vfmaq_n_f32(biases[1], scales[1], 128.0);
            }
            for (m, (total, sum)) in totals.iter_mut().zip(sums).enumerate() {
                let group = *x.sums.add(m * block.groups + g);
                for half in 0..2 {
                    let product = vfmaq_f32(total[half], sum[half], scales[half]);
                    total[half] = vfmaq_n_f32(product, biases[half], group);
                }
            }
        }
    }
    totals
}

/// Loads [`INPUTS_PER_SCALE`] codes of each of eight rows, as signed bytes. The first two vectors
/// have four codes of each row, and the other two vectors the other four. For 4 bits these are the
/// even and the odd codes of a row's word. For 8 bits they are the codes of its first and second
/// word, minus 128.
///
/// # Safety
/// The words of these codes must exist.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
unsafe fn numbers<const BITS: u32>(words: *const u32) -> [[int8x16_t; 2]; 2] {
    let at = words.cast::<u8>();
    // SAFETY: the caller guarantees 32 bytes for 4-bit codes, and 64 for 8-bit codes.
    unsafe {
        if BITS == 4 {
            let (q, mask) = ([vld1q_u8(at), vld1q_u8(at.add(16))], vdupq_n_u8(15));
            let low = |q| vreinterpretq_s8_u8(vandq_u8(q, mask));
            let high = |q| vreinterpretq_s8_u8(vshrq_n_u8::<4>(q));
            [[low(q[0]), low(q[1])], [high(q[0]), high(q[1])]]
        } else {
            let signed = |at| vreinterpretq_s8_u8(veorq_u8(vld1q_u8(at), vdupq_n_u8(128)));
            [
                [signed(at), signed(at.add(16))],
                [signed(at.add(32)), signed(at.add(48))],
            ]
        }
    }
}

/// Adds the products of codes with [`INPUTS_PER_SCALE`] inputs of a row. `place` is the index of
/// these inputs in units of [`INPUTS_PER_SCALE`].
///
/// # Safety
/// The inputs must have this index.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
unsafe fn add(
    sums: &mut [float32x4_t; 2],
    [first, second]: [[int8x16_t; 2]; 2],
    x: InputPtrs,
    place: usize,
) {
    // SAFETY: the caller guarantees that the inputs have this index.
    let (bytes, scale) = unsafe {
        (
            vld1q_s8(x.bytes.add(place * 2 * INPUTS_PER_SCALE)),
            *x.scales.add(place),
        )
    };
    let exact = exact(first, second, bytes);
    sums[0] = vfmaq_n_f32(sums[0], vcvtq_f32_s32(exact[0]), scale);
    sums[1] = vfmaq_n_f32(sums[1], vcvtq_f32_s32(exact[1]), scale);
}

/// The sums of products of [`INPUTS_PER_SCALE`] codes of eight rows with the same number of inputs.
/// Products with high bytes count 256 times. The magnitude of a sum is below 2^25.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
fn exact(first: [int8x16_t; 2], second: [int8x16_t; 2], x: int8x16_t) -> [int32x4_t; 2] {
    let zero = vdupq_n_s32(0);
    // Two sums are computed at a time, which hides latency on in-order processors.
    let sums = [dot::<0>(zero, first[0], x), dot::<0>(zero, first[1], x)];
    let sums = [
        dot::<2>(sums[0], second[0], x),
        dot::<2>(sums[1], second[1], x),
    ];
    let sums = [vshlq_n_s32::<8>(sums[0]), vshlq_n_s32::<8>(sums[1])];
    let sums = [
        dot::<1>(sums[0], first[0], x),
        dot::<1>(sums[1], first[1], x),
    ];
    [
        dot::<3>(sums[0], second[0], x),
        dot::<3>(sums[1], second[1], x),
    ]
}

/// The scales or biases of a group of eight rows.
///
/// # Safety
/// The group must have eight values: float16 if `half`, otherwise float32.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
unsafe fn factors(all: *const u8, group: usize, half: bool) -> [float32x4_t; 2] {
    // SAFETY: the caller guarantees the group's eight values in this type.
    unsafe {
        if half {
            let at = all.cast::<u16>().add(group * INTERLEAVED_ROWS);
            [wide(vld1_u16(at)), wide(vld1_u16(at.add(WIDTH)))]
        } else {
            let at = all.cast::<f32>().add(group * INTERLEAVED_ROWS);
            [vld1q_f32(at), vld1q_f32(at.add(WIDTH))]
        }
    }
}

/// See [`crate::simd::qgemv::prepare_inputs`].
///
/// # Safety
/// The processor must have neon and dotprod.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
pub(crate) unsafe fn prepare_inputs(
    x: &[f32],
    k: usize,
    (bits, group): (u32, usize),
    to: InputPanelMut<'_>,
) {
    /// The number of elements with four adjacent scales, which are computed together.
    const FOUR: usize = WIDTH * INPUTS_PER_SCALE;
    let (rows, groups) = (x.len() / k, k / group);
    // All writes below are within these bounds.
    assert!(to.quants.len() == rows * k && groups * group == k && group.is_multiple_of(FOUR));
    assert!(to.scales.len() * INPUTS_PER_SCALE == rows * k);
    assert!(to.sums.len() == rows * groups);
    let (bytes, scales) = (to.quants.as_mut_ptr().cast::<i8>(), to.scales.as_mut_ptr());
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (g, x) in x.chunks_exact(group).enumerate() {
            let (mut sum, mut rest) = (vdupq_n_f32(0.0), vdupq_n_f32(0.0));
            for (i, x) in (g * group / FOUR..).zip(x.as_chunks::<FOUR>().0) {
                let mut eights = [[vdupq_n_f32(0.0); 2]; WIDTH];
                for (eight, x) in eights.iter_mut().zip(x.as_chunks::<INPUTS_PER_SCALE>().0) {
                    // SAFETY: `x` has eight elements.
                    *eight = unsafe { [vld1q_f32(x.as_ptr()), vld1q_f32(x.as_ptr().add(WIDTH))] };
                }
                let (units, inverses) = scales_of(eights);
                for (j, eight) in eights.into_iter().enumerate() {
                    sum = vaddq_f32(sum, vaddq_f32(eight[0], eight[1]));
                    let (quantized, lost) = quantize_8(eight, bits, units[j], inverses[j]);
                    rest = vaddq_f32(rest, lost);
                    let place = (i * WIDTH + j) * rows + row;
                    // SAFETY: the row has `k / 8` vectors, each with 16 bytes and a scale.
                    unsafe {
                        vst1q_s8(bytes.add(place * 2 * INPUTS_PER_SCALE), quantized);
                        *scales.add(place) = units[j];
                    }
                }
            }
            to.sums[row * groups + g] = vaddvq_f32(sum) - vaddvq_f32(rest);
        }
    }
}

/// For four runs of eight elements: the value of one integer step, and its inverse.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
fn scales_of(eights: [[float32x4_t; 2]; WIDTH]) -> ([f32; WIDTH], [f32; WIDTH]) {
    // The instructions ignore a quiet NaN.
    let most = |[a, b]: [float32x4_t; 2]| vmaxnmq_f32(vabsq_f32(a), vabsq_f32(b));
    let most = vpmaxnmq_f32(
        vpmaxnmq_f32(most(eights[0]), most(eights[1])),
        vpmaxnmq_f32(most(eights[2]), most(eights[3])),
    );
    let largest = vdupq_n_f32(MAX_QUANT);
    let some = vcgtq_f32(most, vdupq_n_f32(MIN_MAGNITUDE));
    let only = |v| vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), some));
    let (mut units, mut inverses) = ([0.0; WIDTH], [0.0; WIDTH]);
    // SAFETY: four elements exist at each address.
    unsafe {
        vst1q_f32(units.as_mut_ptr(), only(vdivq_f32(most, largest)));
        vst1q_f32(inverses.as_mut_ptr(), only(vdivq_f32(largest, most)));
    }
    (units, inverses)
}

/// Quantizes eight elements, which share a scale, to integers of 16 bits. Each integer becomes a
/// high and a low byte. The bytes are in the order of [`numbers`]: for the four elements of its
/// first half the high bytes, then the low bytes; then the same for its second half. Also returns
/// the rounding errors, as four partial sums.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
fn quantize_8(
    [a, b]: [float32x4_t; 2],
    bits: u32,
    unit: f32,
    inverse: f32,
) -> (int8x16_t, float32x4_t) {
    let rounded = [
        vcvtnq_s32_f32(vmulq_n_f32(a, inverse)),
        vcvtnq_s32_f32(vmulq_n_f32(b, inverse)),
    ];
    let lost = vaddq_f32(
        vfmsq_n_f32(a, vcvtq_f32_s32(rounded[0]), unit),
        vfmsq_n_f32(b, vcvtq_f32_s32(rounded[1]), unit),
    );
    let all = vcombine_s16(vqmovn_s32(rounded[0]), vqmovn_s32(rounded[1]));
    // The low byte is signed, so the high byte is rounded to the nearest.
    let (high, low) = (vrshrn_n_s16::<8>(all), vmovn_s16(all));
    let quantized = if bits == 4 {
        vcombine_s8(vuzp1_s8(high, low), vuzp2_s8(high, low))
    } else {
        let (high, low) = (vreinterpret_s32_s8(high), vreinterpret_s32_s8(low));
        vcombine_s8(
            vreinterpret_s8_s32(vzip1_s32(high, low)),
            vreinterpret_s8_s32(vzip2_s32(high, low)),
        )
    };
    (quantized, lost)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::testing::{noise, tested};

    /// The index of an input's high byte among the 16 bytes of its run. The low byte is four bytes
    /// later.
    fn place(i: usize, bits: u32) -> usize {
        if bits == 4 {
            i % 2 * 8 + i / 2
        } else {
            i / 4 * 8 + i % 4
        }
    }

    /// [`super::prepare_inputs`] by its definition.
    pub(crate) fn plain(x: &[f32], k: usize, (bits, group): (u32, usize), to: InputPanelMut<'_>) {
        let rows = x.len() / k;
        let bytes: &mut [i8] = bytemuck::cast_slice_mut(to.quants);
        to.sums.fill(0.0);
        for (row, x) in x.chunks_exact(k).enumerate() {
            for (n, x) in x.chunks_exact(INPUTS_PER_SCALE).enumerate() {
                let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let (unit, inverse) = if most > MIN_MAGNITUDE {
                    (most / MAX_QUANT, MAX_QUANT / most)
                } else {
                    (0.0, 0.0)
                };
                let at = n * rows + row;
                to.scales[at] = unit;
                for (i, x) in x.iter().enumerate() {
                    let rounded = (x * inverse).round_ties_even() as i32;
                    let low = rounded as i8;
                    let high = (rounded - i32::from(low)) / 256;
                    let place = at * 2 * INPUTS_PER_SCALE + place(i, bits);
                    bytes[place] = i8::try_from(high).unwrap();
                    bytes[place + 4] = low;
                    to.sums[row * (k / group) + n * INPUTS_PER_SCALE / group] +=
                        rounded as f32 * unit;
                }
            }
        }
    }

    /// Products of row blocks of 32 columns with `x`. All codes are `q`.
    fn products(bits: u32, q: u32, (scale, bias): (f32, f32), x: &[f32]) -> Vec<f32> {
        const K: usize = 32;
        let (rows, byte) = (x.len() / K, if bits == 4 { q * 17 } else { q });
        let matrix = PackedMatrix {
            words: &vec![byte * 0x0101_0101; K * INTERLEAVED_ROWS * bits as usize / 32],
            scales: GroupParams::F32(&[scale; INTERLEAVED_ROWS]),
            biases: GroupParams::F32(&[bias; INTERLEAVED_ROWS]),
            groups: 1,
            bits,
        };
        let (mut quants, mut scales) = (vec![7; rows * K], vec![7.0; rows * K / INPUTS_PER_SCALE]);
        let (mut sums, mut out) = (vec![7.0; rows], vec![7.0; rows * INTERLEAVED_ROWS]);
        let to = InputPanelMut {
            values: &mut [],
            quants: &mut quants,
            scales: &mut scales,
            sums: &mut sums,
        };
        // SAFETY: the callers check that the processor has neon and dotprod, or that both are
        // emulated.
        unsafe { prepare_inputs(x, K, (bits, K), to) };
        let x = InputPanel {
            rows,
            values: &[],
            quants: &quants,
            scales: &scales,
            sums: &sums,
        };
        let mut columns = OutputBlock::contiguous(&mut out, rows);
        // SAFETY: the callers check that the processor has neon and dotprod, or that both are
        // emulated.
        unsafe {
            match bits {
                4 => qgemv::<4>(matrix, x, &mut columns),
                _ => qgemv::<8>(matrix, x, &mut columns),
            }
        };
        out
    }

    fn is_here() -> bool {
        tested().contains(&Isa::Dot)
    }

    /// The maximum codes and inputs. If this fails, bytes or sums overflow.
    #[test]
    fn the_largest_numbers_are_exact() {
        if !is_here() {
            return;
        }
        for (bits, most) in [(4, 15), (8, 255)] {
            for q in [0, 1, 7, 8, most / 2, most / 2 + 1, most - 1, most] {
                for (x, bias) in [(1.0f32, 0.0f32), (-1.0, 0.0), (-1.0, -100.0), (1e30, 0.5)] {
                    let wanted = 32.0 * x * (q as f32 + bias);
                    for got in products(bits, q, (1.0, bias), &[x; 3 * 32]) {
                        let size = 32.0 * x.abs() * (most as f32 + bias.abs());
                        assert!(
                            (got - wanted).abs() <= 1e-6 * size,
                            "{bits} {q}: {got} {wanted}"
                        );
                    }
                }
            }
        }
    }

    /// Each byte of an input must affect the result. The test has large inputs next to small
    /// inputs, and inputs on both sides of a limit of the high byte.
    #[test]
    fn all_whole_numbers_come_back() {
        if !is_here() {
            return;
        }
        // The codes are signed and have no bias, so nothing is rounded.
        for (bits, q, bias) in [(4, 3, 0.0), (8, 131, -128.0), (8, 125, -128.0)] {
            let w = q as f32 + bias;
            for first in (-32_639..=32_639i32 - 6).step_by(97) {
                let mut x = [0.0; 32];
                for (i, x) in x[..7].iter_mut().enumerate() {
                    *x = (first + i as i32) as f32;
                }
                // With this maximum, an integer step is 1.
                x[7] = MAX_QUANT;
                let wanted: f32 = x.iter().map(|x| w * x).sum();
                for got in products(bits, q, (1.0, bias), &x) {
                    assert_eq!(got, wanted, "{bits} bits, from {first} on");
                }
            }
        }
    }

    #[test]
    fn what_has_no_inverse_is_zero() {
        if !is_here() {
            return;
        }
        for x in [0.0, 1e-45, -1e-40, 1e-36, 9e-35] {
            for got in products(8, 200, (1.0, 0.5), &[x; 32]) {
                assert!(got.abs() < 1e-30, "{x}: {got}");
            }
        }
        let mut x = noise(32, 1);
        x[9] = 1e-38;
        let wanted: f32 = x.iter().sum();
        assert!((products(4, 1, (1.0, 0.0), &x)[0] - wanted).abs() < 1e-3);
    }
}
