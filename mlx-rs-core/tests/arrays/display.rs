//! Compares printed arrays with the output of Python MLX (tools/golden/display.py). Also, printing
//! for a log must not evaluate an array.

use mlx_rs_core::{Array, Complex32, Dtype, array, idx, memory, ones};
use serde_json::Value;

fn float(value: &Value) -> f64 {
    match value.as_str() {
        Some("inf") => f64::INFINITY,
        Some("-inf") => f64::NEG_INFINITY,
        Some(_) => f64::NAN,
        None => value.as_f64().unwrap(),
    }
}

fn array_of(dtype: Dtype, shape: &[i32], values: &[Value]) -> Array {
    let floats = || Array::from_vec(values.iter().map(float).collect(), shape).unwrap();
    match dtype {
        Dtype::Complex64 => {
            let value = |v: &Value| Complex32::new(float(&v[0]) as f32, float(&v[1]) as f32);
            Array::from_vec(values.iter().map(value).collect(), shape).unwrap()
        }
        Dtype::Bool => {
            let values = values.iter().map(|v| v.as_bool().unwrap()).collect();
            Array::from_vec(values, shape).unwrap()
        }
        Dtype::Float64 => floats(),
        d if d.is_float() => floats().astype(d).unwrap(),
        d => {
            let values = values.iter().map(|v| v.as_i64().unwrap()).collect();
            Array::from_vec(values, shape).unwrap().astype(d).unwrap()
        }
    }
}

#[test]
fn arrays_print_as_in_python() {
    let cases: Value = serde_json::from_str(include_str!("../fixtures/display.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 100);
    for case in cases {
        let name = case[0].as_str().unwrap();
        let dtype = Dtype::ALL
            .into_iter()
            .find(|d| d.to_string() == name)
            .unwrap();
        let shape: Vec<i32> = case[1]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| d.as_i64().unwrap() as i32)
            .collect();
        let a = mlx_rs_core::Device::cpu()
            .scope(|| {
                Ok::<_, mlx_rs_core::Error>(array_of(dtype, &shape, case[2].as_array().unwrap()))
            })
            .unwrap();
        assert_eq!(a.to_string(), case[3].as_str().unwrap(), "{case}");
    }
}

#[test]
fn debug_shows_shape_and_type_without_computing() {
    crate::alone::alone(
        "display::debug_shows_shape_and_type_without_computing",
        debug_shows_shape_and_type_without_computing_alone,
    );
}

fn debug_shows_shape_and_type_without_computing_alone() {
    let a = ones(&[2, 3], Dtype::Float16).unwrap();
    assert_eq!(format!("{a:?}"), "Array([2, 3], float16)");
    let before = memory::active().unwrap();
    // An array of a gigabyte, which is never computed.
    let huge = ones(&[1 << 14, 1 << 14], Dtype::Float32).unwrap();
    assert_eq!(format!("{huge:?}"), "Array([16384, 16384], float32)");
    // The limit has a margin, because other tests of this process change memory at the same time.
    assert!(memory::active().unwrap() < before + (1 << 20));
    assert_eq!(format!("{a:#?}"), a.to_string());
}

#[test]
fn a_precision_sets_the_digits() {
    let a = array!([1.0 / 3.0, 1234.5]).unwrap();
    assert_eq!(format!("{a:.3}"), "array([0.333, 1.23e+03], dtype=float32)");
    // Views print their visible elements.
    let a = array!([[1, 2], [3, 4]]).unwrap();
    let view = a.transpose().unwrap().get(idx![..; -1]).unwrap();
    assert_eq!(
        view.to_string(),
        "array([[2, 4],\n       [1, 3]], dtype=int32)"
    );
}
