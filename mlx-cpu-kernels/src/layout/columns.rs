//! Dense matrices in micro-panels: adjacent rows of the matrix, interleaved column by column. A
//! product reads them sequentially, and needs no sum across lanes. This file has only the layout.

use crate::isa::Isa;
use crate::layout::aligned::AlignedVec;
use crate::layout::dense::{DenseType, DenseView};

/// A matrix `[n, k]` in micro-panels `[k, width]`. Missing rows of the last panel are zero.
#[derive(Debug)]
pub struct ColumnMatrix {
    /// The number of rows of the matrix, which are outputs.
    pub n: usize,
    /// The number of columns of the matrix, which are inputs.
    pub k: usize,
    /// The number of matrix rows of a panel.
    pub(crate) width: usize,
    /// The instruction set whose kernel reads the panels.
    pub(crate) isa: Isa,
    elements: Elements,
}

/// The elements, by type.
#[derive(Debug)]
enum Elements {
    F32(AlignedVec),
    /// The bits of float16 or bfloat16.
    Half(Vec<u16>, DenseType),
}

impl ColumnMatrix {
    /// Packs a matrix with rows of `k` elements, `width` rows a panel, for an instruction set.
    pub(crate) fn pack(matrix: DenseView<'_>, k: usize, isa: Isa, width: usize) -> Self {
        let n = matrix.len().checked_div(k).unwrap_or(0);
        let len = n.next_multiple_of(width) * k;
        let elements = match matrix {
            DenseView::F32(all) => {
                let mut packed = AlignedVec::default();
                packed.resize(len);
                interleave(all, k, width, &mut packed);
                Elements::F32(packed)
            }
            DenseView::F16(all) | DenseView::Bf16(all) => {
                let mut packed = vec![0; len];
                interleave(all, k, width, &mut packed);
                let number = match matrix {
                    DenseView::Bf16(_) => DenseType::Bf16,
                    _ => DenseType::F16,
                };
                Elements::Half(packed, number)
            }
        };
        Self {
            n,
            k,
            width,
            isa,
            elements,
        }
    }

    /// The type of the elements.
    pub fn number(&self) -> DenseType {
        match &self.elements {
            Elements::F32(_) => DenseType::F32,
            Elements::Half(_, number) => *number,
        }
    }

    /// The number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.n.div_ceil(self.width)
    }

    /// The elements of a panel, `[k, width]`.
    pub(crate) fn panel(&self, i: usize) -> DenseView<'_> {
        let size = self.k * self.width;
        let range = i * size..(i + 1) * size;
        match &self.elements {
            Elements::F32(all) => DenseView::F32(&all[range]),
            Elements::Half(all, DenseType::Bf16) => DenseView::Bf16(&all[range]),
            Elements::Half(all, _) => DenseView::F16(&all[range]),
        }
    }

    /// The matrix in rows `[n, k]`, for float32.
    pub fn rows_f32(&self) -> Option<Vec<f32>> {
        match &self.elements {
            Elements::F32(all) => Some(self.rows(all)),
            Elements::Half(..) => None,
        }
    }

    /// The bits of the matrix in rows `[n, k]`, for float16 and bfloat16.
    pub fn rows_half(&self) -> Option<Vec<u16>> {
        match &self.elements {
            Elements::F32(_) => None,
            Elements::Half(all, _) => Some(self.rows(all)),
        }
    }

    /// The elements in rows.
    fn rows<T: Copy>(&self, packed: &[T]) -> Vec<T> {
        let (k, width) = (self.k, self.width);
        let mut rows = Vec::with_capacity(self.n * k);
        for row in 0..self.n {
            let panel = &packed[row / width * width * k..][..width * k];
            rows.extend(panel.iter().skip(row % width).step_by(width).copied());
        }
        rows
    }
}

/// Writes rows of `k` elements to panels of `width` rows. Missing rows of the last panel are zero.
fn interleave<T: Copy + Default>(matrix: &[T], k: usize, width: usize, packed: &mut [T]) {
    if k == 0 {
        return;
    }
    /// The number of columns copied at a time, so that each cache line of a panel's rows is read
    /// only once.
    const COLUMNS: usize = 16;
    let panels = packed.chunks_exact_mut(width * k);
    for (panel, rows) in panels.zip(matrix.chunks(width * k)) {
        let count = rows.len() / k;
        for from in (0..k).step_by(COLUMNS) {
            for column in from..k.min(from + COLUMNS) {
                let lanes = &mut panel[column * width..(column + 1) * width];
                for (row, lane) in lanes.iter_mut().enumerate() {
                    *lane = match row < count {
                        true => rows[row * k + column],
                        false => T::default(),
                    };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_matrix_has_the_elements_of_its_rows() {
        for (n, k, width) in [
            (1, 1, 16),
            (5, 3, 16),
            (48, 7, 48),
            (100, 33, 48),
            (0, 4, 16),
        ] {
            let rows: Vec<f32> = (0..n * k).map(|i| i as f32).collect();
            let bits: Vec<u16> = (0..n * k).map(|i| i as u16).collect();
            let wide = ColumnMatrix::pack(DenseView::F32(&rows), k, Isa::Portable, width);
            assert_eq!((wide.n, wide.number()), (n, DenseType::F32));
            assert_eq!(wide.rows_f32(), Some(rows));
            assert_eq!(wide.rows_half(), None);
            for view in [DenseView::F16(&bits), DenseView::Bf16(&bits)] {
                let half = ColumnMatrix::pack(view, k, Isa::Portable, width);
                assert_eq!(half.rows_half().as_ref(), Some(&bits));
                assert_eq!(half.rows_f32(), None);
            }
            if n == 5 {
                let DenseView::F32(panel) = wide.panel(0) else {
                    panic!("the elements are float32");
                };
                // The second column of five rows, then zeros.
                assert_eq!(panel[width..width + 6], [1.0, 4.0, 7.0, 10.0, 13.0, 0.0]);
            }
        }
    }
}
