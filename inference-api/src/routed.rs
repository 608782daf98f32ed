//! Models whose feed-forward parts can be computed in two ways: by a plan, and as they were trained.

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::Result;
use crate::message::Prompt;
use crate::options::FeedForwardPlan;
use crate::token_model::LogitsOutput;

/// A model that was loaded with a plan for its feed-forward parts other than dense.
pub trait RoutedModel: TextModel {
    /// The plan.
    fn feed_forward_plan(&self) -> &FeedForwardPlan;

    /// Whether all parts as they were trained are in memory:
    /// [`LoadOptions::walk_only`](crate::LoadOptions::walk_only) leaves some out.
    fn has_dense(&self) -> bool;

    /// Logits after the last token of a prompt, `[1, vocab]`, by the plan or, where `dense`, with all
    /// parts as they were trained. Nothing that earlier requests have computed is used.
    ///
    /// # Errors
    /// As [`TokenModel::logits_until`](crate::TokenModel::logits_until);
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for `dense` where the model does
    /// not have it.
    fn routed_logits_until(
        &self,
        prompt: &Prompt,
        dense: bool,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput>;
}
