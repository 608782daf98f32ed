//! Measures the time of a sum over all processes of a group, for vectors of several sizes.
//!
//! Each process needs MLX's variables, as `mlx launch` and `mpirun` set them:
//!
//! ```sh
//! echo '[["127.0.0.1:5001"], ["127.0.0.1:5002"]]' > ring.json
//! for rank in 0 1; do MLX_RANK=$rank MLX_HOSTFILE=ring.json target/release/examples/all_reduce & done
//! ```

use std::time::Instant;

use mlx_rs_core::{Array, Dtype, Result, distributed, full};

/// The number of measured sums of each size.
const ROUNDS: usize = 50;

fn main() -> Result<()> {
    let group = distributed::init(true)?;
    for elements in [1, 256, 1024, 4096, 16_384, 262_144, 1_048_576] {
        let vector = full(&[elements], &Array::scalar(1.0f32)?, Dtype::Float32)?;
        vector.eval()?;
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let started = Instant::now();
            group.all_sum(&vector)?.eval()?;
            times.push(started.elapsed());
        }
        times.sort_unstable();
        if group.rank() == 0 {
            println!(
                "{} processes, {} bytes: median {:.1} us, least {:.1} us",
                group.size(),
                4 * elements,
                times[ROUNDS / 2].as_secs_f64() * 1e6,
                times[0].as_secs_f64() * 1e6,
            );
        }
    }
    distributed::finalize();
    Ok(())
}
