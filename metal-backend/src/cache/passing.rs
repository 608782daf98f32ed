//! A cache that stores nothing, for training and for scoring of complete texts. Queries attend to
//! the keys and values of the same pass, so gradients flow through keys and values.

use std::collections::BTreeMap;

use mlx_rs_core::{Array, Error, ErrorKind, Result};

use super::{Caches, KvCache, KvView, LayerState, Order, Row, Snapshot, Stored};

/// A cache without storage.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassingCache;

/// Creates caches without storage: `layers` caches for each of `rows` rows.
pub fn caches(rows: usize, layers: usize) -> Vec<Caches> {
    let one = || Box::new(PassingCache) as Box<dyn KvCache>;
    let row = || (0..layers).map(|_| one()).collect::<Caches>();
    (0..rows).map(|_| row()).collect()
}

/// Creates rows of these lengths, each with its caches.
pub fn rows<'a>(lengths: &[i32], caches: &'a mut [Caches]) -> Vec<Row<'a>> {
    let pairs = lengths.iter().zip(caches);
    pairs
        .map(|(&length, caches)| Row { length, caches })
        .collect()
}

/// Returns a view of the pass's own keys and values.
fn passed(keys: &Array, values: &Array) -> KvView {
    KvView {
        keys: Stored::Plain(keys.clone()),
        values: Stored::Plain(values.clone()),
        offset: 0,
        order: Order::Run { keep: 0, start: 0 },
        window: None,
        reach: 0,
    }
}

/// Returns the keys and values of a view, as arguments of a differentiated function.
///
/// # Errors
/// If keys or values are quantized, which those of a [`PassingCache`] never are.
pub fn both(view: &KvView) -> Result<[Array; 2]> {
    match (&view.keys, &view.values) {
        (Stored::Plain(keys), Stored::Plain(values)) => Ok([keys.clone(), values.clone()]),
        _ => Err(Error::new(
            ErrorKind::Value,
            "attention",
            "packed keys have no gradients",
        )),
    }
}

/// Creates views from keys and values in the order of [`both`].
pub fn views(all: &[Array]) -> Vec<KvView> {
    let pairs = all.chunks_exact(2);
    pairs.map(|pair| passed(&pair[0], &pair[1])).collect()
}

impl KvCache for PassingCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView> {
        Ok(passed(keys, values))
    }
}

impl LayerState for PassingCache {
    fn offset(&self) -> i32 {
        0
    }

    fn arrays(&self) -> Vec<&Array> {
        Vec::new()
    }

    fn can_trim(&self, _n: i32) -> bool {
        true
    }

    fn keeps_all(&self, _: i32) -> bool {
        true
    }

    fn reset(&mut self) {}

    fn trim(&mut self, _n: i32) -> bool {
        true
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(*self))
    }

    fn kind(&self) -> String {
        String::from("passing")
    }

    fn snapshot(&self) -> Result<Snapshot> {
        Ok(Snapshot {
            kind: self.kind(),
            offset: 0,
            arrays: BTreeMap::new(),
        })
    }

    fn restore(&mut self, _snapshot: Snapshot) -> std::result::Result<(), String> {
        Err(String::from("this cache keeps nothing"))
    }

    fn as_kv(&self) -> Option<&dyn KvCache> {
        Some(self)
    }

    fn as_kv_mut(&mut self) -> Option<&mut dyn KvCache> {
        Some(self)
    }
}
