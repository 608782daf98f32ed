//! Calls operations, memory functions and devices with numbers at their limits; `soundness_ops.rs`
//! has the other operations. No argument may end the process or hang. The answer is a result or an
//! error. A result is evaluated and must have its declared shape and type.

use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{
    Array, Device, Dtype, ErrorKind, QuantMode, Quantized, Result, Side, Stream, bartlett,
    blackman, eval, fast, fft, hamming, hanning, linalg, linspace, memory, zeros,
};
use proptest::prelude::*;

const NUMBERS: [i32; 8] = [0, 1, -1, 2, -3, i32::MAX, i32::MIN, i32::MIN + 1];
const SHAPES: [&[i32]; 7] = [&[], &[0], &[1], &[5], &[0, 3], &[2, 3], &[2, 1, 3]];
const TYPES: [Dtype; 4] = [Dtype::Float32, Dtype::Int8, Dtype::Uint64, Dtype::Complex64];

fn array(shape: &[i32], dtype: Dtype) -> Array {
    let n: i32 = shape.iter().product();
    let values: Vec<i32> = (0..n).map(|i| (i * 7 + 3) % 5).collect();
    Array::from_slice(&values, shape)
        .and_then(|a| a.astype(dtype))
        .unwrap()
}

/// Limits memory, because some of the numbers lead to results of gigabytes.
fn limited() {
    memory::set_budget(1 << 22);
}

fn settle(name: &str, results: impl IntoIterator<Item = Result<Array>>) {
    for a in results.into_iter().flatten() {
        let before = (a.shape().to_vec(), a.dtype());
        if a.eval().is_ok() {
            assert_eq!((a.shape().to_vec(), a.dtype()), before, "{name}");
        }
    }
}

#[test]
fn spacing_is_as_exact_as_its_type() {
    // MLX supports doubles only on CPUs.
    let stream = Stream::default_of(Device::cpu()).unwrap();
    let got = stream.scope(|| linspace(-0.1, 1.0, 7, Dtype::Float64).unwrap());
    for (i, got) in got.to_vec::<f64>().unwrap().iter().enumerate() {
        let part = i as f64 / 6.0;
        let want = (1.0 - part) * -0.1 + part;
        assert!((got - want).abs() < 1e-15, "{got} is not {want}");
    }
}

#[test]
fn eight_bit_floats_are_numbers_or_not() {
    let codes: Vec<u8> = (0..=255).collect();
    let codes = Array::vector(&codes).unwrap();
    for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
        let got = codes.from_fp8(dtype).unwrap();
        assert_eq!(got.dtype(), dtype);
        let got = got.astype(Dtype::Float32).unwrap().to_vec::<f32>().unwrap();
        for (code, got) in got.iter().enumerate() {
            let (exponent, mantissa) = ((code >> 3 & 15) as i32, (code & 7) as f32 / 8.0);
            let size = match (exponent, code & 7) {
                (15, 7) => f32::NAN,
                (0, _) => mantissa / 64.0,
                _ => (1.0 + mantissa) * 2f32.powi(exponent - 7),
            };
            let want = if code < 128 { size } else { -size };
            assert!(
                *got == want || got.is_nan() && want.is_nan(),
                "{got} for {code:#x}"
            );
        }
    }
}

#[test]
fn factors_and_random_numbers() {
    limited();
    let key = Key::new(u64::MAX).unwrap();
    for shape in SHAPES {
        for dtype in TYPES {
            let a = array(shape, dtype);
            if let Ok((packed, pivots)) = linalg::lu_factor(&a) {
                settle("lu_factor", [Ok(packed), Ok(pivots)]);
            }
            for n in NUMBERS {
                settle(
                    "uniform_between",
                    [random::uniform_between(
                        &a,
                        &a,
                        &[n, 3],
                        Dtype::Float32,
                        &key,
                    )],
                );
            }
        }
    }
    for n in NUMBERS {
        if n < 100 {
            assert_eq!(key.split_into(n).is_ok(), n >= 0, "{n}");
        }
    }
}

#[test]
fn composed_operations() {
    limited();
    for shape in SHAPES {
        for dtype in TYPES {
            let a = array(shape, dtype);
            for (name, other) in [("same", a.clone()), ("vector", array(&[3], dtype))] {
                let ones = vec![1; a.ndim()];
                settle(
                    name,
                    [
                        fast::cross_entropy(&other, &a),
                        fast::cross_entropy(&a, &other),
                    ],
                );
                settle(name, [a.searchsorted(&other, Side::Left)]);
                settle(name, [a.searchsorted(&other, Side::Right)]);
                for n in NUMBERS {
                    settle("vecdot", [a.vecdot(&other, n)]);
                    let bounds = [vec![n; a.ndim()], vec![n.wrapping_add(2); a.ndim()]];
                    for f in [
                        Array::slice_add,
                        Array::slice_multiply,
                        Array::slice_maximum,
                        Array::slice_minimum,
                    ] {
                        settle(name, [f(&a, &other, &bounds[0], &bounds[1], &ones)]);
                        settle(name, [f(&a, &other, &bounds[0], &bounds[1], &bounds[0])]);
                    }
                }
            }
            for n in NUMBERS {
                settle("unstack", a.unstack(n).into_iter().flatten().map(Ok));
                for times in [0, 1, 7, u32::MAX] {
                    settle("diff", [a.diff(times, n)]);
                }
            }
            if let Ok((sign, log)) = linalg::slogdet(&a) {
                settle("slogdet", [Ok(sign), Ok(log)]);
            }
        }
    }
    for n in NUMBERS {
        settle("window", [bartlett(n), blackman(n), hamming(n), hanning(n)]);
        for d in [0.0, -1.0, f64::NAN, f64::MIN_POSITIVE] {
            settle("frequencies", [fft::fftfreq(n, d), fft::rfftfreq(n, d)]);
        }
    }
    assert_eq!(
        hanning(i32::MAX).unwrap_err().kind(),
        ErrorKind::OutOfMemory
    );
}

#[test]
fn quantized_matrices_of_any_form() {
    limited();
    let modes = [
        QuantMode::Affine,
        QuantMode::Mxfp4,
        QuantMode::Mxfp8,
        QuantMode::Nvfp4,
    ];
    for mode in modes {
        for shape in [&[32, 64][..], &[0, 64], &[2, 32, 64], &[64], &[3, 5]] {
            for (group, bits) in [
                (32, 4),
                (16, 4),
                (32, 8),
                (i32::MAX, 4),
                (32, i32::MIN),
                (0, 0),
            ] {
                let w = array(shape, Dtype::Float32);
                let Ok(q) = Quantized::quantize(&w, group, bits, mode) else {
                    continue;
                };
                q.validate("test").unwrap();
                for n in NUMBERS {
                    let rows = q.take_rows(&Array::vector(&[n]).unwrap());
                    settle(
                        "take_rows",
                        [rows.and_then(|r| r.dequantize(Dtype::Float32))],
                    );
                }
                for x in SHAPES {
                    settle(
                        "matmul_quantized",
                        [q.matmul_quantized(&array(x, Dtype::Float32))],
                    );
                }
            }
        }
    }
}

/// Arguments at the limits that MLX accepts, and beyond them. Each call must succeed or return an
/// error.
#[test]
fn memory_and_devices_at_their_limits() {
    crate::alone::alone(
        "edges::memory_and_devices_at_their_limits",
        memory_and_devices_at_their_limits_alone,
    );
}

fn memory_and_devices_at_their_limits_alone() {
    let before = memory::limit().unwrap();
    for bytes in [0, 1, 1 << 40, usize::MAX] {
        for set in [
            memory::set_cache_limit,
            memory::set_limit,
            memory::set_wired_limit,
        ] {
            if let Ok(old) = set(bytes) {
                let a = zeros(&[100], Dtype::Float32).unwrap();
                a.eval().unwrap();
                set(old).unwrap();
            }
        }
    }
    assert_eq!(memory::limit().unwrap(), before);
    memory::clear_cache().unwrap();
    memory::reset_peak().unwrap();
    assert!(memory::peak().unwrap() <= memory::active().unwrap() + (1 << 24));
    let _ = memory::cache().unwrap();
    assert!(memory::physical_memory().is_none_or(|b| b > 0));
    for device in [Device::cpu(), Device::gpu()] {
        assert_eq!(device.is_available(), Stream::new(device).is_ok());
        let count = device.count().unwrap_or(0);
        assert!((0..1000).contains(&count), "{device}: {count}");
        assert_eq!(device.info().is_ok(), device.is_available(), "{device}");
    }
    // Creates far more streams than a program needs; all must work.
    let streams: Vec<Stream> = (0..40)
        .map(|_| Stream::new(Device::cpu()).unwrap())
        .collect();
    let sums: Vec<Array> = streams
        .iter()
        .map(|s| s.scope(|| array(&[5], Dtype::Int32).square()).unwrap())
        .collect();
    eval(&sums).unwrap();
}

fn edge() -> impl Strategy<Value = i32> {
    prop_oneof![3 => -3i32..6, 1 => Just(i32::MAX), 1 => Just(i32::MIN)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn reading_any_place_is_a_value_or_an_index_error(
        shape in prop::collection::vec(0i32..4, 0..4),
        place in prop::collection::vec(edge(), 0..4),
    ) {
        let a = array(&shape, Dtype::Int32);
        let inside = place.len() == shape.len() && place.iter().zip(&shape).all(|(p, n)| (0..*n).contains(p));
        match a.at::<i32>(&place) {
            Ok(_) => prop_assert!(inside),
            Err(e) => {
                prop_assert!(!inside);
                prop_assert_eq!(e.kind(), ErrorKind::Index);
            }
        }
        for axis in place {
            let axes = shape.len() as i64;
            prop_assert_eq!(a.dim(axis).is_ok(), (-axes..axes).contains(&i64::from(axis)));
        }
    }

    #[test]
    fn updates_of_any_bounds_change_nothing_else(
        n in 0i32..8, start in edge(), stop in edge(), step in prop_oneof![-3i32..4, Just(i32::MAX), Just(i32::MIN)],
    ) {
        let a = array(&[n], Dtype::Int32);
        let minus = Array::scalar(-1i32).unwrap();
        let updated = a.slice_update(&minus, &[start], &[stop], &[step]);
        let Ok(part) = a.slice(&[start], &[stop], &[step]) else {
            prop_assert!(updated.is_err());
            return Ok(());
        };
        let changed = updated.unwrap().to_vec::<i32>().unwrap();
        let count = changed.iter().filter(|v| **v == -1).count();
        prop_assert_eq!(count, part.size());
        let before = a.to_vec::<i32>().unwrap();
        prop_assert!(changed.iter().zip(&before).all(|(c, k)| c == k || *c == -1));
    }
}
