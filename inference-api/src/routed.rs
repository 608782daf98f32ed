//! Models that can compute feed-forward parts in two ways: by a plan, or densely.

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::Result;
use crate::message::Prompt;
use crate::options::FeedForwardPlan;
use crate::token_model::LogitsOutput;

/// A model loaded with a feed-forward plan that is not dense.
pub trait RoutedModel: TextModel {
    /// The plan.
    fn feed_forward_plan(&self) -> &FeedForwardPlan;

    /// Whether the weights for dense computation are in memory.
    /// [`LoadOptions::walk_only`](crate::LoadOptions::walk_only) omits some of them.
    fn has_dense(&self) -> bool;

    /// The logits after the last token of a prompt, `[1, vocab]`. They are computed by the plan or,
    /// if `dense` is set, densely. Caches of earlier requests are not used.
    ///
    /// # Errors
    /// As [`TokenModel::logits`](crate::TokenModel::logits).
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for `dense` if some weights are
    /// not in memory.
    fn routed_logits(
        &self,
        prompt: &Prompt,
        dense: bool,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput>;
}
