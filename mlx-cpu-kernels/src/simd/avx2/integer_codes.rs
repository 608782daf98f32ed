//! Unpacks codes of quantized words to pairs of 16-bit integers, for vectors of any width.
//! `qgemv.rs` of AVX2 and of AVX-512 multiply these pairs with the inputs, and `integer_pairs.rs`
//! stores them.

/// Generates functions for the processor features `$features`. Each returns the pairs of a run of
/// eight codes, in the order of the inputs. In the arguments, `and` and `or` are bitwise
/// operations, shuffles are of bytes, and the other intrinsics operate on lanes of 16 or 32 bits.
macro_rules! integer_codes {
    (
        $features:literal, $int:ident,
        and: $and:ident,
        or: $or:ident,
        shuffle: $shuffle:ident,
        set_8: $set_8:ident,
        set_16: $set_16:ident,
        set_32: $set_32:ident,
        left_16: $left_16:ident,
        right_16: $right_16:ident,
        signed_right_16: $signed_right_16:ident,
        left_32: $left_32:ident,
        right_32: $right_32:ident,
        sub_16: $sub_16:ident,
        mul_16: $mul_16:ident,
    ) => {
        /// Subtracts a constant from each integer.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn less<const N: i16>(n: [$int; 4]) -> [$int; 4] {
            let all = $set_16(N);
            [
                $sub_16(n[0], all),
                $sub_16(n[1], all),
                $sub_16(n[2], all),
                $sub_16(n[3], all),
            ]
        }

        /// Multiplies both halves of each lane by the factor of the lane. A lane of `factors` holds
        /// its factor in both halves. The products must fit 16 bits.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn times(n: [$int; 4], factors: $int) -> [$int; 4] {
            [
                $mul_16(n[0], factors),
                $mul_16(n[1], factors),
                $mul_16(n[2], factors),
                $mul_16(n[3], factors),
            ]
        }

        /// The low halves of lanes, in both halves of each lane.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn in_both_halves(n: $int) -> $int {
            let half = std::arch::x86_64::_mm_cvtsi32_si128(16);
            $or($and(n, $set_32(0xffff)), $left_32(n, half))
        }

        /// The pairs of a word of eight 4-bit codes.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn pairs_of_4bit(q: $int) -> [$int; 4] {
            let mask = $set_16(15);
            [
                $and(q, mask),
                $and($right_16::<4>(q), mask),
                $and($right_16::<8>(q), mask),
                $right_16::<12>(q),
            ]
        }

        /// The pairs of two words of four 8-bit codes each.
        #[inline]
        #[target_feature(enable = $features)]
        fn pairs_of_8bit([first, second]: [$int; 2]) -> [$int; 4] {
            let byte = $set_16(255);
            [
                $and(first, byte),
                $right_16::<8>(first),
                $and(second, byte),
                $right_16::<8>(second),
            ]
        }

        /// As [`pairs_of_8bit`], in the order of other widths: each pair is a code and the code
        /// four later.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn distant_pairs_of_8bit([first, second]: [$int; 2]) -> [$int; 4] {
            let half = std::arch::x86_64::_mm_cvtsi32_si128(16);
            let low = $set_32(0xffff);
            let high = $set_32(-0x1_0000);
            pairs_of_8bit([
                $or($and(first, low), $left_32(second, half)),
                $or($right_32(first, half), $and(second, high)),
            ])
        }

        /// The pairs of a word of eight 4-bit codes, mapped to the integers of a table. The
        /// integers are below 128.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn looked_up_pairs<const CODES: u32>(q: $int, table: $int) -> [$int; 4] {
            let nibbles = $set_8(15);
            // The bytes of `even` are codes 0, 2, 4, 6 of a word; those of `odd` are codes 1, 3, 5,
            // 7.
            let even = $shuffle(table, $and(q, nibbles));
            let odd = $shuffle(table, $and($right_16::<4>(q), nibbles));
            if CODES == Codes::TABLE_ID {
                // The integers are signed, so the shifts to the right extend the sign.
                [
                    $signed_right_16::<8>($left_16::<8>(even)),
                    $signed_right_16::<8>($left_16::<8>(odd)),
                    $signed_right_16::<8>(even),
                    $signed_right_16::<8>(odd),
                ]
            } else {
                let byte = $set_16(255);
                [
                    $and(even, byte),
                    $and(odd, byte),
                    $right_16::<8>(even),
                    $right_16::<8>(odd),
                ]
            }
        }

        /// The pairs of eight codes of a chunk. `RUN` is the index of the codes in units of eight.
        /// `q` has the words of the chunk.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn pairs_of_run<const BITS: u32, const RUN: usize>(q: &[$int; 5]) -> [$int; 4] {
            let first = 8 * RUN;
            // Inputs have the order of `integer_index`: each pair is a code and the code four
            // later.
            [
                code_pair::<BITS>(q, first, first + 4),
                code_pair::<BITS>(q, first + 1, first + 5),
                code_pair::<BITS>(q, first + 2, first + 6),
                code_pair::<BITS>(q, first + 3, first + 7),
            ]
        }

        /// Codes `a` and `b` of a chunk, in the lower and the upper half of each lane.
        #[inline]
        #[target_feature(enable = $features)]
        fn code_pair<const BITS: u32>(q: &[$int; 5], a: usize, b: usize) -> $int {
            let mask = (u32::MAX >> (32 - BITS)).cast_signed();
            let low = $and(code_at::<BITS>(q, a, 0), $set_32(mask));
            let high = $and(code_at::<BITS>(q, b, 16), $set_32(mask << 16));
            $or(low, high)
        }

        /// Code `i` of a chunk at bit `to` of each lane, with arbitrary bits around it.
        #[inline]
        #[target_feature(enable = $features)]
        fn code_at<const BITS: u32>(q: &[$int; 5], i: usize, to: u32) -> $int {
            // After inlining, all positions are constants.
            let count = |n: u32| std::arch::x86_64::_mm_cvtsi32_si128(n.cast_signed());
            let right = |v, n: u32| $right_32(v, count(n));
            let left = |v, n: u32| $left_32(v, count(n));
            let (word, bit) = crate::layout::packed::code_position(i, BITS);
            if bit + BITS > 32 {
                // The code continues in the next word, so both parts are combined.
                $or(right(q[word], bit - to), left(q[word + 1], 32 - bit + to))
            } else if bit >= to {
                right(q[word], bit - to)
            } else {
                left(q[word], to - bit)
            }
        }
    };
}
pub(crate) use integer_codes;
