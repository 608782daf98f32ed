//! Attention of single queries, as when tokens are generated: the heads that share keys look at them together, and
//! long memories are cut into segments for several threads, which are put together after (Dao et al. 2023,
//! "Flash-Decoding"). Not for many queries of one row, which `sweep.rs` answers.

use std::ops::Range;

use crate::attention::attend::Rows;
use crate::simd::dispatch::{self, Isa};
use crate::simd::microkernel::{self, LANES, Left, Product, Right};

#[cfg(target_arch = "x86_64")]
use crate::simd::avx2::vmath::{exp as exp_avx2, horizontal};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_add_ps, _mm_prefetch, _mm_storeu_ps, _mm256_add_ps,
    _mm256_broadcast_ss, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_hadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_storeu_ps, _mm256_sub_ps,
};

/// Heads that look at keys together, so that their sums fit the registers.
const TOGETHER: usize = 3;

/// Keys of a segment: few where there are few, so that each thread gets some. How a row is cut must depend on
/// nothing but its own length, so that it finds the same alone and among others.
fn segment(n: usize) -> usize {
    if n <= 512 { 64 } else { 128 }
}

/// How many segments so many keys have.
pub(crate) fn segments(n: usize) -> usize {
    n.div_ceil(segment(n)).max(1)
}

/// The heads of one query that share keys and values.
pub(crate) struct Glance<'a> {
    pub isa: Isa,
    pub d: usize,
    pub softcap: Option<f32>,
    pub keys: Rows<'a>,
    pub values: Rows<'a>,
    /// The head of keys and values.
    pub group: usize,
    /// Runs of positions that the query sees.
    pub runs: [Range<usize>; 2],
    /// Where the keys begin that are likely to be looked at after these; null for nowhere.
    pub after: *const f32,
}

/// What heads found in a segment.
pub(crate) struct Found<'a> {
    /// `[heads, D]`: sums of values, each times its exponential.
    pub sums: &'a mut [f32],
    /// Of each head: the greatest score, and the sum of the exponentials below it.
    pub states: &'a mut [(f32, f32)],
}

impl Glance<'_> {
    /// Looks at the keys of segment `number`. `queries` is `[heads, D]`, scaled; `scores` is room to use.
    pub(crate) fn look(
        &self,
        number: usize,
        queries: &[f32],
        scores: &mut Vec<f32>,
        found: Found<'_>,
    ) {
        let d = self.d;
        let heads = queries.len() / d;
        let total: usize = self.runs.iter().map(Range::len).sum();
        let size = segment(total);
        let (from, to) = (number * size, total.min((number + 1) * size));
        let n = to.saturating_sub(from);
        scores.clear();
        scores.resize(heads * n, 0.0);
        // The parts of the segment in each run, with the number of the first one's score.
        let mut parts: [(Range<usize>, usize); 2] = Default::default();
        let mut before = 0;
        for (part, run) in parts.iter_mut().zip(&self.runs) {
            let cut = |at: usize| run.start + at.clamp(before, before + run.len()) - before;
            let own = cut(from)..cut(to);
            *part = (own, from.max(before) - from);
            before += run.len();
        }
        for (part, first) in &parts {
            if !part.is_empty() {
                let keys = self.keys.reach(self.group, part.start, part.end, d);
                for h in (0..heads).step_by(TOGETHER) {
                    let some = TOGETHER.min(heads - h);
                    let queries = &queries[h * d..(h + some) * d];
                    let to = (&mut scores[h * n + first..], n);
                    let next = Next::of(&self.values, (self.group, part.start), h == 0);
                    let keys = (keys, self.keys.position);
                    inner_products(self.isa, queries, keys, (part.len(), d), to, next);
                }
            }
        }
        if n == 0 {
            found.states.fill((f32::NEG_INFINITY, 0.0));
            found.sums.fill(0.0);
            return;
        }
        for (scores, state) in scores.chunks_exact_mut(n).zip(found.states.iter_mut()) {
            *state = soften(self.isa, self.softcap, scores);
        }
        found.sums.fill(0.0);
        for (part, first) in &parts {
            if !part.is_empty() {
                let values = self.values.reach(self.group, part.start, part.end, d);
                let shares = (&scores[*first..], n);
                // Most likely the next segment's keys.
                let mut next = Next::of(&self.keys, (self.group, part.end), true);
                if part.end >= self.runs[1].end {
                    next.data = self.after;
                }
                self.gather(shares, values, part.len(), found.sums, next);
            }
        }
    }

    /// Adds values, each times its share: `shares` is `[heads, ..]` with rows `step` apart.
    fn gather(
        &self,
        (shares, step): (&[f32], usize),
        values: &[f32],
        n: usize,
        sums: &mut [f32],
        next: Next,
    ) {
        let d = self.d;
        let heads = sums.len() / d;
        assert!(shares.len() >= (heads - 1) * step + n);
        assert!(values.len() >= (n - 1) * self.values.position + d);
        let wide = self.gather_wide((shares, step), values, n, sums, next);
        let whole = d / LANES * LANES;
        for at in (wide..whole).step_by(LANES) {
            let left = Left {
                data: shares.as_ptr(),
                row_step: step,
                step: 1,
            };
            let right = Right {
                data: values[at..].as_ptr(),
                step: self.values.position,
            };
            let product = Product {
                data: sums[at..].as_mut_ptr(),
                row_step: d,
                adds: true,
            };
            // SAFETY: `n` shares of each head and `n` rows of values with `d` elements, as asserted; `at` and the
            // lanes after it are below `d`, and the sums are `heads` rows of `d`.
            unsafe { microkernel::tiles(self.isa, heads, n, left, right, product) };
        }
        for h in 0..heads {
            for (i, share) in shares[h * step..h * step + n].iter().enumerate() {
                let row = &values[i * self.values.position..][whole..d];
                for (sum, value) in sums[h * d + whole..(h + 1) * d].iter_mut().zip(row) {
                    *sum += share * value;
                }
            }
        }
    }

    /// [`Self::gather`] for lanes that tiles of few rows leave waiting for one another: more of them at a time. Returns
    /// how many of `d` are done.
    fn gather_wide(
        &self,
        (shares, step): (&[f32], usize),
        values: &[f32],
        n: usize,
        sums: &mut [f32],
        next: Next,
    ) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_avx2() {
            let d = self.d;
            let (heads, whole) = (sums.len() / d, d / WIDE * WIDE);
            for h in (0..heads).step_by(TOGETHER) {
                for at in (0..whole).step_by(WIDE) {
                    let shares = (shares[h * step..].as_ptr(), step);
                    let next = next.lanes(at, h == 0);
                    let values = (values[at..].as_ptr(), self.values.position);
                    let sums = (sums[h * d + at..].as_mut_ptr(), d);
                    // SAFETY: `Isa::Avx2` is made by `detect` only; `gather` asserts the lengths, and the heads and
                    // lanes are within them.
                    unsafe {
                        match heads - h {
                            1 => gather_avx2::<1>(shares, values, n, sums, next),
                            2 => gather_avx2::<2>(shares, values, n, sums, next),
                            _ => gather_avx2::<3>(shares, values, n, sums, next),
                        }
                    }
                }
            }
            return whole;
        }
        let _ = (shares, step, values, n, sums, next);
        0
    }
}

/// What is fetched while something else is computed: memory, not the processor, is what single queries wait for, and what
/// the processor fetches ahead by itself ends with each page and each segment.
#[derive(Clone, Copy)]
struct Next {
    /// The first of neighboring positions, which need not be there; null for nothing.
    data: *const f32,
    /// Elements from one to the next.
    position: usize,
}

impl Next {
    /// Position `at` of head `h` and those after it, if it is `wanted`.
    fn of(rows: &Rows<'_>, (h, at): (usize, usize), wanted: bool) -> Self {
        Self {
            data: if wanted {
                rows.place(h, at)
            } else {
                std::ptr::null()
            },
            position: rows.position,
        }
    }

    /// The lanes from `at` on, if they are `wanted`.
    #[cfg(target_arch = "x86_64")]
    fn lanes(self, at: usize, wanted: bool) -> Self {
        let data = if wanted && !self.data.is_null() {
            self.data.wrapping_add(at)
        } else {
            std::ptr::null()
        };
        Self { data, ..self }
    }

    /// Fetches so many elements of position `i`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn fetch(self, i: usize, n: usize) {
        if self.data.is_null() {
            return;
        }
        for at in (0..n).step_by(LANES) {
            let place = self.data.wrapping_add(i * self.position + at);
            // SAFETY: what is not there is not fetched; the processors of this architecture have sse.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
        }
    }
}

/// Lanes that heads gather at a time: with three heads, twelve sums fill the registers.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 32;

/// Adds `WIDE` lanes of `n` values, each times its share, for `R` heads. Each of the three is an address, and how many
/// elements are from a row to the next: shares and sums have a row for each head, values have `n`.
///
/// # Safety
/// The processor must have avx2 and fma; all these elements must be there, and nobody else may use the sums.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn gather_avx2<const R: usize>(
    (shares, step): (*const f32, usize),
    (values, position): (*const f32, usize),
    n: usize,
    (sums, row): (*mut f32, usize),
    next: Next,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut totals = [[_mm256_setzero_ps(); WIDE / 8]; R];
        for i in 0..n {
            next.fetch(i, WIDE);
            let value = values.add(i * position);
            let mut own = [_mm256_setzero_ps(); R];
            for (r, own) in own.iter_mut().enumerate() {
                *own = _mm256_broadcast_ss(&*shares.add(r * step + i));
            }
            for j in 0..WIDE / 8 {
                let value = _mm256_loadu_ps(value.add(8 * j));
                for (totals, own) in totals.iter_mut().zip(own) {
                    totals[j] = _mm256_fmadd_ps(own, value, totals[j]);
                }
            }
        }
        for (r, totals) in totals.into_iter().enumerate() {
            for (j, total) in totals.into_iter().enumerate() {
                let to = sums.add(r * row + 8 * j);
                _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), total));
            }
        }
    }
}

/// What the heads found in all segments: `sums` is `[segments, D]` of one head, `sink` a score that adds nothing.
pub(crate) fn together<'a>(
    parts: impl Iterator<Item = (&'a [f32], (f32, f32))> + Clone,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let greatest = parts.clone().map(|(_, (greatest, _))| greatest).fold(
        sink.unwrap_or(f32::NEG_INFINITY),
        |a, b| {
            // What is no number stays.
            if b > a || b.is_nan() { b } else { a }
        },
    );
    out.fill(0.0);
    let mut total = sink.map_or(0.0, |sink| (sink - greatest).exp());
    for (sums, (own, sum)) in parts {
        if sum == 0.0 {
            continue;
        }
        let factor = (own - greatest).exp();
        total += sum * factor;
        for (out, sum) in out.iter_mut().zip(sums) {
            *out += sum * factor;
        }
    }
    out.iter_mut().for_each(|v| *v /= total);
}

/// Replaces scores by their exponentials below the greatest; returns that one and their sum.
fn soften(isa: Isa, cap: Option<f32>, scores: &mut [f32]) -> (f32, f32) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { soften_avx2(cap, scores) },
        // Every aarch64 processor has neon.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dot => soften_with(cap, scores),
        Isa::Portable => soften_with(cap, scores),
    }
}

/// # Safety
/// The processor must have avx2 and fma.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn soften_avx2(cap: Option<f32>, scores: &mut [f32]) -> (f32, f32) {
    if let Some(cap) = cap {
        scores
            .iter_mut()
            .for_each(|s| *s = microkernel::tanh(*s / cap) * cap);
    }
    let (lanes, rest) = scores.as_chunks_mut::<8>();
    let mut most = _mm256_set1_ps(f32::NEG_INFINITY);
    for scores in &*lanes {
        // SAFETY: eight elements. What is no number is not greater.
        most = unsafe { _mm256_max_ps(_mm256_loadu_ps(scores.as_ptr()), most) };
    }
    let mut eight = [0.0; 8];
    // SAFETY: eight elements.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), most) };
    let greatest = greatest(&eight).max(greatest(rest));
    let base = base(greatest);
    let mut sums = _mm256_setzero_ps();
    for scores in lanes {
        // SAFETY: eight elements; features are the caller's promise.
        unsafe {
            let below = _mm256_sub_ps(_mm256_loadu_ps(scores.as_ptr()), _mm256_set1_ps(base));
            let power = exp_avx2(below);
            _mm256_storeu_ps(scores.as_mut_ptr(), power);
            sums = _mm256_add_ps(sums, power);
        }
    }
    let mut total = horizontal(sums);
    for score in rest {
        *score = microkernel::exp(*score - base);
        total += *score;
    }
    (greatest, total)
}

/// The greatest score; none is no number's.
#[inline(always)]
fn greatest(scores: &[f32]) -> f32 {
    let (lanes, rest) = scores.as_chunks::<8>();
    let mut most = [f32::NEG_INFINITY; 8];
    for scores in lanes {
        for (most, score) in most.iter_mut().zip(scores) {
            *most = if *score > *most { *score } else { *most };
        }
    }
    most.iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a })
}

/// What exponentials are taken below: a query that sees nothing but impossible scores would subtract infinities.
#[inline(always)]
fn base(greatest: f32) -> f32 {
    if greatest == f32::NEG_INFINITY {
        0.0
    } else {
        greatest
    }
}

#[inline(always)]
fn soften_with(cap: Option<f32>, scores: &mut [f32]) -> (f32, f32) {
    if let Some(cap) = cap {
        scores
            .iter_mut()
            .for_each(|s| *s = microkernel::tanh(*s / cap) * cap);
    }
    let greatest = greatest(scores);
    let base = base(greatest);
    let (lanes, rest) = scores.as_chunks_mut::<8>();
    let mut sums = [0.0f32; 8];
    for scores in lanes {
        for (sum, score) in sums.iter_mut().zip(scores) {
            *score = microkernel::exp(*score - base);
            *sum += *score;
        }
    }
    let mut total: f32 = sums.iter().sum();
    for score in rest {
        *score = microkernel::exp(*score - base);
        total += *score;
    }
    (greatest, total)
}

/// Products of a few queries `[heads, d]` with `n` keys, `step` elements apart: row `h` of them begins `row` elements
/// after the one before.
fn inner_products(
    isa: Isa,
    queries: &[f32],
    (keys, step): (&[f32], usize),
    (n, d): (usize, usize),
    (to, row): (&mut [f32], usize),
    next: Next,
) {
    let heads = queries.len() / d;
    assert!(heads <= TOGETHER && keys.len() >= (n - 1) * step + d);
    assert!(to.len() >= (heads - 1) * row + n);
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() && d.is_multiple_of(8) {
        let keys = (keys.as_ptr(), step);
        let to = (to.as_mut_ptr(), row);
        // SAFETY: `Isa::Avx2` is made by `detect` only; the lengths are asserted.
        return unsafe {
            match heads {
                3 => inner_avx2::<3>(queries.as_ptr(), keys, (n, d), to, next),
                2 => inner_avx2::<2>(queries.as_ptr(), keys, (n, d), to, next),
                _ => inner_avx2::<1>(queries.as_ptr(), keys, (n, d), to, next),
            }
        };
    }
    let _ = next;
    for (h, query) in queries.chunks_exact(d).enumerate() {
        for i in 0..n {
            to[h * row + i] = dispatch::inner(isa, query, &keys[i * step..][..d]);
        }
    }
}

/// # Safety
/// The processor must have avx2 and fma. There must be `R` queries of `d` elements, a multiple of 8; `n` keys so far
/// apart; and room for `n` results of each query so far apart.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn inner_avx2<const R: usize>(
    queries: *const f32,
    (keys, step): (*const f32, usize),
    (n, d): (usize, usize),
    (to, row): (*mut f32, usize),
    next: Next,
) {
    // SAFETY: all offsets are within what the caller promises.
    unsafe {
        let mut i = 0;
        while i + 4 <= n {
            (i..i + 4).for_each(|i| next.fetch(i, d));
            let sums = inner_some::<R, 4>(queries, keys.add(i * step), step, d);
            for (r, [a, b, c, e]) in sums.into_iter().enumerate() {
                let four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, e));
                let sum = _mm_add_ps(
                    _mm256_castps256_ps128(four),
                    _mm256_extractf128_ps::<1>(four),
                );
                _mm_storeu_ps(to.add(r * row + i), sum);
            }
            i += 4;
        }
        while i < n {
            next.fetch(i, d);
            let sums = inner_some::<R, 1>(queries, keys.add(i * step), step, d);
            for (r, [a]) in sums.into_iter().enumerate() {
                let two = _mm256_hadd_ps(a, a);
                let one = _mm256_hadd_ps(two, two);
                let sum = _mm_add_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps::<1>(one));
                *to.add(r * row + i) = std::arch::x86_64::_mm_cvtss_f32(sum);
            }
            i += 1;
        }
    }
}

/// Products of `R` queries with `K` keys, in eight sums each.
///
/// # Safety
/// As [`inner_avx2`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn inner_some<const R: usize, const K: usize>(
    queries: *const f32,
    keys: *const f32,
    step: usize,
    d: usize,
) -> [[__m256; K]; R] {
    let mut sums = [[_mm256_setzero_ps(); K]; R];
    let mut at = 0;
    while at < d {
        // SAFETY: below `d` in each query and key.
        unsafe {
            let mut own = [_mm256_setzero_ps(); K];
            for (k, own) in own.iter_mut().enumerate() {
                *own = _mm256_loadu_ps(keys.add(k * step + at));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = _mm256_loadu_ps(queries.add(r * d + at));
                for (sum, key) in sums.iter_mut().zip(own) {
                    *sum = _mm256_fmadd_ps(query, key, *sum);
                }
            }
        }
        at += 8;
    }
    sums
}
