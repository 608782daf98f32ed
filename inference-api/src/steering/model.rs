//! The interface of models whose activations can be edited.

use super::{Hook, Steering, SteeringShape};
use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::{Error, ErrorKind, Result};
use crate::inspect::{AttentionWeights, FeedForwardActivations, ResidualTrace};
use crate::message::Prompt;
use crate::token_model::LogitsOutput;

/// The states of a prompt at one hook of a layer.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub struct HookStates {
    /// The layer.
    pub layer: usize,
    /// The hook in the layer.
    pub hook: Hook,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// `[tokens, width]`, row-major.
    pub states: Vec<f32>,
}

impl HookStates {
    /// Creates a value with the states `[tokens, width]` of the prompt `tokens`.
    #[must_use]
    pub fn new((layer, hook): (usize, Hook), tokens: Vec<u32>, states: Vec<f32>) -> Self {
        Self {
            layer,
            hook,
            tokens,
            states,
        }
    }

    /// The states, position by position.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        let width = self.states.len().checked_div(self.tokens.len());
        self.states.chunks_exact(width.unwrap_or(0).max(1))
    }
}

fn unseen() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "this backend does not show the inside of an edited model",
    )
}

/// A model that honors [`GenerateOptions::steering`](crate::GenerateOptions::steering).
pub trait SteerableModel: TextModel {
    /// The hooks that can be edited.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) with the reason if no hook can be
    /// edited, and [`ErrorKind::Closed`](crate::ErrorKind::Closed).
    fn steering_shape(&self) -> Result<SteeringShape>;

    /// As [`TokenModel::logits`](crate::TokenModel::logits), with edits.
    ///
    /// # Errors
    /// The errors of the same call without edits, and of [`Steering::check`].
    fn steered_logits(
        &self,
        prompt: &Prompt,
        all: bool,
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput>;

    /// As [`TokenModel::token_logprobs`](crate::TokenModel::token_logprobs), with
    /// edits.
    ///
    /// # Errors
    /// The errors of the same call without edits, and of [`Steering::check`].
    fn steered_logprobs(
        &self,
        prompt: &Prompt,
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<Vec<f32>>;

    /// As [`AttentionInspector::trace_residuals`](crate::AttentionInspector::trace_residuals), with
    /// edits. An edit at [`Hook::ResidPre`] counts as part of the mixer. An edit at
    /// [`Hook::ResidPost`] counts as part of the feed-forward network.
    ///
    /// # Errors
    /// The errors of the same call without edits, and of [`Steering::check`];
    /// [`ErrorKind::Unsupported`] if the backend cannot trace.
    fn steered_residuals(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<ResidualTrace> {
        let _ = (prompt, positions, steering, interrupt);
        Err(unseen())
    }

    /// As [`AttentionInspector::attention_weights`](crate::AttentionInspector::attention_weights),
    /// with edits.
    ///
    /// # Errors
    /// As [`Self::steered_residuals`].
    fn steered_attention_weights(
        &self,
        prompt: &Prompt,
        layers: Option<&[usize]>,
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<AttentionWeights> {
        let _ = (prompt, layers, steering, interrupt);
        Err(unseen())
    }

    /// As [`feed_forward_activations`], with edits. Edits at [`Hook::Neurons`] change the returned
    /// activations.
    ///
    /// # Errors
    /// As [`Self::steered_residuals`].
    ///
    /// [`feed_forward_activations`]: crate::AttentionInspector::feed_forward_activations
    fn steered_activations(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<FeedForwardActivations> {
        let _ = (prompt, positions, steering, interrupt);
        Err(unseen())
    }

    /// The states of a prompt at `places` (layer and hook), computed by the unedited model.
    ///
    /// # Errors
    /// For an unknown layer or hook, insufficient memory, a closed model, or an interrupt.
    fn hook_states(
        &self,
        prompt: &Prompt,
        places: &[(usize, Hook)],
        interrupt: &Interrupt,
    ) -> Result<Vec<HookStates>>;
}
