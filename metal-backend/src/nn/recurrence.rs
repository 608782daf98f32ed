//! Batching of rows and their states for a recurrence. All recurrent layers share it; each layer's
//! file implements the recurrence.

use mlx_rs_core::{Array, Error, ErrorKind, Result, concatenate};

use crate::cache::{RecurrentState, Row, StateLayout};

/// A range of positions that a recurrence computes in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The index of the first position in the concatenated input.
    pub first: i32,
    /// The number of sequences.
    pub rows: i32,
    /// The number of positions of each sequence.
    pub length: i32,
}

impl Span {
    /// Selects the span's positions of a concatenated input `[1, T, ..]`, as `[rows, length, ..]`.
    ///
    /// # Errors
    /// If the input has fewer positions than the span needs.
    pub fn of(self, packed: &Array) -> Result<Array> {
        let count = self.rows.saturating_mul(self.length);
        let selected = if packed.dim(1)? == count {
            packed.clone()
        } else {
            packed.slice_axis(1, self.first, self.first + count)?
        };
        if self.rows == 1 {
            return Ok(selected);
        }
        let rest = selected.shape().get(2..).unwrap_or_default();
        let shape = [&[self.rows, self.length], rest].concat();
        selected.reshape(&shape)
    }
}

/// Reshapes `[R, L, H*D]` to `[R, H * repeats, L, D]`. Each head is repeated `repeats` times.
///
/// # Errors
/// If the last axis is not `heads * dim`.
pub fn heads_first(packed: &Array, [heads, dim]: [i32; 2], repeats: i32) -> Result<Array> {
    let [rows, length] = [packed.dim(0)?, packed.dim(1)?];
    let apart = packed.reshape(&[rows, length, heads, dim])?;
    let all = apart.transpose_axes(&[0, 2, 1, 3])?;
    match repeats {
        1 => Ok(all),
        repeats => all.repeat(repeats, 1),
    }
}

/// Runs `scan` over the positions of all rows, and stores the states that `scan` returns.
///
/// `scan` receives a span of positions and the state arrays before them, `[rows, ..]` each. It
/// returns outputs `[rows, length, ..]` and the state after the span. Rows with one position are
/// computed together. Longer rows are computed one by one, because their lengths differ. The result
/// is concatenated like the input: `[1, T, ..]`.
///
/// If a row's state has another kind, as in training, the row begins with an empty state.
///
/// # Errors
/// Errors of `scan`, and a state that does not match the layout.
pub fn over_rows(
    rows: &mut [Row<'_>],
    layer: usize,
    layout: &StateLayout,
    mut scan: impl FnMut(Span, Vec<Array>) -> Result<(Array, Vec<Array>)>,
) -> Result<Array> {
    let mut first = 0;
    let mut outputs = Vec::with_capacity(rows.len());
    let together = rows.len() > 1 && rows.iter().all(|row| row.length == 1);
    let count = if together { rows.len() } else { 1 };
    for group in rows.chunks_mut(count) {
        let span = Span {
            first,
            rows: i32::try_from(group.len()).unwrap_or(i32::MAX),
            length: group[0].length,
        };
        let states: Option<Vec<&RecurrentState>> = (group.iter())
            .map(|row| row.caches.get(layer)?.as_recurrent())
            .collect();
        let before = match states {
            Some(states) => RecurrentState::merge(&states)?,
            None => layout.zeros(span.rows)?,
        };
        let (output, after) = scan(span, before)?;
        for (row, at) in group.iter_mut().zip(0..) {
            let state = row.caches.get_mut(layer);
            if let Some(state) = state.and_then(|state| state.as_recurrent_mut()) {
                let of_row = match span.rows {
                    1 => after.clone(),
                    _ => RecurrentState::extract(&after, at)?,
                };
                state.advance(of_row, span.length)?;
            }
        }
        first += span.rows * span.length;
        outputs.push(packed(&output)?);
    }
    match outputs.as_slice() {
        [] => Err(Error::new(
            ErrorKind::Value,
            "recurrence",
            "there are no rows",
        )),
        [one] => Ok(one.clone()),
        several => concatenate(&several.iter().collect::<Vec<_>>(), 1),
    }
}

/// Returns the array of a state at index `at`.
///
/// # Errors
/// If the index is too large.
pub fn part(state: &[Array], at: usize) -> Result<&Array> {
    state.get(at).ok_or_else(|| {
        let message = format!("there is no part {at} among {}", state.len());
        Error::new(ErrorKind::Value, "recurrence", message)
    })
}

/// Reshapes `[rows, length, ..]` to `[1, rows * length, ..]`.
fn packed(output: &Array) -> Result<Array> {
    match output.shape() {
        [1, ..] => Ok(output.clone()),
        [rows, length, rest @ ..] => output.reshape(&[&[1, rows * length], rest].concat()),
        _ => Err(Error::new(
            ErrorKind::Shape,
            "recurrence",
            "an output has rows and positions",
        )),
    }
}
