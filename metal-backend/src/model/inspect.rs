//! The inspection functions of the public contract, on top of `inspect/`.

use inference::{
    AttentionInspector, AttentionProjections, AttentionSnapshot, AttentionWeights, EmbedOptions,
    EmbeddingInfo, EmbeddingModel, FeedForwardActivations, FeedForwardInputs, FeedForwardWeights,
    GenerateOptions, HiddenStates, Interrupt, ProfiledModel, Prompt, Ranking, RerankModel,
    RerankOptions, ResidualTrace, Result, StepProfile,
};

use super::MlxModel;
use crate::{embed, inspect};

impl AttentionInspector for MlxModel {
    fn inspect_attention(
        &self,
        prompt: &Prompt,
        interrupt: &Interrupt,
    ) -> Result<AttentionSnapshot> {
        inspect::attention(&self.engine, prompt, interrupt)
    }

    fn hidden_states(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<HiddenStates> {
        let one = std::slice::from_ref(prompt);
        let states = inspect::hidden_states(&self.engine, one, &[positions.to_vec()], interrupt)?;
        Ok(states.into_iter().next().unwrap_or_default())
    }

    fn hidden_states_many(
        &self,
        prompts: &[Prompt],
        positions: &[Vec<usize>],
        interrupt: &Interrupt,
    ) -> Result<Vec<HiddenStates>> {
        inspect::hidden_states(&self.engine, prompts, positions, interrupt)
    }

    fn trace_residuals(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<ResidualTrace> {
        inspect::residuals(&self.engine, (prompt, None), positions, interrupt)
    }

    fn attention_weights(
        &self,
        prompt: &Prompt,
        layers: Option<&[usize]>,
        interrupt: &Interrupt,
    ) -> Result<AttentionWeights> {
        inspect::attention_weights(&self.engine, (prompt, None), layers, interrupt)
    }

    fn feed_forward_inputs(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<FeedForwardInputs> {
        inspect::feed_forward_inputs(&self.engine, prompt, positions, interrupt)
    }

    fn feed_forward_activations(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<FeedForwardActivations> {
        inspect::feed_forward_activations(&self.engine, (prompt, None), positions, interrupt)
    }

    fn feed_forward_weights(&self, layer: usize) -> Result<FeedForwardWeights> {
        inspect::feed_forward_weights(&self.engine, layer)
    }

    fn attention_projections(&self, layer: usize) -> Result<AttentionProjections> {
        inspect::attention_projections(&self.engine, layer)
    }

    fn token_embeddings(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        inspect::token_embeddings(&self.engine, tokens)
    }

    fn token_scores(&self, vectors: &[f32]) -> Result<Vec<Vec<f32>>> {
        inspect::token_scores(&self.engine, vectors)
    }

    fn unembed(&self, states: &[f32]) -> Result<Vec<Vec<f32>>> {
        inspect::unembed(&self.engine, states)
    }
}

impl EmbeddingModel for MlxModel {
    fn embedding_info(&self) -> EmbeddingInfo {
        self.engine.sentence().info().clone()
    }

    fn embedding_tokens(&self, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>> {
        embed::tokens(&self.engine, prompt, options)
    }

    fn embed(
        &self,
        prompts: &[Prompt],
        options: &EmbedOptions,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<f32>>> {
        embed::embed(&self.engine, prompts, options, interrupt)
    }
}

impl RerankModel for MlxModel {
    fn rerank(
        &self,
        query: &str,
        documents: &[String],
        options: &RerankOptions,
        interrupt: &Interrupt,
    ) -> Result<Ranking> {
        embed::rerank(&self.engine, (query, documents), options, interrupt)
    }
}

impl ProfiledModel for MlxModel {
    fn profile_steps(
        &self,
        prompt: &Prompt,
        options: &GenerateOptions,
        interrupt: &Interrupt,
    ) -> Result<StepProfile> {
        inspect::profile_steps(&self.engine, prompt, options, interrupt)
    }
}
