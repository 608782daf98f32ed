//! The state of a recurrent layer: named arrays of fixed shape. Its memory does not depend on the
//! number of positions. The layer defines the meaning of the arrays.
//!
//! A state does not contain earlier states, so it cannot be rewound. Therefore a prefix can be
//! reused only completely or up to a checkpoint (`checkpoint.rs`), and speculative decoding is an
//! error.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, concatenate, zeros};

use super::{LayerState, Snapshot};

/// One array of a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePart {
    name: &'static str,
    /// The shape for one row.
    shape: Vec<i32>,
    dtype: Dtype,
}

impl StatePart {
    /// Creates an array of `shape` per row, in float32: a state accumulates over the complete
    /// sequence, and 16-bit floats would lose small terms.
    pub fn new(name: &'static str, shape: &[i32]) -> Self {
        Self {
            name,
            shape: shape.to_vec(),
            dtype: Dtype::Float32,
        }
    }

    /// Sets another type. This is suitable for arrays that do not accumulate, such as the last
    /// inputs of a convolution.
    #[cfg(test)]
    pub fn with_dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// Returns the shape for `rows` rows.
    fn rows(&self, rows: i32) -> Vec<i32> {
        [&[rows], self.shape.as_slice()].concat()
    }

    /// Whether `array` has the shape and type of this part for `rows` rows.
    fn fits(&self, array: &Array, rows: i32) -> bool {
        let (first, rest) = array.shape().split_first().unwrap_or((&0, &[]));
        *first == rows && rest == self.shape && array.dtype() == self.dtype
    }

    /// Returns the bytes of this part for one row.
    fn nbytes(&self) -> usize {
        let elements = self.shape.iter().map(|d| d.unsigned_abs() as usize);
        elements.fold(self.dtype.size(), usize::saturating_mul)
    }
}

/// The layout of one layer's state, which all rows share.
#[derive(Debug, PartialEq, Eq)]
pub struct StateLayout {
    kind: String,
    parts: Vec<StatePart>,
}

impl StateLayout {
    /// Creates the layout of a layer with this name, such as `mlstm`.
    pub fn new(name: &str, parts: Vec<StatePart>) -> Arc<Self> {
        let mut kind = name.to_owned();
        for part in &parts {
            let shape: Vec<String> = part.shape.iter().map(i32::to_string).collect();
            kind.push_str(&format!(":{}={}", part.name, shape.join("x")));
        }
        Arc::new(Self { kind, parts })
    }

    /// Returns the bytes of one row's state.
    pub fn nbytes(&self) -> usize {
        self.parts.iter().map(StatePart::nbytes).sum()
    }

    /// Returns the state of `rows` rows before their first position: zeros.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn zeros(&self, rows: i32) -> Result<Vec<Array>> {
        let zero = |part: &StatePart| zeros(&part.rows(rows), part.dtype);
        self.parts.iter().map(zero).collect()
    }

    /// Returns an error for arrays that do not match this layout for `rows` rows.
    fn check(&self, arrays: &[Array], rows: i32) -> Result<()> {
        let fault = |message: String| Error::new(ErrorKind::Value, "state", message);
        if arrays.len() != self.parts.len() {
            return Err(fault(format!(
                "{} arrays for a state of {}",
                arrays.len(),
                self.parts.len()
            )));
        }
        for (part, array) in self.parts.iter().zip(arrays) {
            if !part.fits(array, rows) {
                return Err(fault(format!(
                    "{} is {} {:?}, expected {} {:?}",
                    part.name,
                    array.dtype(),
                    array.shape(),
                    part.dtype,
                    part.rows(rows)
                )));
            }
        }
        Ok(())
    }
}

/// The state of one recurrent layer for one row.
#[derive(Debug, Clone)]
pub struct RecurrentState {
    layout: Arc<StateLayout>,
    /// `[1, ..]` each, in the layout's order; `None` before the first position.
    arrays: Option<Vec<Array>>,
    offset: i32,
}

impl RecurrentState {
    /// Creates the state before the first position.
    pub fn new(layout: &Arc<StateLayout>) -> Self {
        Self {
            layout: Arc::clone(layout),
            arrays: None,
            offset: 0,
        }
    }

    /// Returns the current arrays, `[1, ..]` each, in the layout's order.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn parts(&self) -> Result<Vec<Array>> {
        match &self.arrays {
            Some(arrays) => Ok(arrays.clone()),
            None => self.layout.zeros(1),
        }
    }

    /// Replaces the arrays by the arrays after `length` more positions.
    ///
    /// # Errors
    /// If the arrays do not match the layout.
    pub fn advance(&mut self, parts: Vec<Array>, length: i32) -> Result<()> {
        self.layout.check(&parts, 1)?;
        self.arrays = Some(parts);
        self.offset = self.offset.saturating_add(length);
        Ok(())
    }

    /// Concatenates the states of several rows: `[rows, ..]` each.
    ///
    /// # Errors
    /// If the states' layouts differ, or memory runs out.
    pub fn merge(states: &[&Self]) -> Result<Vec<Array>> {
        let Some((first, others)) = states.split_first() else {
            return Ok(Vec::new());
        };
        if others.iter().any(|other| other.layout != first.layout) {
            let message = "rows with states of different layers";
            return Err(Error::new(ErrorKind::Value, "state", message));
        }
        if others.is_empty() {
            return first.parts();
        }
        let rows: Vec<Vec<Array>> = (states.iter())
            .map(|state| state.parts())
            .collect::<Result<_>>()?;
        (0..first.layout.parts.len())
            .map(|part| concatenate(&rows.iter().map(|row| &row[part]).collect::<Vec<_>>(), 0))
            .collect()
    }

    /// Returns the state of one row from the result of [`Self::merge`].
    ///
    /// # Errors
    /// If the row does not exist.
    pub fn extract(merged: &[Array], row: i32) -> Result<Vec<Array>> {
        let row_of = |a: &Array| {
            if row < 0 || row >= a.dim(0)? {
                let message = format!("row {row} of {:?}", a.shape());
                return Err(Error::new(ErrorKind::Value, "state", message));
            }
            a.slice_axis(0, row, row + 1)
        };
        merged.iter().map(row_of).collect()
    }
}

impl LayerState for RecurrentState {
    fn offset(&self) -> i32 {
        self.offset
    }

    fn reset(&mut self) {
        (self.arrays, self.offset) = (None, 0);
    }

    fn arrays(&self) -> Vec<&Array> {
        self.arrays.iter().flatten().collect()
    }

    fn can_trim(&self, n: i32) -> bool {
        n <= 0 || n >= self.offset
    }

    fn keeps_all(&self, _: i32) -> bool {
        false
    }

    fn trim(&mut self, n: i32) -> bool {
        let possible = self.can_trim(n);
        if possible && n > 0 {
            self.reset();
        }
        possible
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(self.clone()))
    }

    fn kind(&self) -> String {
        self.layout.kind.clone()
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let parts = self.layout.parts.iter().map(|part| part.name.to_owned());
        let arrays = parts.zip(self.arrays.iter().flatten().cloned()).collect();
        Ok(Snapshot {
            kind: self.kind(),
            offset: self.offset,
            arrays,
        })
    }

    fn restore(&mut self, snapshot: Snapshot) -> std::result::Result<(), String> {
        let Snapshot {
            kind,
            offset,
            mut arrays,
        } = snapshot;
        if kind != self.layout.kind {
            return Err(format!(
                "it holds a state of kind `{kind}`, where `{}` is needed",
                self.layout.kind
            ));
        }
        if offset < 0 {
            return Err(format!("it holds {offset} positions"));
        }
        if offset == 0 {
            self.reset();
            return Ok(());
        }
        let parts = (self.layout.parts.iter())
            .map(|part| {
                let array = arrays.remove(part.name);
                array.ok_or_else(|| format!("it has no {}", part.name))
            })
            .collect::<std::result::Result<Vec<_>, _>>()?;
        self.layout
            .check(&parts, 1)
            .map_err(|e| e.message().to_owned())?;
        (self.arrays, self.offset) = (Some(parts), offset);
        Ok(())
    }

    fn as_recurrent(&self) -> Option<&RecurrentState> {
        Some(self)
    }

    fn as_recurrent_mut(&mut self) -> Option<&mut RecurrentState> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Arc<StateLayout> {
        StateLayout::new(
            "toy",
            vec![
                StatePart::new("sum", &[2, 3]),
                StatePart::new("last", &[4]).with_dtype(Dtype::Bfloat16),
            ],
        )
    }

    fn filled(value: f32) -> Vec<Array> {
        let sum = Array::from_slice(&[value; 6], &[1, 2, 3]).unwrap();
        let last = Array::from_slice(&[value; 4], &[1, 4]).unwrap();
        vec![sum, last.astype(Dtype::Bfloat16).unwrap()]
    }

    #[test]
    fn a_state_advances_forks_and_begins_again() {
        let mut state = RecurrentState::new(&layout());
        assert!(state.is_empty() && state.arrays().is_empty());
        assert_eq!(state.parts().unwrap()[0].to_vec::<f32>().unwrap(), [0.0; 6]);
        state.advance(filled(1.0), 7).unwrap();
        let mut fork = state.copy().unwrap();
        state.advance(filled(2.0), 1).unwrap();
        assert_eq!((state.len(), fork.len()), (8, 7));
        let parts = fork.as_recurrent().unwrap().parts().unwrap();
        assert_eq!(parts[0].to_vec::<f32>().unwrap(), [1.0; 6]);
        assert_eq!(state.nbytes(), layout().nbytes());
        assert_eq!(state.nbytes(), 6 * 4 + 4 * 2);
        assert!(!fork.can_trim(1) && !fork.trim(6) && fork.len() == 7);
        assert!(fork.trim(0) && fork.len() == 7);
        assert!(fork.trim(7) && fork.is_empty() && fork.nbytes() == 0);
        state.reset();
        assert_eq!((state.offset(), state.parts().unwrap().len()), (0, 2));
    }

    #[test]
    fn what_is_of_another_shape_or_type_is_refused() {
        let mut state = RecurrentState::new(&layout());
        let mut wrong = filled(1.0);
        wrong[1] = wrong[1].astype(Dtype::Float32).unwrap();
        let error = state.advance(wrong, 1).unwrap_err();
        assert!(error.message().contains("last"), "{error}");
        let mut wrong = filled(1.0);
        wrong[0] = wrong[0].swap_axes(1, 2).unwrap();
        assert!(state.advance(wrong, 1).is_err());
        assert!(state.advance(filled(1.0)[..1].to_vec(), 1).is_err());
        assert_eq!(state.len(), 0, "nothing of it is kept");
    }

    #[test]
    fn rows_merge_and_come_apart() {
        let layout = layout();
        let mut states: Vec<RecurrentState> =
            (0..3).map(|_| RecurrentState::new(&layout)).collect();
        states[0].advance(filled(1.0), 1).unwrap();
        states[2].advance(filled(3.0), 5).unwrap();
        let merged = RecurrentState::merge(&states.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(merged[0].shape(), [3, 2, 3]);
        assert_eq!(merged[1].shape(), [3, 4]);
        for (row, value) in [(0, 1.0), (1, 0.0), (2, 3.0)] {
            let state = RecurrentState::extract(&merged, row).unwrap();
            assert_eq!(state[0].to_vec::<f32>().unwrap(), [value; 6]);
            assert!(states[0].clone().advance(state, 1).is_ok());
        }
        assert!(RecurrentState::extract(&merged, 3).is_err());
        let other = StateLayout::new("toy", vec![StatePart::new("sum", &[2, 3])]);
        let other = RecurrentState::new(&other);
        assert!(RecurrentState::merge(&[&states[0], &other]).is_err());
    }

    #[test]
    fn a_snapshot_is_restored_by_its_own_kind_only() {
        let mut state = RecurrentState::new(&layout());
        state.advance(filled(2.0), 9).unwrap();
        let snapshot = state.snapshot().unwrap();
        assert_eq!(snapshot.kind, "toy:sum=2x3:last=4");
        assert!(snapshot.arrays.keys().eq(["last", "sum"]));
        let mut other = RecurrentState::new(&layout());
        other.restore(snapshot.clone()).unwrap();
        assert_eq!(other.len(), 9);
        assert_eq!(other.parts().unwrap()[0].to_vec::<f32>().unwrap(), [2.0; 6]);
        for spoil in [
            |s: &mut Snapshot| s.kind.push('x'),
            |s: &mut Snapshot| s.offset = -1,
            |s: &mut Snapshot| drop(s.arrays.remove("sum")),
            |s: &mut Snapshot| {
                let last = s.arrays["last"].clone();
                s.arrays.insert("sum".into(), last);
            },
        ] {
            let mut bad = snapshot.clone();
            spoil(&mut bad);
            let mut fresh = RecurrentState::new(&layout());
            assert!(fresh.restore(bad).is_err());
            assert!(fresh.is_empty());
        }
    }
}
