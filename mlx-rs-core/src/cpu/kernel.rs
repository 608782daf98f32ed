//! Products of rows: one row of a matrix with up to eight rows of inputs at once, for each instruction
//! set. Sums are float32.

use std::sync::OnceLock;

/// Elements that are unpacked at a time; every group size is a multiple.
pub(super) const CHUNK: usize = 32;

/// Rows of inputs that share one unpacked row of the matrix.
pub(super) const MAX_ROWS: usize = 8;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Isa {
    /// The best one of this processor, or the portable one where it is asked for.
    pub(super) fn detect() -> Self {
        static FOUND: OnceLock<Isa> = OnceLock::new();
        #[cfg(test)]
        if let Some(isa) = tests::FORCED.get() {
            return isa;
        }
        *FOUND.get_or_init(|| {
            if super::portable_wanted() {
                Self::Portable
            } else {
                Self::best()
            }
        })
    }

    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Self::Avx2;
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            return Self::Neon;
        }
        Self::Portable
    }

    /// Whether this is what every processor has.
    pub(super) fn is_portable(self) -> bool {
        self == Self::Portable
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }
}

/// A row of a quantized matrix: `w = scale * q + bias`, group after group.
#[derive(Debug, Clone, Copy)]
pub(super) struct QuantizedRow<'a> {
    /// Packed numbers: two to a byte, the lower half first, or one.
    pub packed: &'a [u8],
    /// One a group.
    pub scales: &'a [f32],
    /// One a group.
    pub biases: &'a [f32],
}

/// A row of inputs, prepared.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "digits are for AVX2")
)]
#[derive(Debug, Clone, Copy)]
pub(super) struct InputRow<'a> {
    /// The elements, in the order of [`prepare`]; empty where there are digits.
    pub values: &'a [f32],
    /// The elements as whole numbers of three signed digits to the base 256, so precise as float32: the
    /// lowest digits of all, then the middle and the highest ones. Products with weights of 4 bits are
    /// exact then, 32 at a time.
    pub digits: &'a [i8],
    /// One a group: an element is its whole number times this.
    pub scales: &'a [f32],
    /// The sum of each group.
    pub sums: &'a [f32],
}

/// A row of inputs while it is prepared; see [`InputRow`].
pub(super) struct Prepared<'a> {
    pub values: &'a mut [f32],
    pub digits: &'a mut [i8],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

/// The largest whole number that is used: a little below the largest of three digits, 8,355,711, so that
/// rounding does not lead beyond.
const LARGEST: f32 = 8_355_000.0;

/// Whether inputs for a matrix of so many bits are prepared as digits.
pub(super) fn in_digits(isa: Isa, bits: u32) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => bits == 4,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => {
            // Floats, whatever the bits.
            let _ = bits;
            false
        }
        Isa::Portable => false,
    }
}

/// Puts a row of inputs into the form and the order that the kernels read, and sums each group. With 4
/// bits the even elements of a chunk come before the odd ones, as the halves of bytes do.
pub(super) fn prepare(isa: Isa, x: &[f32], bits: u32, group: usize, to: Prepared<'_>) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 => unsafe { super::x86::prepare(x, bits, group, to) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => prepare_with(isa, x, bits, group, to),
        Isa::Portable => prepare_with(isa, x, bits, group, to),
    }
}

/// [`prepare`] for whatever instructions it is compiled for.
#[inline(always)]
pub(super) fn prepare_with(isa: Isa, x: &[f32], bits: u32, group: usize, to: Prepared<'_>) {
    for (sum, part) in to.sums.iter_mut().zip(x.chunks_exact(group)) {
        // Over eight lanes: exact enough, and vectorizable.
        let mut lanes = [0.0f32; 8];
        for part in part.as_chunks::<8>().0 {
            for (lane, value) in lanes.iter_mut().zip(part) {
                *lane += value;
            }
        }
        *sum = lanes.iter().sum();
    }
    if in_digits(isa, bits) {
        let (low, rest) = to.digits.split_at_mut(x.len());
        let (middle, high) = rest.split_at_mut(x.len());
        let groups = low
            .chunks_exact_mut(group)
            .zip(middle.chunks_exact_mut(group))
            .zip(high.chunks_exact_mut(group))
            .zip(x.chunks_exact(group))
            .zip(to.scales);
        for ((((low, middle), high), x), scale) in groups {
            let mut greatest = [0.0f32; 8];
            for part in x.as_chunks::<8>().0 {
                for (greatest, value) in greatest.iter_mut().zip(part) {
                    *greatest = greatest.max(value.abs());
                }
            }
            let greatest = greatest.iter().copied().fold(0.0f32, f32::max);
            *scale = greatest / LARGEST;
            let inverse = if greatest > 0.0 {
                LARGEST / greatest
            } else {
                0.0
            };
            // Even elements before odd ones, chunk after chunk. What is no number becomes some number
            // here; the sum carries it on.
            for (chunk, x) in x.as_chunks::<CHUNK>().0.iter().enumerate() {
                for half in 0..2 {
                    let at = chunk * CHUNK + half * (CHUNK / 2);
                    for i in 0..CHUNK / 2 {
                        let whole = (x[2 * i + half] * inverse).round_ties_even() as i32;
                        let first = whole as i8;
                        let rest = (whole - i32::from(first)) >> 8;
                        let second = rest as i8;
                        low[at + i] = first;
                        middle[at + i] = second;
                        high[at + i] = ((rest - i32::from(second)) >> 8) as i8;
                    }
                }
            }
        }
    } else if bits == 4 {
        for (from, to) in x
            .as_chunks::<CHUNK>()
            .0
            .iter()
            .zip(to.values.as_chunks_mut::<CHUNK>().0)
        {
            for i in 0..CHUNK / 2 {
                to[i] = from[2 * i];
                to[CHUNK / 2 + i] = from[2 * i + 1];
            }
        }
    } else {
        to.values.copy_from_slice(x);
    }
}

/// Products of consecutive rows of a matrix, with `groups` groups each, with at most [`MAX_ROWS`] rows of
/// inputs: `out` is `[inputs, rows of the matrix]`.
pub(super) fn block(
    isa: Isa,
    matrix: QuantizedRow<'_>,
    groups: usize,
    bits: u32,
    x: &[InputRow<'_>],
    out: &mut [f32],
) {
    let columns = out.len() / x.len().max(1);
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx2 && bits == 4 {
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        return unsafe { super::x86::block_4(matrix, groups, x, out) };
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        // SAFETY: `Isa::Neon` is made by `detect` only, where the processor has neon.
        return unsafe { super::neon::block(matrix, groups, bits, x, out) };
    }
    let bytes = matrix.packed.len() / columns.max(1);
    let rows = matrix
        .packed
        .chunks_exact(bytes)
        .zip(matrix.scales.chunks_exact(groups))
        .zip(matrix.biases.chunks_exact(groups));
    for (column, ((packed, scales), biases)) in rows.enumerate() {
        let row = QuantizedRow {
            packed,
            scales,
            biases,
        };
        let mut sums = [0.0; MAX_ROWS];
        let sums = &mut sums[..x.len()];
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { super::x86::row_8(row, x, sums) },
            _ => {
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = portable_quantized(row, bits, *x);
                }
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            out[i * columns + column] = *sum;
        }
    }
}

/// `row . x` for each `x`; at most [`MAX_ROWS`] of them, as many as `out` has elements.
pub(super) fn dense(isa: Isa, row: &[f32], x: &[&[f32]], out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 => unsafe { super::x86::dense(row, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Neon` is made by `detect` only, where the processor has neon.
        Isa::Neon => unsafe { super::neon::dense(row, x, out) },
        Isa::Portable => {
            for (out, x) in out.iter_mut().zip(x) {
                *out = portable_dense(row, x);
            }
        }
    }
}

/// `a . b`.
pub(super) fn inner(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 => unsafe { super::x86::inner(a, b) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Neon` is made by `detect` only, where the processor has neon.
        Isa::Neon => unsafe { super::neon::inner(a, b) },
        Isa::Portable => portable_dense(a, b),
    }
}

/// `y += a * x`.
pub(super) fn add_scaled(isa: Isa, y: &mut [f32], a: f32, x: &[f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 => unsafe { super::x86::add_scaled(y, a, x) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Neon` is made by `detect` only, where the processor has neon.
        Isa::Neon => unsafe { super::neon::add_scaled(y, a, x) },
        Isa::Portable => y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x),
    }
}

/// A row of a matrix as floats. With 4 bits the even elements of a chunk come before the odd ones.
pub(super) fn unpack(isa: Isa, row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 => unsafe { super::x86::unpack(row, bits, out) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unpack_with(row, bits, out),
        Isa::Portable => unpack_with(row, bits, out),
    }
}

/// [`unpack`] for whatever instructions it is compiled for.
#[inline(always)]
pub(super) fn unpack_with(row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
    let groups = row.scales.len().max(1);
    let (width, bytes) = (out.len() / groups, row.packed.len() / groups);
    let parts = out
        .chunks_exact_mut(width)
        .zip(row.packed.chunks_exact(bytes))
        .zip(row.scales.iter().zip(row.biases));
    for ((out, packed), (&scale, &bias)) in parts {
        if bits == 4 {
            let chunks = packed.as_chunks::<{ CHUNK / 2 }>().0;
            for (out, q) in out.as_chunks_mut::<CHUNK>().0.iter_mut().zip(chunks) {
                let (even, odd) = out.split_at_mut(CHUNK / 2);
                for i in 0..CHUNK / 2 {
                    even[i] = f32::from(q[i] & 15) * scale + bias;
                    odd[i] = f32::from(q[i] >> 4) * scale + bias;
                }
            }
        } else {
            for (out, q) in out.iter_mut().zip(packed) {
                *out = f32::from(*q) * scale + bias;
            }
        }
    }
}

fn portable_quantized(row: QuantizedRow<'_>, bits: u32, x: InputRow<'_>) -> f32 {
    let groups = row.scales.len().max(1);
    let width = x.values.len() / groups;
    let bytes = row.packed.len() / groups;
    let mut total = 0.0;
    for (g, scale) in row.scales.iter().enumerate() {
        let values = &x.values[g * width..(g + 1) * width];
        let packed = &row.packed[g * bytes..(g + 1) * bytes];
        let mut lanes = [0.0f32; CHUNK / 2];
        if bits == 4 {
            for (chunk, q) in values
                .as_chunks::<CHUNK>()
                .0
                .iter()
                .zip(packed.as_chunks::<{ CHUNK / 2 }>().0)
            {
                for i in 0..CHUNK / 2 {
                    lanes[i] += f32::from(q[i] & 15) * chunk[i]
                        + f32::from(q[i] >> 4) * chunk[CHUNK / 2 + i];
                }
            }
        } else {
            for (chunk, q) in values
                .as_chunks::<{ CHUNK / 2 }>()
                .0
                .iter()
                .zip(packed.as_chunks::<{ CHUNK / 2 }>().0)
            {
                for i in 0..CHUNK / 2 {
                    lanes[i] += f32::from(q[i]) * chunk[i];
                }
            }
        }
        total += scale * lanes.iter().sum::<f32>() + row.biases[g] * x.sums[g];
    }
    total
}

fn portable_dense(row: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (head, tail) = row.as_chunks::<16>();
    let (x_head, x_tail) = x.as_chunks::<16>();
    for (w, x) in head.iter().zip(x_head) {
        for i in 0..16 {
            lanes[i] += w[i] * x[i];
        }
    }
    let rest: f32 = tail.iter().zip(x_tail).map(|(w, x)| w * x).sum();
    lanes.iter().sum::<f32>() + rest
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// The instruction set of operations that this thread builds.
        pub static FORCED: Cell<Option<Isa>> = const { Cell::new(None) };
    }

    /// Runs `f` with each instruction set that is here.
    pub(crate) fn with_each(f: impl Fn(Isa)) {
        for isa in isas() {
            FORCED.set(Some(isa));
            f(isa);
        }
        FORCED.set(None);
    }

    pub(crate) fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1u32 << 24) as f32 - 0.5
            })
            .collect()
    }

    fn isas() -> Vec<Isa> {
        let mut all = vec![Isa::Portable];
        if Isa::best() != Isa::Portable {
            all.push(Isa::best());
        }
        all
    }

    #[test]
    fn quantized_rows_equal_the_definition() {
        for bits in [4u32, 8] {
            for group in [32, 64, 128] {
                for groups in [1, 3, 18] {
                    let k = group * groups;
                    let packed: Vec<u8> = noise(k * bits as usize / 8, bits + group as u32)
                        .iter()
                        .map(|v| ((v + 0.5) * 255.9) as u8)
                        .collect();
                    let (scales, biases) = (noise(groups, 1), noise(groups, 2));
                    let at = |i: usize| {
                        let q = match bits {
                            4 => packed[i / 2] >> (4 * (i % 2)) & 15,
                            _ => packed[i],
                        };
                        f64::from(scales[i / group]) * f64::from(q) + f64::from(biases[i / group])
                    };
                    for m in 1..=MAX_ROWS {
                        let rows: Vec<Vec<f32>> = (0..m).map(|r| noise(k, r as u32 + 7)).collect();
                        let row = QuantizedRow {
                            packed: &packed,
                            scales: &scales,
                            biases: &biases,
                        };
                        for isa in isas() {
                            let prepared: Vec<_> = rows
                                .iter()
                                .map(|x| {
                                    let mut p = (
                                        vec![0.0; k],
                                        vec![0; 3 * k],
                                        vec![0.0; groups],
                                        vec![0.0; groups],
                                    );
                                    let to = Prepared {
                                        values: &mut p.0,
                                        digits: &mut p.1,
                                        scales: &mut p.2,
                                        sums: &mut p.3,
                                    };
                                    prepare(isa, x, bits, group, to);
                                    p
                                })
                                .collect();
                            let inputs: Vec<InputRow<'_>> = prepared
                                .iter()
                                .map(|p| InputRow {
                                    values: &p.0,
                                    digits: &p.1,
                                    scales: &p.2,
                                    sums: &p.3,
                                })
                                .collect();
                            let mut out = vec![0.0; m];
                            block(isa, row, groups, bits, &inputs, &mut out);
                            for (x, got) in rows.iter().zip(&out) {
                                let exact: f64 = x
                                    .iter()
                                    .enumerate()
                                    .map(|(i, x)| at(i) * f64::from(*x))
                                    .sum();
                                let size: f64 = x
                                    .iter()
                                    .enumerate()
                                    .map(|(i, x)| (at(i) * f64::from(*x)).abs())
                                    .sum();
                                assert!(
                                    (exact - f64::from(*got)).abs() <= 2e-6 * size.max(1.0),
                                    "{isa:?} {bits} bits, group {group}, {k} inputs: {got} {exact}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn dense_rows_equal_the_definition() {
        for k in [1, 7, 8, 31, 64, 577] {
            let w = noise(k, 3);
            for m in 1..=MAX_ROWS {
                let rows: Vec<Vec<f32>> = (0..m).map(|r| noise(k, r as u32 + 11)).collect();
                let x: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
                for isa in isas() {
                    let mut out = vec![0.0; m];
                    dense(isa, &w, &x, &mut out);
                    for (x, got) in rows.iter().zip(&out) {
                        let exact: f64 = w.iter().zip(x).map(|(w, x)| f64::from(w * x)).sum();
                        assert!((exact - f64::from(*got)).abs() < 1e-4, "{isa:?} {k}");
                    }
                }
            }
        }
    }
}
