//! Operations that are another one in a different form: they are held against that one, which has golden
//! values, in every type.

use mlx_rs_core::random::Key;
use mlx_rs_core::{
    All, Array, Dtype, Result, ScatterMode, depends, eval, full, ones, random, zeros,
};

fn values(shape: &[i32], dtype: Dtype) -> Array {
    let n: i32 = shape.iter().product();
    let values: Vec<i32> = (0..n).map(|i| (i * 5 + 2) % 7).collect();
    Array::from_slice(&values, shape)
        .and_then(|a| a.astype(dtype))
        .unwrap()
}

/// Pairs of what must be the same.
fn pairs(dtype: Dtype) -> Result<Vec<(&'static str, Array, Array)>> {
    let a = values(&[3, 4], dtype);
    let ids = Array::vector(&[2u32, 0])?;
    let part = values(&[3, 2], dtype);
    let block = values(&[2, 1, 4], dtype);
    Ok(vec![
        (
            "take_flat",
            a.take_flat(&ids)?,
            a.reshape(&[12])?.take(&ids, 0)?,
        ),
        ("take_ids", a.take_ids(&[2, 0], 1)?, a.take(&ids, 1)?),
        (
            "take_clamped",
            a.take_clamped(&Array::vector(&[2i32, -9])?, 0)?,
            a.take(&ids, 0)?,
        ),
        (
            "update_axis",
            a.update_axis(&part, 1, 2)?,
            a.slice_update(&part, &[0, 2], &[3, 4], &[1, 1])?,
        ),
        (
            "gather_axis",
            a.gather_axis(&ids, 0, &[1, 4])?,
            a.gather(&[&ids], &[0], &[1, 4])?,
        ),
        (
            "scatter_axis",
            a.scatter_axis(&ids, &block, 0, ScatterMode::Replace)?,
            a.scatter(&[&ids], &block, &[0], ScatterMode::Replace)?,
        ),
        (
            "squeeze_axis",
            block.squeeze_axis(1)?,
            block.squeeze_axes(&[1])?,
        ),
        ("zeros_like", a.zeros_like()?, zeros(&[3, 4], dtype)?),
        ("ones_like", a.ones_like()?, ones(&[3, 4], dtype)?),
        (
            "full_like",
            a.full_like(&Array::scalar(3i32)?, dtype)?,
            full(&[3, 4], &Array::scalar(3i32)?, dtype)?,
        ),
        ("depends", depends(&[&a], &[&part])?.remove(0), a.clone()),
        ("stop_gradient", a.stop_gradient()?, a.clone()),
        (
            "number_of_elements",
            a.number_of_elements(&[0, 1], false, Dtype::Int32)?,
            ones(&[3, 4], Dtype::Int32)?.sum(All, false)?,
        ),
    ])
}

#[test]
fn other_forms_of_an_operation_are_that_operation() {
    for dtype in Dtype::ALL {
        for (name, got, expected) in pairs(dtype).unwrap() {
            eval([&got, &expected]).unwrap();
            assert_eq!(
                (got.shape(), got.dtype()),
                (expected.shape(), expected.dtype()),
                "{name}"
            );
            assert!(got.array_equal(&expected).unwrap(), "{name} of {dtype}");
        }
    }
    let key = Key::new(5).unwrap();
    let (uniform, between) = (
        random::uniform(0.0, 2.0, &[9], Dtype::Float32, &key).unwrap(),
        random::uniform_between(
            &Array::scalar(0.0f32).unwrap(),
            &Array::scalar(2.0f32).unwrap(),
            &[9],
            Dtype::Float32,
            &key,
        )
        .unwrap(),
    );
    assert!(uniform.array_equal(&between).unwrap());
}
