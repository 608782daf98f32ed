//! Compares every operation with numpy. `fixtures/ops.json` contains small calls and their results,
//! made by `tools/golden/ops.py`. This test makes the calls (`calls.rs`), and compares types,
//! shapes and values.

mod aliases;
mod calls;
#[path = "../support/operations.rs"]
mod operations;

use std::collections::BTreeMap;

use mlx_rs_core::{Array, Complex32, Dtype, Element, Result, bf16, eval, f16};
use serde_json::Value;

/// One call: its name, its array arguments, and its other arguments.
pub(crate) struct Case<'a> {
    pub(crate) op: &'a str,
    pub(crate) inputs: Vec<Array>,
    params: &'a Value,
}

impl Case<'_> {
    pub(crate) fn a(&self) -> &Array {
        &self.inputs[0]
    }
    pub(crate) fn b(&self) -> &Array {
        &self.inputs[1]
    }
    pub(crate) fn c(&self) -> &Array {
        &self.inputs[2]
    }
    pub(crate) fn refs(&self) -> Vec<&Array> {
        self.inputs.iter().collect()
    }
    pub(crate) fn is_null(&self, name: &str) -> bool {
        self.params.get(name).is_none_or(Value::is_null)
    }
    pub(crate) fn int(&self, name: &str) -> i32 {
        i32::try_from(self.params[name].as_i64().expect(name)).unwrap()
    }
    pub(crate) fn ints(&self, name: &str) -> Vec<i32> {
        self.params[name]
            .as_array()
            .map(|list| list.iter().map(|v| v.as_i64().unwrap() as i32).collect())
            .unwrap_or_default()
    }
    pub(crate) fn number(&self, name: &str) -> f64 {
        number(&self.params[name])
    }
    pub(crate) fn flag(&self, name: &str) -> bool {
        self.params.get(name).is_some_and(|v| v.as_bool().unwrap())
    }
    pub(crate) fn text(&self, name: &str) -> &str {
        self.params[name].as_str().unwrap_or_default()
    }
    pub(crate) fn dtype(&self) -> Dtype {
        dtype(self.text("dtype"))
    }
}

fn dtype(name: &str) -> Dtype {
    Dtype::ALL
        .into_iter()
        .find(|d| d.to_string() == name)
        .unwrap_or_else(|| panic!("no type {name:?}"))
}

fn number(v: &Value) -> f64 {
    match v {
        Value::String(s) => s.parse().unwrap(),
        Value::Number(n) => n.as_f64().unwrap(),
        Value::Bool(b) => f64::from(*b),
        other => panic!("{other} is not a number"),
    }
}

fn integers<T: Element + TryFrom<i128>>(values: &[Value], shape: &[i32]) -> Array
where
    T::Error: std::fmt::Debug,
{
    let values: Vec<T> = values
        .iter()
        .map(|v| {
            v.as_i64()
                .map_or_else(|| i128::from(v.as_u64().unwrap()), i128::from)
        })
        .map(|v| T::try_from(v).unwrap())
        .collect();
    Array::from_slice(&values, shape).unwrap()
}

/// An array from `[type, shape, values]`, as the script writes it.
fn array(v: &Value) -> Array {
    let shape: Vec<i32> = v[1]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d.as_i64().unwrap() as i32)
        .collect();
    let values = v[2].as_array().unwrap();
    let floats = || values.iter().map(number);
    match dtype(v[0].as_str().unwrap()) {
        Dtype::Bool => {
            let values: Vec<bool> = floats().map(|v| v != 0.0).collect();
            Array::from_slice(&values, &shape).unwrap()
        }
        Dtype::Uint8 => integers::<u8>(values, &shape),
        Dtype::Uint16 => integers::<u16>(values, &shape),
        Dtype::Uint32 => integers::<u32>(values, &shape),
        Dtype::Uint64 => integers::<u64>(values, &shape),
        Dtype::Int8 => integers::<i8>(values, &shape),
        Dtype::Int16 => integers::<i16>(values, &shape),
        Dtype::Int32 => integers::<i32>(values, &shape),
        Dtype::Int64 => integers::<i64>(values, &shape),
        Dtype::Float16 => {
            let values: Vec<f16> = floats().map(f16::from_f64).collect();
            Array::from_slice(&values, &shape).unwrap()
        }
        Dtype::Bfloat16 => {
            let values: Vec<bf16> = floats().map(bf16::from_f64).collect();
            Array::from_slice(&values, &shape).unwrap()
        }
        Dtype::Float32 => {
            let values: Vec<f32> = floats().map(|v| v as f32).collect();
            Array::from_slice(&values, &shape).unwrap()
        }
        Dtype::Float64 => Array::from_slice(&floats().collect::<Vec<f64>>(), &shape).unwrap(),
        Dtype::Complex64 => {
            let parts: Vec<f32> = floats().map(|v| v as f32).collect();
            let values: Vec<Complex32> = parts
                .chunks(2)
                .map(|p| Complex32::new(p[0], p[1]))
                .collect();
            Array::from_slice(&values, &shape).unwrap()
        }
    }
}

/// Values in double precision. A complex value becomes two numbers.
fn wide(a: &Array) -> Vec<f64> {
    if a.dtype() == Dtype::Complex64 {
        let values = a.to_vec::<Complex32>().unwrap();
        return values
            .iter()
            .flat_map(|c| [f64::from(c.re), f64::from(c.im)])
            .collect();
    }
    a.astype(Dtype::Float64).unwrap().to_vec().unwrap()
}

/// The allowed error of a type, relative to the greater of 1 and the value.
fn tolerance(d: Dtype) -> f64 {
    match d {
        Dtype::Float16 => 4e-3,
        Dtype::Bfloat16 => 3e-2,
        Dtype::Float32 | Dtype::Complex64 => 2e-5,
        // Some of MLX's functions compute in single precision internally.
        Dtype::Float64 => 1e-6,
        _ => 0.0,
    }
}

fn compare(got: &Array, expected: &Array, tolerance: f64) -> std::result::Result<(), String> {
    if got.dtype() != expected.dtype() || got.shape() != expected.shape() {
        return Err(format!("{got:?}, not {expected:?}"));
    }
    if got.dtype().is_integer() {
        // A float cannot represent all 64-bit integers, so these are compared exactly.
        return if got.array_equal(expected).unwrap() {
            Ok(())
        } else {
            Err(format!("{got}, not {expected}"))
        };
    }
    let same = |(g, e): (&f64, &f64)| {
        g == e
            || (g.is_nan() && e.is_nan())
            || (e.is_finite() && (g - e).abs() <= tolerance * e.abs().max(1.0))
    };
    if wide(got).iter().zip(&wide(expected)).all(same) {
        Ok(())
    } else {
        Err(format!("{got}, not {expected}"))
    }
}

#[test]
fn every_operation_agrees_with_numpy() {
    let text = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/ops.json"
    ))
    .unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 2000, "{} cases read", cases.len());
    let mut faults = Vec::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let none = Value::Object(serde_json::Map::new());
    for case in cases {
        let op = case["op"].as_str().unwrap();
        *counts.entry(op).or_default() += 1;
        let call = Case {
            op,
            inputs: case["in"].as_array().unwrap().iter().map(array).collect(),
            params: case.get("p").unwrap_or(&none),
        };
        let expected: Vec<Array> = case["out"].as_array().unwrap().iter().map(array).collect();
        let told = format!("{op} {:?} {}", call.inputs, call.params);
        let computed = calls::make(&call).and_then(|got| eval(&got).map(|()| got));
        let got = match computed {
            Ok(got) => got,
            Err(e) => {
                faults.push(format!("{told}: {e}"));
                continue;
            }
        };
        if got.len() != expected.len() {
            faults.push(format!("{told}: {} results", got.len()));
        }
        for (got, expected) in got.iter().zip(&expected) {
            let tolerance = case["tol"]
                .as_f64()
                .unwrap_or_else(|| tolerance(expected.dtype()));
            if let Err(why) = compare(got, expected, tolerance) {
                faults.push(format!("{told}: {why}"));
            }
        }
    }
    assert!(counts.len() > 200, "{} operations", counts.len());
    assert!(
        faults.is_empty(),
        "{} of {} calls differ:\n{}",
        faults.len(),
        cases.len(),
        faults.join("\n")
    );
}

/// Without this test, a comparison that always succeeds would go unnoticed.
#[test]
fn the_comparison_can_fail() {
    let one = Array::vector(&[1.0f32]).unwrap();
    let other = |v: f32| Array::vector(&[v]).unwrap();
    assert!(compare(&one, &one, 1e-5).is_ok());
    for wrong in [other(1.001), other(f32::NAN), other(f32::INFINITY)] {
        assert!(compare(&one, &wrong, 1e-5).is_err());
        assert!(compare(&wrong, &one, 1e-5).is_err());
    }
    assert!(compare(&one, &one.astype(Dtype::Float64).unwrap(), 1e-5).is_err());
    assert!(compare(&one, &one.expand_dims(0).unwrap(), 1e-5).is_err());
    let big = |v: i64| Array::vector(&[v]).unwrap();
    assert!(compare(&big(i64::MAX), &big(i64::MAX - 1), 0.0).is_err());
}

/// Wraps a single result as a list, because some calls return several arrays.
pub(crate) fn one(a: Result<Array>) -> Result<Vec<Array>> {
    Ok(vec![a?])
}
