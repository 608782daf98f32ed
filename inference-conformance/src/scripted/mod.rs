//! A backend whose models reply by a script, for tests of programs and for authors of backends.
//!
//! A [`Scripted`] model has fixed or computed replies. It honors stop strings and stop tokens,
//! logits processors, cancellation and deadlines, as the contract requires. It waits, fails or
//! panics where the script says so. It computes no probabilities, so it ignores options that change
//! them.
//!
//! ```
//! use inference::{ErrorKind, GenerateOptions, TextModel};
//! use inference_conformance::scripted::{Scripted, Step};
//!
//! # fn main() -> inference::Result<()> {
//! let model = Scripted::replies(["Par", "is", "."]).after(2, Step::fail(ErrorKind::Engine));
//! let mut stream = model.generate(&"The capital of France?".into(), &GenerateOptions::new())?;
//! assert_eq!(stream.next().unwrap()?.text, "Par");
//! assert_eq!(stream.next().unwrap()?.text, "is");
//! assert_eq!(stream.next().unwrap().unwrap_err().kind(), ErrorKind::Engine);
//! assert_eq!(model.asked(), ["text The capital of France?"]);
//! # Ok(()) }
//! ```
//!
//! [`ScriptedBackend`] registers models under a name. [`Reply::into_stream`] creates a stream
//! without a model.

mod backend;
mod control;
mod model;
mod reply;
mod run;
mod vocabulary;

use std::sync::Arc;
use std::time::Duration;

use inference::{
    ChatPrompt, EmbeddingInfo, GenerateMetrics, GenerateOptions, ModelInfo, RerankOptions, Result,
};

pub use backend::ScriptedBackend;
pub use control::{Asked, Control, Input};
pub use model::{ScriptedAdapter, attention};
pub use reply::{Reply, Step};
pub use vocabulary::{END, Vocabulary};

type Replying = dyn Fn(&Asked) -> Result<Reply> + Send + Sync;
type Measuring = dyn Fn(&mut GenerateMetrics) + Send + Sync;
type Rendering = dyn Fn(&ChatPrompt) -> Result<String> + Send + Sync;
type Preparing = dyn Fn(&GenerateOptions) -> Result<()> + Send + Sync;
/// A function that computes logits or a vector from ids.
type Computing = dyn Fn(&[u32]) -> Vec<f32> + Send + Sync;
type Reranking = dyn Fn(&str, &str, &RerankOptions) -> Result<f32> + Send + Sync;

/// All settings of a model. Running requests share them.
#[derive(Clone)]
struct Script {
    reply: Arc<Replying>,
    vocabulary: Vocabulary,
    info: ModelInfo,
    pace: Duration,
    control: Arc<Control>,
    measured: Arc<Measuring>,
    rendered: Arc<Rendering>,
    prepared: Arc<Preparing>,
    logits: Option<Arc<Computing>>,
    embedded: Option<(EmbeddingInfo, Arc<Computing>)>,
    reranked: Option<Arc<Reranking>>,
    template: Option<String>,
    opaque: bool,
    trainable: bool,
    inspectable: bool,
}

/// A model that replies by a script. Clones share their [`Control`].
#[derive(Clone)]
pub struct Scripted {
    script: Arc<Script>,
}

impl Scripted {
    /// A model that replies to each request with these texts, one token each. Ids count from 0.
    pub fn replies<S: Into<String>>(pieces: impl IntoIterator<Item = S>) -> Self {
        let pieces: Vec<String> = pieces.into_iter().map(Into::into).collect();
        Self::computed(move |_| Ok(Reply::pieces(&pieces)))
    }

    /// A model whose reply depends on the request. An error refuses the request.
    pub fn computed(reply: impl Fn(&Asked) -> Result<Reply> + Send + Sync + 'static) -> Self {
        let mut info = ModelInfo::default();
        info.architecture = String::from("scripted");
        info.vocab_size = Vocabulary::new().len();
        info.device = String::from("cpu");
        Self {
            script: Arc::new(Script {
                reply: Arc::new(reply),
                vocabulary: Vocabulary::new(),
                info,
                pace: Duration::ZERO,
                control: Arc::default(),
                measured: Arc::new(|_| {}),
                rendered: Arc::new(model::render),
                prepared: Arc::new(|_| Ok(())),
                logits: None,
                embedded: None,
                reranked: None,
                template: None,
                opaque: false,
                trainable: false,
                inspectable: false,
            }),
        }
    }

    /// A model in which `next` computes each token from the ids so far. The token's logit is 1, and
    /// all other logits are 0.
    pub fn predicting(next: impl Fn(&[u32]) -> u32 + Send + Sync + 'static) -> Self {
        let next = Arc::new(next);
        let after = Arc::clone(&next);
        let model = Self::computed(move |asked| {
            let (mut ids, next) = (asked.ids.to_vec(), Arc::clone(&next));
            Ok(Reply::ids(std::iter::from_fn(move || {
                ids.push(next(&ids));
                ids.last().copied()
            })))
        });
        model.with_logits(move |ids| {
            let mut row = vec![0.0; Vocabulary::new().len()];
            if let Some(logit) = row.get_mut(after(ids) as usize) {
                *logit = 1.0;
            }
            row
        })
    }

    fn with(mut self, change: impl FnOnce(&mut Script)) -> Self {
        change(Arc::make_mut(&mut self.script));
        self
    }

    /// Inserts `step` into each reply, after `n` tokens.
    #[must_use]
    pub fn after(self, n: usize, step: Step) -> Self {
        let reply = Arc::clone(&self.script.reply);
        let changed = move |asked: &Asked| Ok(reply(asked)?.after(n, step.clone()));
        self.with(|script| script.reply = Arc::new(changed))
    }

    /// Waits for `pace` before each step, to imitate the time of a forward pass.
    #[must_use]
    pub fn with_pace(self, pace: Duration) -> Self {
        self.with(|script| script.pace = pace)
    }

    /// Sets the special tokens.
    #[must_use]
    pub fn with_vocabulary(self, vocabulary: Vocabulary) -> Self {
        self.with(|script| {
            script.info.vocab_size = vocabulary.len();
            script.vocabulary = vocabulary;
        })
    }

    /// Changes the [`ModelInfo`] that the model reports.
    #[must_use]
    pub fn with_info(self, change: impl FnOnce(&mut ModelInfo)) -> Self {
        self.with(|script| change(&mut script.info))
    }

    /// Sets a function that changes the metrics of each request, for example to make times
    /// reproducible.
    #[must_use]
    pub fn with_metrics(
        self,
        change: impl Fn(&mut GenerateMetrics) + Send + Sync + 'static,
    ) -> Self {
        self.with(|script| script.measured = Arc::new(change))
    }

    /// Sets how conversations are rendered. By default, each message is a line `role: content`.
    #[must_use]
    pub fn with_rendering(
        self,
        render: impl Fn(&ChatPrompt) -> Result<String> + Send + Sync + 'static,
    ) -> Self {
        self.with(|script| script.rendered = Arc::new(render))
    }

    /// Sets the text that the model reports as its chat template.
    #[must_use]
    pub fn with_template(self, template: impl Into<String>) -> Self {
        self.with(|script| {
            script.template = Some(template.into());
            script.info.has_chat_template = true;
        })
    }

    /// Sets the function that [`TextModel::prepare`](inference::TextModel::prepare) calls.
    #[must_use]
    pub fn with_preparation(
        self,
        prepare: impl Fn(&GenerateOptions) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.with(|script| script.prepared = Arc::new(prepare))
    }

    /// Sets the function that computes a token's logits from the preceding ids. Replies do not
    /// depend on it.
    #[must_use]
    pub fn with_logits(self, logits: impl Fn(&[u32]) -> Vec<f32> + Send + Sync + 'static) -> Self {
        self.with(|script| script.logits = Some(Arc::new(logits)))
    }

    /// Makes the model an [`EmbeddingModel`](inference::EmbeddingModel). `embed` computes a
    /// prompt's vector from its ids.
    #[must_use]
    pub fn with_embeddings(
        self,
        info: EmbeddingInfo,
        embed: impl Fn(&[u32]) -> Vec<f32> + Send + Sync + 'static,
    ) -> Self {
        self.with(|script| script.embedded = Some((info, Arc::new(embed))))
    }

    /// Makes the model a [`RerankModel`](inference::RerankModel). `score` computes the score of a
    /// document for a query.
    #[must_use]
    pub fn with_reranking(
        self,
        score: impl Fn(&str, &str, &RerankOptions) -> Result<f32> + Send + Sync + 'static,
    ) -> Self {
        self.with(|script| script.reranked = Some(Arc::new(score)))
    }

    /// Makes the model a [`TrainableModel`](inference::TrainableModel), to which adapters can be
    /// added. Its adapters do not affect replies, except through
    /// [`Asked::options`].
    #[must_use]
    pub fn with_training(self) -> Self {
        self.with(|script| script.trainable = true)
    }

    /// Makes the model an [`AttentionInspector`](inference::AttentionInspector). The keys of a
    /// prompt are its ids; see [`attention`].
    #[must_use]
    pub fn with_attention(self) -> Self {
        self.with(|script| script.inspectable = true)
    }

    /// Removes access to the [`TokenModel`](inference::TokenModel), which models have by default.
    #[must_use]
    pub fn opaque(self) -> Self {
        self.with(|script| script.opaque = true)
    }

    /// The state that requests and sessions share.
    #[must_use]
    pub fn control(&self) -> &Arc<Control> {
        &self.script.control
    }

    /// The latest requests as short texts, such as `text hi`; see [`Input`].
    #[must_use]
    pub fn asked(&self) -> Vec<String> {
        let asked = self.control().asked();
        asked.iter().map(|asked| asked.input.to_string()).collect()
    }
}
