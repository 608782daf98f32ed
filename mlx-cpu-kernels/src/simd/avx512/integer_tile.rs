//! Many-row multiplication in 16-bit integers. It quantizes sixteen input rows and multiplies them
//! with rows of a quantized matrix. One instruction multiplies and adds two columns of sixteen
//! rows, twice as many as with floats.
//!
//! The products of a step are assembly. LLVM 22 splits the intrinsic of `vpdpwssd` into `vpmaddwd`
//! and `vpaddd` where sums form a chain.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_abs_ps, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_cvtepi32_ps, _mm512_cvtps_epi32, _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_max_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_ps,
    _mm512_storeu_si512,
};
use std::ops::Range;

use crate::layout::input_panel::MAX_QUANT;
use crate::layout::integer_panel::{
    CodePanel, InputColumns, InputColumnsMut, STEP, paired_columns,
};
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::layout::tile::LANES;

/// The number of matrix rows per tile, half of a row block. With three panels, the integer sums and
/// the group sums take 24 of the 32 registers. The others hold inputs and a row's codes.
const TILE_ROWS: usize = 4;

/// Quantizes columns `[columns, LANES]`, with a scale per [`STEP`] columns.
///
/// # Safety
/// The processor must have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn quantize(columns: &[f32], to: InputColumnsMut<'_>) {
    let steps = columns.len() / (STEP * LANES);
    // All reads and writes below are within these bounds.
    assert!(columns.len() == steps * STEP * LANES && to.pairs.len() == columns.len() / 2);
    assert!(to.scales.len() == steps * LANES && to.sums.len() == steps * LANES);
    let zero = _mm512_setzero_ps();
    for step in 0..steps {
        // SAFETY: columns, pairs, scale and sum of step `step` are within the asserted bounds.
        unsafe {
            let from = columns.as_ptr().add(step * STEP * LANES);
            let x: [__m512; STEP] = std::array::from_fn(|c| _mm512_loadu_ps(from.add(c * LANES)));
            let (mut most, mut no_number) = (zero, zero);
            for x in x {
                most = _mm512_max_ps(most, _mm512_abs_ps(x));
                // Adds zero; if an input is infinite or NaN, it adds NaN.
                no_number = _mm512_fmadd_ps(x, zero, no_number);
            }
            // In a row of zeros, any scale with a finite inverse is correct.
            let most = _mm512_max_ps(most, _mm512_set1_ps(f32::MIN_POSITIVE * MAX_QUANT));
            let inverse = _mm512_div_ps(_mm512_set1_ps(MAX_QUANT), most);
            let scale = _mm512_mul_ps(most, _mm512_set1_ps(1.0 / MAX_QUANT));
            let mut sum = _mm512_setzero_si512();
            for i in 0..STEP / 2 {
                let [first, second] = paired_columns(i);
                // This is not a closure, because `map` would call it instead of keeping vectors in
                // registers.
                let first = _mm512_cvtps_epi32(_mm512_mul_ps(x[first], inverse));
                let second = _mm512_cvtps_epi32(_mm512_mul_ps(x[second], inverse));
                let low = _mm512_and_si512(first, _mm512_set1_epi32(0xffff));
                let both = _mm512_or_si512(low, _mm512_slli_epi32::<16>(second));
                let place = (step * STEP / 2 + i) * LANES;
                _mm512_storeu_si512(to.pairs.as_mut_ptr().add(place).cast(), both);
                sum = _mm512_add_epi32(sum, _mm512_add_epi32(first, second));
            }
            let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, no_number);
            // No integer represents NaN, so the scale does.
            let scale = _mm512_add_ps(scale, no_number);
            _mm512_storeu_ps(to.scales.as_mut_ptr().add(step * LANES), scale);
            _mm512_storeu_ps(to.sums.as_mut_ptr().add(step * LANES), sum);
        }
    }
}

/// See [`crate::simd::integer_tile::multiply`].
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) unsafe fn multiply(
    rows: usize,
    groups: Range<usize>,
    matrix: CodePanel<'_>,
    x: &[InputColumns<'_>],
    (sums, apart): (&mut [f32], usize),
    accumulate: bool,
) {
    // All reads and writes below are within these bounds.
    let (columns, stride) = (groups.end * matrix.group, matrix.rows);
    let written = rows.next_multiple_of(TILE_ROWS) * LANES;
    assert!(matrix.group.is_multiple_of(STEP) && columns <= matrix.columns);
    assert!(rows <= stride && stride.is_multiple_of(INTERLEAVED_ROWS));
    assert!(matrix.columns / 2 * stride <= matrix.pairs.len());
    matrix.assert_groups(groups.end);
    assert!(apart >= written && sums.len() >= (x.len() - 1) * apart + written);
    for x in x {
        assert!(columns / 2 * LANES <= x.pairs.len() && columns / STEP * LANES <= x.scales.len());
        assert!(columns / STEP * LANES <= x.sums.len());
    }
    if !accumulate {
        for sums in sums.chunks_mut(apart).take(x.len()) {
            sums[..written].fill(0.0);
        }
    }
    let task = Task {
        groups,
        columns: matrix.group,
        biases: matrix.biases_per_scale,
        stride,
    };
    for row in (0..rows).step_by(TILE_ROWS) {
        // SAFETY: as asserted, matrix and sums have `rows` rows rounded up to whole tiles, and
        // matrix and inputs have the groups.
        unsafe {
            // There may be no biases.
            let factors = [matrix.scales, matrix.biases].map(|all| all.as_ptr().wrapping_add(row));
            let block = row / INTERLEAVED_ROWS * (matrix.columns / 2) * INTERLEAVED_ROWS;
            let pairs = matrix.pairs.as_ptr().add(block + row % INTERLEAVED_ROWS);
            let to = sums.as_mut_ptr().add(row * LANES);
            let matrix = (pairs, factors);
            match *x {
                [a] => tile(&task, matrix, [a].map(PanelPtrs::new), [to]),
                [a, b] => {
                    let x = [a, b].map(PanelPtrs::new);
                    tile(&task, matrix, x, [to, to.add(apart)]);
                }
                [a, b, c] => {
                    let x = [a, b, c].map(PanelPtrs::new);
                    tile(&task, matrix, x, [to, to.add(apart), to.add(2 * apart)]);
                }
                _ => unreachable!("one to three panels"),
            }
        }
    }
}

/// The parameters shared by all tiles of a product.
struct Task {
    groups: Range<usize>,
    /// The number of columns per group.
    columns: usize,
    /// The number of biases per group.
    biases: usize,
    /// The number of rows in the matrix's panel.
    stride: usize,
}

/// The addresses of pairs, and of scales and biases, beginning at a row of a [`CodePanel`].
type CodePtrs = (*const i32, [*const f32; 2]);

/// The addresses of [`InputColumns`].
#[derive(Clone, Copy)]
struct PanelPtrs {
    pairs: *const i32,
    scales: *const f32,
    sums: *const f32,
}

impl PanelPtrs {
    fn new(x: InputColumns<'_>) -> Self {
        Self {
            pairs: x.pairs.as_ptr(),
            scales: x.scales.as_ptr(),
            sums: x.sums.as_ptr(),
        }
    }
}

/// The integer sums of the rows of a tile with `P` panels.
type Exact<const P: usize> = [[__m512i; P]; TILE_ROWS];

/// Multiplies [`TILE_ROWS`] matrix rows with `P` panels, and adds to the sums. A lane sums sixteen
/// products exactly. A product is at most 2^12 * (2^15 - 1); see
/// [`crate::layout::packed::MAX_SCALED_CODE`].
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni. All addresses must have the rows and
/// groups of the task.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const P: usize>(
    task: &Task,
    (pairs, [scales, biases]): CodePtrs,
    x: [PanelPtrs; P],
    sums: [*mut f32; P],
) where
    [*const i32; P]: Step<P>,
{
    let Task {
        columns,
        biases: biases_per_group,
        stride,
        ..
    } = *task;
    // The number of steps per bias.
    let steps = columns / STEP / biases_per_group.max(1);
    // SAFETY: the caller guarantees the features, and the rows and groups of the task.
    unsafe {
        for g in task.groups.clone() {
            let mut group = [[_mm512_setzero_ps(); P]; TILE_ROWS];
            for step in g * columns / STEP..(g + 1) * columns / STEP {
                let place = step * (STEP / 2);
                let from = x.map(|x| x.pairs.add(place * LANES));
                let exact = from.products(pairs.add(place * INTERLEAVED_ROWS));
                let scale = x.map(|x| _mm512_loadu_ps(x.scales.add(step * LANES)));
                for (group, exact) in group.iter_mut().zip(exact) {
                    for ((group, exact), scale) in group.iter_mut().zip(exact).zip(scale) {
                        *group = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, *group);
                    }
                }
            }
            let sum_of = |part: usize| {
                let mut all = [_mm512_setzero_ps(); P];
                for step in part * steps..(part + 1) * steps {
                    for (all, x) in all.iter_mut().zip(x) {
                        *all = _mm512_add_ps(*all, _mm512_loadu_ps(x.sums.add(step * LANES)));
                    }
                }
                all
            };
            if biases_per_group == 1 {
                let all = sum_of(g);
                for (m, group) in group.into_iter().enumerate() {
                    let scale = _mm512_set1_ps(*scales.add(g * stride + m));
                    let bias = _mm512_set1_ps(*biases.add(g * stride + m));
                    for ((group, all), to) in group.into_iter().zip(all).zip(sums) {
                        let to = to.add(m * LANES);
                        let total = _mm512_fmadd_ps(group, scale, _mm512_loadu_ps(to));
                        _mm512_storeu_ps(to, _mm512_fmadd_ps(bias, all, total));
                    }
                }
                continue;
            }
            let mut totals: [[__m512; P]; TILE_ROWS] =
                std::array::from_fn(|m| sums.map(|sums| _mm512_loadu_ps(sums.add(m * LANES))));
            for part in g * biases_per_group..(g + 1) * biases_per_group {
                let all = sum_of(part);
                for (m, totals) in totals.iter_mut().enumerate() {
                    let bias = _mm512_set1_ps(*biases.add(part * stride + m));
                    for (total, all) in totals.iter_mut().zip(all) {
                        *total = _mm512_fmadd_ps(bias, all, *total);
                    }
                }
            }
            for (m, (totals, group)) in totals.into_iter().zip(group).enumerate() {
                let scale = _mm512_set1_ps(*scales.add(g * stride + m));
                for ((total, group), to) in totals.into_iter().zip(group).zip(sums) {
                    _mm512_storeu_ps(to.add(m * LANES), _mm512_fmadd_ps(group, scale, total));
                }
            }
        }
    }
}

/// The inputs of a step: [`STEP`] columns of `P` panels.
trait Step<const P: usize> {
    /// Multiplies the step with [`TILE_ROWS`] matrix rows, whose codes begin at `codes`.
    ///
    /// # Safety
    /// The processor must have avx512f and avx512vnni. The columns of the panels and of the codes
    /// must exist.
    unsafe fn products(self, codes: *const i32) -> Exact<P>;
}

/// The instructions for pair `$i`: the inputs of each panel, then for each row its codes and the
/// products with each panel.
macro_rules! products_of_pair {
    ($i:literal; $([$x:ident, $lanes:ident: $a:ident $b:ident $c:ident $d:ident]),*) => {
        concat!(
            $("vmovdqu64 {", stringify!($lanes), "}, [{", stringify!($x), "} + 64*", $i, "]\n",)*
            "vpbroadcastd {row}, dword ptr [{codes} + 32*", $i, "]\n",
            $("vpdpwssd {", stringify!($a), "}, {", stringify!($lanes), "}, {row}\n",)*
            "vpbroadcastd {row}, dword ptr [{codes} + 32*", $i, " + 4]\n",
            $("vpdpwssd {", stringify!($b), "}, {", stringify!($lanes), "}, {row}\n",)*
            "vpbroadcastd {row}, dword ptr [{codes} + 32*", $i, " + 8]\n",
            $("vpdpwssd {", stringify!($c), "}, {", stringify!($lanes), "}, {row}\n",)*
            "vpbroadcastd {row}, dword ptr [{codes} + 32*", $i, " + 12]\n",
            $("vpdpwssd {", stringify!($d), "}, {", stringify!($lanes), "}, {row}\n",)*
        )
    };
}

/// Implements [`Step`] for some panels. Each has its index, and names for its address, its inputs,
/// and its sums with the four rows.
macro_rules! step_of {
    ($count:literal; $($p:literal: $panel:tt),*) => {
        step_of!(@impl $count; [$($p),*]; $($panel),*);
    };
    (@impl $count:literal; [$($p:literal),*];
        $([$x:ident, $lanes:ident: $a:ident $b:ident $c:ident $d:ident]),*) => {
        impl Step<$count> for [*const i32; $count] {
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
            unsafe fn products(self, codes: *const i32) -> Exact<$count> {
                let mut exact = [[_mm512_setzero_si512(); $count]; TILE_ROWS];
                let [[$($a),*], [$($b),*], [$($c),*], [$($d),*]] = &mut exact;
                // SAFETY: the caller guarantees the instructions and the columns. The assembly only
                // reads memory.
                unsafe {
                    asm!(
                        products_of_pair!(0; $([$x, $lanes: $a $b $c $d]),*),
                        products_of_pair!(1; $([$x, $lanes: $a $b $c $d]),*),
                        products_of_pair!(2; $([$x, $lanes: $a $b $c $d]),*),
                        products_of_pair!(3; $([$x, $lanes: $a $b $c $d]),*),
                        products_of_pair!(4; $([$x, $lanes: $a $b $c $d]),*),
                        products_of_pair!(5; $([$x, $lanes: $a $b $c $d]),*),
                        products_of_pair!(6; $([$x, $lanes: $a $b $c $d]),*),
                        products_of_pair!(7; $([$x, $lanes: $a $b $c $d]),*),
                        codes = in(reg) codes,
                        row = out(zmm_reg) _,
                        $($x = in(reg) self[$p],)*
                        $($lanes = out(zmm_reg) _,)*
                        $($a = inout(zmm_reg) *$a,)*
                        $($b = inout(zmm_reg) *$b,)*
                        $($c = inout(zmm_reg) *$c,)*
                        $($d = inout(zmm_reg) *$d,)*
                        options(pure, readonly, nostack, preserves_flags),
                    );
                }
                exact
            }
        }
    };
}

step_of!(1; 0: [x0, lanes0: a0 b0 c0 d0]);
step_of!(2; 0: [x0, lanes0: a0 b0 c0 d0], 1: [x1, lanes1: a1 b1 c1 d1]);
step_of!(
    3;
    0: [x0, lanes0: a0 b0 c0 d0],
    1: [x1, lanes1: a1 b1 c1 d1],
    2: [x2, lanes2: a2 b2 c2 d2]
);
