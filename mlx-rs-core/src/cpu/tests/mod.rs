//! Compares whole operations with their definitions in double precision, on each instruction set.

mod attention;
mod matrices;
mod products;
mod steps;
mod super_scales;
mod table_codes;

use std::sync::Arc;

use mlx_cpu_kernels::testing::{noise, with_each};

use super::*;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::ops::{QuantMode, Quantized};
use crate::{Device, Stream};

pub(super) fn on_cpu(f: impl FnOnce()) {
    Stream::default_of(Device::cpu()).unwrap().scope(f);
}

/// Heads without norms, rotation, sinks or cap.
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

/// The matrix `q` with scales and biases rounded to float16.
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
