//! Whole operations against their definitions in double precision, on each instruction set.

mod attention;
mod matrices;
mod products;
mod steps;

use std::sync::Arc;

use super::kernel::tests::{noise, with_each};
use super::tile;
use super::*;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::ops::{QuantMode, Quantized};
use crate::{Device, Stream};

pub(super) fn on_cpu(f: impl FnOnce()) {
    Stream::default_of(Device::cpu()).unwrap().scope(f);
}

/// Heads with nothing around the attention.
fn plain_heads(n_heads: i32, n_kv_heads: i32, head_dim: i32) -> Heads {
    Heads {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: 1.0,
        softcap: None,
        q_norm: None,
        k_norm: None,
        rotation: None,
        sinks: None,
    }
}

pub(super) fn array(data: &[f32], shape: &[i32]) -> Array {
    Array::from_slice(data, shape).unwrap()
}

pub(super) fn host(a: &Array) -> Vec<f32> {
    a.to_vec::<f32>().unwrap()
}

pub(super) fn close(got: &[f32], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let difference = (f64::from(*got) - wanted).abs();
        assert!(
            difference <= tolerance,
            "{what}: {got} is not {wanted} at {i}"
        );
    }
}

#[test]
fn exponentials_and_tangents() {
    for i in -2000..2000 {
        let x = i as f32 * 0.0435;
        let (got, exact) = (f64::from(tile::exp(x)), f64::from(x).exp());
        assert!((got - exact).abs() <= 4e-7 * exact, "{x}: {got} {exact}");
        let difference = (f64::from(tile::tanh(x)) - f64::from(x).tanh()).abs();
        assert!(difference < 4e-7, "{x}");
    }
    assert_eq!(tile::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(tile::exp(-1000.0), 0.0);
    assert!(tile::exp(f32::NAN).is_nan());
    assert!(tile::exp(1000.0).is_finite() && tile::exp(0.0) == 1.0);
}

/// The same with scales and biases that are numbers of float16.
pub(in crate::cpu) fn in_few_digits(q: Quantized) -> Quantized {
    let rounded = |a: &Array| {
        let half = a.astype(Dtype::Float16).unwrap();
        half.astype(Dtype::Float32).unwrap()
    };
    Quantized {
        scales: rounded(&q.scales),
        biases: q.biases.as_ref().map(rounded),
        ..q
    }
}
