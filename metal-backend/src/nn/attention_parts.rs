//! Norms and factors of queries, keys and values that some families apply before attention, and the
//! greatest lengths of a step's rows.

use super::norm::Norm;
use crate::cache::{Row, offset};

/// A factor on queries that grows with the logarithm of their position. The factor is 1 within the
/// trained context length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    /// The factor of the logarithm.
    pub beta: f32,
    /// The number of positions for which the factor stays constant.
    pub step: i32,
    /// The number added to positions (1 in Llama 4).
    pub shift: i32,
}

impl Growth {
    pub(super) fn factor(self, position: i32) -> f32 {
        1.0 + self.beta * ((1 + (position + self.shift) / self.step) as f32).ln()
    }

    /// Whether any of the first `positions` positions has a factor other than 1.
    pub(super) fn is_felt(self, positions: i32) -> bool {
        positions.saturating_add(self.shift) > self.step
    }
}

/// Norms of queries, keys and values.
#[derive(Debug, Clone, Default)]
pub struct HeadNorms {
    /// The norm of queries.
    pub q: Option<Norm>,
    /// The norm of keys.
    pub k: Option<Norm>,
    /// The norm of values (Gemma 4).
    pub v: Option<Norm>,
    /// Whether a norm covers all heads together instead of each head (OLMo 2).
    pub across_heads: bool,
    /// Whether queries and keys are rotated before their norms (Hunyuan).
    pub after_rotation: bool,
}

impl HeadNorms {
    /// The norms of queries and keys before rotation.
    pub(super) fn before(&self) -> [Option<&Norm>; 2] {
        match self.after_rotation {
            true => [None; 2],
            false => [self.q.as_ref(), self.k.as_ref()],
        }
    }

    /// The norms of queries and keys after rotation.
    pub(super) fn after(&self) -> [Option<&Norm>; 2] {
        match self.after_rotation {
            true => [self.q.as_ref(), self.k.as_ref()],
            false => [None; 2],
        }
    }
}

/// The greatest lengths of the rows of a step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Furthest {
    /// The greatest number of positions after the step.
    pub position: i32,
    /// The greatest known length of a sequence.
    pub reach: i32,
}

/// Returns the greatest lengths of these rows.
pub(super) fn furthest(rows: &[Row<'_>]) -> Furthest {
    rows.iter().fold(Furthest::default(), |furthest, row| {
        let end = offset(row.caches) + row.length;
        Furthest {
            position: furthest.position.max(end),
            reach: furthest.reach.max(end).max(row.caches.reach()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_grow_beyond_the_trained_context() {
        let growth = Growth {
            beta: 0.1,
            step: 8,
            shift: 0,
        };
        assert!(!growth.is_felt(8) && growth.is_felt(9));
        assert_eq!((growth.factor(0), growth.factor(7)), (1.0, 1.0));
        assert!((growth.factor(8) - (1.0 + 0.1 * 2.0f32.ln())).abs() < 1e-6);
        assert_eq!(growth.factor(15), growth.factor(8));
        let shifted = Growth { shift: 1, ..growth };
        assert!(!shifted.is_felt(7) && shifted.is_felt(8));
        assert_eq!(
            (shifted.factor(6), shifted.factor(7)),
            (1.0, growth.factor(8))
        );
    }
}
