//! Dense matrices: float32, float16 or bfloat16. 16-bit elements are converted exactly to float32,
//! a few at a time. So results equal those of a float32 matrix with the same values.

use crate::isa::Isa;
pub use crate::layout::dense::DenseType;
pub(crate) use crate::layout::dense::DenseView;
use crate::simd::{portable, vmath};

impl DenseView<'_> {
    /// Converts elements to float32, beginning with element `from`, until `to` is full.
    pub(crate) fn to_f32(self, isa: Isa, from: usize, to: &mut [f32]) {
        let all = from..from + to.len();
        match self {
            Self::F32(elements) => to.copy_from_slice(&elements[all]),
            Self::F16(elements) => vmath::f16_to_f32(isa, &elements[all], to),
            Self::Bf16(elements) => portable::vmath::bf16_to_f32(&elements[all], to),
        }
    }
}
