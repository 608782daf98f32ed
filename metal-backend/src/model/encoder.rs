//! A loaded encoder. It implements the public contract's embeddings and scores, and no text
//! generation.

use std::sync::Arc;

use inference::{
    BatchResult, ChatPrompt, ClassifyResult, EmbedOptions, EmbeddingInfo, EmbeddingModel, Error,
    ErrorKind, GenerateMetrics, GenerateOptions, Interrupt, LogitsOutput, Message, ModelInfo,
    PreparedPrompt, Prompt, Ranking, RerankModel, RerankOptions, Result, TextModel, TokenModel,
    TokenStream, TrainableModel,
};

use super::{decoded, embed, encoded};
use crate::engine::Engine;

/// An encoder.
pub struct EncoderModel {
    engine: Arc<Engine>,
    /// Whether the model scores documents. Stored here because a closed model has dropped its
    /// network.
    reranks: bool,
}

impl EncoderModel {
    /// Creates an encoder on `engine`.
    pub fn new(engine: impl Into<Arc<Engine>>) -> Self {
        let engine = engine.into();
        Self {
            reranks: embed::reranks(&engine),
            engine,
        }
    }

    /// The engine, shared by all requests.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the error of functions that predict a next token. Encoders do not support them.
    fn no_text<T>(&self) -> Result<T> {
        self.engine.check_open()?;
        let use_it_so = match self.reranks {
            true => "it scores documents (`mlx rerank`)",
            false => "it makes vectors of texts (`mlx embed`)",
        };
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is an encoder and writes no text; {use_it_so}",
                self.model_type()
            ),
        ))
    }
}

impl TextModel for EncoderModel {
    fn generate(&self, _: &Prompt, _: &GenerateOptions) -> Result<TokenStream> {
        self.no_text()
    }

    fn chat(&self, _: &[Message], _: &GenerateOptions) -> Result<TokenStream> {
        self.no_text()
    }

    fn classify(&self, _: &[Prompt], _: &GenerateOptions, _: bool) -> Result<Vec<ClassifyResult>> {
        self.no_text()
    }

    fn batch_generate(&self, _: &[Prompt], _: &GenerateOptions) -> Result<Vec<BatchResult>> {
        self.no_text()
    }

    fn batch_session(&self) -> Result<Box<dyn inference::BatchSession>> {
        self.no_text()
    }

    fn model_type(&self) -> &str {
        &self.engine.info().architecture
    }

    fn info(&self) -> ModelInfo {
        self.engine.info().clone()
    }

    fn metrics(&self) -> GenerateMetrics {
        self.engine.metrics()
    }

    fn close(&self) -> Result<()> {
        self.engine.close()
    }

    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        Some(self)
    }

    fn as_rerank_model(&self) -> Option<&dyn RerankModel> {
        self.reranks.then_some(self)
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }

    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        Some(self)
    }
}

impl EmbeddingModel for EncoderModel {
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

impl RerankModel for EncoderModel {
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

impl TokenModel for EncoderModel {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        encoded(&self.engine, text, add_special)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        decoded(&self.engine, ids)
    }

    fn prepare_chat(&self, _: &ChatPrompt) -> Result<PreparedPrompt> {
        self.no_text()
    }

    fn logits(&self, _: &Prompt, _: bool, _: &Interrupt) -> Result<LogitsOutput> {
        self.no_text()
    }

    fn token_logprobs(&self, _: &Prompt, _: &Interrupt) -> Result<Vec<f32>> {
        self.no_text()
    }

    fn eos_tokens(&self) -> Vec<u32> {
        self.engine.eos_tokens().to_vec()
    }
}
