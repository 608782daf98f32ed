//! Selects rows from the matrices of a stored stack.

use inference::Result;

/// The rows of each matrix of a stored stack that together form one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slice {
    /// Rows and columns of each stored matrix.
    pub matrix: (usize, usize),
    /// The index of the first matrix.
    pub first_matrix: usize,
    /// Whether the rows of the tensor are columns of the stored matrices.
    pub transposed: bool,
    /// The first selected row of each matrix.
    pub first: usize,
    /// The distance between selected rows.
    pub step: usize,
    /// The number of selected rows of each matrix.
    pub count: usize,
}

impl Slice {
    /// Selects all rows of all matrices.
    pub(super) fn all(rows: usize, cols: usize) -> Self {
        Self {
            matrix: (rows, cols),
            first_matrix: 0,
            transposed: false,
            first: 0,
            step: 1,
            count: rows,
        }
    }

    /// Selects the first or the second half of the rows of each matrix.
    pub(super) fn half(rows: usize, cols: usize, second: bool) -> Self {
        let count = rows / 2;
        Self {
            first: if second { count } else { 0 },
            count,
            ..Self::all(rows, cols)
        }
    }

    /// The number of elements in a row.
    pub(super) fn width(&self) -> usize {
        if self.transposed {
            self.matrix.0
        } else {
            self.matrix.1
        }
    }

    /// Whether reading one row requires reading its complete matrix.
    pub(super) fn reads_matrices(&self) -> bool {
        self.transposed || self.step != 1
    }

    /// Returns the bytes of rows `first..first + rows`, counted over all matrices. A row has
    /// `row_bytes` bytes. `read` reads bytes of the stored tensor; its arguments are offset and
    /// length.
    pub(super) fn bytes(
        &self,
        row_bytes: usize,
        (first, rows): (usize, usize),
        read: impl Fn(usize, usize) -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let (stored_rows, stored_cols) = self.matrix;
        let matrix_bytes = if self.transposed {
            row_bytes * stored_cols
        } else {
            row_bytes * stored_rows
        };
        let mut bytes = Vec::with_capacity(rows * row_bytes);
        let mut at = first;
        while at < first + rows {
            let (matrix, within) = (at / self.count.max(1), at % self.count.max(1));
            let count = (self.count - within).min(first + rows - at);
            let start = (self.first_matrix + matrix) * matrix_bytes;
            if self.reads_matrices() {
                let all = read(start, matrix_bytes)?;
                self.pick(&all, row_bytes, within..within + count, &mut bytes);
            } else {
                let row = start + (self.first + within) * row_bytes;
                bytes.extend(read(row, count * row_bytes)?);
            }
            at += count;
        }
        Ok(bytes)
    }

    /// Appends rows of one stored matrix.
    fn pick(
        &self,
        matrix: &[u8],
        row_bytes: usize,
        rows: std::ops::Range<usize>,
        bytes: &mut Vec<u8>,
    ) {
        let (_, stored_cols) = self.matrix;
        for row in rows {
            let row = self.first + row * self.step;
            if self.transposed {
                let element = row_bytes / self.width().max(1);
                let column = matrix.chunks_exact(element * stored_cols);
                bytes.extend(column.flat_map(|r| &r[row * element..(row + 1) * element]));
            } else {
                bytes.extend(&matrix[row * row_bytes..(row + 1) * row_bytes]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two matrices `[4, 3]` whose elements have two bytes: the index of the element, and 100.
    fn rows(slice: Slice, first: usize, count: usize) -> Vec<u8> {
        let stored: Vec<u8> = (0..24).flat_map(|i| [i, 100]).collect();
        let read = |at: usize, len: usize| Ok(stored[at..at + len].to_vec());
        let bytes = slice
            .bytes(2 * slice.width(), (first, count), read)
            .unwrap();
        assert!(bytes.iter().skip(1).step_by(2).all(|b| *b == 100));
        bytes.into_iter().step_by(2).collect()
    }

    #[test]
    fn rows_continue_in_the_next_matrix() {
        let all = Slice::all(4, 3);
        assert_eq!(rows(all, 3, 2), [9, 10, 11, 12, 13, 14]);
        let second = Slice::half(4, 3, true);
        assert_eq!(rows(second, 1, 2), [9, 10, 11, 18, 19, 20]);
        let one = Slice {
            first_matrix: 1,
            ..all
        };
        assert_eq!(rows(one, 0, 1), [12, 13, 14]);
        let alternate = Slice {
            first: 1,
            step: 2,
            count: 2,
            ..all
        };
        assert_eq!(rows(alternate, 1, 2), [9, 10, 11, 15, 16, 17]);
    }

    #[test]
    fn columns_become_rows() {
        let columns = Slice {
            transposed: true,
            first: 1,
            count: 2,
            ..Slice::all(4, 3)
        };
        assert_eq!(rows(columns, 0, 1), [1, 4, 7, 10]);
        assert_eq!(rows(columns, 1, 2), [2, 5, 8, 11, 13, 16, 19, 22]);
        let alternate = Slice {
            first: 0,
            step: 2,
            ..columns
        };
        assert_eq!(rows(alternate, 1, 1), [2, 5, 8, 11]);
    }
}
