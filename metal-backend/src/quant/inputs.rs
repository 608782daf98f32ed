//! Statistics of the inputs of linear layers: second moments `X^T X` and summed magnitudes, per
//! layer, and per expert of a stack.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use inference::Result;
use mlx_rs_core::{Array, Dtype, eval};
use parking_lot::Mutex;

use super::walk::Walk;
use crate::exec::product_of;
use crate::nn::adapter::Observer;

/// Sums over all calibration positions, for the input of one layer or of several layers that share
/// it.
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
    /// Returns the sums for the inputs `x` `[.., in]`, not evaluated.
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

/// Returns the moments of the layers `names` in the walk's current block. Layers with the same
/// input share one entry.
pub(super) fn moments(
    walk: &Walk<'_>,
    names: &BTreeSet<String>,
) -> Result<BTreeMap<String, Arc<Moments>>> {
    let add = |sums: &mut BTreeMap<String, Moments>, name: &str, x: &Array, _: Option<&Array>| {
        let of_batch = Moments::of(x)?;
        match sums.get_mut(name) {
            Some(sum) => sum.add(&of_batch)?,
            None => {
                sums.insert(name.to_owned(), of_batch);
            }
        }
        Ok(())
    };
    sums(walk, names, add, |sum| vec![sum])
}

/// Returns the moments of each expert's inputs, for the stacks `names` in the walk's current block;
/// `None` for an expert without inputs. Stacks with the same inputs share one entry.
pub(super) fn expert_moments(
    walk: &Walk<'_>,
    names: &BTreeSet<String>,
) -> Result<BTreeMap<String, Arc<Vec<Option<Moments>>>>> {
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let add = |sums: &mut BTreeMap<String, Vec<Option<Moments>>>,
               name: &str,
               x: &Array,
               ids: Option<&Array>| match ids {
        Some(ids) => add_experts(sums.entry(name.to_owned()).or_default(), x, ids),
        None => Ok(()),
    };
    sums(walk, names, add, |experts| {
        experts.iter().flatten().collect()
    })
}

/// Adds the input of a layer to the sums of all layers; the last argument has the ids of experts.
type Add<T> = fn(&mut BTreeMap<String, T>, &str, &Array, Option<&Array>) -> mlx_rs_core::Result<()>;

/// Returns sums over all batches for the layers `names`. `add` adds the input of one layer, with
/// the ids of experts if it is a stack. `moments` returns the moments in an entry; they are
/// evaluated after each batch.
fn sums<T: Send + 'static>(
    walk: &Walk<'_>,
    names: &BTreeSet<String>,
    add: Add<T>,
    moments: fn(&T) -> Vec<&Moments>,
) -> Result<BTreeMap<String, Arc<T>>> {
    let leaders = leaders(walk, names)?;
    let wanted: BTreeSet<String> = leaders.values().cloned().collect();
    let sums: Arc<Mutex<BTreeMap<String, T>>> = Arc::default();
    for batch in 0..walk.batches() {
        let (wanted, into) = (wanted.clone(), Arc::clone(&sums));
        let observer = Observer::new(move |name, x, ids| match wanted.contains(name) {
            true => add(&mut into.lock(), name, x, ids),
            false => Ok(()),
        });
        walk.observe(batch, observer, || {
            let sums = sums.lock();
            let all = sums.values().flat_map(moments);
            eval(all.flat_map(|m| [&m.products, &m.magnitudes]))
        })?;
    }
    let sums: BTreeMap<String, Arc<T>> = std::mem::take(&mut *sums.lock())
        .into_iter()
        .map(|(name, sum)| (name, Arc::new(sum)))
        .collect();
    Ok(leaders
        .into_iter()
        .filter_map(|(name, leader)| Some((name, Arc::clone(sums.get(&leader)?))))
        .collect())
}

/// Adds the moments of inputs `x` `[.., 1, in]`, which broadcast to the ids of experts `[..]`.
fn add_experts(sums: &mut Vec<Option<Moments>>, x: &Array, ids: &Array) -> mlx_rs_core::Result<()> {
    let width = x.dim(-1)?;
    let mut shape = ids.shape().to_vec();
    shape.extend([1, width]);
    let rows = x.broadcast_to(&shape)?.reshape(&[-1, width])?;
    let mut of_experts: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let ids = ids.astype(Dtype::Uint32)?.reshape(&[-1])?.to_vec::<u32>()?;
    for (row, id) in (0..).zip(&ids) {
        of_experts.entry(*id as usize).or_default().push(row);
    }
    for (expert, own) in of_experts {
        let of_batch = Moments::of(&rows.take_clamped(&Array::vector(&own)?, 0)?)?;
        if sums.len() <= expert {
            sums.resize(expert + 1, None);
        }
        match sums.get_mut(expert) {
            Some(Some(sum)) => sum.add(&of_batch)?,
            Some(none) => *none = Some(of_batch),
            None => {}
        }
    }
    Ok(())
}

/// Maps each layer to the first layer that has the same input. Compares inputs of the first batch.
fn leaders(walk: &Walk<'_>, names: &BTreeSet<String>) -> Result<BTreeMap<String, String>> {
    let seen: Arc<Mutex<Vec<(String, Array)>>> = Arc::default();
    let (wanted, into) = (names.clone(), Arc::clone(&seen));
    let observer = Observer::new(move |name, x, _| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_expert_counts_its_own_tokens() {
        let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 1, 1, 2]).unwrap();
        let ids = Array::from_slice(&[3u32, 0, 0, 1, 3, 1], &[3, 2]).unwrap();
        let mut sums = Vec::new();
        add_experts(&mut sums, &x, &ids).unwrap();
        let counts: Vec<usize> = sums
            .iter()
            .map(|sum| sum.as_ref().map_or(0, |sum| sum.count))
            .collect();
        assert_eq!(counts, [2, 2, 0, 2]);
        let products = |expert: usize| {
            let sum = sums[expert].as_ref().unwrap();
            sum.products.to_vec::<f32>().unwrap()
        };
        // Expert 0 receives rows 0 and 1, expert 1 rows 1 and 2, expert 3 rows 0 and 2.
        assert_eq!(products(0), [10.0, 14.0, 14.0, 20.0]);
        assert_eq!(products(1), [34.0, 42.0, 42.0, 52.0]);
        assert_eq!(products(3), [26.0, 32.0, 32.0, 40.0]);
        add_experts(&mut sums, &x, &ids).unwrap();
        assert_eq!(sums[0].as_ref().unwrap().count, 4);
    }
}
