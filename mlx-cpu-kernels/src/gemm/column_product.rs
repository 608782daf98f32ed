//! Products of any number of rows with matrices that are packed once ([`ColumnMatrix`]), for AVX2
//! and AVX-512. Encoders use them: their passes have many rows, and no pass has only one. `run.rs`
//! handles matrices in rows.
//!
//! Input rows are read in place. A thread multiplies tiles of rows with a micro-panel of the
//! matrix, and adds the bias and the residual before it stores the outputs. Meanwhile it prefetches
//! the next panel, one slice per tile.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use crate::gemm::dense::DenseType;
use crate::isa::Isa;
use crate::layout::aligned::AlignedVec;
pub use crate::layout::columns::ColumnMatrix;
use crate::layout::dense::DenseView;
#[cfg(target_arch = "x86_64")]
use crate::layout::tile::{Ahead, ColumnOutput, TileA};
use crate::partition::{MIN_PARALLEL_WORK, SharedOutput, parallel_ranges};
use crate::pool;
#[cfg(target_arch = "x86_64")]
use crate::simd::columns;
use crate::simd::portable::vmath::Gate;
use crate::simd::vmath::{dot, gate_apply, gate_mul};
use crate::work::{Input, Work};

/// The maximum number of input elements per chunk of rows. A chunk is multiplied with all panels,
/// and fits the L2 cache. A chunk of [`LEAST_ROWS`] rows may be larger.
const INPUTS: usize = 1 << 18;

/// The minimum number of rows of a chunk, if the input has as many. For fewer rows, reading the
/// matrix would take a large part of the time.
const LEAST_ROWS: usize = 128;

/// The maximum number of rows of a chunk.
const MOST_ROWS: usize = 512;

/// The maximum width of a panel, and the maximum number of rows of a tile.
const MOST_WIDTH: usize = 48;
const MOST_TILE: usize = 8;

thread_local! {
    /// Input rows after the norm.
    static NORMALIZED: RefCell<AlignedVec> = RefCell::default();
    /// A panel of a 16-bit matrix, or two of a gate, as float32.
    static WIDE: RefCell<AlignedVec> = RefCell::default();
}

/// One matrix of a [`ColumnProduct`].
#[derive(Debug)]
pub struct ColumnPart {
    /// The matrix.
    pub matrix: Arc<ColumnMatrix>,
    /// Whether a bias follows in the inputs.
    pub bias: bool,
}

/// A product of rows with transposed matrices, as [`Product`](super::product::Product) computes it,
/// but with matrices that the operation stores. The inputs are float32: the rows `[rows, k]`, the
/// weight of the norm `[k]`, the bias `[n]` of each part that has one, and the residual `[rows,
/// n]`.
#[derive(Debug)]
pub struct ColumnProduct {
    /// At least one matrix. All have `k` columns and were packed for one instruction set.
    pub parts: Vec<ColumnPart>,
    /// The number of rows of the input.
    pub rows: usize,
    /// The number of columns of the input.
    pub k: usize,
    /// The number of columns of the output.
    pub n: usize,
    /// Epsilon of the RMS norm, if there is one.
    pub eps: Option<f32>,
    /// The activation of a gate: it is applied to the first of two parts of equal size, and the
    /// result is multiplied with the second part.
    pub gate: Option<Gate>,
    /// The activation of a single part. It excludes `gate` and `residual`.
    pub activation: Option<Gate>,
    /// Whether a residual is added.
    pub residual: bool,
}

impl ColumnMatrix {
    /// Packs a float32 matrix with rows of `k` elements; `None` if there is no kernel for this
    /// instruction set.
    pub fn from_f32(isa: Isa, rows: &[f32], k: usize) -> Option<Self> {
        Some(Self::pack(DenseView::F32(rows), k, isa, width(isa)?))
    }

    /// Packs a matrix of float16 or bfloat16 bits with rows of `k` elements; `None` if there is no
    /// kernel for this instruction set and type. AMX has tiles for bfloat16 (`amx_gemm_bf16.rs`).
    pub fn from_half(isa: Isa, rows: &[u16], number: DenseType, k: usize) -> Option<Self> {
        let view = match number {
            DenseType::F16 => DenseView::F16(rows),
            DenseType::Bf16 if isa.has_bf16_tiles() => return None,
            DenseType::Bf16 => DenseView::Bf16(rows),
            DenseType::F32 => return None,
        };
        Some(Self::pack(view, k, isa, width(isa)?))
    }
}

/// The number of outputs of a panel.
fn width(isa: Isa) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    return columns::sizes(isa).map(|(width, _)| width);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        None
    }
}

/// The operands of a product.
struct Task<'a> {
    product: &'a ColumnProduct,
    isa: Isa,
    /// The rows, after the norm.
    x: &'a [f32],
    biases: Vec<Option<&'a [f32]>>,
    residual: Option<&'a [f32]>,
    out: SharedOutput,
}

/// A panel, and the `(distance, step)` of its prefetch: with each column, a tile prefetches `step`
/// elements. The first ones are `distance` elements after the start of the panel.
type PanelAhead<'a> = (&'a [f32], (usize, usize));

/// A panel of one part, or of both parts of a gate.
#[derive(Clone, Copy)]
struct Place {
    part: usize,
    panel: usize,
    /// The first column of the output.
    start: usize,
    /// The number of columns of the output.
    columns: usize,
}

impl Work for ColumnProduct {
    fn outputs(&self) -> usize {
        self.rows * self.n
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let mut inputs = inputs.iter();
        // SAFETY: the caller guarantees float32.
        let mut next = || inputs.next().map_or(&[][..], |i| unsafe { i.as_slice() });
        let Some(first) = self.parts.first() else {
            return;
        };
        let isa = first.matrix.isa;
        let x: &[f32] = next();
        let norm = self.eps.map(|eps| (next(), eps));
        let biases = self.parts.iter().map(|part| part.bias.then(&mut next));
        let biases = biases.collect();
        let residual = self.residual.then(&mut next);
        NORMALIZED.with_borrow_mut(|normalized| {
            let task = Task {
                product: self,
                isa,
                x: match norm {
                    Some(norm) => normalize(isa, x, norm, normalized),
                    None => x,
                },
                biases,
                residual,
                out: SharedOutput::new(output),
            };
            task.run();
        });
    }
}

/// The rows of `x` after an RMS norm, a weight and epsilon.
fn normalize<'n>(
    isa: Isa,
    x: &[f32],
    (weight, eps): (&[f32], f32),
    normalized: &'n mut AlignedVec,
) -> &'n [f32] {
    let k = weight.len();
    normalized.resize(x.len());
    let all = SharedOutput::new(normalized);
    parallel_ranges(x.len() / k.max(1), 4 * x.len(), &|from, to| {
        for row in from..to {
            let x = &x[row * k..(row + 1) * k];
            let factor = 1.0 / (dot(isa, x, x) / k as f32 + eps).sqrt();
            // SAFETY: no other part of the job writes this row.
            let out = unsafe { all.slice_mut(row * k, k) };
            for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                *out = x * factor * w;
            }
        }
    });
    normalized
}

impl Task<'_> {
    fn run(&self) {
        let ColumnProduct { rows, k, n, .. } = *self.product;
        let places = self.places();
        let at_once = (INPUTS / k.max(1)).clamp(LEAST_ROWS, MOST_ROWS) / MOST_TILE * MOST_TILE;
        let chunks = rows.div_ceil(at_once);
        let unit = |i: usize| {
            let first = i / places.len() * at_once;
            self.panel(first..rows.min(first + at_once), places[i % places.len()]);
        };
        let units = chunks * places.len();
        if rows * n * k < MIN_PARALLEL_WORK {
            (0..units).for_each(unit);
        } else {
            pool::pool().run(units, &unit);
        }
    }

    /// The panels of all parts. With a gate, a panel of the first part also represents the panel of
    /// the second part.
    fn places(&self) -> Vec<Place> {
        let parts = match self.product.gate {
            Some(_) => &self.product.parts[..1],
            None => &self.product.parts[..],
        };
        let mut places = Vec::new();
        let mut start = 0;
        for (part, ColumnPart { matrix, .. }) in parts.iter().enumerate() {
            for panel in 0..matrix.panels() {
                let before = panel * matrix.width;
                places.push(Place {
                    part,
                    panel,
                    start: start + before,
                    columns: matrix.width.min(matrix.n - before),
                });
            }
            start += matrix.n;
        }
        places
    }

    /// Multiplies some rows with a panel.
    fn panel(&self, rows: Range<usize>, place: Place) {
        let parts = place.part..place.part + 1 + usize::from(self.product.gate.is_some());
        let parts = &self.product.parts[parts];
        WIDE.with_borrow_mut(|wide| {
            let size = self.product.k * parts[0].matrix.width;
            let is_half = |part: &ColumnPart| part.matrix.number() != DenseType::F32;
            if parts.iter().any(is_half) {
                wide.resize(parts.len() * size);
            }
            let mut converted = wide.chunks_exact_mut(size.max(1));
            let mut panels = [&[][..]; 2];
            for (panel, part) in panels.iter_mut().zip(parts) {
                *panel = match (part.matrix.panel(place.panel), converted.next()) {
                    (DenseView::F32(all), _) => all,
                    (half, Some(wide)) => {
                        half.to_f32(self.isa, 0, wide);
                        wide
                    }
                    (_, None) => return,
                };
            }
            // Tiles have about equal height, because the latency of additions limits a tile with
            // few rows.
            let tiles = rows
                .len()
                .div_ceil(MOST_TILE.min(most_rows(self.isa)))
                .max(1);
            let step = parts[0].matrix.width.div_ceil(tiles);
            let mut first = rows.start;
            for tile in 0..tiles {
                let last = rows.start + (tile + 1) * rows.len() / tiles;
                // The next panel begins where this panel ends, unless it belongs to another matrix.
                let distance = size + tile * step * self.product.k;
                let panels = panels.map(|panel| (panel, (distance, step)));
                match self.product.gate {
                    Some(gate) => self.gated_tile(first..last, panels, place, gate),
                    None => self.tile(first..last, panels[0], place),
                }
                first = last;
            }
        });
    }

    /// A tile of a part.
    fn tile(&self, rows: Range<usize>, panel: PanelAhead<'_>, place: Place) {
        let ColumnProduct { n, activation, .. } = *self.product;
        let matrix = &self.product.parts[place.part].matrix;
        let (count, width) = (rows.len(), matrix.width);
        let begin = rows.start * n + place.start;
        let reach = (count - 1) * n + place.columns;
        if place.columns < width {
            let mut tile = [0.0; MOST_TILE * MOST_WIDTH];
            let tile = &mut tile[..count * width];
            self.multiply(rows, (place.part, place.panel), panel, tile);
            for (i, tile) in tile.chunks_exact(width).enumerate() {
                // SAFETY: no other part of the job writes these columns of this row.
                let out = unsafe { self.out.slice_mut(begin + i * n, place.columns) };
                out.copy_from_slice(&tile[..place.columns]);
                if let Some(residual) = self.residual {
                    let residual = &residual[begin + i * n..][..place.columns];
                    out.iter_mut().zip(residual).for_each(|(out, r)| *out += r);
                }
            }
        } else {
            let bias = self.biases[place.part].map(|bias| &bias[place.panel * width..][..width]);
            let residual = self
                .residual
                .map(|residual| &residual[begin..begin + reach]);
            self.multiply_to(
                rows,
                panel,
                (bias, residual),
                (self.out.ptr(begin, reach), n),
            );
        }
        if let Some(activation) = activation {
            for i in 0..count {
                // SAFETY: no other part of the job writes these columns of this row.
                let out = unsafe { self.out.slice_mut(begin + i * n, place.columns) };
                gate_apply(self.isa, activation, out);
            }
        }
    }

    /// A tile of both parts of a gate.
    fn gated_tile(
        &self,
        rows: Range<usize>,
        panels: [PanelAhead<'_>; 2],
        place: Place,
        gate: Gate,
    ) {
        let n = self.product.n;
        let (count, width) = (rows.len(), self.product.parts[place.part].matrix.width);
        let mut tiles = [[0.0; MOST_TILE * MOST_WIDTH]; 2];
        for (i, (tile, panel)) in tiles.iter_mut().zip(panels).enumerate() {
            let tile = &mut tile[..count * width];
            self.multiply(rows.clone(), (place.part + i, place.panel), panel, tile);
        }
        let [gates, ups] = &mut tiles;
        gate_mul(
            self.isa,
            gate,
            &mut gates[..count * width],
            &ups[..count * width],
        );
        for (row, tile) in rows.zip(gates.chunks_exact(width)) {
            // SAFETY: no other part of the job writes these columns of this row.
            let out = unsafe { self.out.slice_mut(row * n + place.start, place.columns) };
            out.copy_from_slice(&tile[..place.columns]);
        }
    }

    /// Multiplies a tile and adds the bias of the part: `tile[row][i]` for the whole panel.
    fn multiply(
        &self,
        rows: Range<usize>,
        (part, index): (usize, usize),
        panel: PanelAhead<'_>,
        tile: &mut [f32],
    ) {
        let width = self.product.parts[part].matrix.width;
        let mut bias = [0.0; MOST_WIDTH];
        if let Some(all) = self.biases[part] {
            let some = &all[index * width..all.len().min((index + 1) * width)];
            bias[..some.len()].copy_from_slice(some);
        }
        let biased = self.biases[part].map(|_| &bias[..width]);
        assert!(tile.len() >= rows.len() * width);
        self.multiply_to(rows, panel, (biased, None), (tile.as_mut_ptr(), width));
    }

    /// Multiplies rows with a whole panel, and adds a bias and a residual with the output's stride.
    /// The outputs must exist, and no other part of the job may use them.
    fn multiply_to(
        &self,
        rows: Range<usize>,
        (panel, (distance, step)): PanelAhead<'_>,
        (bias, residual): (Option<&[f32]>, Option<&[f32]>),
        (data, row_stride): (*mut f32, usize),
    ) {
        let k = self.product.k;
        let x = &self.x[rows.start * k..rows.end * k];
        #[cfg(target_arch = "x86_64")]
        if let Some((width, _)) = columns::sizes(self.isa) {
            let reach = rows.len().saturating_sub(1) * row_stride + width;
            assert!(panel.len() >= k * width);
            assert!(bias.is_none_or(|bias| bias.len() >= width));
            assert!(residual.is_none_or(|residual| residual.len() >= reach));
            let x = TileA {
                data: x.as_ptr(),
                row_stride: k,
                stride: 1,
            };
            let to = ColumnOutput {
                data,
                row_stride,
                bias: bias.map(<[f32]>::as_ptr),
                residual: residual.map(<[f32]>::as_ptr),
            };
            let ahead = Ahead {
                data: panel.as_ptr().wrapping_add(distance),
                step,
            };
            let panel = (panel.as_ptr(), ahead);
            // SAFETY: the slices have the elements, as asserted. Both callers checked the outputs,
            // which no other part of the job uses.
            unsafe { columns::multiply(self.isa, (rows.len(), k), x, panel, &to) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            // No matrix is packed for other processors.
            let _ = (x, panel, distance, step, bias, residual, data, row_stride);
        }
    }
}

/// The maximum number of rows of a tile.
fn most_rows(isa: Isa) -> usize {
    #[cfg(target_arch = "x86_64")]
    return columns::sizes(isa).map_or(1, |(_, rows)| rows);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{exact_gate, noise, with_each};

    /// A product and its inputs after the rows.
    struct Case {
        product: ColumnProduct,
        inputs: Vec<Vec<f32>>,
        /// The matrices in rows.
        matrices: Vec<Vec<f32>>,
    }

    impl Case {
        fn outputs(&self, x: &[f32], rows: Range<usize>) -> Vec<f32> {
            let ColumnProduct { k, n, residual, .. } = self.product;
            let product = ColumnProduct {
                parts: (self.product.parts.iter())
                    .map(|part| ColumnPart {
                        matrix: Arc::clone(&part.matrix),
                        bias: part.bias,
                    })
                    .collect(),
                rows: rows.len(),
                ..self.product
            };
            let mut inputs = vec![Input::from_slice(&x[rows.start * k..rows.end * k])];
            for (i, all) in self.inputs.iter().enumerate() {
                let last = i + 1 == self.inputs.len();
                inputs.push(Input::from_slice(match residual && last {
                    true => &all[rows.start * n..rows.end * n],
                    false => all,
                }));
            }
            let mut out = vec![f32::NAN; product.outputs()];
            // SAFETY: the inputs are float32, in the documented order and sizes.
            unsafe { product.run(&inputs, &mut out) };
            out
        }
    }

    fn case(isa: Isa, rows: usize, k: usize, sizes: &[usize], seed: u32) -> Option<Case> {
        let matrices: Vec<Vec<f32>> = (sizes.iter().zip(seed..))
            .map(|(n, seed)| noise(n * k, seed))
            .collect();
        let parts = (matrices.iter())
            .map(|rows| {
                Some(ColumnPart {
                    matrix: Arc::new(ColumnMatrix::from_f32(isa, rows, k)?),
                    bias: true,
                })
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Case {
            product: ColumnProduct {
                parts,
                rows,
                k,
                n: sizes.iter().sum(),
                eps: None,
                gate: None,
                activation: None,
                residual: false,
            },
            inputs: (sizes.iter().zip(seed + 20..))
                .map(|(n, seed)| noise(*n, seed))
                .collect(),
            matrices,
        })
    }

    /// `x W^T + b` of a part in float64.
    fn exact(case: &Case, part: usize, x: &[f32]) -> Vec<f64> {
        let wide = |v: &f32| f64::from(*v);
        let bias = &case.inputs[part];
        (case.matrices[part].chunks_exact(case.product.k))
            .zip(bias)
            .map(|(w, b)| {
                let sum: f64 = w.iter().zip(x).map(|(w, x)| wide(w) * wide(x)).sum();
                sum + wide(b)
            })
            .collect()
    }

    const SHAPES: [(usize, usize, &[usize]); 5] = [
        (1, 1, &[1]),
        (3, 17, &[16, 48, 5]),
        (16, 384, &[96]),
        (35, 20, &[50, 50]),
        (300, 2100, &[52]),
    ];

    #[test]
    fn outputs_equal_a_float64_product_and_a_row_has_the_same_bits_alone() {
        with_each(|isa| {
            for (rows, k, sizes) in SHAPES {
                let x = noise(rows * k, 7);
                let Some(mut case) = case(isa, rows, k, sizes, 1) else {
                    return;
                };
                let n = case.product.n;
                for residual in [false, true] {
                    if residual {
                        case.product.residual = true;
                        case.inputs.push(noise(rows * n, 40));
                    }
                    let all = case.outputs(&x, 0..rows);
                    for (row, x) in x.chunks_exact(k).enumerate() {
                        let wanted = (0..sizes.len()).flat_map(|part| exact(&case, part, x));
                        for (i, wanted) in wanted.enumerate() {
                            let add = match residual {
                                true => f64::from(case.inputs[sizes.len()][row * n + i]),
                                false => 0.0,
                            };
                            let got = f64::from(all[row * n + i]);
                            let most = 2e-6 * (k as f64).sqrt().max(1.0);
                            assert!((got - wanted - add).abs() < most, "{isa:?} {k} {row} {i}");
                        }
                    }
                    for row in [0, rows / 2, rows - 1] {
                        let alone = case.outputs(&x, row..row + 1);
                        assert_eq!(alone, all[row * n..(row + 1) * n], "{isa:?} {k} {row}");
                        let few = case.outputs(&x, row..rows.min(row + 7));
                        assert_eq!(few[..n], alone, "{isa:?} {k} {row}");
                    }
                }
            }
        });
    }

    #[test]
    fn gates_activations_and_norms_equal_their_definitions() {
        with_each(|isa| {
            for gate in [Gate::Gelu, Gate::Silu] {
                for (rows, k, n) in [(5, 33, 50), (17, 8, 96)] {
                    let x = noise(rows * k, 9);
                    let Some(mut gated) = case(isa, rows, k, &[n, n], 3) else {
                        return;
                    };
                    (gated.product.gate, gated.product.n) = (Some(gate), n);
                    let Some(mut active) = case(isa, rows, k, &[n], 3) else {
                        return;
                    };
                    active.product.activation = Some(gate);
                    let plain = active.outputs(&x, 0..rows);
                    let got = gated.outputs(&x, 0..rows);
                    for (row, x) in x.chunks_exact(k).enumerate() {
                        let [first, second] = [0, 1].map(|part| exact(&gated, part, x));
                        for i in 0..n {
                            let open = exact_gate(gate, first[i]);
                            let at = row * n + i;
                            assert!((f64::from(got[at]) - open * second[i]).abs() < 2e-5);
                            assert!((f64::from(plain[at]) - open).abs() < 2e-5);
                        }
                    }
                    active.product.activation = None;
                    active.product.eps = Some(1e-3);
                    active.inputs.insert(0, noise(k, 30));
                    let normed: Vec<f32> = (x.chunks_exact(k))
                        .flat_map(|x| {
                            let square: f32 = x.iter().map(|v| v * v).sum();
                            let factor = 1.0 / (square / k as f32 + 1e-3).sqrt();
                            let weight = &active.inputs[0];
                            x.iter().zip(weight).map(move |(x, w)| x * factor * w)
                        })
                        .collect();
                    let got = active.outputs(&x, 0..rows);
                    active.product.eps = None;
                    active.inputs.remove(0);
                    let wanted = active.outputs(&normed, 0..rows);
                    assert!(got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 2e-5));
                }
            }
        });
    }

    #[test]
    fn matrices_of_16_bits_have_the_results_of_float32_with_their_values() {
        with_each(|isa| {
            let (rows, k, n) = (11, 40, 70);
            let (x, w) = (noise(rows * k, 5), noise(n * k, 6));
            for number in [DenseType::F16, DenseType::Bf16] {
                let bits: Vec<u16> = (w.iter())
                    .map(|v| match number {
                        DenseType::Bf16 => half::bf16::from_f32(*v).to_bits(),
                        _ => half::f16::from_f32(*v).to_bits(),
                    })
                    .collect();
                let wide: Vec<f32> = (bits.iter())
                    .map(|bits| match number {
                        DenseType::Bf16 => half::bf16::from_bits(*bits).to_f32(),
                        _ => half::f16::from_bits(*bits).to_f32(),
                    })
                    .collect();
                let Some(half) = ColumnMatrix::from_half(isa, &bits, number, k) else {
                    continue;
                };
                let full = ColumnMatrix::from_f32(isa, &wide, k).unwrap();
                let [half, full] = [half, full].map(|matrix| {
                    let case = Case {
                        product: ColumnProduct {
                            parts: vec![ColumnPart {
                                matrix: Arc::new(matrix),
                                bias: false,
                            }],
                            rows,
                            k,
                            n,
                            eps: None,
                            gate: None,
                            activation: None,
                            residual: false,
                        },
                        inputs: Vec::new(),
                        matrices: Vec::new(),
                    };
                    case.outputs(&x, 0..rows)
                });
                assert_eq!(half, full, "{isa:?} {number:?}");
            }
        });
    }
}
