//! Helpers for tests of this crate and of dependent crates: forcing an instruction set on a thread,
//! noise, and a counting allocator.

mod allocations;

use crate::isa::{FORCED, Isa};
pub use crate::sampling::sample::{MOST_CANDIDATES, tail};
pub use crate::sampling::softmax_pass::relative_logit;
pub use crate::sampling::top_k::ascending;
use crate::simd::portable::vmath::Gate;
pub use allocations::CountingAllocator;

/// The instruction sets to test: those of this processor. Tests of this crate add the emulated ones
/// of aarch64.
pub(crate) fn tested() -> Vec<Isa> {
    let emulated: &[Isa] = &[
        #[cfg(all(test, not(target_arch = "aarch64")))]
        Isa::Neon,
        #[cfg(all(test, not(target_arch = "aarch64")))]
        Isa::Dot,
    ];
    let mut all = Isa::all();
    all.extend_from_slice(emulated);
    all
}

/// Runs `f` once per instruction set, which is forced for operations of this thread. The
/// instruction sets are those of this processor; tests of this crate add the emulated ones of
/// aarch64.
pub fn with_each(f: impl Fn(Isa)) {
    for isa in tested() {
        FORCED.set(Some(isa));
        f(isa);
    }
    FORCED.set(None);
}

/// A gate's activation function by its definition, in float64.
pub fn exact_gate(gate: Gate, x: f64) -> f64 {
    match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::Gelu => {
            // Simpson's rule for the density from 0 to x.
            let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
            let (n, step) = (2000, x / 2000.0);
            let inner: f64 = (1..n)
                .map(|i| f64::from(2 + 2 * (i % 2)) * density(f64::from(i) * step))
                .sum();
            x * (0.5 + step / 3.0 * (density(0.0) + inner + density(x)))
        }
        Gate::GeluTanh => 0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044_715 * x.powi(3))).tanh()),
        Gate::Relu => x.max(0.0),
    }
}

/// Pseudo-random numbers between -0.5 and 0.5.
pub fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1u32 << 24) as f32 - 0.5
        })
        .collect()
}
