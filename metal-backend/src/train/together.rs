//! Data-parallel training: each process has a copy of the model and computes its share of every
//! batch. Gradients are averaged before an update. The update equals that of a single process on
//! the complete batch.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::distributed::{self, Group};
use mlx_rs_core::transforms::Tree;
use mlx_rs_core::{Array, concatenate};

use crate::adapter::Params;
use crate::error::engine;

/// The processes that train together.
#[derive(Debug, Clone, Copy)]
pub struct Together {
    group: Group,
    rank: usize,
    size: usize,
}

impl Together {
    /// Returns the group in which this process was started; `None` for a single process.
    ///
    /// # Errors
    /// If MLX cannot connect to the group.
    pub fn started() -> Result<Option<Self>> {
        let group = distributed::init(false).map_err(engine("group"))?;
        let (Ok(rank), Ok(size)) = (usize::try_from(group.rank()), usize::try_from(group.size()))
        else {
            return Err(Error::new(ErrorKind::Engine, "MLX's group has no size"));
        };
        Ok((size > 1).then_some(Self { group, rank, size }))
    }

    /// The number of processes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns this process's share of a batch, and whether the share counts. All processes must
    /// take part in the sum, so a process without a share computes a row that does not count.
    pub(super) fn part<'a, T>(&self, batch: &'a [T]) -> (&'a [T], bool) {
        let n = batch.len();
        let part = &batch[self.rank * n / self.size..(self.rank + 1) * n / self.size];
        match part {
            [] => (&batch[..n.min(1)], false),
            part => (part, true),
        }
    }

    /// Returns the sums of weighted losses and weighted gradients over all processes. They are sent
    /// as one array.
    pub(super) fn summed(
        &self,
        loss: &Array,
        grads: &Params,
    ) -> mlx_rs_core::Result<(Array, Params)> {
        let mut parts = vec![loss.reshape(&[1])?];
        for grad in grads.values() {
            parts.push(grad.astype(loss.dtype())?.reshape(&[-1])?);
        }
        let all = concatenate(&parts.iter().collect::<Vec<_>>(), 0)?;
        let all = self.group.all_sum(&all)?;
        let mut from = 1;
        let summed = grads.map_leaves(|grad| {
            let to = from + i32::try_from(grad.size()).unwrap_or(i32::MAX);
            let part = all.slice_axis(0, from, to)?;
            from = to;
            part.reshape(grad.shape())?.astype(grad.dtype())
        })?;
        Ok((all.slice_axis(0, 0, 1)?.reshape(&[])?, summed))
    }

    /// Returns the sums of the values over all processes.
    pub(super) fn sums(&self, values: &[f32]) -> Result<Vec<f32>> {
        Array::vector(values)
            .and_then(|vector| self.group.all_sum(&vector)?.to_vec::<f32>())
            .map_err(engine("group"))
    }

    /// Whether the flag is set in any process.
    pub(super) fn any(&self, flag: bool) -> Result<bool> {
        Ok(self.sums(&[f32::from(u8::from(flag))])?.first() > Some(&0.0))
    }
}
