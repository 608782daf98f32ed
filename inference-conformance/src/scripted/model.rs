//! Implements the contract's traits for scripted models.

use std::path::Path;
use std::sync::Arc;

use inference::{
    Adapter, AttentionInspector, AttentionSnapshot, BatchResult, BatchSession, ChatEnd, ChatPrompt,
    ClassifyResult, EmbedOptions, EmbeddingInfo, EmbeddingModel, Error, ErrorKind, GenerateMetrics,
    GenerateOptions, Interrupt, LogitsOutput, LoraConfig, Message, ModelInfo, Prepared,
    PreparedPrompt, Prompt, Ranking, RerankModel, RerankOptions, Result, TextModel, TokenModel,
    TokenSource, TokenStream, TrainableModel,
};

use super::Scripted;
use super::control::{Asked, Input};
use super::reply::Reply;
use super::run::{Run, Session, Stream};
use super::vocabulary::END;

fn invalid<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOption, message))
}

fn unsupported<T>(what: &str) -> Result<T> {
    let message = format!("this scripted model has no {what}");
    Err(Error::new(ErrorKind::Unsupported, message))
}

/// The default rendering: each message is a line `role: content`.
pub(super) fn render(prompt: &ChatPrompt) -> Result<String> {
    let lines = prompt.messages.iter();
    let lines = lines.map(|message| format!("{}: {}\n", message.role, message.content));
    Ok(lines.collect())
}

impl Scripted {
    /// Starts a request whose reply is `reply`.
    pub(super) fn run(&self, reply: Reply, ids: Arc<[u32]>, options: GenerateOptions) -> Run {
        Run::new(Arc::clone(&self.script), reply, ids, options)
    }

    fn ids(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let ids = match prompt {
            Prompt::Text(text) => self.script.vocabulary.encode(text),
            Prompt::Tokens(ids) => ids.clone(),
            _ => return unsupported("prompts of this kind"),
        };
        if ids.is_empty() {
            return invalid("the prompt is empty; give at least one token");
        }
        self.script.vocabulary.check(&ids)?;
        Ok(ids)
    }

    pub(super) fn begin(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<Run> {
        let ids: Arc<[u32]> = self.ids(prompt)?.into();
        let input = match prompt {
            Prompt::Text(text) => Input::Text(text.clone()),
            _ => {
                let made_of = self.script.control.made_of(&ids);
                made_of.unwrap_or_else(|| Input::Tokens(Arc::clone(&ids)))
            }
        };
        self.ask(input, ids, options)
    }

    fn ask(&self, input: Input, ids: Arc<[u32]>, options: &GenerateOptions) -> Result<Run> {
        options.validate()?;
        self.script.control.check_open()?;
        if let Some(name) = &options.adapter {
            if !self.script.trainable {
                return unsupported("adapters");
            }
            if !self.script.control.adapters().contains(name) {
                return invalid(format!("there is no adapter `{name}`"));
            }
        }
        let asked = Asked {
            text: self.script.vocabulary.decode(&ids, true)?,
            input,
            ids: Arc::clone(&ids),
            options: options.clone(),
        };
        let reply = (self.script.reply)(&asked)?;
        self.script.control.ask(asked);
        Ok(self.run(reply, ids, options.clone()))
    }
}

impl TextModel for Scripted {
    fn add_adapter(&self, name: &str, path: &Path) -> Result<()> {
        self.script.control.check_open()?;
        if !self.script.trainable {
            return unsupported("adapters");
        }
        if !path.join(ScriptedAdapter::FILE).is_file() {
            let missing = Error::new(ErrorKind::ModelNotFound, "there is no adapter here");
            return Err(missing.with_path(path));
        }
        match !name.is_empty() && self.script.control.add_adapter(name) {
            true => Ok(()),
            false => invalid(format!("the adapter's name `{name}` is empty or taken")),
        }
    }

    fn drop_adapter(&self, name: &str) -> Result<bool> {
        self.script.control.check_open()?;
        Ok(self.script.control.drop_adapter(name))
    }

    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        Ok(TokenStream::new(Stream(self.begin(prompt, options)?)))
    }

    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        let prompt = ChatPrompt::new(messages).with_end(ChatEnd::Reply);
        let ids = self.prepare_chat(&prompt)?.ids;
        let run = self.ask(Input::Chat(messages.to_vec()), ids.into(), options)?;
        Ok(TokenStream::new(Stream(run)))
    }

    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>> {
        let mut options = options.clone().with_max_tokens(1);
        options.stop.ignore_eos = true;
        options.validate()?;
        self.script.control.check_open()?;
        let one = |prompt: &Prompt| {
            let token = Stream(self.begin(prompt, &options)?).next().transpose()?;
            let Some(token) = token else {
                return invalid("a stop option leaves no token; leave it out");
            };
            let logits = match return_logits {
                true => Some(self.logits(prompt, false, &Interrupt::new())?.logits),
                false => None,
            };
            Ok(ClassifyResult::new(token, logits))
        };
        prompts.iter().map(one).collect()
    }

    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>> {
        options.validate()?;
        self.script.control.check_open()?;
        let one = |prompt| {
            let mut stream = match self.begin(prompt, options) {
                Ok(run) => Stream(run),
                Err(error) => return BatchResult::failed(Vec::new(), error),
            };
            let mut tokens = Vec::new();
            for token in stream.by_ref() {
                match token {
                    Ok(token) => tokens.push(token),
                    Err(error) => return BatchResult::failed(tokens, error),
                }
            }
            BatchResult::new(tokens, stream.finish_reason())
        };
        Ok(prompts.iter().map(one).collect())
    }

    fn model_type(&self) -> &str {
        &self.script.info.architecture
    }

    fn info(&self) -> ModelInfo {
        self.script.info.clone()
    }

    fn metrics(&self) -> GenerateMetrics {
        self.script.control.metrics()
    }

    fn close(&self) -> Result<()> {
        self.script.control.close();
        Ok(())
    }

    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        self.script.control.check_open()?;
        Ok(Box::new(Session::new(self.clone())))
    }

    fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        (self.script.prepared)(options)?;
        Ok(Prepared::default())
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        (!self.script.opaque).then_some(self)
    }

    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        self.script.trainable.then_some(self)
    }

    fn as_attention_inspector(&self) -> Option<&dyn AttentionInspector> {
        self.script.inspectable.then_some(self)
    }

    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        self.script.embedded.is_some().then_some(self)
    }

    fn as_rerank_model(&self) -> Option<&dyn RerankModel> {
        self.script.reranked.is_some().then_some(self)
    }
}

impl TokenModel for Scripted {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let ids = self.script.vocabulary.encode(text);
        if add_special {
            let input = Input::Text(text.to_owned());
            self.script.control.prepare(&ids, input);
        }
        Ok(ids)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.script.vocabulary.decode(ids, false)
    }

    /// Text of a conversation never becomes a special token.
    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt> {
        let text = (self.script.rendered)(prompt)?;
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        let input = Input::Chat(prompt.messages.clone());
        self.script.control.prepare(&ids, input);
        Ok(PreparedPrompt::new(text, ids))
    }

    fn chat_template(&self) -> Option<&str> {
        self.script.template.as_deref()
    }

    fn logits(&self, prompt: &Prompt, all: bool, interrupt: &Interrupt) -> Result<LogitsOutput> {
        interrupt.check()?;
        self.script.control.check_open()?;
        let Some(logits) = &self.script.logits else {
            return unsupported("logits");
        };
        let ids = self.ids(prompt)?;
        let from = if all { 1 } else { ids.len() };
        let rows: Vec<_> = (from..=ids.len()).map(|n| logits(&ids[..n])).collect();
        let shape = vec![rows.len(), rows[0].len()];
        Ok(LogitsOutput::new(ids, shape, rows.concat()))
    }

    fn eos_tokens(&self) -> Vec<u32> {
        vec![END]
    }
}

/// An adapter of a scripted model. Its file contains the names of its parameters.
#[derive(Debug)]
pub struct ScriptedAdapter(LoraConfig);

impl ScriptedAdapter {
    /// The file that [`Adapter::save`] writes.
    pub const FILE: &str = "adapter.txt";

    /// The projections that an adapter can target.
    const PROJECTIONS: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];

    /// An adapter with this configuration.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if the targets match no projection of attention.
    pub fn new(config: &LoraConfig) -> Result<Self> {
        let adapter = Self(config.clone());
        match adapter.parameter_names().is_empty() {
            true => invalid(format!(
                "the targets match nothing; there are {}",
                Self::PROJECTIONS.join(", ")
            )),
            false => Ok(adapter),
        }
    }
}

impl Adapter for ScriptedAdapter {
    fn parameter_names(&self) -> Vec<String> {
        let targets = self.0.targets.iter();
        let known = targets.filter(|target| Self::PROJECTIONS.contains(&target.as_str()));
        let mut names: Vec<String> = known.cloned().collect();
        names.sort();
        names
    }

    fn num_parameters(&self) -> usize {
        self.0.rank * self.parameter_names().len()
    }

    fn save(&self, path: &Path) -> Result<()> {
        let names = self.parameter_names().join(" ");
        std::fs::create_dir(path)
            .and_then(|()| std::fs::write(path.join(Self::FILE), names))
            .map_err(|e| {
                let message = format!("the adapter cannot be saved: {e}");
                Error::new(ErrorKind::Io, message)
                    .with_path(path)
                    .with_source(e)
            })
    }
}

impl TrainableModel for Scripted {
    fn apply_lora(&self, config: &LoraConfig) -> Result<Box<dyn Adapter>> {
        config.validate()?;
        Ok(Box::new(ScriptedAdapter::new(config)?))
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        TokenModel::encode(self, text, false)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        TokenModel::decode(self, ids)
    }

    fn num_layers(&self) -> usize {
        1
    }
}

/// The attention that a scripted model reports: one layer, whose keys are the prompt's ids.
#[must_use]
pub fn attention(ids: &[u32]) -> AttentionSnapshot {
    let mut s = AttentionSnapshot::default();
    (s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim) = (1, 2, 1, 1);
    s.seq_len = ids.len();
    s.keys = vec![vec![ids.iter().map(|id| *id as f32).collect()]];
    s
}

impl AttentionInspector for Scripted {
    fn inspect_attention(
        &self,
        prompt: &Prompt,
        interrupt: &Interrupt,
    ) -> Result<AttentionSnapshot> {
        interrupt.check()?;
        self.script.control.check_open()?;
        Ok(attention(&self.ids(prompt)?))
    }
}

impl EmbeddingModel for Scripted {
    fn embedding_info(&self) -> EmbeddingInfo {
        let embedded = self.script.embedded.as_ref();
        embedded.map(|(info, _)| info.clone()).unwrap_or_default()
    }

    fn embedding_tokens(&self, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>> {
        let info = self.embedding_info();
        options.validate(&info)?;
        let mut ids = self.ids(prompt)?;
        let limits = [info.max_length, options.max_length];
        let most = limits.into_iter().flatten().min().unwrap_or(usize::MAX);
        if ids.len() > most && !options.truncate {
            let message = format!("the text has {} tokens; at most {most} are read", ids.len());
            return invalid(message);
        }
        ids.truncate(most);
        Ok(ids)
    }

    fn embed(
        &self,
        prompts: &[Prompt],
        options: &EmbedOptions,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<f32>>> {
        self.script.control.check_open()?;
        let Some((info, embed)) = &self.script.embedded else {
            return unsupported("embeddings");
        };
        let one = |prompt: &Prompt| {
            interrupt.check()?;
            let mut vector = embed(&self.embedding_tokens(prompt, options)?);
            vector.truncate(options.dimensions.unwrap_or(usize::MAX));
            if options.normalize.unwrap_or(info.normalize) {
                let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
                vector.iter_mut().for_each(|x| *x /= norm);
            }
            Ok(vector)
        };
        prompts.iter().map(one).collect()
    }
}

impl RerankModel for Scripted {
    fn rerank(
        &self,
        query: &str,
        documents: &[String],
        options: &RerankOptions,
        interrupt: &Interrupt,
    ) -> Result<Ranking> {
        self.script.control.check_open()?;
        let Some(score) = &self.script.reranked else {
            return unsupported("reranking");
        };
        if options.max_length == Some(0) {
            return invalid("max_length is 0; it must be at least 1");
        }
        let one = |document: &String| {
            interrupt.check()?;
            score(query, document, options)
        };
        let scores = documents.iter().map(one).collect::<Result<_>>()?;
        let tokens = documents.iter().map(|d| d.len() + query.len()).sum();
        Ok(Ranking::new(scores, tokens))
    }
}
