//! Matrices that are not quantized, as they lie in memory: float32, float16 or bfloat16. Elements
//! of 16 bits become float32 a few at a time and exactly. So products equal those with a float32
//! matrix.

use std::cell::RefCell;
use std::ops::Range;

use crate::isa::Isa;
use crate::layout::input_panel::MAX_ROWS;
use crate::simd::vmath;
use crate::work::Input;

/// The type of a matrix's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseType {
    /// float32.
    F32,
    /// float16.
    F16,
    /// bfloat16.
    Bf16,
}

/// Elements of a row that become float32 at a time: they stay in the L1 cache until they are
/// multiplied.
const AT_ONCE: usize = 2048;

thread_local! {
    static WIDE: RefCell<Vec<f32>> = RefCell::default();
}

/// Elements in memory.
#[derive(Clone, Copy)]
pub(crate) enum DenseView<'a> {
    F32(&'a [f32]),
    /// float16.
    F16(&'a [u16]),
    /// bfloat16.
    Bf16(&'a [u16]),
}

impl<'a> DenseView<'a> {
    /// An input's elements.
    ///
    /// # Safety
    /// They must be of that type.
    pub(crate) unsafe fn of(number: DenseType, input: Option<&'a Input>) -> Self {
        // SAFETY: the caller's promise; both 16-bit types can be read as their bits.
        unsafe {
            match number {
                DenseType::F32 => Self::F32(input.map(|i| i.as_slice()).unwrap_or_default()),
                DenseType::F16 => Self::F16(input.map(|i| i.as_slice()).unwrap_or_default()),
                DenseType::Bf16 => Self::Bf16(input.map(|i| i.as_slice()).unwrap_or_default()),
            }
        }
    }

    /// Some of the elements.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[range]),
            Self::F16(all) => Self::F16(&all[range]),
            Self::Bf16(all) => Self::Bf16(&all[range]),
        }
    }

    /// Elements as float32, as many as `to` has, from `from` on.
    pub(crate) fn to_f32(self, isa: Isa, from: usize, to: &mut [f32]) {
        let all = from..from + to.len();
        match self {
            Self::F32(elements) => to.copy_from_slice(&elements[all]),
            Self::F16(elements) => vmath::f16_to_f32(isa, &elements[all], to),
            Self::Bf16(elements) => {
                for (to, from) in to.iter_mut().zip(&elements[all]) {
                    *to = f32::from_bits(u32::from(*from) << 16);
                }
            }
        }
    }

    /// The inner products of the elements of `row` with each of at most [`MAX_ROWS`] `x`, which are
    /// as long.
    pub(crate) fn dot_rows(self, isa: Isa, row: Range<usize>, x: &[&[f32]], out: &mut [f32]) {
        if let Self::F32(elements) = self {
            return vmath::dot_rows(isa, &elements[row], x, out);
        }
        WIDE.with_borrow_mut(|wide| {
            wide.resize(AT_ONCE, 0.0);
            out.fill(0.0);
            for from in row.clone().step_by(AT_ONCE) {
                let n = AT_ONCE.min(row.end - from);
                self.to_f32(isa, from, &mut wide[..n]);
                let at = from - row.start;
                let mut parts = [&[][..]; MAX_ROWS];
                for (part, x) in parts.iter_mut().zip(x) {
                    *part = &x[at..at + n];
                }
                let mut sums = [0.0; MAX_ROWS];
                let sums = &mut sums[..out.len()];
                vmath::dot_rows(isa, &wide[..n], &parts[..x.len()], sums);
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out += *sum;
                }
            }
        });
    }
}
