//! mlx-c 0.4, 0.5 and 0.7 differ inside this crate (cfgs `mlx_c_*`), but the public behavior must
//! be equal. `tools/mlx_versions.sh` runs these tests with each version.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mlx_rs_core::fast::{Mask, scaled_dot_product_attention};
use mlx_rs_core::transforms::{compile, grad};
use mlx_rs_core::{
    All, Array, Device, DeviceInfo, Dtype, Error, QuantMode, Quantized, Stream, cuda_is_available,
    distributed, fft, linspace, metal_is_available, random,
};

/// The files with such a cfg, the number of its uses, and the test in this file that covers them.
const PATHS: [(&str, usize, &str); 11] = [
    ("array/managed.rs", 3, "vectors_become_arrays"),
    ("compat.rs", 4, "functions_of_other_forms_compute_the_same"),
    ("device.rs", 7, "devices_are_counted_and_described"),
    ("fast.rs", 3, "the_last_query_meets_the_last_key"),
    ("ops/create.rs", 2, "linspace_is_in_double_precision"),
    (
        "ops/dequantized.rs",
        1,
        "packed_floats_multiply_as_they_are_dequantized",
    ),
    ("ops/index.rs", 1, "indices_have_no_slope"),
    ("ops/scan.rs", 1, "extremes_of_nan_have_no_slope"),
    ("random/discrete.rs", 2, "bits_of_one_key_keep_their_widths"),
    ("stream.rs", 3, "a_stream_serves_all_threads"),
    (
        "transforms/compile_caches.rs",
        6,
        "what_was_compiled_leaves_every_thread",
    ),
];

fn count(dir: &Path, below: &Path, counts: &mut BTreeMap<String, usize>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            count(&path, below, counts);
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let n = text.matches("(mlx_c_0_").count();
        if n > 0 {
            let name = path.strip_prefix(below).unwrap();
            counts.insert(name.to_string_lossy().replace('\\', "/"), n);
        }
    }
}

#[test]
fn every_path_of_the_cfg_has_its_test() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut counts = BTreeMap::new();
    count(&src, &src, &mut counts);
    let listed = PATHS.map(|(file, n, _)| (file.to_owned(), n));
    assert_eq!(
        counts,
        listed.into(),
        "a path without a test, or a test without a path"
    );
    let here = include_str!("mlx_c_versions.rs");
    for (file, _, test) in PATHS {
        assert!(
            here.contains(&format!("\nfn {test}()")),
            "{file}: no test {test}"
        );
    }
}

#[test]
fn vectors_become_arrays() {
    for n in [0usize, 1, 5000] {
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let a = Array::from_vec(values.clone(), &[n as i32]).unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), values);
    }
    assert!(Array::from_vec(vec![1.0f32; 3], &[2]).is_err());
}

#[test]
fn devices_are_counted_and_described() {
    assert_eq!(Device::cpu().count().unwrap(), 1);
    let gpu = metal_is_available() || cuda_is_available();
    assert_eq!(Device::gpu().count().unwrap() > 0, gpu);
    assert!(!(metal_is_available() && cuda_is_available()));
    Device::cpu().info().unwrap();
    if metal_is_available() {
        let info = Device::gpu().info().unwrap();
        assert!(matches!(info.get("memory_size"), Some(DeviceInfo::Number(n)) if *n > 0));
    }
}

#[test]
fn the_last_query_meets_the_last_key() {
    // [B, H, L, D]: cases with as many queries as keys, with more queries, and with fewer.
    for (queries, keys) in [(4, 4), (6, 4), (2, 5)] {
        let numbers = |n: i32, seed: i32| {
            let values: Vec<f32> = (0..n * 8).map(|i| ((i * seed) % 11) as f32 * 0.1).collect();
            Array::from_slice(&values, &[1, 1, n, 8]).unwrap()
        };
        let (q, k, v) = (numbers(queries, 3), numbers(keys, 5), numbers(keys, 7));
        let out = scaled_dot_product_attention(&q, &k, &v, 0.5, Mask::Causal).unwrap();
        let (q, k, v) = [&q, &k, &v].map(|a| a.to_vec::<f32>().unwrap()).into();
        let row = |a: &[f32], i: i32| a[i as usize * 8..][..8].to_vec();
        for at in 0..queries {
            // The last query and the last key are aligned. So query `at` sees this number of keys.
            let seen = keys - queries + at + 1;
            if seen < 1 {
                // The result of a query that sees no key is undefined.
                continue;
            }
            let query = row(&q, at);
            let score = |j| {
                let dot: f32 = row(&k, j).iter().zip(&query).map(|(a, b)| a * b).sum();
                (dot * 0.5).exp()
            };
            let all: f32 = (0..seen).map(score).sum();
            let got = row(&out.to_vec::<f32>().unwrap(), at);
            for (d, got) in got.iter().enumerate() {
                let expected: f32 = (0..seen).map(|j| score(j) / all * row(&v, j)[d]).sum();
                assert!(
                    (got - expected).abs() < 1e-5,
                    "{queries}x{keys}: {got} {expected}"
                );
            }
        }
    }
}

#[test]
fn linspace_is_in_double_precision() {
    let device = Device::cpu();
    let x = device.scope(|| linspace(0.0, 1.0, 11, Dtype::Float64)?.to_vec::<f64>());
    let x = x.unwrap();
    for (i, x) in x.iter().enumerate() {
        assert!((x - i as f64 / 10.0).abs() < 1e-15, "{i}: {x}");
    }
    let one = device.scope(|| linspace(3.0, 9.0, 1, Dtype::Float64)?.to_vec::<f64>());
    assert_eq!(one.unwrap(), [3.0]);
}

#[test]
fn packed_floats_multiply_as_they_are_dequantized() {
    let values: Vec<f32> = (0..16 * 64)
        .map(|i| ((i * 37) % 23) as f32 * 0.2 - 2.0)
        .collect();
    let matrix = Array::from_slice(&values, &[16, 64]).unwrap();
    let x: Vec<f32> = (0..3 * 64).map(|i| ((i * 13) % 7) as f32 * 0.25).collect();
    let x = Array::from_slice(&x, &[3, 64]).unwrap();
    for (mode, group, bits) in [
        (QuantMode::Affine, 32, 4),
        (QuantMode::Mxfp4, 32, 4),
        (QuantMode::Mxfp8, 32, 8),
        (QuantMode::Nvfp4, 16, 4),
    ] {
        let packed = Quantized::quantize(&matrix, group, bits, mode).unwrap();
        let dense = packed.dequantize(Dtype::Float32).unwrap();
        let expected = x.matmul(&dense.transpose().unwrap()).unwrap();
        let got = packed.matmul_transposed(&x).unwrap();
        assert!(got.all_close(&expected, 1e-4, 1e-4).unwrap(), "{mode:?}");
    }
}

#[test]
fn bits_of_one_key_keep_their_widths() {
    // When MLX 0.30.1 compiles these calls, it takes equal operations with different widths for
    // one. It never merges outputs, so each call is followed by another operation.
    let draw = |key: &[Array]| -> Result<Vec<Array>, Error> {
        let key = random::Key::from_array(key[0].clone())?;
        let one = |width| random::bits(&[64], width, &key)?.astype(Dtype::Uint32);
        Ok(vec![one(1)?, one(2)?, one(4)?.add(&Array::scalar(1u32)?)?])
    };
    let key = Array::vector(&[3u32, 4]).unwrap();
    let plain = draw(std::slice::from_ref(&key)).unwrap();
    let compiled = compile(draw).call(&[key]).unwrap();
    for (plain, compiled) in plain.iter().zip(&compiled) {
        assert_eq!(
            plain.to_vec::<u32>().unwrap(),
            compiled.to_vec::<u32>().unwrap()
        );
    }
}

#[test]
fn functions_of_other_forms_compute_the_same() {
    let a = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let numbers = |a: Result<Array, Error>| a.unwrap().to_vec::<f32>().unwrap();
    assert_eq!(numbers(a.cumsum(1, false, true)), [1.0, 3.0, 3.0, 7.0]);
    assert_eq!(numbers(a.cumprod(0, false, true)), [1.0, 2.0, 3.0, 8.0]);
    assert_eq!(numbers(a.cummax(1, true, true)), [2.0, 2.0, 4.0, 4.0]);
    assert_eq!(numbers(a.cummin(1, true, true)), [1.0, 2.0, 3.0, 4.0]);
    let log = numbers(a.logcumsumexp(1, false, false));
    assert_eq!(log, [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 3.0]);
    assert_eq!(numbers(a.trace(0, 0, 1, Dtype::Float32)), [5.0]);
    // The inverse transform divides by the length. The forward transform does not.
    let ones = Array::vector(&[1.0f32; 4]).unwrap();
    let forth = fft::fft(&ones, None, -1).unwrap();
    assert_eq!(numbers(forth.abs()), [4.0, 0.0, 0.0, 0.0]);
    assert_eq!(
        numbers(fft::ifft(&forth, None, -1).unwrap().real()),
        [1.0; 4]
    );
    let group = distributed::init(false).unwrap();
    assert!(group.rank() < group.size());
    assert_eq!(group.split(0, 0).is_err(), group.size() == 1);
}

#[test]
fn indices_have_no_slope() {
    // The indices depend on the differentiated argument.
    let sum = |x: &[Array]| -> Result<Vec<Array>, Error> {
        let sorted = x[0].take_along_axis(&x[0].argsort(0)?, 0)?;
        let scaled = sorted.multiply(&Array::vector(&[1.0f32, 10.0, 100.0])?)?;
        Ok(vec![scaled.sum(All, false)?])
    };
    let x = Array::vector(&[3.0f32, 1.0, 2.0]).unwrap();
    let slope = grad(sum, &[0])(&[x]).unwrap();
    assert_eq!(slope[0].to_vec::<f32>().unwrap(), [100.0, 1.0, 10.0]);
}

#[test]
fn extremes_of_nan_have_no_slope() {
    let sum = |x: &[Array]| -> Result<Vec<Array>, Error> {
        Ok(vec![x[0].cummax(0, false, true)?.sum(All, false)?])
    };
    for (values, slopes) in [
        ([1.0f32, 3.0, 2.0], [1.0f32, 2.0, 0.0]),
        ([f32::NAN, 3.0, 2.0], [0.0; 3]),
        ([1.0, f32::NAN, 2.0], [1.0, 0.0, 0.0]),
    ] {
        // MLX before 0.32 does not support this gradient.
        match grad(sum, &[0])(&[Array::vector(&values).unwrap()]) {
            Ok(slope) => assert_eq!(slope[0].to_vec::<f32>().unwrap(), slopes, "{values:?}"),
            Err(e) => assert!(e.to_string().contains("VJP is not implemented"), "{e}"),
        }
    }
}

#[test]
fn a_stream_serves_all_threads() {
    let stream = Stream::new(Device::cpu()).unwrap();
    let default = Stream::default_of(Device::cpu()).unwrap();
    let made = stream.scope(|| Array::vector(&[1.0f32, 2.0]).unwrap().exp().unwrap());
    let here = [
        made.clone(),
        Array::vector(&[3.0f32]).unwrap().exp().unwrap(),
    ];
    // Another thread can use the stream, and evaluate operations recorded for it.
    let there = std::thread::spawn(move || {
        assert_eq!(Stream::default_of(Device::cpu()).unwrap(), default);
        let more = stream.scope(|| made.add(&made)).unwrap();
        more.to_vec::<f32>().unwrap()
    });
    let there = there.join().unwrap();
    for (double, one) in there.iter().zip(here[0].to_vec::<f32>().unwrap()) {
        assert_eq!(*double, 2.0 * one);
    }
    assert!((here[1].item::<f32>().unwrap() - 3.0f32.exp()).abs() < 1e-5);
}

#[test]
fn what_was_compiled_leaves_every_thread() {
    let function = |factor: f32| {
        compile(move |x: &[Array]| -> Result<Vec<Array>, Error> {
            Ok(vec![x[0].multiply(&Array::scalar(factor)?)?])
        })
    };
    let x = Array::vector(&[1.0f32, 2.0]).unwrap();
    let (to, calls) = std::sync::mpsc::channel::<Box<dyn FnOnce() + Send>>();
    let thread = std::thread::spawn(move || calls.into_iter().for_each(|call| call()));
    // In both threads, new functions reuse the addresses of dropped ones.
    for factor in [2.0f32, 3.0, 5.0, 7.0] {
        let compiled = std::sync::Arc::new(function(factor));
        let (other, y, (done, wait)) = (compiled.clone(), x.clone(), std::sync::mpsc::channel());
        to.send(Box::new(move || {
            let out = other.call(&[y]).unwrap()[0].to_vec::<f32>().unwrap();
            drop(other);
            done.send(out).unwrap();
        }))
        .unwrap();
        assert_eq!(wait.recv().unwrap(), [factor, 2.0 * factor]);
        let out = compiled.call(std::slice::from_ref(&x)).unwrap();
        assert_eq!(out[0].to_vec::<f32>().unwrap(), [factor, 2.0 * factor]);
    }
    drop(to);
    thread.join().unwrap();
}
