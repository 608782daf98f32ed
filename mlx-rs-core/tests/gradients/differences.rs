//! Checks derivatives against finite differences. `main.rs` has the cases.

use mlx_rs_core::transforms::{VmapAxes, jvp, vjp, vmap};
use mlx_rs_core::{Array, Dtype, Result, random, stack};

/// The distance of the points. It is a power of two, so that computing the points does not round.
const H: f32 = 1.0 / 64.0;
const TOLERANCE: f64 = 2e-3;

/// Cases that MLX refuses in some or all batches. The gradient of a quantized kernel is a quantized
/// matrix multiplication. The dense kernel evaluates its matrix.
const NO_BATCHES: [&str; 7] = [
    "quantized_matmul",
    "gather_qmm",
    "gather_mm",
    "topk",
    "addmm",
    "gradient of a gradient",
    "dense kernel, matrix",
];

/// Pseudo-random values between `low` and `high`, which depend only on the seed.
pub fn numbers(seed: u64, shape: &[i32], low: f32, high: f32) -> Array {
    random::uniform(
        low,
        high,
        shape,
        Dtype::Float32,
        &random::Key::new(seed).unwrap(),
    )
    .unwrap()
}
pub fn normal(seed: u64, shape: &[i32]) -> Array {
    numbers(seed, shape, -1.5, 1.5)
}
pub fn positive(seed: u64, shape: &[i32]) -> Array {
    numbers(seed, shape, 0.5, 2.0)
}
pub fn scalar(v: f32) -> Array {
    Array::scalar(v).unwrap()
}
pub fn ids(v: &[i32]) -> Array {
    Array::vector(v).unwrap()
}

type Function<'a> = &'a dyn Fn(&[Array]) -> Result<Array>;

/// The weighted sum of the outputs of `f`.
fn weighted(f: Function<'_>, args: &[Array], weights: &[f32]) -> f64 {
    let values = f(args).unwrap().to_vec::<f32>().unwrap();
    values
        .iter()
        .zip(weights)
        .map(|(v, w)| f64::from(*v) * f64::from(*w))
        .sum()
}

/// `args`, with `step` added to element `i` of argument `n`.
fn moved(args: &[Array], n: usize, i: usize, step: f32) -> Vec<Array> {
    let mut args = args.to_vec();
    let mut values = args[n].to_vec::<f32>().unwrap();
    values[i] += step;
    args[n] = Array::from_slice(&values, args[n].shape()).unwrap();
    args
}

fn near(name: &str, how: &str, n: usize, i: usize, given: f64, expected: f64) {
    assert!(
        (given - expected).abs() <= TOLERANCE * expected.abs().max(1.0),
        "{name}: {how}, argument {n}, element {i}: {given}, but the differences give {expected}"
    );
}

/// Compares reverse-mode and forward-mode derivatives with finite differences.
fn compare(name: &str, args: &[Array], f: Function<'_>) {
    let value = f(args).unwrap();
    assert_eq!(value.dtype(), Dtype::Float32, "{name}");
    let cotangent = numbers(99, value.shape(), 0.5, 1.5);
    let weights = cotangent.to_vec::<f32>().unwrap();
    let one = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![f(x)?]) };
    let (values, products) =
        vjp(one, args, &[cotangent]).unwrap_or_else(|e| panic!("{name}: reverse: {e}"));
    assert!(values[0].all_close(&value, 1e-5, 1e-5).unwrap(), "{name}");
    let mut slopes = vec![0.0; products.len()];
    let tangents: Vec<Array> = args
        .iter()
        .enumerate()
        .map(|(n, a)| numbers(7 + n as u64, a.shape(), 0.5, 1.5))
        .collect();
    let mut any = false;
    for (n, product) in products.iter().enumerate() {
        assert_eq!(
            (product.shape(), product.dtype()),
            (args[n].shape(), Dtype::Float32),
            "{name}"
        );
        let tangent = tangents[n].to_vec::<f32>().unwrap();
        for (i, given) in product.to_vec::<f32>().unwrap().into_iter().enumerate() {
            let at = |steps: f32| weighted(f, &moved(args, n, i, steps * H), &weights);
            let difference =
                (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * f64::from(H));
            near(name, "reverse", n, i, f64::from(given), difference);
            slopes[n] += difference * f64::from(tangent[i]);
            any |= difference.abs() > 1e-2;
        }
    }
    assert!(any, "{name}: the case is of no use, nothing changes");
    let (_, products) =
        jvp(one, args, &tangents).unwrap_or_else(|e| panic!("{name}: forward: {e}"));
    let given: f64 = products[0]
        .to_vec::<f32>()
        .unwrap()
        .iter()
        .zip(&weights)
        .map(|(v, w)| f64::from(*v) * f64::from(*w))
        .sum();
    near(name, "forward", 0, 0, given, slopes.iter().sum());
}

/// Compares batches of two examples with single examples: each argument alone in a batch, then all
/// arguments.
fn batches(name: &str, args: &[Array], f: Function<'_>) {
    let others: Vec<Array> = args
        .iter()
        .map(|a| a.multiply(&scalar(1.25)).unwrap())
        .collect();
    let one = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![f(x)?]) };
    let choices = (0..args.len())
        .map(|n| vec![n])
        .chain([(0..args.len()).collect()]);
    for choice in choices {
        let mut second = args.to_vec();
        let mut both = args.to_vec();
        let mut axes = vec![None; args.len()];
        for &n in &choice {
            second[n] = others[n].clone();
            both[n] = stack(&[&args[n], &others[n]], 0).unwrap();
            axes[n] = Some(0);
        }
        let expected = stack(&[&f(args).unwrap(), &f(&second).unwrap()], 0).unwrap();
        match vmap(one, VmapAxes::Each(axes), 0)(&both) {
            Ok(given) => {
                assert_eq!(
                    given[0].shape(),
                    expected.shape(),
                    "{name}: batch of {choice:?}"
                );
                let close = given[0].all_close(&expected, 1e-4, 1e-4).unwrap();
                assert!(close, "{name}: batch of {choice:?}");
            }
            Err(e) => {
                let known = NO_BATCHES.iter().any(|n| name.starts_with(n));
                assert!(known, "{name}: batch of {choice:?}: {e}");
            }
        }
    }
}

pub fn check(name: &str, args: &[Array], f: impl Fn(&[Array]) -> Result<Array>) {
    compare(name, args, &f);
    batches(name, args, &f);
}
