//! A loaded model: implements the public traits with its engine.

mod adapters;
mod encoder;
mod inspect;
mod steerable;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use inference::{
    AttentionInspector, BatchEvent, BatchResult, BatchSession, ChatPrompt, ClassifyResult,
    EmbeddingModel, Error, ErrorKind, FeedForwardPlan, GenerateMetrics, GenerateOptions, Interrupt,
    LogitsOutput, Message, ModelInfo, Prepared, PreparedPrompt, ProfiledModel, Prompt,
    PromptCacheModel, RerankModel, Result, RoutedModel, SteerableModel, Steering, TextModel, Token,
    TokenModel, TokenStream, TrainableModel,
};
use mlx_rs_core::{concatenate, eval};

use crate::cache;
use crate::embed;
use crate::engine::Engine;
use crate::engine::forward::{forward, forward_prompt};
use crate::error::engine as engine_error;
use crate::generate::{Batch, Generation, salt};
use crate::nn::attention::Positions;
use crate::nn::feed_forward::as_trained;
use crate::steer::{edits_of, hook};

pub use encoder::EncoderModel;

/// The maximum number of requests that run concurrently in one call.
const TOGETHER: usize = 32;

/// A loaded model, for the public traits.
pub struct MlxModel {
    engine: Arc<Engine>,
}

impl MlxModel {
    /// Creates a model on `engine`.
    pub fn new(engine: impl Into<Arc<Engine>>) -> Self {
        Self {
            engine: engine.into(),
        }
    }

    /// The engine, shared by all requests.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns this model; `None` if this process has only a share of the model.
    fn unless_part(&self) -> Option<&Self> {
        (!self.engine.is_part()).then_some(self)
    }

    fn start(&self, ids: Vec<u32>, options: &GenerateOptions) -> Result<Generation> {
        Generation::new(Arc::clone(&self.engine), ids, options)
    }

    /// Runs requests in one batch, at most [`TOGETHER`] at a time, and returns their results.
    fn run_batch(&self, prompts: &[Prompt], options: &GenerateOptions) -> Result<Vec<BatchResult>> {
        options.validate()?;
        let mut batch = Batch::new(Arc::clone(&self.engine));
        let mut results: Vec<Option<BatchResult>> = vec![None; prompts.len()];
        let mut tokens: Vec<Vec<Token>> = vec![Vec::new(); prompts.len()];
        // Maps each row of the batch to the index of its prompt.
        let mut places = BTreeMap::new();
        let mut encoded: Vec<(usize, Result<Vec<u32>>)> = prompts
            .iter()
            .map(|prompt| self.engine.encode_prompt(prompt))
            .enumerate()
            .collect();
        // Prompts of similar length run together. Results are returned in the original order.
        encoded.sort_by_key(|(_, ids)| ids.as_ref().map_or(0, Vec::len));
        let mut waiting = encoded.into_iter();
        loop {
            while batch.len() < TOGETHER
                && let Some((i, ids)) = waiting.next()
            {
                match ids.and_then(|ids| batch.add_ids(ids, options)) {
                    Ok(row) => {
                        places.insert(row, i);
                    }
                    Err(e) if e.kind() == ErrorKind::Closed => return Err(e),
                    Err(e) => results[i] = Some(BatchResult::failed(Vec::new(), e)),
                }
            }
            if batch.is_empty() {
                break;
            }
            for event in batch.step()? {
                let Some(&i) = places.get(&event.row()) else {
                    continue;
                };
                match event {
                    BatchEvent::Token { token, .. } => tokens[i].push(token),
                    BatchEvent::Done { reason, .. } => {
                        let tokens = std::mem::take(&mut tokens[i]);
                        results[i] = Some(BatchResult::new(tokens, Some(reason)));
                    }
                    BatchEvent::Failed { error, .. } => {
                        let tokens = std::mem::take(&mut tokens[i]);
                        results[i] = Some(BatchResult::failed(tokens, error));
                    }
                    _ => {}
                }
            }
        }
        let lost = || Error::new(ErrorKind::Engine, "the engine lost the request");
        Ok(results
            .into_iter()
            .map(|r| r.unwrap_or_else(|| BatchResult::failed(Vec::new(), lost())))
            .collect())
    }
}

impl TextModel for MlxModel {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        let ids = self.engine.encode_prompt(prompt)?;
        Ok(TokenStream::new(self.start(ids, options)?))
    }

    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        let prompt = ChatPrompt::new(messages);
        let ids = self.engine.text().prepare_chat(&prompt)?.ids;
        Ok(TokenStream::new(self.start(ids, options)?))
    }

    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>> {
        // The caller's options must be valid before this function changes them.
        options.validate()?;
        self.engine.check_open()?;
        let options = options
            .clone()
            .with_max_tokens(1)
            .with_min_tokens(0)
            .with_stop(Vec::new())
            .with_stop_tokens(Vec::new())
            .with_ignore_eos(true)
            .with_cache_prompt(false)
            .with_logits(return_logits);
        self.run_batch(prompts, &options)?
            .into_iter()
            .map(|result| {
                if let Some(error) = result.error {
                    return Err(error);
                }
                let mut token = result
                    .tokens
                    .into_iter()
                    .next()
                    .ok_or_else(|| Error::new(ErrorKind::Engine, "the model gave no token"))?;
                let logits = token.logits.take().map(|l| l.to_vec());
                Ok(ClassifyResult::new(token, logits))
            })
            .collect()
    }

    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>> {
        self.engine.check_open()?;
        self.run_batch(prompts, options)
    }

    fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        options.validate()?;
        self.engine.prepare(options)
    }

    fn add_adapter(&self, name: &str, path: &Path) -> Result<()> {
        self.engine.add_adapter(name, path)
    }

    fn drop_adapter(&self, name: &str) -> Result<bool> {
        self.engine.check_open()?;
        Ok(self.engine.drop_adapter(name))
    }

    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        self.engine.check_open()?;
        Ok(Box::new(Batch::new(Arc::clone(&self.engine))))
    }

    fn as_attention_inspector(&self) -> Option<&dyn AttentionInspector> {
        Some(self.unless_part()?)
    }

    fn as_routed(&self) -> Option<&dyn RoutedModel> {
        self.engine.is_routed().then_some(self)
    }

    fn as_profiled(&self) -> Option<&dyn ProfiledModel> {
        Some(self.unless_part()?)
    }

    fn as_steerable(&self) -> Option<&dyn SteerableModel> {
        Some(self)
    }

    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        Some(self)
    }

    fn as_rerank_model(&self) -> Option<&dyn RerankModel> {
        self.engine
            .sentence()
            .scorer()
            .map(|_| self as &dyn RerankModel)
    }

    fn as_prompt_cache(&self) -> Option<&dyn PromptCacheModel> {
        Some(self.unless_part()?)
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

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }

    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        Some(self.unless_part()?)
    }
}

impl PromptCacheModel for MlxModel {
    fn save_prompt_cache(
        &self,
        prompt: &Prompt,
        path: &Path,
        interrupt: &Interrupt,
    ) -> Result<usize> {
        let engine = &self.engine;
        let ids = engine.encode_prompt(prompt)?;
        engine.check_prompt(&ids)?;
        let decoder = engine.decoder()?;
        let (identity, epoch) = engine.identity();
        engine.scope(|| {
            let caches = decoder.new_caches(engine.cache_options());
            let mut caches = caches.for_sequence(ids.len());
            let step = GenerateOptions::default().prefill.prefill_step_size;
            let check = || engine.check_open().and_then(|()| interrupt.check());
            check()?;
            forward_prompt(decoder.as_ref(), &ids, (&mut caches, None), step, &mut |_| check())?;
            cache::eval_caches(&caches).map_err(engine_error("prefill"))?;
            check()?;
            if engine.prefixes().epoch() != epoch {
                return Err(Error::new(
                    ErrorKind::Engine,
                    "the adapter changed while the prompt was computed; nothing was saved, call again",
                ));
            }
            let source = engine.source().to_string_lossy();
            cache::file::save(path, (&identity, &source), &ids, &caches)?;
            let n = ids.len();
            engine.prefixes().put(epoch, ids, caches);
            Ok(n)
        })
    }

    fn load_prompt_cache(&self, path: &Path) -> Result<Vec<u32>> {
        let (loaded, epoch) = self.read_prompt_cache(path)?;
        let tokens = loaded.tokens.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "the file has no tokens (mlx-lm's have none); use continue_prompt_cache",
            )
            .with_path(path)
        })?;
        let prefixes = self.engine.prefixes();
        prefixes.put(epoch, tokens.clone(), loaded.caches);
        Ok(tokens)
    }

    fn prompt_cache_len(&self, path: &Path) -> Result<usize> {
        cache::file::positions(path)
    }

    fn continue_prompt_cache(
        &self,
        path: &Path,
        prompt: &Prompt,
        options: &GenerateOptions,
    ) -> Result<TokenStream> {
        let engine = &self.engine;
        options.validate()?;
        let mut more = match prompt {
            // The start tokens are already in the file, so they are not added again.
            Prompt::Text(text) => engine.text().tokenizer().encode(text, false)?,
            other => engine.encode_prompt(other)?,
        };
        let (loaded, epoch) = self.read_prompt_cache(path)?;
        let generation = match loaded.tokens {
            Some(mut tokens) => {
                // The file's caches were computed without edits and without a named adapter.
                let salt = salt(&options.prefill, None, None);
                let prefixes = engine.prefixes();
                prefixes.put_salted((epoch, salt.as_deref()), tokens.clone(), loaded.caches);
                tokens.append(&mut more);
                self.start(tokens, options)
            }
            None => {
                let before = (loaded.caches, epoch);
                Generation::continuing(Arc::clone(engine), before, more, options)
            }
        };
        Ok(TokenStream::new(generation?))
    }
}

impl MlxModel {
    /// Reads a prompt cache. Returns its content and the adapter's epoch in which it was read.
    fn read_prompt_cache(&self, path: &Path) -> Result<(cache::file::Kept, u64)> {
        let engine = &self.engine;
        let decoder = engine.decoder()?;
        let (identity, epoch) = engine.identity();
        let loaded = engine.scope(|| {
            let empty = || decoder.new_caches(engine.cache_options());
            cache::file::load(path, &identity, empty(), &mut || {
                let mut caches = empty();
                forward_prompt(decoder.as_ref(), &[0], (&mut caches, None), 1, &mut |_| {
                    Ok(())
                })?;
                cache::eval_caches(&caches).map_err(engine_error("prompt cache"))?;
                Ok(caches)
            })
        })?;
        if let Some(tokens) = &loaded.tokens {
            engine.check_prompt(tokens)?;
        }
        Ok((loaded, epoch))
    }
}

impl RoutedModel for MlxModel {
    fn feed_forward_plan(&self) -> &FeedForwardPlan {
        self.engine.feed_forward()
    }

    fn has_dense(&self) -> bool {
        self.engine.has_dense()
    }

    fn routed_logits(
        &self,
        prompt: &Prompt,
        dense: bool,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput> {
        let run = || self.logits(prompt, false, interrupt);
        match dense {
            false => run(),
            true if self.has_dense() => as_trained(run),
            true => Err(Error::new(
                ErrorKind::Unsupported,
                "the dense feed-forward parts are not loaded (walk_only)",
            )),
        }
    }
}

impl MlxModel {
    /// Computes the logits as [`TokenModel::logits`] does, and applies edits of activations.
    fn edited_logits(
        &self,
        prompt: &Prompt,
        all: bool,
        steering: Option<&Steering>,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput> {
        let engine = &self.engine;
        let ids = engine.encode_prompt(prompt)?;
        engine.check_prompt(&ids)?;
        let decoder = engine.decoder()?;
        let logits = engine.scope(|| {
            let of = (&**engine, decoder.as_ref());
            let mut edits = edits_of(of, steering, ids.len(), interrupt)?;
            let caches = decoder.new_caches(engine.cache_options());
            let mut caches = caches.for_sequence(ids.len());
            let mut parts = Vec::new();
            let step = GenerateOptions::default().prefill.prefill_step_size;
            let check = || engine.check_open().and_then(|()| interrupt.check());
            check()?;
            if all {
                for tokens in ids.chunks(step) {
                    check()?;
                    let part = forward(
                        decoder.as_ref(),
                        tokens,
                        (&mut caches, hook(&mut edits)),
                        Positions::All,
                    )
                    .and_then(|part| eval([&part]).map(|()| part))
                    .map_err(engine_error("logits"))?;
                    parts.push(part);
                }
            } else {
                parts.push(forward_prompt(
                    decoder.as_ref(),
                    &ids,
                    (&mut caches, hook(&mut edits)),
                    step,
                    &mut |_| check(),
                )?);
            }
            concatenate(&parts.iter().collect::<Vec<_>>(), 1)
                .and_then(|logits| logits.to_f32_vec())
                .map_err(engine_error("logits"))
        })?;
        let shape = vec![if all { ids.len() } else { 1 }, engine.info().vocab_size];
        Ok(LogitsOutput::new(ids, shape, logits))
    }
}

/// Decodes token ids to text. All ids must be in the vocabulary.
fn decoded(engine: &Engine, ids: &[u32]) -> Result<String> {
    let tokenizer = engine.text().tokenizer();
    if let Some(id) = ids.iter().find(|&&id| tokenizer.token_text(id).is_none()) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("token {id} is not in the tokenizer's vocabulary"),
        ));
    }
    tokenizer.decode(ids)
}

/// Encodes a text as [`TextModel::generate`] would with this `add_special`. Returns the token ids.
fn encoded(engine: &Engine, text: &str, add_special: bool) -> Result<Vec<u32>> {
    match add_special {
        true => engine.text().encode_prompt(text),
        false => engine.text().tokenizer().encode(text, false),
    }
}

impl TokenModel for MlxModel {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        encoded(&self.engine, text, add_special)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        decoded(&self.engine, ids)
    }

    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt> {
        self.engine.text().prepare_chat(prompt)
    }

    fn chat_template(&self) -> Option<&str> {
        let template = self.engine.text().template()?;
        Some(template.for_tools().source())
    }

    fn logits(&self, prompt: &Prompt, all: bool, interrupt: &Interrupt) -> Result<LogitsOutput> {
        self.edited_logits(prompt, all, None, interrupt)
    }

    fn token_logprobs(&self, prompt: &Prompt, interrupt: &Interrupt) -> Result<Vec<f32>> {
        let ids = self.engine.encode_prompt(prompt)?;
        self.engine.check_prompt(&ids)?;
        crate::inspect::token_logprobs(&self.engine, &ids, None, interrupt)
    }

    fn eos_tokens(&self) -> Vec<u32> {
        self.engine.eos_tokens().to_vec()
    }
}
