//! Element-wise functions and dot products of float32. The instruction set determines the kernel.

use crate::isa::Isa;
#[cfg(any(target_arch = "aarch64", test))]
use crate::simd::neon;
use crate::simd::portable;
use crate::simd::portable::vmath::Gate;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// Converts float16 to float32. Stops at the end of the shorter slice.
pub(crate) fn f16_to_f32(isa: Isa, from: &[u16], to: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes it, on processors with avx2, fma and f16c.
        Isa::Avx2 => unsafe { avx2::vmath::f16_to_f32(from, to) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::vmath::f16_to_f32(from, to) },
        _ => {
            for (to, from) in to.iter_mut().zip(from) {
                *to = half::f16::from_bits(*from).to_f32();
            }
        }
    }
}

/// Computes `row . x` for each `x`. `x` and `out` have equal lengths.
pub(crate) fn dot_rows(isa: Isa, row: &[f32], x: &[&[f32]], out: &mut [f32]) {
    match isa {
        #[cfg(any(target_arch = "aarch64", test))]
        // SAFETY: the processor has neon, or neon is emulated; see `Isa::Neon`.
        Isa::Neon | Isa::Dot => unsafe { neon::f32::dot_rows(row, x, out) },
        // Other instruction sets have kernels for this case in `dense_rows.rs`.
        _ => {
            for (out, x) in out.iter_mut().zip(x) {
                *out = portable::vmath::dot(row, x);
            }
        }
    }
}

/// `a . b`.
pub(crate) fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2 and fma.
        Isa::Avx2 => unsafe { avx2::vmath::dot(a, b) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::vmath::dot(a, b) },
        #[cfg(any(target_arch = "aarch64", test))]
        // SAFETY: the processor has neon, or neon is emulated; see `Isa::Neon`.
        Isa::Neon | Isa::Dot => unsafe { neon::f32::dot(a, b) },
        Isa::Portable => portable::vmath::dot(a, b),
    }
}

/// `y += weights[0] * rows[0] + ...`. Each row must be at least as long as `y`.
pub(crate) fn add_scaled<const N: usize>(
    isa: Isa,
    y: &mut [f32],
    rows: [&[f32]; N],
    weights: [f32; N],
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx2.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { avx2::vmath::add_scaled(y, rows, weights) },
        _ => portable::vmath::add_scaled(y, rows, weights),
    }
}

/// `gates = gate(gates) * ups`.
pub(crate) fn gate_mul(isa: Isa, gate: Gate, gates: &mut [f32], ups: &[f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2.
        Isa::Avx2 => unsafe { avx2::vmath::gate_mul(gate, gates, ups) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::vmath::gate_mul(gate, gates, ups) },
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon | Isa::Dot => portable::vmath::gate_mul(gate, gates, ups),
        Isa::Portable => portable::vmath::gate_mul(gate, gates, ups),
    }
}

/// `values = gate(values)`, as [`gate_mul`] with ones.
pub(crate) fn gate_apply(isa: Isa, gate: Gate, values: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2 and fma.
        Isa::Avx2 => unsafe { avx2::vmath::gate_apply(gate, values) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::vmath::gate_apply(gate, values) },
        _ => {
            const ONES: [f32; 64] = [1.0; 64];
            for some in values.chunks_mut(ONES.len()) {
                portable::vmath::gate_mul(gate, some, &ONES[..some.len()]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{exact_gate, noise, with_each};

    /// The result of an element must not depend on other elements, or on how rows are divided.
    #[test]
    fn an_element_goes_through_a_gate_in_the_same_way_wherever_it_stands() {
        let (gates, ups) = (noise(43, 1), noise(43, 2));
        let gates: Vec<f32> = gates.iter().map(|v| 9.0 * v).collect();
        with_each(|isa| {
            for gate in [Gate::Silu, Gate::Gelu, Gate::GeluTanh, Gate::Relu] {
                let mut all = gates.clone();
                gate_mul(isa, gate, &mut all, &ups);
                for ((x, up), got) in gates.iter().zip(&ups).zip(&all) {
                    let wanted = exact_gate(gate, f64::from(*x)) * f64::from(*up);
                    assert!((f64::from(*got) - wanted).abs() < 1e-5, "{gate:?} {x}");
                }
                for from in 0..gates.len() {
                    for to in from..gates.len() {
                        let mut some = gates[from..to].to_vec();
                        gate_mul(isa, gate, &mut some, &ups[from..to]);
                        assert_eq!(some, all[from..to], "{gate:?} {from} {to}");
                    }
                }
                for len in [0, 1, 8, 19, 43] {
                    let (mut alone, mut times_one) = (gates[..len].to_vec(), gates[..len].to_vec());
                    gate_apply(isa, gate, &mut alone);
                    gate_mul(isa, gate, &mut times_one, &vec![1.0; len]);
                    assert_eq!(alone, times_one, "{gate:?} {len}");
                }
                let mut ends = [f32::INFINITY, f32::NAN, 3e38, 0.0, -1000.0];
                gate_mul(isa, gate, &mut ends, &[1.0; 5]);
                assert_eq!(ends[0], f32::INFINITY, "{gate:?}");
                assert!(ends[1].is_nan(), "{gate:?}");
                assert!((ends[2] / 3e38 - 1.0).abs() < 1e-6, "{gate:?}");
                assert_eq!(ends[3], 0.0, "{gate:?}");
                assert!(ends[4].abs() < 1e-30, "{gate:?}");
            }
        });
    }
}
