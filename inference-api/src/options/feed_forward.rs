//! Strategies for the feed-forward part of each layer, and a plan that assigns a strategy to each
//! layer. This file names, parses and checks strategies; backends compute them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::invalid;
use crate::error::{Error, Result};

/// The syntax of all strategies, for error messages.
const KNOWN: &str = "dense, sparse:K, walk, walk:K, attention-only, gain:G";

/// A way to compute the feed-forward part of a layer.
///
/// A feed-forward part has one *feature* per element of its inner width. Row `f` of the gate and up
/// matrices computes the activation `a_f` of feature `f`. The feature adds `a_f` times column `f`
/// of the down matrix to the residual stream (Geva et al. 2021).
///
/// ```
/// use inference::FeedForwardStrategy;
///
/// let sparse: FeedForwardStrategy = "sparse:512".parse()?;
/// assert_eq!(sparse, FeedForwardStrategy::Sparse { top_k: 512 });
/// assert_eq!(sparse.to_string(), "sparse:512");
/// # Ok::<(), inference::Error>(())
/// ```
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum FeedForwardStrategy {
    /// Computes all features, as the model was trained.
    #[default]
    Dense,
    /// At each position, computes only the `top_k` features whose gate value before the activation
    /// has the greatest magnitude. Without a gate, the input of the activation decides. Other
    /// features count as zero.
    Sparse {
        /// The number of features, at least 1. If it reaches the layer's number of features, the
        /// result is [`FeedForwardStrategy::Dense`].
        top_k: usize,
    },
    /// Computes the features of [`FeedForwardStrategy::Sparse`], but reads them from the files of
    /// [`LoadOptions::vindex`](crate::LoadOptions::vindex), where each feature is contiguous. The
    /// up and down weights of other features are not read.
    Walk {
        /// The number of features, at least 1. If it reaches the layer's number of features, all
        /// are computed.
        top_k: usize,
    },
    /// No feed-forward part: the layer adds only its attention or recurrent part.
    AttentionOnly,
    /// Replaces the whole layer, including attention: the residual stream is multiplied by this
    /// factor.
    Gain(f32),
}

impl FeedForwardStrategy {
    /// Checks the parameters of the strategy.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](crate::ErrorKind::InvalidOption) for zero features or a factor
    /// that is not finite.
    pub fn validate(self) -> Result<()> {
        match self {
            Self::Sparse { top_k: 0 } | Self::Walk { top_k: 0 } => invalid(format!(
                "{self} leaves no feature; it must be at least 1, or attention-only",
            )),
            Self::Gain(gain) if !gain.is_finite() => {
                invalid(format!("gain:{gain} is not a finite factor"))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for FeedForwardStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense => f.write_str("dense"),
            Self::Sparse { top_k } => write!(f, "sparse:{top_k}"),
            Self::Walk { top_k: usize::MAX } => f.write_str("walk"),
            Self::Walk { top_k } => write!(f, "walk:{top_k}"),
            Self::AttentionOnly => f.write_str("attention-only"),
            Self::Gain(gain) => write!(f, "gain:{gain}"),
        }
    }
}

impl FromStr for FeedForwardStrategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, number) = match text.split_once(':') {
            Some((name, number)) => (name, Some(number)),
            None => (text, None),
        };
        let strategy = match (name, number) {
            ("dense", None) => Self::Dense,
            ("attention-only" | "highway", None) => Self::AttentionOnly,
            ("walk", None) => Self::Walk { top_k: usize::MAX },
            ("sparse" | "walk", Some(k)) => match k.parse() {
                Ok(top_k) if name == "walk" => Self::Walk { top_k },
                Ok(top_k) => Self::Sparse { top_k },
                Err(_) => return invalid(format!("`{text}` needs a number of features")),
            },
            ("gain", Some(g)) => match g.parse() {
                Ok(gain) => Self::Gain(gain),
                Err(_) => return invalid(format!("`{text}` needs a factor, such as gain:1.02")),
            },
            ("sparse" | "gain", None) => {
                return invalid(format!(
                    "`{text}` needs a colon and a number; the strategies are {KNOWN}"
                ));
            }
            _ => {
                return invalid(format!(
                    "feed-forward strategy `{text}` is not one of {KNOWN}"
                ));
            }
        };
        strategy.validate()?;
        Ok(strategy)
    }
}

/// A strategy for each layer. Layers outside all ranges are dense.
///
/// As text, it is a list of ranges, `0-11=dense,12-23=sparse:512`. `12-=sparse:512` extends to the
/// last layer, and a strategy without a range applies to all layers.
///
/// ```
/// use inference::{FeedForwardPlan, FeedForwardStrategy};
///
/// let plan: FeedForwardPlan = "2-3=attention-only,5-=sparse:64".parse()?;
/// let all = plan.for_layers(7)?;
/// assert_eq!(all[2], FeedForwardStrategy::AttentionOnly);
/// assert_eq!(all[4], FeedForwardStrategy::Dense);
/// assert_eq!(all[6], FeedForwardStrategy::Sparse { top_k: 64 });
/// assert!(plan.for_layers(3).is_err(), "there is no layer 3, and none from 5 on");
/// # Ok::<(), inference::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FeedForwardPlan {
    /// Sorted by layer, without overlap.
    ranges: Vec<Range>,
}

/// Layers `first..=last`, or all from `first` onward.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Range {
    first: usize,
    last: Option<usize>,
    strategy: FeedForwardStrategy,
}

impl Range {
    fn has(&self, layer: usize) -> bool {
        layer >= self.first && self.last.is_none_or(|last| layer <= last)
    }
}

impl FeedForwardPlan {
    /// Creates a plan in which all layers are dense.
    #[must_use]
    pub fn dense() -> Self {
        Self::default()
    }

    /// Creates a plan with one strategy for all layers.
    #[must_use]
    pub fn uniform(strategy: FeedForwardStrategy) -> Self {
        Self {
            ranges: vec![Range {
                first: 0,
                last: None,
                strategy,
            }],
        }
    }

    /// Adds a strategy for layers `first..=last`, or for all from `first` onward.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](crate::ErrorKind::InvalidOption) when the range ends before it
    /// begins or overlaps another range.
    pub fn with_layers(
        mut self,
        first: usize,
        last: Option<usize>,
        strategy: FeedForwardStrategy,
    ) -> Result<Self> {
        if last.is_some_and(|last| last < first) {
            return invalid(format!(
                "layers {}: the range ends before it begins",
                shown(first, last)
            ));
        }
        let new = Range {
            first,
            last,
            strategy,
        };
        let other = (self.ranges.iter()).find(|other| other.has(first) || new.has(other.first));
        if let Some(other) = other {
            return invalid(format!(
                "layers {} and {} overlap; give each layer one strategy",
                shown(other.first, other.last),
                shown(first, last)
            ));
        }
        self.ranges.push(new);
        self.ranges.sort_by_key(|range| range.first);
        Ok(self)
    }

    /// Whether every layer is dense.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        let dense = |range: &Range| range.strategy == FeedForwardStrategy::Dense;
        self.ranges.iter().all(dense)
    }

    /// Whether a layer reads its features from a vindex.
    #[must_use]
    pub fn walks(&self) -> bool {
        let walks = |range: &Range| matches!(range.strategy, FeedForwardStrategy::Walk { .. });
        self.ranges.iter().any(walks)
    }

    /// The strategy of a layer.
    #[must_use]
    pub fn of(&self, layer: usize) -> FeedForwardStrategy {
        let range = self.ranges.iter().find(|range| range.has(layer));
        range.map_or(FeedForwardStrategy::Dense, |range| range.strategy)
    }

    /// The strategies of a model with `layers` layers, in order.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](crate::ErrorKind::InvalidOption) when a range names an unknown
    /// layer.
    pub fn for_layers(&self, layers: usize) -> Result<Vec<FeedForwardStrategy>> {
        let beyond = |range: &&Range| range.last.unwrap_or(range.first) >= layers;
        if let Some(range) = self.ranges.iter().find(beyond) {
            return invalid(format!(
                "feed_forward names layers {}; the model has {layers}, from 0",
                shown(range.first, range.last)
            ));
        }
        Ok((0..layers).map(|layer| self.of(layer)).collect())
    }

    /// Checks the parameters of all strategies.
    ///
    /// # Errors
    /// As [`FeedForwardStrategy::validate`].
    pub fn validate(&self) -> Result<()> {
        self.ranges.iter().try_for_each(|r| r.strategy.validate())
    }
}

/// A range of layers in the syntax of a plan.
fn shown(first: usize, last: Option<usize>) -> String {
    match last {
        Some(last) if last == first => first.to_string(),
        Some(last) => format!("{first}-{last}"),
        None => format!("{first}-"),
    }
}

impl fmt::Display for FeedForwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.ranges.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            if (range.first, range.last) != (0, None) {
                write!(f, "{}=", shown(range.first, range.last))?;
            }
            range.strategy.fmt(f)?;
        }
        Ok(())
    }
}

impl FromStr for FeedForwardPlan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut plan = Self::default();
        if text.trim().is_empty() {
            return Ok(plan);
        }
        for part in text.split(',').map(str::trim) {
            let Some((layers, strategy)) = part.split_once('=') else {
                plan = plan.with_layers(0, None, part.parse()?)?;
                continue;
            };
            let number = |n: &str| match n.trim().parse::<usize>() {
                Ok(n) => Ok(n),
                Err(_) => invalid(format!(
                    "`{layers}` is neither a layer nor a range such as 0-11 or 12-"
                )),
            };
            let (first, last) = match layers.split_once('-') {
                None => (number(layers)?, Some(number(layers)?)),
                Some((first, last)) if last.trim().is_empty() => (number(first)?, None),
                Some((first, last)) => (number(first)?, Some(number(last)?)),
            };
            plan = plan.with_layers(first, last, strategy.trim().parse()?)?;
        }
        Ok(plan)
    }
}

impl TryFrom<String> for FeedForwardPlan {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<FeedForwardPlan> for String {
    fn from(plan: FeedForwardPlan) -> Self {
        plan.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn refused(text: &str) -> String {
        let error = text.parse::<FeedForwardPlan>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{text}");
        error.to_string()
    }

    #[test]
    fn plans_are_read_and_written() {
        let plan: FeedForwardPlan = "12-23=sparse:512, 0-3=dense,5=gain:1.5".parse().unwrap();
        assert_eq!(plan.to_string(), "0-3=dense,5=gain:1.5,12-23=sparse:512");
        assert_eq!(plan.of(5), FeedForwardStrategy::Gain(1.5));
        assert_eq!(plan.of(4), FeedForwardStrategy::Dense);
        assert_eq!(plan.of(23), FeedForwardStrategy::Sparse { top_k: 512 });
        assert!(!plan.is_dense());
        let all: FeedForwardPlan = "highway".parse().unwrap();
        assert_eq!(
            all,
            FeedForwardPlan::uniform(FeedForwardStrategy::AttentionOnly)
        );
        assert_eq!(all.to_string(), "attention-only");
        let walk: FeedForwardPlan = "0-1=walk:7,2-=walk".parse().unwrap();
        assert_eq!(walk.to_string(), "0-1=walk:7,2-=walk");
        assert_eq!(walk.of(1), FeedForwardStrategy::Walk { top_k: 7 });
        assert_eq!(walk.of(9), FeedForwardStrategy::Walk { top_k: usize::MAX });
        assert!(walk.walks() && !walk.is_dense() && !all.walks());
        let dense: FeedForwardPlan = "".parse().unwrap();
        assert!(dense.is_dense() && dense == FeedForwardPlan::dense());
    }

    #[test]
    fn what_makes_no_plan_is_named() {
        for (text, named) in [
            ("0-3=dense,3-4=sparse:2", "0-3 and 3-4 overlap"),
            ("sparse:2,7=dense", "overlap"),
            ("5-=dense,9=dense", "5- and 9 overlap"),
            ("4-2=dense", "ends before it begins"),
            ("a=dense", "`a` is neither a layer"),
            ("-3=dense", "neither a layer"),
            ("1-2-3=dense", "neither a layer"),
            ("0=", "not one of dense"),
            ("0=nothing", "`nothing` is not one of dense, sparse:K"),
            ("sparse", "needs a colon and a number"),
            ("sparse:-1", "needs a number of features"),
            ("sparse:0", "at least 1"),
            ("walk:0", "walk:0 leaves no feature"),
            ("walk:many", "needs a number of features"),
            ("gain:x", "needs a factor"),
            ("gain:inf", "not a finite factor"),
            ("gain:NaN", "not a finite factor"),
            ("dense:3", "not one of"),
            ("dense,", "not one of"),
        ] {
            let message = refused(text);
            assert!(message.contains(named), "{text}: {message}");
        }
    }

    #[test]
    fn ranges_are_held_against_the_model() {
        let plan: FeedForwardPlan = "2-3=attention-only".parse().unwrap();
        assert_eq!(plan.for_layers(4).unwrap().len(), 4);
        let message = plan.for_layers(3).unwrap_err().to_string();
        assert!(message.contains("layers 2-3; the model has 3"), "{message}");
        let rest: FeedForwardPlan = "3-=dense".parse().unwrap();
        assert!(rest.for_layers(3).is_err() && rest.for_layers(4).is_ok());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[0-9a-z:,=. -]{0,40}") {
            if let Ok(plan) = text.parse::<FeedForwardPlan>() {
                let again: FeedForwardPlan = plan.to_string().parse().unwrap();
                prop_assert_eq!(again, plan);
            }
        }

        #[test]
        fn plans_survive_json(first in 0usize..50, n in 0usize..50, k in 1usize.., gain in -9f32..9.0) {
            let plan = FeedForwardPlan::dense()
                .with_layers(first, Some(first + n), FeedForwardStrategy::Sparse { top_k: k })
                .and_then(|p| p.with_layers(first + n + 1, None, FeedForwardStrategy::Gain(gain)))
                .unwrap();
            let json = serde_json::to_string(&plan).unwrap();
            prop_assert_eq!(serde_json::from_str::<FeedForwardPlan>(&json).unwrap(), plan);
        }
    }
}
