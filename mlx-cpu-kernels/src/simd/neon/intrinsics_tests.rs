//! Compares each function of `intrinsics.rs` with Arm's definition (Arm C Language Extensions; Arm
//! Architecture Reference Manual). On aarch64 the functions are the processor's instructions, and
//! on other processors the emulated ones. Expected values are literals, not computed.

use super::intrinsics::*;
use crate::isa::Isa;
use crate::testing::tested;

/// Converts between a vector and its lanes.
fn of<A: Copy, B: Copy>(a: A) -> B {
    const { assert!(size_of::<A>() == size_of::<B>()) };
    // SAFETY: both types are vectors or arrays of integers and floats with equal sizes. All bits
    // are valid for them.
    unsafe { std::mem::transmute_copy(&a) }
}

/// Generates tests in which the instructions may be used.
macro_rules! definitions {
    ($($(#[$doc:meta])* fn $name:ident() $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon,dotprod"))]
            unsafe fn run() $body
            if tested().contains(&Isa::Dot) {
                // SAFETY: the processor has neon and dotprod, or they are emulated.
                unsafe { run() };
            }
        }
    )*};
}

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;
/// The smallest positive float32.
const TINY: f32 = 1e-45;

/// The bits of the floats. Comparing bits distinguishes the signs of zeros, and makes NaN equal to
/// itself.
fn bits(a: [f32; 4]) -> [u32; 4] {
    a.map(f32::to_bits)
}

/// Consecutive bytes, beginning with `first`.
fn bytes<const N: usize>(first: i8) -> [i8; N] {
    std::array::from_fn(|i| first + i as i8)
}

definitions! {
    /// Lane 0 is the element at the address, which need not be aligned.
    fn loads_read_lanes_in_order() {
        let floats = [9.0f32, 1.0, -0.0, INF, TINY, 7.0];
        // SAFETY: the elements from the second on exist.
        let lanes = unsafe { vld1q_f32(floats[1..].as_ptr()) };
        assert_eq!(bits(of(lanes)), bits([1.0, -0.0, INF, TINY]));
        let words = [9u32, 1, 2, u32::MAX, 1 << 31];
        // SAFETY: the elements from the second on exist.
        let lanes = unsafe { vld1q_u32(words[1..].as_ptr()) };
        assert_eq!(of::<_, [u32; 4]>(lanes), [1, 2, u32::MAX, 1 << 31]);
        let halves = [9u16, 1, 2, 3, 0x8000];
        // SAFETY: the elements from the second on exist.
        let lanes = unsafe { vld1_u16(halves[1..].as_ptr()) };
        assert_eq!(of::<_, [u16; 4]>(lanes), [1, 2, 3, 0x8000]);
        let all: [i8; 17] = bytes(-8);
        // SAFETY: the elements from the second on exist.
        let lanes = unsafe { vld1q_s8(all[1..].as_ptr()) };
        assert_eq!(of::<_, [i8; 16]>(lanes), bytes(-7));
        let all: [u8; 17] = std::array::from_fn(|i| 239 + i as u8);
        // SAFETY: the elements from the second on exist.
        let lanes = unsafe { vld1q_u8(all[1..].as_ptr()) };
        assert_eq!(of::<_, [u8; 16]>(lanes), all[1..]);
    }

    fn stores_write_lanes_in_order_and_nothing_else() {
        let mut floats = [9.0f32; 6];
        // SAFETY: four elements exist from the second on.
        unsafe { vst1q_f32(floats[1..].as_mut_ptr(), of([1.0f32, 2.0, 3.0, 4.0])) };
        assert_eq!(floats, [9.0, 1.0, 2.0, 3.0, 4.0, 9.0]);
        let mut all = [99i8; 18];
        // SAFETY: sixteen elements exist from the second on.
        unsafe { vst1q_s8(all[1..].as_mut_ptr(), of(bytes::<16>(-8))) };
        assert_eq!(
            (all[0], &all[1..17], all[17]),
            (99, &bytes::<16>(-8)[..], 99)
        );
    }

    fn one_number_goes_to_all_lanes() {
        assert_eq!(bits(of(vdupq_n_f32(-0.0))), bits([-0.0; 4]));
        assert_eq!(of::<_, [i32; 4]>(vdupq_n_s32(i32::MIN)), [i32::MIN; 4]);
        assert_eq!(of::<_, [u32; 4]>(vdupq_n_u32(u32::MAX)), [u32::MAX; 4]);
        assert_eq!(of::<_, [u8; 16]>(vdupq_n_u8(200)), [200; 16]);
    }

    /// For every lane width, the lowest lane must be in the lowest bits.
    fn reinterpreted_vectors_keep_their_bits() {
        let floats = [1.0f32, -2.0, f32::from_bits(0x7f80_0001), -0.0];
        let words = [0x3f80_0000, 0xc000_0000, 0x7f80_0001, 0x8000_0000u32];
        assert_eq!(of::<_, [u32; 4]>(vreinterpretq_u32_f32(of(floats))), words);
        assert_eq!(bits(of(vreinterpretq_f32_u32(of(words)))), words);
        let pairs = vreinterpretq_f64_f32(of(floats));
        assert_eq!(
            of::<_, [u64; 2]>(pairs),
            [0xc000_0000_3f80_0000, 0x8000_0000_7f80_0001]
        );
        assert_eq!(bits(of(vreinterpretq_f32_f64(pairs))), words);
        let all: [u8; 16] = std::array::from_fn(|i| 120 + i as u8);
        let signed: [i8; 16] = of(vreinterpretq_s8_u8(of(all)));
        assert_eq!(
            (signed[0], signed[7], signed[8], signed[15]),
            (120, 127, -128, -121)
        );
        let two: [i32; 2] = of(vreinterpret_s32_s8(of(bytes::<8>(1))));
        assert_eq!(two, [0x0403_0201, 0x0807_0605]);
        let eight: [i8; 8] = of(vreinterpret_s8_s32(of([0x0403_0201i32, -2])));
        assert_eq!(eight, [1, 2, 3, 4, -2, -1, -1, -1]);
    }

    fn float_operations_round_to_nearest() {
        let a = of([1.0f32, f32::MAX, TINY, -0.0]);
        let b = of([f32::EPSILON / 2.0, f32::MAX, -TINY, -0.0]);
        // A tie of half a unit in the last place rounds to even.
        assert_eq!(bits(of(vaddq_f32(a, b))), bits([1.0, INF, 0.0, -0.0]));
        let odd = of([1.0 + f32::EPSILON, -INF, 3.0, 0.0]);
        let sum: [f32; 4] = of(vaddq_f32(odd, b));
        assert_eq!(bits(sum), bits([1.0 + 2.0 * f32::EPSILON, -INF, 3.0, 0.0]));
        // Subnormal numbers are kept.
        let small = of([1e-38f32, 3.0, -0.0, INF]);
        let product: [f32; 4] = of(vmulq_f32(small, of([0.125f32, -2.0, 5.0, -1.0])));
        assert_eq!(bits(product), bits([1.25e-39, -6.0, -0.0, -INF]));
        let product: [f32; 4] = of(vmulq_n_f32(small, -0.125));
        assert_eq!(bits(product), bits([-1.25e-39, -0.375, 0.0, -INF]));
        let quotient: [f32; 4] = of(vdivq_f32(
            of([1.0f32, -1.0, 0.0, 7.0]),
            of([3.0f32, 0.0, 0.0, 2.0]),
        ));
        assert_eq!(
            bits([quotient[0], quotient[1], 0.0, quotient[3]]),
            [0x3eaa_aaab, 0xff80_0000, 0, 0x4060_0000]
        );
        assert!(quotient[2].is_nan());
        assert_eq!(
            bits(of(vabsq_f32(of([-0.0f32, -INF, -TINY, 2.0])))),
            bits([0.0, INF, TINY, 2.0])
        );
        let nan = f32::from_bits(0xffc0_0001);
        assert_eq!(bits(of(vabsq_f32(of([nan; 4]))))[0], 0x7fc0_0001);
    }

    /// The product must stay exact until the sum is rounded.
    fn multiplications_with_a_sum_round_once() {
        let e = 1.0 + f32::EPSILON;
        // The square is 1 + 2e + e^2. After subtracting 1 + 2e, e^2 remains.
        let rest = f32::EPSILON * f32::EPSILON;
        let (minus, plus) = (
            of([-1.0 - 2.0 * f32::EPSILON; 4]),
            of([1.0 + 2.0 * f32::EPSILON; 4]),
        );
        assert_eq!(
            of::<_, [f32; 4]>(vfmaq_f32(minus, of([e; 4]), of([e, -e, e, -e])))[0],
            rest
        );
        assert_eq!(
            of::<_, [f32; 4]>(vfmaq_n_f32(minus, of([e; 4]), e)),
            [rest; 4]
        );
        assert_eq!(
            of::<_, [f32; 4]>(vfmsq_n_f32(plus, of([e; 4]), e)),
            [-rest; 4]
        );
        // The first argument is the addend.
        let (a, b) = (of([1.0f32, 2.0, 3.0, -0.0]), of([10.0f32, 20.0, 30.0, 0.0]));
        assert_eq!(
            bits(of(vfmaq_f32(a, b, of([2.0f32, 3.0, 4.0, -1.0])))),
            bits([21.0, 62.0, 123.0, -0.0])
        );
        assert_eq!(
            of::<_, [f32; 4]>(vfmaq_n_f32(a, b, 2.0)),
            [21.0, 42.0, 63.0, 0.0]
        );
        assert_eq!(
            of::<_, [f32; 4]>(vfmsq_n_f32(a, b, 2.0)),
            [-19.0, -38.0, -57.0, 0.0]
        );
    }

    /// The order of addition is `(0 + 1) + (2 + 3)`.
    fn all_lanes_are_added_in_pairs() {
        assert_eq!(vaddvq_f32(of([1e8f32, -1e8, 1.0, 2.0])), 3.0);
        // Adding one lane after another would result in 1.
        assert_eq!(vaddvq_f32(of([1e8f32, 1.0, -1e8, 1.0])), 0.0);
    }

    /// A quiet NaN counts as missing, so the other operand is the result.
    fn the_greater_number_is_no_nan() {
        let a = of([1.0f32, NAN, -0.0, NAN]);
        let b = of([NAN, -3.0, 0.0, NAN]);
        let most: [f32; 4] = of(vmaxnmq_f32(a, b));
        assert_eq!(bits(most)[..3], bits([1.0, -3.0, 0.0, 0.0])[..3]);
        assert!(most[3].is_nan());
        let most: [f32; 4] = of(vmaxnmq_f32(b, a));
        assert_eq!(bits(most)[..3], bits([1.0, -3.0, 0.0, 0.0])[..3]);
        let most: [f32; 4] = of(vmaxnmq_f32(
            of([-INF, TINY, -2.0, 5.0]),
            of([-1.0f32, 0.0, -3.0, 6.0]),
        ));
        assert_eq!(most, [-1.0, TINY, -2.0, 6.0]);
        // A signaling NaN is returned as a quiet one.
        let signaling = of([f32::from_bits(0xff80_0003); 4]);
        assert_eq!(
            bits(of(vmaxnmq_f32(of([1.0f32; 4]), signaling))),
            [0xffc0_0003; 4]
        );
        // Pairs of the first vector come before those of the second.
        let (a, b) = (of([1.0f32, 2.0, 4.0, 3.0]), of([NAN, -7.0, -0.0, 0.0]));
        assert_eq!(bits(of(vpmaxnmq_f32(a, b))), bits([2.0, 4.0, -7.0, 0.0]));
    }

    /// All bits of a lane are set where the comparison is true. Comparisons with NaN are false.
    fn comparisons_give_masks() {
        let mask = vcgtq_f32(of([1.0f32, NAN, 0.0, -1.0]), of([0.5f32, 1.0, -0.0, NAN]));
        assert_eq!(of::<_, [u32; 4]>(mask), [u32::MAX, 0, 0, 0]);
        let mask = vcgtq_f32(of([INF, TINY, 1.0, -1.0]), of([f32::MAX, 0.0, 1.0, -2.0]));
        assert_eq!(of::<_, [u32; 4]>(mask), [u32::MAX, u32::MAX, 0, u32::MAX]);
    }

    /// Rounds to the nearest integer, with ties to even. The result saturates, and NaN becomes
    /// zero.
    fn floats_become_integers() {
        for (from, to) in [
            ([0.5f32, 1.5, 2.5, -0.5], [0, 2, 2, 0]),
            ([-1.5, -2.5, 0.500_000_06, -0.0], [-2, -2, 1, 0]),
            (
                [2_147_483_520.0, 2_147_483_648.0, -2_147_483_648.0, -3e9],
                [2_147_483_520, i32::MAX, i32::MIN, i32::MIN],
            ),
            ([INF, -INF, NAN, TINY], [i32::MAX, i32::MIN, 0, 0]),
            (
                [8_388_609.0, 32_767.5, 32_766.5, -32_767.5],
                [8_388_609, 32_768, 32_766, -32_768],
            ),
        ] {
            assert_eq!(of::<_, [i32; 4]>(vcvtnq_s32_f32(of(from))), to);
        }
    }

    /// Integers that have no exact float are rounded to the nearest one, with ties to even.
    fn integers_become_floats() {
        let from = [16_777_217, 16_777_219, i32::MIN, i32::MAX];
        assert_eq!(
            of::<_, [f32; 4]>(vcvtq_f32_s32(of(from))),
            [
                16_777_216.0,
                16_777_220.0,
                -2_147_483_648.0,
                2_147_483_648.0
            ]
        );
        let from = [16_777_217u32, 16_777_219, 1 << 31, u32::MAX];
        assert_eq!(
            of::<_, [f32; 4]>(vcvtq_f32_u32(of(from))),
            [16_777_216.0, 16_777_220.0, 2_147_483_648.0, 4_294_967_296.0]
        );
    }

    fn narrowed_integers_are_saturated_or_cut_off() {
        // Each lane keeps its low half.
        let from = [0i16, 127, 128, 255, 256, -128, -129, i16::MIN];
        assert_eq!(
            of::<_, [i8; 8]>(vmovn_s16(of(from))),
            [0, 127, -128, -1, 0, -128, 127, 0]
        );
        // Values beyond 16 bits become the nearest 16-bit integer.
        let from = [32_767, 32_768, -32_769, i32::MIN];
        assert_eq!(
            of::<_, [i16; 4]>(vqmovn_s32(of(from))),
            [32_767, 32_767, -32_768, -32_768]
        );
        assert_eq!(
            of::<_, [i16; 4]>(vqmovn_s32(of([-32_768, -1, 0, i32::MAX]))),
            [-32_768, -1, 0, 32_767]
        );
        // Half rounds up, and overflow wraps around.
        let from = [127i16, 128, -128, -129, 384, 32_639, 32_640, i16::MIN];
        assert_eq!(
            of::<_, [i8; 8]>(vrshrn_n_s16::<8>(of(from))),
            [0, 1, 0, -1, 2, 127, -128, -128]
        );
        assert_eq!(
            of::<_, [i8; 8]>(vrshrn_n_s16::<1>(of([
                1i16,
                -1,
                3,
                -3,
                254,
                255,
                0,
                i16::MAX
            ]))),
            [1, 0, 2, -1, 127, -128, 0, 0]
        );
    }

    fn shifts_drop_bits() {
        assert_eq!(
            of::<_, [i32; 4]>(vshlq_n_s32::<8>(of([1, -1, i32::MAX, 1 << 24]))),
            [256, -256, -256, 0]
        );
        assert_eq!(
            of::<_, [i32; 4]>(vshlq_n_s32::<0>(of([1, -1, i32::MAX, 7]))),
            [1, -1, i32::MAX, 7]
        );
        let all: [u8; 16] = std::array::from_fn(|i| 17 * i as u8);
        assert_eq!(
            of::<_, [u8; 16]>(vshrq_n_u8::<4>(of(all))),
            std::array::from_fn(|i| i as u8)
        );
        assert_eq!(of::<_, [u8; 16]>(vshrq_n_u8::<8>(of(all))), [0; 16]);
        let words = [u32::MAX, 0x8000_0000, 15, 16];
        assert_eq!(
            of::<_, [u32; 4]>(vshrq_n_u32::<4>(of(words))),
            [0x0fff_ffff, 0x0800_0000, 0, 1]
        );
        assert_eq!(of::<_, [u32; 4]>(vshrq_n_u32::<32>(of(words))), [0; 4]);
    }

    fn bits_are_masked() {
        let words = [u32::MAX, 0x1234_5678, 0, 0xffff_0000];
        assert_eq!(
            of::<_, [u32; 4]>(vandq_u32(of(words), of([15u32, 255, 7, 0xff_ff00]))),
            [15, 0x78, 0, 0xff_0000]
        );
        let all: [u8; 16] = std::array::from_fn(|i| 0xa0 + i as u8);
        assert_eq!(
            of::<_, [u8; 16]>(vandq_u8(of(all), of([15u8; 16]))),
            std::array::from_fn(|i| i as u8)
        );
        assert_eq!(
            of::<_, [u8; 16]>(veorq_u8(of(all), of([0xa0u8; 16]))),
            std::array::from_fn(|i| i as u8)
        );
    }

    /// The first argument fills the low half of the result, or the first lane of each pair.
    fn lanes_of_two_vectors_are_arranged() {
        let (a, b) = (of(bytes::<8>(1)), of(bytes::<8>(11)));
        assert_eq!(
            of::<_, [i8; 16]>(vcombine_s8(a, b)),
            [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18]
        );
        assert_eq!(
            of::<_, [i8; 8]>(vuzp1_s8(a, b)),
            [1, 3, 5, 7, 11, 13, 15, 17]
        );
        assert_eq!(
            of::<_, [i8; 8]>(vuzp2_s8(a, b)),
            [2, 4, 6, 8, 12, 14, 16, 18]
        );
        let (a, b) = (of([1i16, 2, 3, 4]), of([5i16, 6, 7, -8]));
        assert_eq!(
            of::<_, [i16; 8]>(vcombine_s16(a, b)),
            [1, 2, 3, 4, 5, 6, 7, -8]
        );
        let (a, b) = (of([1, 2]), of([3, 4]));
        assert_eq!(of::<_, [i32; 2]>(vzip1_s32(a, b)), [1, 3]);
        assert_eq!(of::<_, [i32; 2]>(vzip2_s32(a, b)), [2, 4]);
        let (a, b) = (of([1.0f32, 2.0, 3.0, 4.0]), of([5.0f32, 6.0, 7.0, 8.0]));
        assert_eq!(of::<_, [f32; 4]>(vtrn1q_f32(a, b)), [1.0, 5.0, 3.0, 7.0]);
        assert_eq!(of::<_, [f32; 4]>(vtrn2q_f32(a, b)), [2.0, 6.0, 4.0, 8.0]);
        let (a, b) = (of([1u64, 2]), of([3u64, 4]));
        assert_eq!(of::<_, [u64; 2]>(vtrn1q_f64(a, b)), [1, 3]);
        assert_eq!(of::<_, [u64; 2]>(vtrn2q_f64(a, b)), [2, 4]);
    }

    /// Lane `i` adds products of signed bytes: bytes `4 * i..` of the second argument with four
    /// bytes of the third.
    fn four_products_of_bytes_are_added_to_a_lane() {
        let (sums, w) = ([100, -100, 0, 7], bytes::<16>(-8));
        let x: [i8; 16] = [
            1, 0, 0, 0, 0, 10, 0, 0, 0, 0, 100, 0, -128, -128, -128, -128,
        ];
        let lanes = |sums| of::<_, [i32; 4]>(sums);
        assert_eq!(lanes(dot::<0>(of(sums), of(w), of(x))), [92, -104, 0, 11]);
        assert_eq!(lanes(dot::<1>(of(sums), of(w), of(x))), [30, -130, 10, 57]);
        assert_eq!(
            lanes(dot::<2>(of(sums), of(w), of(x))),
            [-500, -300, 200, 607]
        );
        assert_eq!(
            lanes(dot::<3>(of(sums), of(w), of(x))),
            [3428, 1180, -768, -2809]
        );
        let least = [i8::MIN; 16];
        assert_eq!(
            lanes(dot::<3>(of([0; 4]), of(least), of(least))),
            [65_536; 4]
        );
        // The sum wraps around instead of saturating.
        let wrapped = dot::<0>(of([i32::MAX; 4]), of([1i8; 16]), of([1i8; 16]));
        assert_eq!(lanes(wrapped), [i32::MIN + 3; 4]);
    }

    /// Every float16 converts exactly to float32, including subnormals, infinity and NaN.
    fn halves_become_floats() {
        let from = [0x3c00u16, 0xc000, 0x7bff, 0x0001];
        assert_eq!(
            of::<_, [f32; 4]>(wide(of(from))),
            [1.0, -2.0, 65_504.0, 5.960_464_5e-8]
        );
        let from = [0x8000u16, 0x7c00, 0xfc00, 0x83ff];
        assert_eq!(
            bits(of(wide(of(from)))),
            bits([-0.0, INF, -INF, -6.097_555e-5])
        );
        let from = [0x7e00u16, 0x7c01, 0xfe55, 0x0400];
        assert_eq!(
            bits(of(wide(of(from)))),
            [0x7fc0_0000, 0x7fc0_2000, 0xffca_a000, 0x3880_0000]
        );
    }
}
