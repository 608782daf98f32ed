//! Products of rows: one row of a matrix with up to eight rows of inputs at once, for each instruction
//! set. Sums are float32.

use std::sync::OnceLock;

use crate::layout::packed::{BAND, Bands};
use crate::partition::Columns;

/// Elements that are unpacked at a time; every group size is a multiple.
pub(crate) const CHUNK: usize = 32;

/// Rows of inputs that share one unpacked row of the matrix.
pub(crate) const MAX_ROWS: usize = 8;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The same, and AVX-512 F, BW and VNNI: made by `detect` only where all are, so what is said of `Avx2` holds.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// All that `Avx512` has, and AMX with tiles of bfloat16, which the system lets the process use: made by `detect` only
    /// where it does, so what is said of `Avx512` and `Avx2` holds.
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON and dotprod.
    #[cfg(target_arch = "aarch64")]
    Dot,
    /// No vectors of its own.
    Portable,
}

impl Isa {
    /// The best one of this processor, or a lesser one where that is asked for.
    pub fn detect() -> Self {
        static FOUND: OnceLock<Isa> = OnceLock::new();
        #[cfg(any(test, feature = "testing"))]
        if let Some(isa) = crate::testing::forced() {
            return isa;
        }
        *FOUND.get_or_init(|| {
            let all = Self::all();
            let wanted = all.iter().find(|isa| crate::wanted(isa.name()));
            wanted.or(all.last()).copied().unwrap_or(Self::Portable)
        })
    }

    /// Those of this processor, each better than the one before.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            all.push(Self::Avx2);
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vnni")
            {
                all.push(Self::Avx512);
                if crate::simd::amx::available() {
                    all.push(Self::Amx);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Self::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                all.push(Self::Dot);
            }
        }
        all
    }

    /// What a processor must have for the next better one, if there is one for its kind.
    pub fn next_needs(self) -> Option<&'static str> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Some("AVX-512 with VNNI"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Some("AMX with bfloat16"),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => None,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Some("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Self::Dot => None,
            Self::Portable if cfg!(target_arch = "x86_64") => Some("AVX2, FMA and F16C"),
            Self::Portable => None,
        }
    }

    /// Whether it has AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx2(self) -> bool {
        matches!(self, Self::Avx2 | Self::Avx512 | Self::Amx)
    }

    /// Whether the processor has a better one.
    pub fn has_better(self) -> bool {
        Self::all().last() != Some(&self)
    }

    /// Its name in `MLX_CPU_KERNELS`.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::Dot => "neon+dotprod",
            Self::Portable => "portable",
        }
    }
}

/// A row of a quantized matrix: `w = scale * q + bias`, group after group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuantizedRow<'a> {
    /// Packed numbers: two to a byte, the lower half first, or one.
    pub packed: &'a [u8],
    /// One a group.
    pub scales: &'a [f32],
    /// One a group.
    pub biases: &'a [f32],
}

/// A row of inputs, prepared as floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputRow<'a> {
    /// The elements.
    pub values: &'a [f32],
    /// The sum of each group.
    pub sums: &'a [f32],
}

/// At most [`MAX_ROWS`] rows of inputs, prepared: as floats, or as whole numbers of 16 bits with a scale for
/// each few neighbors. The latter stand word of the matrix after word, for a word row after row.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "whole numbers are for AVX2 and dotprod")
)]
pub(crate) struct Panel<'a> {
    /// How many.
    pub rows: usize,
    /// The elements row after row; empty where they are whole numbers.
    pub values: &'a [f32],
    /// Whole numbers `[words, rows, neighbors]`, in the order of [`place`] (with dotprod as bytes, see `dot.rs`), or empty.
    pub whole: &'a [i16],
    /// What they are multiplied with: one for each few neighbors ([`sharing`]), `[words, rows]`.
    pub scales: &'a [f32],
    /// The sum of each group, `[rows, groups]`: of whole numbers what they stand for, so that a rounding counts times the
    /// weight that it meets, bias and all, rather than times the packed number alone, which is never negative.
    pub sums: &'a [f32],
}

impl<'a> Panel<'a> {
    /// Row `i` of a panel of floats with rows of `k` elements in so many groups.
    pub(crate) fn row(self, i: usize, k: usize, groups: usize) -> InputRow<'a> {
        InputRow {
            values: &self.values[i * k..(i + 1) * k],
            sums: &self.sums[i * groups..(i + 1) * groups],
        }
    }
}

/// A panel while it is prepared; see [`Panel`].
pub(crate) struct Prepared<'a> {
    pub values: &'a mut [f32],
    pub whole: &'a mut [i16],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

/// Neighboring inputs that share a scale, so that what is large leaves others precise: those whose products with a
/// word of a matrix of so many bits end in one lane.
pub(crate) fn neighbors(bits: u32) -> usize {
    if bits == 4 { 8 } else { 4 }
}

/// Neighboring inputs that share a scale with this instruction set.
pub(crate) fn sharing(isa: Isa, bits: u32) -> usize {
    match isa {
        #[cfg(target_arch = "aarch64")]
        Isa::Dot => crate::simd::neon::qgemv_dotprod::NEAR,
        _ => neighbors(bits),
    }
}

/// Where an input stands among its neighbors: shifts of a word bring pairs of its numbers that are half a word
/// apart into 16-bit lanes.
pub(crate) const fn place(i: usize, near: usize) -> usize {
    2 * (i % (near / 2)) + i / (near / 2)
}

/// The largest whole number.
pub(crate) const LARGEST: f32 = 32_767.0;

/// Whether inputs are prepared as whole numbers.
pub(crate) fn in_whole(isa: Isa) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => true,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => false,
        #[cfg(target_arch = "aarch64")]
        Isa::Dot => true,
        Isa::Portable => false,
    }
}

/// Numbers of float16 as float32, as many as both have.
pub(crate) fn widen(isa: Isa, from: &[u16], to: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2, fma and f16c.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { crate::simd::avx2::vmath::widen(from, to) },
        _ => {
            for (to, from) in to.iter_mut().zip(from) {
                *to = half::f16::from_bits(*from).to_f32();
            }
        }
    }
}

/// Puts rows of `k` inputs into the form that the kernels read, and sums each group: whole numbers where
/// [`in_whole`] says so.
pub(crate) fn prepare(
    isa: Isa,
    x: &[f32],
    k: usize,
    (bits, group): (u32, usize),
    to: Prepared<'_>,
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            crate::simd::avx2::qgemv::prepare(x, k, (bits, group), to);
        },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => prepare_with(x, k, (bits, group), to),
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Dot` is made by `detect` only, where the processor has neon and dotprod.
        Isa::Dot => unsafe { crate::simd::neon::qgemv_dotprod::prepare(x, k, (bits, group), to) },
        Isa::Portable => prepare_with(x, k, (bits, group), to),
    }
}

/// [`prepare`] for whatever instructions it is compiled for.
#[inline(always)]
pub(crate) fn prepare_with(x: &[f32], k: usize, (bits, group): (u32, usize), to: Prepared<'_>) {
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
    if !to.whole.is_empty() {
        let rows = x.len() / k;
        let sums = to.sums.chunks_exact_mut(k / group);
        for ((row, x), sums) in x.chunks_exact(k).enumerate().zip(sums) {
            for ((g, x), sum) in x.chunks_exact(group).enumerate().zip(sums) {
                let first = g * group / neighbors(bits);
                *sum -= to_whole(x, first, (bits, row, rows), to.whole, to.scales);
            }
        }
    } else {
        to.values.copy_from_slice(x);
    }
}

/// A group of a row in whole numbers, from word `first` of the row on; returns what rounding took from its sum. What is
/// no number becomes some number here; the group's sum carries it on.
#[inline(always)]
fn to_whole(
    x: &[f32],
    first: usize,
    (bits, row, rows): (u32, usize, usize),
    whole: &mut [i16],
    scales: &mut [f32],
) -> f32 {
    let near = neighbors(bits);
    let mut rest = 0.0;
    for (word, x) in (first..).zip(x.chunks_exact(near)) {
        let whole = &mut whole[(word * rows + row) * near..][..near];
        let greatest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let inverse = if greatest > 0.0 {
            LARGEST / greatest
        } else {
            0.0
        };
        let scale = greatest / LARGEST;
        scales[word * rows + row] = scale;
        for (i, x) in x.iter().enumerate() {
            let own = (x * inverse).round_ties_even() as i16;
            rest += x - f32::from(own) * scale;
            whole[place(i, near)] = own;
        }
    }
    rest
}

/// Products of the rows of bands with rows of inputs: `out` is `[inputs, rows of the bands]`.
pub(crate) fn block(isa: Isa, bands: Bands<'_>, x: Panel<'_>, out: &mut Columns<'_>) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2, fma and f16c.
        Isa::Avx2 => unsafe { crate::simd::avx2::qgemv::block(bands, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx512` is made by `detect` only, where the processor has all that it names.
        Isa::Avx512 | Isa::Amx => unsafe { crate::simd::avx512::qgemv::block(bands, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Neon` is made by `detect` only, where the processor has neon.
        Isa::Neon => unsafe { crate::simd::neon::kernels::block(bands, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Dot` is made by `detect` only, where the processor has neon and dotprod.
        Isa::Dot => unsafe { crate::simd::neon::qgemv_dotprod::block(bands, x, out) },
        Isa::Portable if bands.bits == 4 => portable_bands::<4>(bands, x, out),
        Isa::Portable => portable_bands::<8>(bands, x, out),
    }
}

/// `row . x` for each `x`; at most [`MAX_ROWS`] of them, as many as `out` has elements.
pub(crate) fn dense(isa: Isa, row: &[f32], x: &[&[f32]], out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            crate::simd::avx2::vmath::dense(row, x, out)
        },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: these are made by `detect` only, where the processor has neon.
        Isa::Neon | Isa::Dot => unsafe { crate::simd::neon::kernels::dense(row, x, out) },
        Isa::Portable => {
            for (out, x) in out.iter_mut().zip(x) {
                *out = portable_dense(row, x);
            }
        }
    }
}

/// `a . b`.
pub(crate) fn inner(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 => unsafe { crate::simd::avx2::vmath::inner(a, b) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: these are made by `detect` only, where the processor has avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { crate::simd::avx512::vmath::inner(a, b) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: these are made by `detect` only, where the processor has neon.
        Isa::Neon | Isa::Dot => unsafe { crate::simd::neon::kernels::inner(a, b) },
        Isa::Portable => portable_dense(a, b),
    }
}

/// A row of a matrix as floats. With 4 bits the even elements of a chunk come before the odd ones.
pub(crate) fn unpack(isa: Isa, row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            crate::simd::avx2::vmath::unpack(row, bits, out)
        },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dot => unpack_with(row, bits, out),
        Isa::Portable => unpack_with(row, bits, out),
    }
}

/// [`unpack`] for whatever instructions it is compiled for.
#[inline(always)]
pub(crate) fn unpack_with(row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
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

fn portable_bands<const BITS: u32>(bands: Bands<'_>, x: Panel<'_>, out: &mut Columns<'_>) {
    let (groups, per, near) = (bands.groups, bands.group_words(), 32 / BITS as usize);
    for band in 0..bands.count() {
        let own = bands.part(band..band + 1);
        let words = own.words.as_chunks::<BAND>().0;
        for i in 0..x.rows {
            let row = x.row(i, groups * per * near, groups);
            let mut totals = [0.0f32; BAND];
            for g in 0..groups {
                let mut sums = [0.0f32; BAND];
                let values = row.values[g * per * near..].chunks_exact(near);
                for (words, x) in words[g * per..(g + 1) * per].iter().zip(values) {
                    for (i, x) in x.iter().enumerate() {
                        for (sum, word) in sums.iter_mut().zip(words) {
                            let q = word >> (i as u32 * BITS) & (u32::MAX >> (32 - BITS));
                            // Signed ones become floats faster.
                            *sum += q.cast_signed() as f32 * x;
                        }
                    }
                }
                let (scales, biases) = (own.scales.eight(g), own.biases.eight(g));
                for lane in 0..BAND {
                    totals[lane] += scales[lane] * sums[lane] + biases[lane] * row.sums[g];
                }
            }
            out.row(i)[band * BAND..][..BAND].copy_from_slice(&totals);
        }
    }
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
#[path = "dispatch_tests.rs"]
pub(crate) mod tests;
