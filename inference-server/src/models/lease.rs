//! Leases of loaded models. The registry counts the leases of each model, and never unloads a model
//! that has one.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::ServedModel;
use crate::error::ApiError;

/// How long a model stays loaded after its last request; `None` means forever.
pub(crate) type KeepAlive = Option<Duration>;

/// The outcome of a load.
pub(super) type Outcome = Option<std::result::Result<Lease, ApiError>>;

/// The owner of the models. It is notified when a lease ends.
pub(super) trait Release: Send + Sync {
    /// Ends one lease of the model with this key.
    fn release(&self, key: u64);
}

/// A model in use.
#[derive(Clone)]
pub(crate) struct Lease(Arc<Hold>);

struct Hold {
    owner: Weak<dyn Release>,
    key: u64,
    model: Arc<ServedModel>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.upgrade() {
            owner.release(self.key);
        }
    }
}

impl std::ops::Deref for Lease {
    type Target = ServedModel;
    fn deref(&self) -> &ServedModel {
        &self.0.model
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lease").field(&self.id()).finish()
    }
}

impl Lease {
    /// Creates a lease of the model with this key. `owner` has already counted the lease.
    pub(super) fn new(owner: &Weak<dyn Release>, key: u64, model: &Arc<ServedModel>) -> Self {
        Self(Arc::new(Hold {
            owner: Weak::clone(owner),
            key,
            model: Arc::clone(model),
        }))
    }

    /// The key of the model whose session runs the requests: for an adapter, of the model whose
    /// weights it shares.
    pub(crate) fn session(&self) -> u64 {
        self.base().map_or(self.0.key, Lease::key)
    }

    /// An id of this load of the model. Each load has a different key.
    pub(crate) fn key(&self) -> u64 {
        self.0.key
    }
}
