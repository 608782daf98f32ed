//! Models that compute feed-forward parts in two ways: by a plan, and densely.

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

    /// Whether all parts are in memory for dense computation;
    /// [`LoadOptions::walk_only`](crate::LoadOptions::walk_only) leaves some out.
    fn has_dense(&self) -> bool;

    /// Logits after the last token of a prompt, `[1, vocab]`, by the plan, or densely if `dense` is
    /// set. Caches of earlier requests are not used.
    ///
    /// # Errors
    /// As [`TokenModel::logits`](crate::TokenModel::logits);
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for `dense` if parts are not in
    /// memory.
    fn routed_logits(
        &self,
        prompt: &Prompt,
        dense: bool,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput>;
}
