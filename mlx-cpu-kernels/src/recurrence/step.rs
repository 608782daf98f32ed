//! One position of a matrix memory: some columns of a head in one pass over the memory's rows.

use crate::isa::Isa;
use crate::partition::OutputBlock;

/// The inputs of one position of one head.
pub(crate) struct Step<'a> {
    /// The scaled query.
    pub q: &'a [f32],
    /// The key, with its gate applied.
    pub k: &'a [f32],
    /// The factor on the memory.
    pub keep: f32,
}

/// Computes `c = keep * c + k^T value` and `y = q c`, where `value` and `y` are the columns of `c`.
/// `before` is the address of these columns in the old memory, with a row stride of `stride`.
/// Without `before`, the old memory is in `c`.
pub(crate) fn advance(
    isa: Isa,
    step: &Step<'_>,
    before: Option<(&[f32], usize)>,
    value: &[f32],
    c: &mut OutputBlock<'_>,
    y: &mut [f32],
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2 and fma.
        Isa::Avx2 => unsafe { advance_avx2(step, before, value, c, y) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx2, fma and avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { advance_avx512(step, before, value, c, y) },
        _ => advance_with(step, before, value, c, y),
    }
}

/// # Safety
/// The processor must have avx2 and fma.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn advance_avx2(
    step: &Step<'_>,
    before: Option<(&[f32], usize)>,
    value: &[f32],
    c: &mut OutputBlock<'_>,
    y: &mut [f32],
) {
    advance_with(step, before, value, c, y);
}

/// # Safety
/// The processor must have avx2, fma and avx512f.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f")]
unsafe fn advance_avx512(
    step: &Step<'_>,
    before: Option<(&[f32], usize)>,
    value: &[f32],
    c: &mut OutputBlock<'_>,
    y: &mut [f32],
) {
    advance_with(step, before, value, c, y);
}

#[inline(always)]
fn advance_with(
    step: &Step<'_>,
    before: Option<(&[f32], usize)>,
    value: &[f32],
    c: &mut OutputBlock<'_>,
    y: &mut [f32],
) {
    y.fill(0.0);
    for (a, (&k, &q)) in step.k.iter().zip(step.q).enumerate() {
        let row = c.row_mut(a);
        if let Some((before, stride)) = before {
            row.copy_from_slice(&before[a * stride..][..value.len()]);
        }
        for ((state, y), value) in row.iter_mut().zip(y.iter_mut()).zip(value) {
            *state = step.keep * *state + k * value;
            *y += q * *state;
        }
    }
}

/// `missing = strength * (value - keep * k c)`: the difference between the value and the one
/// already stored for the key. `before` is as in [`advance`].
pub(crate) fn missing(
    isa: Isa,
    step: &Step<'_>,
    (value, strength): (&[f32], f32),
    before: Option<(&[f32], usize)>,
    c: &mut OutputBlock<'_>,
    missing: &mut [f32],
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2 and fma.
        Isa::Avx2 => unsafe { missing_avx2(step, (value, strength), before, c, missing) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx2, fma and avx512f.
        Isa::Avx512 | Isa::Amx => unsafe {
            missing_avx512(step, (value, strength), before, c, missing);
        },
        _ => missing_with(step, (value, strength), before, c, missing),
    }
}

/// # Safety
/// The processor must have avx2 and fma.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn missing_avx2(
    step: &Step<'_>,
    value: (&[f32], f32),
    before: Option<(&[f32], usize)>,
    c: &mut OutputBlock<'_>,
    missing: &mut [f32],
) {
    missing_with(step, value, before, c, missing);
}

/// # Safety
/// The processor must have avx2, fma and avx512f.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f")]
unsafe fn missing_avx512(
    step: &Step<'_>,
    value: (&[f32], f32),
    before: Option<(&[f32], usize)>,
    c: &mut OutputBlock<'_>,
    missing: &mut [f32],
) {
    missing_with(step, value, before, c, missing);
}

#[inline(always)]
fn missing_with(
    step: &Step<'_>,
    (value, strength): (&[f32], f32),
    before: Option<(&[f32], usize)>,
    c: &mut OutputBlock<'_>,
    missing: &mut [f32],
) {
    missing.fill(0.0);
    for (a, &k) in step.k.iter().enumerate() {
        let row: &[f32] = match before {
            Some((before, stride)) => &before[a * stride..],
            None => c.row_mut(a),
        };
        for (sum, state) in missing.iter_mut().zip(row) {
            *sum += k * state;
        }
    }
    for (sum, value) in missing.iter_mut().zip(value) {
        *sum = strength * (value - step.keep * *sum);
    }
}
