//! A matrix multiplication in tiles of 32 x 32, as a custom kernel. Each thread group reads a tile
//! of both matrices into shared memory, and uses every element 32 times. On a device without Metal
//! and CUDA, MLX's own multiplication replaces the kernel.
//!
//! ```text
//! cargo run --release -p rust-mlx-core --example tiled_product
//! ```

use mlx_rs_core::kernel::{CudaKernel, Dialect, Launch, MetalKernel};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result};

/// The number of rows and columns of a tile. A group has one thread per element.
pub const TILE: u32 = 32;

const BODY: &str = "
int x = THREAD.x;
int y = THREAD.y;
int row = GROUP.y * 32 + y;
int col = GROUP.x * 32 + x;
SHARED float tile_a[32][32];
SHARED float tile_b[32][32];
float sum = 0.0f;
for (int from = 0; from < INNER; from += 32) {
    tile_a[y][x] = row < ROWS && from + x < INNER ? a[row * INNER + from + x] : 0.0f;
    tile_b[y][x] = from + y < INNER && col < COLS ? b[(from + y) * COLS + col] : 0.0f;
    WAIT;
    for (int i = 0; i < 32; ++i) {
        sum += tile_a[y][i] * tile_b[i][x];
    }
    WAIT;
}
if (row < ROWS && col < COLS) {
    product[row * COLS + col] = sum;
}
";

/// The body of the kernel.
pub fn source(dialect: Dialect) -> String {
    let words = match dialect {
        Dialect::Metal => [
            ("THREAD", "thread_position_in_threadgroup"),
            ("GROUP", "threadgroup_position_in_grid"),
            ("SHARED", "threadgroup"),
            ("WAIT", "threadgroup_barrier(mem_flags::mem_threadgroup)"),
        ],
        Dialect::Cuda => [
            ("THREAD", "threadIdx"),
            ("GROUP", "blockIdx"),
            ("SHARED", "__shared__"),
            ("WAIT", "__syncthreads()"),
        ],
    };
    let replace = |body: String, (word, by): (&str, &str)| body.replace(word, by);
    words.into_iter().fold(BODY.to_owned(), replace)
}

/// `a` `[M, K]` times `b` `[K, N]`, both float32.
fn product(a: &Array, b: &Array) -> Result<Array> {
    let (&[rows, inner], &[same, cols]) = (a.shape(), b.shape()) else {
        return Err(Error::new(ErrorKind::Shape, "product", "needs matrices"));
    };
    if inner != same || [a, b].iter().any(|m| m.dtype() != Dtype::Float32) {
        let message = "needs float32 with as many columns as rows";
        return Err(Error::new(ErrorKind::Shape, "product", message));
    }
    let Some(dialect) = Dialect::available() else {
        return a.matmul(b);
    };
    // The grid has whole tiles, so that all threads of a group reach each barrier.
    let padded = |n: i32| n.unsigned_abs().next_multiple_of(TILE);
    let launch = Launch::new()
        .input(a)
        .input(b)
        .output(&[rows, cols], Dtype::Float32)
        .grid(padded(cols), padded(rows), 1)
        .thread_group(TILE, TILE, 1)
        .template("ROWS", rows)
        .template("COLS", cols)
        .template("INNER", inner);
    let (name, source) = ("tiled_product", source(dialect));
    let (inputs, outputs) = (["a", "b"], ["product"]);
    // SAFETY: both matrices have the shapes in the constants. A thread reads only within them and
    // writes only its own element. All threads of a group reach both barriers.
    let made = unsafe {
        match dialect {
            Dialect::Metal => {
                MetalKernel::new(name, &inputs, &outputs, &source)?.launch(&launch)?
            }
            Dialect::Cuda => CudaKernel::new(name, &inputs, &outputs, &source)?.launch(&launch)?,
        }
    };
    let lost = || Error::new(ErrorKind::Mlx, "product", "the kernel has no output");
    made.into_iter().next().ok_or_else(lost)
}

/// Multiplies, and compares with MLX's own product.
pub fn main() -> Result<()> {
    println!("computed by {:?}", Dialect::available());
    for (rows, inner, cols) in [(1, 1, 1), (32, 64, 32), (40, 70, 50), (6, 2560, 512)] {
        let noise =
            |shape: &[i32], seed| random::normal(0.0, 1.0, shape, Dtype::Float32, &Key::new(seed)?);
        let (a, b) = (noise(&[rows, inner], 1)?, noise(&[inner, cols], 2)?);
        let close = product(&a, &b)?.all_close(&a.matmul(&b)?, 1e-4, 1e-3)?;
        println!("[{rows}, {inner}] x [{inner}, {cols}]: equal {close}");
        assert!(close);
    }
    Ok(())
}
