//! The models of rank 0 in a served group. Before each computing call, rank 0 sends an [`Order`]:
//! the other ranks must make the same call. A request can also end for an external reason, such as
//! a deadline or a disconnected client. Only rank 0 checks such reasons. It orders the other ranks
//! to end the request.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use inference::{
    BatchEvent, BatchResult, BatchSession, ChatPrompt, ClassifyResult, EmbedOptions, EmbeddingInfo,
    EmbeddingModel, Error, ErrorKind, GenerateMetrics, GenerateOptions, Interrupt, LogitsOutput,
    Message, ModelInfo, Prepared, PreparedPrompt, Prompt, RequestId, Result, TextModel, TokenModel,
    TokenStream,
};
use parking_lot::Mutex;

use crate::order::{Order, Seen};

/// Sends an encoded [`Order`] to all other ranks.
type Say = dyn Fn(&[u8]) -> Result<()> + Send;

/// Sends the orders of rank 0. A lock protects the leader during each call, so all ranks make their
/// calls in the same sequence.
pub struct Leader {
    say: Box<Say>,
    sessions: u64,
}

impl Leader {
    /// Creates a leader that sends encoded orders with `say`.
    pub fn new(say: impl Fn(&[u8]) -> Result<()> + Send + 'static) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            say: Box::new(say),
            sessions: 0,
        }))
    }

    /// Tells all ranks that the server has ended.
    ///
    /// # Errors
    /// If the other ranks cannot be reached.
    pub fn stop(leader: &Mutex<Self>) -> Result<()> {
        leader.lock().order(&Order::Stop)
    }

    /// Sends an order.
    ///
    /// # Errors
    /// If the other ranks cannot be reached.
    fn order(&self, order: &Order) -> Result<()> {
        let bytes = serde_json::to_vec(order).map_err(|e| {
            Error::new(ErrorKind::Engine, "an order cannot be written").with_source(e)
        })?;
        (self.say)(&bytes)
    }
}

/// A model that all ranks compute together, as the server sees it.
pub struct LedModel {
    model: Box<dyn TextModel>,
    number: usize,
    leader: Arc<Mutex<Leader>>,
}

impl LedModel {
    /// Wraps `model`. All ranks know the model by the same `number`.
    pub fn new(model: Box<dyn TextModel>, number: usize, leader: Arc<Mutex<Leader>>) -> Self {
        Self {
            model,
            number,
            leader,
        }
    }

    fn tokens(&self) -> Result<&dyn TokenModel> {
        self.model
            .as_token_model()
            .ok_or_else(|| alone("token ids"))
    }
}

/// The error for a call that the ranks cannot make together.
fn alone(what: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("a model that several processes serve gives no {what}"),
    )
}

impl TextModel for LedModel {
    fn generate(&self, _: &Prompt, _: &GenerateOptions) -> Result<TokenStream> {
        Err(alone("replies but those of a session"))
    }

    fn chat(&self, _: &[Message], _: &GenerateOptions) -> Result<TokenStream> {
        Err(alone("replies but those of a session"))
    }

    fn classify(&self, _: &[Prompt], _: &GenerateOptions, _: bool) -> Result<Vec<ClassifyResult>> {
        Err(alone("classes"))
    }

    fn batch_generate(&self, _: &[Prompt], _: &GenerateOptions) -> Result<Vec<BatchResult>> {
        Err(alone("replies but those of a session"))
    }

    fn model_type(&self) -> &str {
        self.model.model_type()
    }

    fn info(&self) -> ModelInfo {
        self.model.info()
    }

    fn metrics(&self) -> GenerateMetrics {
        self.model.metrics()
    }

    fn close(&self) -> Result<()> {
        self.model.close()
    }

    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        let mut leader = self.leader.lock();
        let number = leader.sessions;
        leader.order(&Order::Begin {
            model: self.number,
            session: number,
        })?;
        leader.sessions += 1;
        Ok(Box::new(LedSession {
            session: self.model.batch_session()?,
            number,
            interrupts: BTreeMap::new(),
            seen: Seen::default(),
            leader: Arc::clone(&self.leader),
        }))
    }

    fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        self.model.prepare(options)
    }

    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        self.model.as_embedding_model()?;
        Some(self)
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        self.model.as_token_model()?;
        Some(self)
    }
}

impl EmbeddingModel for LedModel {
    fn embedding_info(&self) -> EmbeddingInfo {
        let model = self.model.as_embedding_model();
        model
            .map(EmbeddingModel::embedding_info)
            .unwrap_or_default()
    }

    fn embedding_tokens(&self, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>> {
        let model = self.model.as_embedding_model();
        let model = model.ok_or_else(|| alone("embeddings"))?;
        model.embedding_tokens(prompt, options)
    }

    /// Checks the interrupt only before the call. If rank 0 stopped during the call, the other
    /// ranks would not.
    fn embed(
        &self,
        prompts: &[Prompt],
        options: &EmbedOptions,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<f32>>> {
        interrupt.check()?;
        let model = self.model.as_embedding_model();
        let model = model.ok_or_else(|| alone("embeddings"))?;
        let ids = prompts.iter();
        let ids = ids.map(|prompt| model.embedding_tokens(prompt, options));
        let ids = ids.collect::<Result<Vec<_>>>()?;
        let prompts: Vec<Prompt> = ids.iter().cloned().map(Prompt::Tokens).collect();
        let leader = self.leader.lock();
        leader.order(&Order::Embed {
            model: self.number,
            prompts: ids,
            options: options.clone(),
        })?;
        model.embed(&prompts, options, &Interrupt::new())
    }
}

/// Supports only functions that need no computation.
impl TokenModel for LedModel {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.tokens()?.encode(text, add_special)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokens()?.decode(ids)
    }

    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt> {
        self.tokens()?.prepare_chat(prompt)
    }

    fn chat_template(&self) -> Option<&str> {
        self.model.as_token_model()?.chat_template()
    }

    fn logits(&self, _: &Prompt, _: bool, _: &Interrupt) -> Result<LogitsOutput> {
        Err(alone("logits but those of a session"))
    }

    fn eos_tokens(&self) -> Vec<u32> {
        self.model
            .as_token_model()
            .map_or_else(Vec::new, TokenModel::eos_tokens)
    }
}

/// A session that exists in all ranks.
struct LedSession {
    session: Box<dyn BatchSession>,
    number: u64,
    /// The interrupts of each request. The other ranks do not get them, because each rank would
    /// notice them at another step.
    interrupts: BTreeMap<RequestId, Interrupt>,
    seen: Seen,
    leader: Arc<Mutex<Leader>>,
}

impl BatchSession for LedSession {
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId> {
        let Prompt::Tokens(tokens) = prompt else {
            return Err(alone("replies to prompts that are no tokens"));
        };
        if !options.constraints.logits_processors.is_empty() {
            return Err(alone(
                "replies with logits processors, such as a budget of thinking",
            ));
        }
        options.check_interrupt()?;
        let shared = options.clone().with_interrupt(Interrupt::new());
        let leader = self.leader.lock();
        leader.order(&Order::Add {
            session: self.number,
            tokens: tokens.clone(),
            options: Box::new(shared.clone()),
        })?;
        let row = self.session.add(prompt, &shared)?;
        self.interrupts.insert(row, options.interrupt.clone());
        Ok(row)
    }

    fn remove(&mut self, row: RequestId) -> bool {
        self.interrupts.remove(&row);
        let leader = self.leader.lock();
        let order = Order::Remove {
            session: self.number,
            row,
        };
        // If the other ranks are gone, no further step follows.
        leader.order(&order).is_ok() && self.session.remove(row)
    }

    fn len(&self) -> usize {
        self.session.len()
    }

    fn step(&mut self) -> Result<VecDeque<BatchEvent>> {
        let ended = self.interrupts.iter();
        let ended = ended.filter_map(|(row, interrupt)| Some((*row, interrupt.check().err()?)));
        let mut events = VecDeque::new();
        for (row, error) in ended.collect::<Vec<_>>() {
            self.remove(row);
            events.push_back(BatchEvent::Failed { row, error });
        }
        let leader = self.leader.lock();
        leader.order(&Order::Step {
            session: self.number,
            seen: self.seen.word(),
        })?;
        let computed = self.session.step()?;
        drop(leader);
        self.seen.step(&computed);
        for event in &computed {
            if !matches!(event, BatchEvent::Token { .. }) {
                self.interrupts.remove(&event.row());
            }
        }
        events.extend(computed);
        Ok(events)
    }
}

impl Drop for LedSession {
    fn drop(&mut self) {
        let order = Order::End {
            session: self.number,
        };
        // If the other ranks are gone, they need no order.
        let _ = self.leader.lock().order(&order);
    }
}
