//! `FfnRouter`: assigns a program's own feed-forward backends to layers.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::feed_forward::FfnBackend;

/// Feed-forward backends by layer. Layers without a backend follow the loading options.
///
/// ```
/// use std::sync::Arc;
/// use metal_backend::ffn::{FfnRouter, HighwayFfn, SparseFfn};
///
/// let router = FfnRouter::new()
///     .with_layers(0, Some(11), Arc::new(SparseFfn { top_k: 512 }))?
///     .with_layers(20, None, Arc::new(HighwayFfn))?;
/// assert!(router.backend(11).is_some() && router.backend(12).is_none());
/// # Ok::<(), inference::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct FfnRouter {
    ranges: Vec<Range>,
}

#[derive(Debug, Clone)]
struct Range {
    first: usize,
    /// The last layer of the range; `None` means the last layer of the model.
    last: Option<usize>,
    backend: Arc<dyn FfnBackend>,
}

impl FfnRouter {
    /// Creates a router that assigns no backend.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a router that assigns one backend to all layers.
    #[must_use]
    pub fn uniform(backend: Arc<dyn FfnBackend>) -> Self {
        Self {
            ranges: vec![Range {
                first: 0,
                last: None,
                backend,
            }],
        }
    }

    /// Assigns a backend to the layers from `first` to `last`. `None` means the model's last layer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a range that ends before it begins, or overlaps another
    /// range.
    pub fn with_layers(
        mut self,
        first: usize,
        last: Option<usize>,
        backend: Arc<dyn FfnBackend>,
    ) -> Result<Self> {
        let end = last.unwrap_or(usize::MAX);
        let fault = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        if end < first {
            return fault(format!(
                "the range of layers {first} to {end} ends before it begins"
            ));
        }
        let other = |r: &&Range| r.first <= end && first <= r.last.unwrap_or(usize::MAX);
        if let Some(other) = self.ranges.iter().find(other) {
            return fault(format!(
                "the layers from {first} on overlap with layers that already have the backend {}",
                other.backend.name()
            ));
        }
        self.ranges.push(Range {
            first,
            last,
            backend,
        });
        Ok(self)
    }

    /// The backend of a layer, if it has one.
    #[must_use]
    pub fn backend(&self, layer: usize) -> Option<&Arc<dyn FfnBackend>> {
        let has = |r: &&Range| r.first <= layer && layer <= r.last.unwrap_or(usize::MAX);
        self.ranges.iter().find(has).map(|r| &r.backend)
    }

    /// Whether no layer has a backend.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Checks that all ranges exist in a model of `layers` layers.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a range beyond the model's layers.
    pub fn check(&self, layers: usize) -> Result<()> {
        let beyond = |r: &&Range| r.first.max(r.last.unwrap_or(0)) >= layers;
        match self.ranges.iter().find(beyond) {
            None => Ok(()),
            Some(r) => Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "the backend {} is for layer {}; the model has {layers}, from 0",
                    r.backend.name(),
                    r.first.max(r.last.unwrap_or(0))
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::feed_forward::{DenseFfn, HighwayFfn};

    #[test]
    fn ranges_do_not_meet_and_end_within_the_model() {
        let dense = || Arc::new(DenseFfn);
        let router = FfnRouter::new().with_layers(2, Some(3), dense()).unwrap();
        for (first, last) in [(3, Some(9)), (0, None), (0, Some(2)), (2, Some(2))] {
            assert!(router.clone().with_layers(first, last, dense()).is_err());
        }
        assert!(router.clone().with_layers(4, Some(3), dense()).is_err());
        let router = router.with_layers(5, None, Arc::new(HighwayFfn)).unwrap();
        let name = |layer| router.backend(layer).map(|b| b.name().to_owned());
        assert_eq!(name(3).as_deref(), Some("dense"));
        assert_eq!((name(1), name(4)), (None, None));
        assert_eq!(name(99).as_deref(), Some("highway"));
        assert!(router.check(6).is_ok());
        assert!(router.check(5).is_err());
        assert!(FfnRouter::uniform(dense()).check(0).is_err());
        assert!(FfnRouter::new().check(0).is_ok());
    }
}
