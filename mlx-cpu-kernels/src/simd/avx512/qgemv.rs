//! The products of `whole.rs` for x86-64 with AVX-512 and VNNI: two bands at a time, so that a vector is sixteen
//! outputs, and an instruction multiplies pairs and adds them to their sum. Inputs are prepared there.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_castsi128_si256,
    _mm256_inserti128_si256, _mm256_loadu_pd, _mm256_loadu_si256, _mm256_storeu_ps,
    _mm512_and_si512, _mm512_castpd_ps, _mm512_castpd256_pd512, _mm512_castps512_ps256,
    _mm512_castsi256_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpwssd_epi32,
    _mm512_fmadd_ps, _mm512_insertf64x4, _mm512_inserti64x4, _mm512_set1_epi16, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_srli_epi16, _mm512_storeu_ps,
};

use crate::layout::input_panel::Panel;
use crate::layout::packed::{BAND, Bands};
use crate::partition::Columns;
use crate::simd::avx2::qgemv::{AHEAD, Band, Inputs, with_constants};

with_constants!("avx2,fma,f16c,avx512f,avx512bw,avx512vnni");

/// All bands with `M` rows.
///
/// # Safety
/// As of [`rows`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn bands<const M: usize, const BITS: u32, const HALF: bool>(
    first: Band,
    count: usize,
    x: Panel<'_>,
    out: &mut Columns<'_>,
) {
    let x = Inputs::of(x);
    let factor = if HALF { 2 } else { 4 };
    let (to, step) = out.places();
    for i in (0..count).step_by(2) {
        // The last one of an odd number stands beside itself.
        let next = (i + 1).min(count - 1);
        // SAFETY: bands below `count`, and their places in each row of the output: `Band::first` has seen that they are
        // there.
        unsafe {
            let two = [first.after(i, factor), first.after(next, factor)];
            for (m, found) in tile::<M, BITS, HALF>(two, x).into_iter().enumerate() {
                let to = to.add(m * step + i * BAND);
                if next > i {
                    _mm512_storeu_ps(to, found);
                } else {
                    _mm256_storeu_ps(to, _mm512_castps512_ps256(found));
                }
            }
        }
    }
}

/// Two bands with `M` rows of inputs.
///
/// # Safety
/// The processor must have what [`block`] needs; the bands and `x` must have as many groups and words as they say.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const M: usize, const BITS: u32, const HALF: bool>(
    two: [Band; 2],
    x: Inputs,
) -> [__m512; M] {
    let Band { groups, per, .. } = two[0];
    let mut totals = [_mm512_setzero_ps(); M];
    for g in 0..groups {
        let mut sums = [_mm512_setzero_ps(); M];
        // SAFETY: below the words and groups that the caller promises; what is fetched ahead need not be there.
        unsafe {
            for w in g * per..(g + 1) * per {
                let at = two.map(|band| band.words.wrapping_add(w * BAND));
                if w % 2 == 0 {
                    for at in at {
                        _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
                    }
                }
                let [low, high] = at.map(|at| _mm256_loadu_si256(at.cast()));
                let q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                if BITS == 4 {
                    add_nibbles(&mut sums, q, x, w);
                } else {
                    add_octets(&mut sums, q, x, w);
                }
            }
            let scale = factors::<HALF>(two.map(|band| band.scales), g);
            let bias = factors::<HALF>(two.map(|band| band.biases), g);
            for (m, (total, sum)) in totals.iter_mut().zip(sums).enumerate() {
                let group = _mm512_set1_ps(*x.sums.add(m * groups + g));
                *total = _mm512_fmadd_ps(bias, group, _mm512_fmadd_ps(scale, sum, *total));
            }
        }
    }
    totals
}

/// The scales or biases of a group of two bands.
///
/// # Safety
/// The processor must have avx2, f16c and avx512f; both must have that group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn factors<const HALF: bool>(two: [*const u8; 2], group: usize) -> __m512 {
    // SAFETY: eight factors of a group, which the caller promises; what is fetched ahead need not be there.
    unsafe {
        if HALF {
            let [low, high] = two.map(|band| {
                let at = band.add(group * 2 * BAND);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD / 8).cast());
                _mm_loadu_si128(at.cast())
            });
            let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            _mm512_cvtph_ps(both)
        } else {
            let [low, high] = two.map(|band| _mm256_loadu_pd(band.add(group * 4 * BAND).cast()));
            let both = _mm512_insertf64x4::<1>(_mm512_castpd256_pd512(low), high);
            _mm512_castpd_ps(both)
        }
    }
}

/// Two inputs in each lane.
///
/// # Safety
/// The processor must have avx512f; there must be two.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pair(at: *const i16) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_set1_epi32(unsafe { at.cast::<i32>().read_unaligned() })
}

/// Adds the products of a word of eight numbers of each band. A lane sums eight products below 16 * 2^15.
///
/// # Safety
/// The processor must have what [`block`] needs; the word must be within the inputs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_nibbles<const M: usize>(sums: &mut [__m512; M], q: __m512i, x: Inputs, word: usize) {
    let mask = _mm512_set1_epi16(15);
    let n = [
        _mm512_and_si512(q, mask),
        _mm512_and_si512(_mm512_srli_epi16::<4>(q), mask),
        _mm512_and_si512(_mm512_srli_epi16::<8>(q), mask),
        _mm512_srli_epi16::<12>(q),
    ];
    for (m, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the word is within the inputs: the caller's promise.
        unsafe {
            let at = x.whole.add((word * M + m) * 8);
            let mut exact = _mm512_setzero_si512();
            for (i, n) in n.into_iter().enumerate() {
                exact = _mm512_dpwssd_epi32(exact, n, pair(at.add(2 * i)));
            }
            let scale = _mm512_set1_ps(*x.scales.add(word * M + m));
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, *sum);
        }
    }
}

/// Adds the products of a word of four numbers of each band. A lane sums four products below 2^23.
///
/// # Safety
/// As of [`add_nibbles`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_octets<const M: usize>(sums: &mut [__m512; M], q: __m512i, x: Inputs, word: usize) {
    let even = _mm512_and_si512(q, _mm512_set1_epi16(255));
    let odd = _mm512_srli_epi16::<8>(q);
    for (m, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the word is within the inputs: the caller's promise.
        unsafe {
            let at = x.whole.add((word * M + m) * 4);
            let exact = _mm512_dpwssd_epi32(_mm512_setzero_si512(), even, pair(at));
            let exact = _mm512_dpwssd_epi32(exact, odd, pair(at.add(2)));
            let scale = _mm512_set1_ps(*x.scales.add(word * M + m));
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, *sum);
        }
    }
}
