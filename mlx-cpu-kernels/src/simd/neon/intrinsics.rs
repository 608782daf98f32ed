//! All instructions that the aarch64 kernels use. On aarch64 they are the processor's instructions;
//! in tests on other processors they are emulated. `intrinsics_tests.rs` checks both against Arm's
//! definitions.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64 as vectors;
#[cfg(target_arch = "aarch64")]
use std::arch::asm;

#[cfg(not(target_arch = "aarch64"))]
use crate::simd::neon::emulation as vectors;

#[cfg(not(target_arch = "aarch64"))]
pub(crate) use vectors::{dot, wide};
pub(crate) use vectors::{
    float32x4_t, int8x16_t, int32x4_t, vabsq_f32, vaddq_f32, vaddvq_f32, vandq_u8, vandq_u32,
    vcgtq_f32, vcombine_s8, vcombine_s16, vcvtnq_s32_f32, vcvtq_f32_s32, vcvtq_f32_u32, vdivq_f32,
    vdupq_n_f32, vdupq_n_s32, vdupq_n_u8, vdupq_n_u32, veorq_u8, vfmaq_f32, vfmaq_n_f32,
    vfmsq_n_f32, vld1_u16, vld1q_f32, vld1q_s8, vld1q_u8, vld1q_u32, vmaxnmq_f32, vmovn_s16,
    vmulq_f32, vmulq_n_f32, vpmaxnmq_f32, vqmovn_s32, vreinterpret_s8_s32, vreinterpret_s32_s8,
    vreinterpretq_f32_f64, vreinterpretq_f32_u32, vreinterpretq_f64_f32, vreinterpretq_s8_u8,
    vreinterpretq_u32_f32, vrshrn_n_s16, vshlq_n_s32, vshrq_n_u8, vshrq_n_u32, vst1q_f32, vst1q_s8,
    vtrn1q_f32, vtrn1q_f64, vtrn2q_f32, vtrn2q_f64, vuzp1_s8, vuzp2_s8, vzip1_s32, vzip2_s32,
};

/// For each lane of `sums`, adds the products of the lane's four bytes of `w` with bytes
/// `4 * I..4 * I + 4` of `x`.
#[cfg(target_arch = "aarch64")]
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(crate) fn dot<const I: usize>(sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // Assembly, because the intrinsic is not stable. SAFETY: the instruction uses only these
    // registers. It needs dotprod, which is enabled for this function. With `I` above 3 it would
    // not assemble.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {w:v}.16b, {x:v}.4b[{i}]",
            sums = inout(vreg) sums,
            w = in(vreg) w,
            x = in(vreg) x,
            i = const I,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Converts float16 to float32.
#[cfg(target_arch = "aarch64")]
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn wide(from: vectors::uint16x4_t) -> float32x4_t {
    let to: float32x4_t;
    // Assembly, because the intrinsic's type is not stable. SAFETY: the instruction uses only these
    // registers, and every processor with neon has it.
    unsafe {
        asm!(
            "fcvtl {to:v}.4s, {from:v}.4h",
            to = lateout(vreg) to,
            from = in(vreg) from,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    to
}
