//! Linear regression by gradient descent. The loss is a function, and a transform computes its
//! gradient.
//!
//! ```text
//! cargo run -p rust-mlx-core --example linear_regression
//! ```

use mlx_rs_core::transforms::value_and_grad;
use mlx_rs_core::{All, Array, Dtype, Result, eval, random};

const FEATURES: i32 = 100;
const EXAMPLES: i32 = 1_000;
const STEPS: usize = 500;

pub(crate) fn main() -> Result<()> {
    let key = |seed| random::Key::new(seed);
    let f32 = Dtype::Float32;
    // The coefficients to find, and noisy examples.
    let truth = random::normal(0.0, 1.0, &[FEATURES], f32, &key(0)?)?;
    let inputs = random::normal(0.0, 1.0, &[EXAMPLES, FEATURES], f32, &key(1)?)?;
    let noise = random::normal(0.0, 0.01, &[EXAMPLES], f32, &key(2)?)?;
    let labels = inputs.matmul(&truth)?.add(&noise)?;

    let half = Array::scalar(0.5f32)?;
    let loss = |w: &[Array]| -> Result<Vec<Array>> {
        let error = inputs.matmul(&w[0])?.subtract(&labels)?;
        Ok(vec![error.square()?.mean(All, false)?.multiply(&half)?])
    };
    let mut step = value_and_grad(loss, &[0]);

    let rate = Array::scalar(0.1f32)?;
    let mut weights = random::normal(0.0, 0.01, &[FEATURES], f32, &key(3)?)?;
    for i in 0..STEPS {
        let (values, grads) = step(std::slice::from_ref(&weights))?;
        weights = weights.subtract(&grads[0].multiply(&rate)?)?;
        // The weights are evaluated once per step, so that the graph does not grow.
        eval([&weights])?;
        if i % 100 == 0 {
            println!("step {i:3}  loss {:.6}", values[0].item::<f32>()?);
        }
    }

    let error = weights
        .subtract(&truth)?
        .square()?
        .sum(All, false)?
        .sqrt()?;
    let error = error.item::<f32>()?;
    println!("distance of the weights from the truth: {error:.5}");
    assert!(error < 0.05, "gradient descent did not converge");
    Ok(())
}
