//! Many tiles of inputs with a matrix whose elements became the sum of two bfloat16 each: the greater parts with both of the
//! inputs', and what they lack with the greater ones. What is left out is some 2^-18 of a product. Sums stay in tile
//! registers over many groups.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T1, _mm_cvtsi32_si128, _mm_prefetch, _mm256_loadu_si256,
    _mm512_and_si512, _mm512_castps_si512, _mm512_castsi256_si512, _mm512_cvtepi32_ps,
    _mm512_fmadd_ps, _mm512_inserti64x4, _mm512_mask_blend_epi16, _mm512_set1_epi32,
    _mm512_srl_epi32, _mm512_srli_epi32, _mm512_storeu_si512,
};

use super::super::bands::BAND;
use super::inputs::nearest;
use super::{DEEP, LINE, Line, Outputs, Registers, SIDE, Scratch, Sources, Squares, Two};

/// Blocks of inputs that are unpacked at a time: their tiles stay in the first cache while those of the inputs pass.
const AT_ONCE: usize = 6;

/// See [`super::products`].
///
/// # Safety
/// As of [`super::products`], with what it asserts.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
pub(super) unsafe fn run<const BITS: u32>(
    two: Two<'_>,
    x: &Squares,
    _: &Registers,
    Scratch { matrix, .. }: &mut Scratch,
    out: &mut [Outputs],
) {
    let from = Sources::of(two);
    let (groups, _) = x.packing();
    let (tall, plane) = (x.tall(), x.padded());
    let deep = x.blocks() / groups;
    matrix.resize(AT_ONCE * 4 * SIDE, Line([0; DEEP]));
    for first in (0..x.blocks()).step_by(AT_ONCE) {
        let count = AT_ONCE.min(x.blocks() - first);
        // SAFETY: blocks that there are, room for as many, and the rows of a tile in both planes.
        unsafe {
            for i in 0..count {
                let to = matrix.as_mut_ptr().add(i * 4 * SIDE);
                unpack::<BITS>(&from, first + i, (first + i) / deep, to);
            }
            for tile in 0..x.count() {
                let inputs = x.tile(tile, first).as_ptr();
                let to = out.as_mut_ptr().add(tile * tall);
                multiply(inputs, matrix.as_ptr(), count, (to, plane), first > 0);
            }
        }
    }
}

/// Elements of neighboring inputs, the even one and the odd one, as a line of a tile of greater parts, and one of what
/// they lack.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
pub(super) fn parts(even: __m512, odd: __m512) -> [__m512i; 2] {
    let ((a, _, a_rest), (b, _, b_rest)) = (nearest(even), nearest(odd));
    let rest = together(_mm512_castps_si512(a_rest), _mm512_castps_si512(b_rest));
    [together(a, b), rest]
}

/// The upper halves of both, one beside the other.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
fn together(even: __m512i, odd: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd)
}

/// A block of inputs' elements of both tiles' outputs: two tiles of greater parts, and two of what they lack, a line for
/// each pair of inputs.
///
/// # Safety
/// The processor must have avx512f, avx512bw and f16c; there must be that block, of that group, and room.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
#[inline]
unsafe fn unpack<const BITS: u32>(from: &Sources<'_>, block: usize, group: usize, to: *mut Line) {
    let words = BITS as usize;
    // Pairs of inputs of a word.
    let per = SIDE / words;
    let mask = _mm512_set1_epi32((1 << BITS) - 1);
    // SAFETY: the words and places are the caller's promise; what is fetched ahead need not be there.
    unsafe {
        let [scales, biases] = from.group(group);
        for tile in 0..2 {
            let (own, ahead) = (from.words[tile], from.ahead[tile]);
            for w in 0..words {
                let at = (block * words + w) * BAND;
                let (low, high) = (own[0].add(at), own[1].add(at));
                if w % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T1>(low.wrapping_add(ahead).cast());
                    _mm_prefetch::<_MM_HINT_T1>(high.wrapping_add(ahead).cast());
                }
                let (low, high) = (
                    _mm256_loadu_si256(low.cast()),
                    _mm256_loadu_si256(high.cast()),
                );
                let q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                let upper = _mm512_srli_epi32::<16>(q);
                for i in 0..per {
                    let shift = _mm_cvtsi32_si128((i * words) as i32);
                    let element = |q: __m512i| {
                        let q = _mm512_and_si512(_mm512_srl_epi32(q, shift), mask);
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), scales[tile], biases[tile])
                    };
                    let [near, rest] = parts(element(q), element(upper));
                    let to = to.add(tile * SIDE + w * per + i);
                    _mm512_storeu_si512(to.cast(), near);
                    _mm512_storeu_si512(to.add(2 * SIDE).cast(), rest);
                }
            }
        }
    }
}

/// A tile of inputs with two tiles of outputs, for so many blocks of inputs; the sums replace what is in the outputs'
/// `plane`s, or are added to it.
///
/// # Safety
/// The registers must be set up. There must be as many pairs of tiles of inputs and fours of the matrix, as [`unpack`]
/// leaves them, one after another, and the rows of a tile in both planes.
#[inline]
unsafe fn multiply(
    inputs: *const Line,
    matrix: *const Line,
    blocks: usize,
    (to, plane): (*mut Outputs, usize),
    adds: bool,
) {
    // SAFETY: the caller's promises.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "test {adds:e}, {adds:e}",
            "jz 2f",
            "tileloadd tmm0, [{c} + {line}*1]",
            "tileloadd tmm1, [{d} + {line}*1]",
            "2:",
            "tileloadd tmm4, [{b} + {line}*1]",
            "tileloadd tmm2, [{a} + {line}*1]",
            "tdpbf16ps tmm0, tmm2, tmm4",
            "tileloadd tmm5, [{b} + {line}*1 + 1024]",
            "tdpbf16ps tmm1, tmm2, tmm5",
            "tileloadd tmm6, [{b} + {line}*1 + 2048]",
            "tdpbf16ps tmm0, tmm2, tmm6",
            "tileloadd tmm7, [{b} + {line}*1 + 3072]",
            "tdpbf16ps tmm1, tmm2, tmm7",
            "tileloadd tmm3, [{a} + {line}*1 + 1024]",
            "tdpbf16ps tmm0, tmm3, tmm4",
            "add {b}, 4096",
            "add {a}, 2048",
            "tdpbf16ps tmm1, tmm3, tmm5",
            "dec {n}",
            "jnz 2b",
            "tilestored [{c} + {line}*1], tmm0",
            "tilestored [{d} + {line}*1], tmm1",
            a = inout(reg) inputs => _,
            b = inout(reg) matrix => _,
            n = inout(reg) blocks => _,
            c = in(reg) to,
            d = in(reg) to.add(plane),
            adds = in(reg) u32::from(adds),
            line = in(reg) LINE,
            options(nostack),
        );
    }
}
