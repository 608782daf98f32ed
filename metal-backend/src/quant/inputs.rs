//! Statistics of the inputs of linear layers: for each layer, the matrix of second moments
//! `X^T X` and the mean magnitude of each input.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use inference::Result;
use mlx_rs_core::{Array, Dtype, eval};
use parking_lot::Mutex;

use super::walk::Walk;
use crate::exec::product_of;
use crate::nn::adapter::Observer;

/// The sums over all calibration positions for the input of one layer or of several layers.
#[derive(Debug, Clone)]
pub(super) struct Moments {
    /// `X^T X`, float32 `[in, in]`.
    pub products: Array,
    /// The sums of magnitudes, float32 `[in]`.
    pub magnitudes: Array,
    /// The number of positions.
    pub count: usize,
}

impl Moments {
    /// The sums for the inputs `x` `[.., in]`, not evaluated.
    pub fn of(x: &Array) -> mlx_rs_core::Result<Self> {
        let width = x.dim(-1)?;
        let x = x.astype(Dtype::Float32)?.reshape(&[-1, width])?;
        let turned = x.swap_axes(0, 1)?.contiguous()?;
        Ok(Self {
            products: product_of(&turned, &turned)?,
            magnitudes: x.abs()?.sum(0, false)?,
            count: usize::try_from(x.dim(0)?).unwrap_or(0),
        })
    }

    fn add(&mut self, other: &Self) -> mlx_rs_core::Result<()> {
        self.products = self.products.add(&other.products)?;
        self.magnitudes = self.magnitudes.add(&other.magnitudes)?;
        self.count += other.count;
        Ok(())
    }
}

/// The moments of the layers `names` in the walk's current block. Layers with the same input share
/// one entry.
pub(super) fn moments(
    walk: &Walk<'_>,
    names: &BTreeSet<String>,
) -> Result<BTreeMap<String, Arc<Moments>>> {
    let leaders = leaders(walk, names)?;
    let wanted: BTreeSet<String> = leaders.values().cloned().collect();
    let sums: Arc<Mutex<BTreeMap<String, Moments>>> = Arc::default();
    for batch in 0..walk.batches() {
        let (wanted, into) = (wanted.clone(), Arc::clone(&sums));
        let observer = Observer::new(move |name, x| {
            if !wanted.contains(name) {
                return Ok(());
            }
            let of_batch = Moments::of(x)?;
            let mut sums = into.lock();
            match sums.get_mut(name) {
                Some(sum) => sum.add(&of_batch)?,
                None => {
                    sums.insert(name.to_owned(), of_batch);
                }
            }
            Ok(())
        });
        walk.observe(batch, observer, || {
            let sums = sums.lock();
            eval(sums.values().flat_map(|m| [&m.products, &m.magnitudes]))
        })?;
    }
    let sums: BTreeMap<String, Arc<Moments>> = std::mem::take(&mut *sums.lock())
        .into_iter()
        .map(|(name, sum)| (name, Arc::new(sum)))
        .collect();
    Ok(leaders
        .into_iter()
        .filter_map(|(name, leader)| Some((name, Arc::clone(sums.get(&leader)?))))
        .collect())
}

/// For each layer, the first layer that had the same input for the first batch.
fn leaders(walk: &Walk<'_>, names: &BTreeSet<String>) -> Result<BTreeMap<String, String>> {
    let seen: Arc<Mutex<Vec<(String, Array)>>> = Arc::default();
    let (wanted, into) = (names.clone(), Arc::clone(&seen));
    let observer = Observer::new(move |name, x| {
        if wanted.contains(name) {
            into.lock().push((name.to_owned(), x.clone()));
        }
        Ok(())
    });
    let mut leaders = BTreeMap::new();
    walk.observe(0, observer, || {
        let seen = std::mem::take(&mut *seen.lock());
        eval(seen.iter().map(|(_, x)| x))?;
        let mut firsts: Vec<(&String, &Array)> = Vec::new();
        for (name, x) in &seen {
            let mut leader = None;
            for (first, y) in &firsts {
                if x.shape() == y.shape() && x.array_equal(y)? {
                    leader = Some((*first).clone());
                    break;
                }
            }
            if leader.is_none() {
                firsts.push((name, x));
            }
            leaders.insert(name.clone(), leader.unwrap_or_else(|| name.clone()));
        }
        Ok(())
    })?;
    Ok(leaders)
}
