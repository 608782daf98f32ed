//! A cache that keeps nothing: queries look at the keys and values of their own pass, which therefore have
//! derivatives. For training and for measuring whole texts.

use std::collections::BTreeMap;

use mlx_rs_core::{Array, Result};

use super::{KvCache, Order, Seen, Snapshot, Stored};

/// Keeps nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassingCache;

impl KvCache for PassingCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<Seen> {
        Ok(Seen {
            keys: Stored::Plain(keys.clone()),
            values: Stored::Plain(values.clone()),
            offset: 0,
            order: Order::Run { kept: 0, start: 0 },
            window: None,
        })
    }

    fn offset(&self) -> i32 {
        0
    }

    fn state(&self) -> Vec<&Array> {
        Vec::new()
    }

    fn can_trim(&self, _n: i32) -> bool {
        true
    }

    fn trim(&mut self, _n: i32) {}

    fn copy(&self) -> Result<Box<dyn KvCache>> {
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
}
