//! What some families do to queries, keys and values before attention meets them.

use super::norm::Norm;

/// A factor on queries that grows with the logarithm of their position, one within the trained
/// context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    /// Factor on the logarithm.
    pub beta: f32,
    /// Positions of a step.
    pub step: i32,
}

impl Growth {
    /// The factor at a position.
    pub(super) fn factor(self, position: i32) -> f32 {
        1.0 + self.beta * ((1 + position / self.step) as f32).ln()
    }

    /// Whether one of the first `positions` has another factor than one.
    pub(super) fn is_felt(self, positions: i32) -> bool {
        positions > self.step
    }
}

/// Norms of queries, keys and values.
#[derive(Debug, Clone, Default)]
pub struct HeadNorms {
    /// Of queries.
    pub q: Option<Norm>,
    /// Of keys.
    pub k: Option<Norm>,
    /// Of values (Gemma 4).
    pub v: Option<Norm>,
    /// Over all heads together instead of each (OLMo 2).
    pub across_heads: bool,
    /// Queries and keys are rotated first (Hunyuan).
    pub after_rotation: bool,
}

impl HeadNorms {
    /// Those before rotation, of queries and keys.
    pub(super) fn before(&self) -> [Option<&Norm>; 2] {
        match self.after_rotation {
            true => [None; 2],
            false => [self.q.as_ref(), self.k.as_ref()],
        }
    }

    /// Those after it.
    pub(super) fn after(&self) -> [Option<&Norm>; 2] {
        match self.after_rotation {
            true => [self.q.as_ref(), self.k.as_ref()],
            false => [None; 2],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_grow_beyond_the_trained_context() {
        let growth = Growth { beta: 0.1, step: 8 };
        assert!(!growth.is_felt(8) && growth.is_felt(9));
        assert_eq!((growth.factor(0), growth.factor(7)), (1.0, 1.0));
        assert!((growth.factor(8) - (1.0 + 0.1 * 2.0f32.ln())).abs() < 1e-6);
        assert_eq!(growth.factor(15), growth.factor(8));
    }
}
