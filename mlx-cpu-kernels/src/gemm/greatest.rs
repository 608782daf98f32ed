//! Finds the greatest outputs of each row of a product with many columns, such as the output head.
//! The outputs are never all in memory: tiles are compared while they are in the cache.

use std::cmp::Ordering as Order;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::gemm::packed_gemm::ColumnBlock;
use crate::gemm::product::Product;
use crate::isa::Isa;
use crate::layout::tile::LANES;
use crate::pool::lock;
use crate::work::{Input, Work};

/// The `k` greatest outputs of each row of a product, in descending order. Equal outputs are sorted
/// by column. NaN counts as minus infinity. The product must have one part, no gate or residual,
/// and at most [`crate::MAX_ROW_LEN`] columns. The inputs are the product's. The output is `[rows,
/// 2 k]`: `k` values, then their columns as float32, which is exact.
///
/// The product is computed in float32. The product's fields about input types are ignored.
pub struct GreatestOutputs {
    /// The product.
    pub product: Product,
    /// The number of greatest outputs per row, at most the number of columns.
    pub k: usize,
}

impl Work for GreatestOutputs {
    fn outputs(&self) -> usize {
        2 * self.product.rows * self.k
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Product { rows, n, isa, .. } = self.product;
        assert!(self.k <= n && self.product.gate.is_none() && !self.product.residual);
        if self.k == 0 {
            return;
        }
        let groups: Vec<Group> = (0..rows.div_ceil(LANES))
            .map(|_| Group::new(self.k))
            .collect();
        let sink = |tile: &[f32], (begin, count): (usize, usize), block: ColumnBlock| {
            let tile = tile.as_chunks::<LANES>().0;
            groups[begin / LANES].take(isa, tile, count, block.start + block.from);
        };
        // SAFETY: the caller guarantees that the inputs are those of the product.
        unsafe {
            self.product
                .with_task(inputs, |task, _| task.run_into(&sink));
        };
        let best = groups.into_iter().flat_map(Group::into_rows);
        for (best, out) in best.zip(output.chunks_exact_mut(2 * self.k)) {
            let (values, columns) = out.split_at_mut(self.k);
            for ((entry, value), column) in best.iter().zip(values).zip(columns) {
                *value = entry.0;
                *column = entry.1 as f32; // below `MAX_ROW_LEN`, so exact
            }
        }
    }
}

/// A value and its column.
type Found = (f32, u32);

/// The kept outputs of sixteen rows. The rows are the lanes of a tile.
struct Group {
    /// For each row, the smallest of the `k` kept values, as the bits of a float32. It only
    /// increases. Smaller values are skipped without locking `best`.
    least: [AtomicU32; LANES],
    /// The kept values of each row, in descending order. Equal values are sorted by column.
    best: Mutex<[Vec<Found>; LANES]>,
    k: usize,
}

impl Group {
    fn new(k: usize) -> Self {
        Self {
            least: [const { AtomicU32::new(f32::NEG_INFINITY.to_bits()) }; LANES],
            best: Mutex::new([const { Vec::new() }; LANES]),
            k,
        }
    }

    /// Merges a tile `[columns][LANES]` whose first column is `first`. `count` of its lanes are
    /// rows.
    fn take(&self, isa: Isa, tile: &[[f32; LANES]], count: usize, first: usize) {
        let mut greatest = [f32::NEG_INFINITY; LANES];
        greatest_of_lanes(isa, tile, &mut greatest);
        let least = |lane: usize| f32::from_bits(self.least[lane].load(Ordering::Relaxed));
        let mut wanted = (0..count)
            .filter(|&lane| greatest[lane] >= least(lane))
            .peekable();
        if wanted.peek().is_none() {
            return;
        }
        let mut best = lock(&self.best);
        for lane in wanted {
            let heap = &mut best[lane];
            for (values, column) in tile.iter().zip(first..) {
                // In this order of arguments, `max` turns NaN into minus infinity.
                let value = f32::NEG_INFINITY.max(values[lane]);
                insert(heap, self.k, (value, column as u32));
            }
            if let Some(last) = heap.get(self.k - 1) {
                self.least[lane].store(last.0.to_bits(), Ordering::Relaxed);
            }
        }
    }

    fn into_rows(self) -> [Vec<Found>; LANES] {
        std::mem::take(&mut *lock(&self.best))
    }
}

/// Sorts by value, descending, then by column.
fn order(a: &Found, b: &Found) -> Order {
    // Adding zero turns -0 into 0. `total_cmp` would order -0 before 0, but the two must be equal.
    (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// Inserts a value with its column into a sorted list of at most `k`.
fn insert(best: &mut Vec<Found>, k: usize, candidate: Found) {
    if best.len() >= k {
        match best.last() {
            Some(last) if order(&candidate, last) == Order::Less => best.truncate(k - 1),
            _ => return,
        }
    }
    let at = best.partition_point(|other| order(other, &candidate) == Order::Less);
    best.insert(at, candidate);
}

/// The greatest value of each lane.
fn greatest_of_lanes(isa: Isa, tile: &[[f32; LANES]], greatest: &mut [f32; LANES]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2(tile: &[[f32; LANES]], greatest: &mut [f32; LANES]) {
            greatest_with(tile, greatest);
        }
        if isa.has_avx2() {
            // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2.
            unsafe { avx2(tile, greatest) };
            return;
        }
    }
    // On other processors, default builds already use vectors of four floats, such as NEON.
    let _ = isa;
    greatest_with(tile, greatest);
}

#[inline(always)]
fn greatest_with(tile: &[[f32; LANES]], greatest: &mut [f32; LANES]) {
    for values in tile {
        for (g, &x) in greatest.iter_mut().zip(values) {
            // With this comparison NaN never becomes the maximum, and it costs no extra
            // instruction.
            *g = if x > *g { x } else { *g };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::dense::DenseType;
    use crate::gemm::experts::tests::{Stack, double};
    use crate::gemm::product::{MatrixFormat, Size};
    use crate::layout::packed::ScaleFormat;
    use crate::prefill_inputs::PrefillInputs;
    use crate::testing::{noise, with_each};

    fn work(
        isa: Isa,
        kind: MatrixFormat,
        size: Size,
        (rows, k): (usize, usize),
    ) -> GreatestOutputs {
        let product = Product {
            prefill_inputs: PrefillInputs::Int8,
            ..Product::plain(isa, kind, size, rows)
        };
        GreatestOutputs { product, k }
    }

    /// The values of one row, with their columns.
    fn pairs_of(out: &[f32], k: usize) -> Vec<(f32, usize)> {
        let columns = out[k..].iter().map(|&c| c as usize);
        out[..k].iter().copied().zip(columns).collect()
    }

    #[test]
    fn they_are_those_of_the_sorted_outputs() {
        let quantized = MatrixFormat::Quantized {
            bits: 4,
            group: 32,
            scales: ScaleFormat::F16,
        };
        // The matrix has more than one block of columns, and the input more than one block of rows.
        const SIZE: Size = Size { n: 1300, k: 64 };
        for kind in [MatrixFormat::Dense(DenseType::F32), quantized] {
            let made = Stack::new(kind, SIZE, 3);
            for (rows, k) in [(1, 1), (1, 10), (17, 3), (530, 10), (2, 1300)] {
                let x = noise(rows * SIZE.k, 5);
                let mut inputs = vec![Input::from_slice(&x)];
                inputs.extend(made.arrays(1));
                with_each(|isa| {
                    let work = work(isa, kind, SIZE, (rows, k));
                    let mut out = vec![f32::NAN; work.outputs()];
                    // SAFETY: the inputs are those of a product with this matrix.
                    unsafe { work.run(&inputs, &mut out) };
                    let all = x.chunks_exact(SIZE.k).zip(out.chunks_exact(2 * k));
                    for (x, out) in all.step_by(rows.div_ceil(7)) {
                        let exact = made.exact(0, &double(x), false);
                        let mut sorted = exact.clone();
                        sorted.sort_by(|a, b| b.total_cmp(a));
                        let actual = pairs_of(out, k);
                        for ((value, column), wanted) in actual.iter().zip(&sorted) {
                            assert!((f64::from(*value) - wanted).abs() < 1e-4, "{isa:?} {k}");
                            assert!((f64::from(*value) - exact[*column]).abs() < 1e-4);
                        }
                        let mut columns: Vec<usize> = actual.iter().map(|f| f.1).collect();
                        columns.sort_unstable();
                        columns.dedup();
                        assert_eq!(columns.len(), k, "a column occurs twice");
                    }
                });
            }
        }
    }

    #[test]
    fn of_equals_the_first_are_taken_and_nan_is_the_least() {
        const N: usize = 100;
        let mut matrix = vec![1.0f32; N];
        matrix[3] = f32::NAN;
        matrix[70] = 2.0;
        matrix[71] = -0.0;
        let kind = MatrixFormat::Dense(DenseType::F32);
        let x = [1.0f32];
        with_each(|isa| {
            let work = work(isa, kind, Size { n: N, k: 1 }, (1, N));
            let mut out = vec![0.0; work.outputs()];
            let inputs = [Input::from_slice(&x), Input::from_slice(&matrix)];
            // SAFETY: the inputs are those of a product with this matrix.
            unsafe { work.run(&inputs, &mut out) };
            let actual = pairs_of(&out, N);
            assert_eq!(actual[..4], [(2.0, 70), (1.0, 0), (1.0, 1), (1.0, 2)]);
            assert_eq!(actual[4], (1.0, 4), "NaN is passed over");
            assert_eq!(actual[N - 2], (0.0, 71));
            assert_eq!(actual[N - 1], (f32::NEG_INFINITY, 3));
        });
    }
}
