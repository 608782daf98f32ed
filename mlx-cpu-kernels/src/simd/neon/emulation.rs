//! The functions of `intrinsics.rs` in plain Rust, for tests on other processors. Names, types and
//! results follow Arm's C Language Extensions. Lane 0 is in the lowest bits, as in little-endian
//! memory.

#![allow(non_camel_case_types, reason = "Arm's names")]

use bytemuck::cast;
use half::f16;
use std::array::from_fn;

macro_rules! vectors {
    ($($name:ident: [$lane:ty; $count:literal],)*) => {$(
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(crate) struct $name([$lane; $count]);
    )*};
}

vectors! {
    float32x4_t: [f32; 4],
    // The lanes are stored as integers, because they are only moved and their bits must not change.
    float64x2_t: [u64; 2],
    int8x8_t: [i8; 8],
    int8x16_t: [i8; 16],
    int16x4_t: [i16; 4],
    int16x8_t: [i16; 8],
    int32x2_t: [i32; 2],
    int32x4_t: [i32; 4],
    uint8x16_t: [u8; 16],
    uint16x4_t: [u16; 4],
    uint32x4_t: [u32; 4],
}

macro_rules! loads {
    ($($name:ident: *const $lane:ty => $vector:ident,)*) => {$(
        /// # Safety
        /// All elements of a vector must exist.
        pub(crate) unsafe fn $name(from: *const $lane) -> $vector {
            // SAFETY: the caller guarantees the elements. A vector has the layout of an array of
            // its lanes.
            unsafe { from.cast::<$vector>().read_unaligned() }
        }
    )*};
}

loads! {
    vld1_u16: *const u16 => uint16x4_t,
    vld1q_f32: *const f32 => float32x4_t,
    vld1q_s8: *const i8 => int8x16_t,
    vld1q_u8: *const u8 => uint8x16_t,
    vld1q_u32: *const u32 => uint32x4_t,
}

macro_rules! stores {
    ($($name:ident: $vector:ident => *mut $lane:ty,)*) => {$(
        /// # Safety
        /// There must be space for all elements of a vector.
        pub(crate) unsafe fn $name(to: *mut $lane, a: $vector) {
            // SAFETY: the caller guarantees the space. A vector has the layout of an array of its
            // lanes.
            unsafe { to.cast::<$vector>().write_unaligned(a) }
        }
    )*};
}

stores! {
    vst1q_f32: float32x4_t => *mut f32,
    vst1q_s8: int8x16_t => *mut i8,
}

macro_rules! splats {
    ($($name:ident: $lane:ty => $vector:ident,)*) => {$(
        pub(crate) fn $name(value: $lane) -> $vector {
            $vector([value; _])
        }
    )*};
}

splats! {
    vdupq_n_f32: f32 => float32x4_t,
    vdupq_n_s32: i32 => int32x4_t,
    vdupq_n_u8: u8 => uint8x16_t,
    vdupq_n_u32: u32 => uint32x4_t,
}

macro_rules! casts {
    ($($name:ident: $from:ident => $to:ident,)*) => {$(
        pub(crate) fn $name(a: $from) -> $to {
            $to(cast(a.0))
        }
    )*};
}

casts! {
    vreinterpret_s8_s32: int32x2_t => int8x8_t,
    vreinterpret_s32_s8: int8x8_t => int32x2_t,
    vreinterpretq_f32_f64: float64x2_t => float32x4_t,
    vreinterpretq_f32_u32: uint32x4_t => float32x4_t,
    vreinterpretq_f64_f32: float32x4_t => float64x2_t,
    vreinterpretq_s8_u8: uint8x16_t => int8x16_t,
    vreinterpretq_u32_f32: float32x4_t => uint32x4_t,
}

/// Generates functions that process each lane separately.
macro_rules! unary {
    ($($name:ident: $from:ident => $to:ident, $f:expr;)*) => {$(
        pub(crate) fn $name(a: $from) -> $to {
            $to(a.0.map($f))
        }
    )*};
}

unary! {
    vabsq_f32: float32x4_t => float32x4_t, f32::abs;
    // Rounds to the nearest integer, with ties to even. `as` saturates, and turns NaN into zero.
    vcvtnq_s32_f32: float32x4_t => int32x4_t, |a| a.round_ties_even() as i32;
    vcvtq_f32_s32: int32x4_t => float32x4_t, |a| a as f32;
    vcvtq_f32_u32: uint32x4_t => float32x4_t, |a| a as f32;
    // Keeps the low half of each lane.
    vmovn_s16: int16x8_t => int8x8_t, |a| a as i8;
    // Saturates to the smaller type.
    vqmovn_s32: int32x4_t => int16x4_t, |a| a.clamp(i16::MIN.into(), i16::MAX.into()) as i16;
    wide: uint16x4_t => float32x4_t, |a| f16::from_bits(a).to_f32();
}

macro_rules! binary {
    ($($name:ident: $from:ident => $to:ident, $f:expr;)*) => {$(
        pub(crate) fn $name(a: $from, b: $from) -> $to {
            $to(from_fn(|i| $f(a.0[i], b.0[i])))
        }
    )*};
}

binary! {
    vaddq_f32: float32x4_t => float32x4_t, |a, b| a + b;
    vandq_u8: uint8x16_t => uint8x16_t, |a, b| a & b;
    vandq_u32: uint32x4_t => uint32x4_t, |a, b| a & b;
    vcgtq_f32: float32x4_t => uint32x4_t, |a, b| if a > b { u32::MAX } else { 0 };
    vdivq_f32: float32x4_t => float32x4_t, |a, b| a / b;
    veorq_u8: uint8x16_t => uint8x16_t, |a, b| a ^ b;
    vmaxnmq_f32: float32x4_t => float32x4_t, greater;
    vmulq_f32: float32x4_t => float32x4_t, |a, b| a * b;
}

/// FMAXNM of two floats: a quiet NaN is less than every number, and -0 is less than 0.
fn greater(a: f32, b: f32) -> f32 {
    let signaling = |v: f32| v.is_nan() && v.to_bits() & 1 << 22 == 0;
    if signaling(a) || signaling(b) {
        let first = if signaling(a) { a } else { b };
        return f32::from_bits(first.to_bits() | 1 << 22);
    }
    match (a.is_nan(), b.is_nan()) {
        (false, true) | (true, true) => a,
        (true, false) => b,
        _ if a == b => f32::from_bits(a.to_bits() & b.to_bits()),
        _ if a > b => a,
        _ => b,
    }
}

pub(crate) fn vmulq_n_f32(a: float32x4_t, b: f32) -> float32x4_t {
    float32x4_t(a.0.map(|a| a * b))
}

/// `a + b * c`, rounded once.
pub(crate) fn vfmaq_f32(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    float32x4_t(from_fn(|i| b.0[i].mul_add(c.0[i], a.0[i])))
}

pub(crate) fn vfmaq_n_f32(a: float32x4_t, b: float32x4_t, c: f32) -> float32x4_t {
    vfmaq_f32(a, b, vdupq_n_f32(c))
}

/// `a - b * c`, rounded once.
pub(crate) fn vfmsq_n_f32(a: float32x4_t, b: float32x4_t, c: f32) -> float32x4_t {
    float32x4_t(from_fn(|i| (-b.0[i]).mul_add(c, a.0[i])))
}

/// The sum of all lanes, added in pairs.
pub(crate) fn vaddvq_f32(a: float32x4_t) -> f32 {
    (a.0[0] + a.0[1]) + (a.0[2] + a.0[3])
}

/// The greater of each pair of lanes: first the pairs of `a`, then those of `b`.
pub(crate) fn vpmaxnmq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    let pair = |v: [f32; 4], i: usize| greater(v[2 * i], v[2 * i + 1]);
    float32x4_t([pair(a.0, 0), pair(a.0, 1), pair(b.0, 0), pair(b.0, 1)])
}

pub(crate) fn vshlq_n_s32<const N: i32>(a: int32x4_t) -> int32x4_t {
    const { assert!(0 <= N && N <= 31) };
    int32x4_t(a.0.map(|a| a << N))
}

pub(crate) fn vshrq_n_u8<const N: i32>(a: uint8x16_t) -> uint8x16_t {
    const { assert!(1 <= N && N <= 8) };
    uint8x16_t(a.0.map(|a| (u32::from(a) >> N) as u8))
}

pub(crate) fn vshrq_n_u32<const N: i32>(a: uint32x4_t) -> uint32x4_t {
    const { assert!(1 <= N && N <= 32) };
    uint32x4_t(a.0.map(|a| (u64::from(a) >> N) as u32))
}

/// Shifts right by `N` bits, rounds half up, and keeps the low byte.
pub(crate) fn vrshrn_n_s16<const N: i32>(a: int16x8_t) -> int8x8_t {
    const { assert!(1 <= N && N <= 8) };
    int8x8_t(a.0.map(|a| ((i32::from(a) + (1 << (N - 1))) >> N) as i8))
}

/// Generates functions that move lanes. Lane `i` of the result is lane `$from(i)` of `a` followed
/// by `b`.
macro_rules! moves {
    ($($name:ident: $vector:ident => $to:ident, $from:expr;)*) => {$(
        pub(crate) fn $name(a: $vector, b: $vector) -> $to {
            let of: fn(usize) -> usize = $from;
            $to(from_fn(|i| match of(i).checked_sub(a.0.len()) {
                None => a.0[of(i)],
                Some(i) => b.0[i],
            }))
        }
    )*};
}

moves! {
    vcombine_s8: int8x8_t => int8x16_t, |i| i;
    vcombine_s16: int16x4_t => int16x8_t, |i| i;
    // The even lanes, then the odd ones.
    vuzp1_s8: int8x8_t => int8x8_t, |i| 2 * i;
    vuzp2_s8: int8x8_t => int8x8_t, |i| 2 * i + 1;
    // Alternates lanes of the operands: those of the low halves, then those of the high halves.
    vzip1_s32: int32x2_t => int32x2_t, |i| i / 2 + i % 2 * 2;
    vzip2_s32: int32x2_t => int32x2_t, |i| 1 + i / 2 + i % 2 * 2;
    // Alternates the even lanes of the operands, then their odd lanes.
    vtrn1q_f32: float32x4_t => float32x4_t, |i| i / 2 * 2 + i % 2 * 4;
    vtrn2q_f32: float32x4_t => float32x4_t, |i| i / 2 * 2 + 1 + i % 2 * 4;
    vtrn1q_f64: float64x2_t => float64x2_t, |i| i / 2 * 2 + i % 2 * 2;
    vtrn2q_f64: float64x2_t => float64x2_t, |i| i / 2 * 2 + 1 + i % 2 * 2;
}

/// SDOT by element: see `intrinsics.rs`.
pub(crate) fn dot<const I: usize>(sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    const { assert!(I <= 3) };
    int32x4_t(from_fn(|lane| {
        let product = |j: usize| i32::from(w.0[4 * lane + j]) * i32::from(x.0[4 * I + j]);
        (0..4).fold(sums.0[lane], |sum, j| sum.wrapping_add(product(j)))
    }))
}
