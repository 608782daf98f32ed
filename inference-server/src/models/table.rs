//! The table of loaded models, with their leases and expiry times. `registry.rs` loads and unloads
//! the models.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::ServedModel;
use super::lease::{KeepAlive, Lease, Outcome, Release};

/// Minimum time that a newly loaded model stays loaded for its first request.
const FIRST_USE: Duration = Duration::from_secs(10);

/// A loaded model.
pub(super) struct Resident {
    pub(super) key: u64,
    pub(super) model: Arc<ServedModel>,
    /// Whether the model stays loaded as long as the server runs.
    pub(super) pinned: bool,
    /// Whether the model is due to be unloaded. Such a model accepts no new requests.
    retired: bool,
    pub(super) leases: usize,
    pub(super) keep: KeepAlive,
    /// The time at which its last request ended.
    pub(super) idle_since: Instant,
    /// Before this time, the model is not unloaded for being idle.
    pub(super) not_before: Instant,
}

impl Resident {
    /// The key of the model whose weights it shares.
    fn base(&self) -> Option<u64> {
        self.model.base().map(Lease::key)
    }

    /// Whether the model may be unloaded to free memory. An adapter has no weights of its own.
    fn is_movable(&self) -> bool {
        !self.pinned && self.base().is_none()
    }

    /// The time at which the model is unloaded if no request comes; `None` means never.
    pub(super) fn expires(&self) -> Option<Instant> {
        let keep = self.keep.filter(|_| !self.pinned)?;
        // A time beyond the clock's range means that the model never expires.
        let at = self.idle_since.checked_add(keep)?;
        Some(at.max(self.not_before))
    }
}

#[derive(Default)]
pub(super) struct Table {
    /// The models in the order in which they were loaded.
    pub(super) residents: Vec<Resident>,
    pub(super) loading: HashMap<String, watch::Receiver<Outcome>>,
    keys: u64,
}

/// The name without the tag that Ollama's clients append; `None` if there is no tag.
pub(super) fn bare(name: &str) -> Option<&str> {
    name.strip_suffix(":latest")
}

impl Table {
    pub(super) fn add(&mut self, model: Arc<ServedModel>, pinned: bool, keep: KeepAlive) -> u64 {
        self.keys += 1;
        let now = Instant::now();
        self.residents.push(Resident {
            key: self.keys,
            model,
            pinned,
            retired: false,
            leases: 0,
            keep,
            idle_since: now,
            not_before: now + FIRST_USE,
        });
        self.keys
    }

    /// Finds a model that accepts requests.
    pub(super) fn find(&mut self, name: &str) -> Option<&mut Resident> {
        let of = |wanted: &str| {
            let mut all = self.residents.iter();
            all.position(|r| !r.retired && r.model.id == wanted)
        };
        let at = of(name).or_else(|| of(bare(name)?))?;
        self.residents.get_mut(at)
    }

    pub(super) fn lease(
        &mut self,
        name: &str,
        keep: KeepAlive,
        owner: &Weak<dyn Release>,
    ) -> Option<Lease> {
        let resident = self.find(name)?;
        resident.keep = keep;
        let key = resident.key;
        self.lease_of(key, owner)
    }

    pub(super) fn lease_of(&mut self, key: u64, owner: &Weak<dyn Release>) -> Option<Lease> {
        let resident = self.residents.iter_mut().find(|r| r.key == key)?;
        resident.leases += 1;
        Some(Lease::new(owner, key, &resident.model))
    }

    /// The number of loaded models that may be unloaded. Adapters that share a model's weights do
    /// not count.
    pub(super) fn movable(&self) -> usize {
        self.residents.iter().filter(|r| r.is_movable()).count()
    }

    /// The adapters that share the weights of this model.
    fn adapters_of(&self, key: u64) -> impl Iterator<Item = &Resident> {
        self.residents.iter().filter(move |r| r.base() == Some(key))
    }

    /// Whether requests use a model or its adapters. Each loaded adapter has one lease of the
    /// model.
    fn is_in_use(&self, r: &Resident) -> bool {
        let adapters = self.adapters_of(r.key).count();
        r.leases > adapters || self.adapters_of(r.key).any(|adapter| adapter.leases > 0)
    }

    /// The adapters without leases that share the weights of a retired model.
    pub(super) fn idle_adapters(&self, key: u64) -> Vec<u64> {
        let idle = self.adapters_of(key).filter(|r| r.leases == 0);
        idle.map(|r| r.key).collect()
    }

    /// Sets the keep-alive time of a model and its adapters to zero. They are unloaded as soon as
    /// no request uses them.
    pub(super) fn expire_with_adapters(&mut self, key: u64) {
        for r in &mut self.residents {
            if r.key == key || r.base() == Some(key) {
                r.keep = Some(Duration::ZERO);
                r.not_before = r.idle_since;
            }
        }
    }

    pub(super) fn is_idle(&self, key: u64) -> bool {
        let mut residents = self.residents.iter();
        residents
            .find(|r| r.key == key)
            .is_none_or(|r| r.leases == 0)
    }

    /// Retires the least recently used idle model, with its adapters. If no model is idle, retires
    /// the model with the oldest `idle_since`.
    pub(super) fn retire(&mut self) -> Option<u64> {
        let movable = self.residents.iter().filter(|r| r.is_movable());
        let key = movable
            .min_by_key(|r| (self.is_in_use(r), r.idle_since))?
            .key;
        for r in &mut self.residents {
            r.retired |= r.key == key || r.base() == Some(key);
        }
        Some(key)
    }

    /// A model whose keep-alive time has ended; otherwise the time at which the next one ends.
    pub(super) fn due(&self) -> (Option<u64>, Option<Instant>) {
        let idle = self
            .residents
            .iter()
            .filter(|r| r.leases == 0 && !r.retired);
        let first = idle
            .filter_map(|r| Some((r.expires()?, r.key)))
            .min_by_key(|(at, _)| *at);
        match first {
            Some((at, key)) if at <= Instant::now() => (Some(key), None),
            Some((at, _)) => (None, Some(at)),
            None => (None, None),
        }
    }
}
