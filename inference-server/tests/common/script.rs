//! A model whose prompt is its script. Tokens are bytes; 256 ends a text.
//!
//! It replies with the text after the last `say:` of the prompt, up to a new line, else with
//! `hello world`. Words anywhere in the prompt make it misbehave. `!long` continues until it is
//! stopped, `!prefill` computes the prompt in many steps, and `!fail` fails one request at its
//! third token. `!error` fails the whole step, `!panic` panics in a step, `!addpanic` panics when
//! it is added, and `!refuse` is refused as invalid. In a grammar, `!badgrammar` is refused and
//! `!preparepanic` panics, both at preparation.
//!
//! `⏎` in a reply is a new line. With [`Script::writing`] the model has a chat template, and
//! special tokens that a reply writes by name.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inference::{
    BatchEvent, BatchResult, BatchSession, Capabilities, ChatEnd, ChatPrompt, ClassifyResult,
    EmbedOptions, EmbeddingInfo, EmbeddingModel, Error, ErrorKind, FinishReason, GenerateMetrics,
    GenerateOptions, Grammar, Interrupt, LogitsOutput, LogitsProcessor, LogitsProcessorFactory,
    Message, ModelInfo, Prepared, Prompt, Ranking, RequestId, RerankModel, RerankOptions, Result,
    SamplingDefaults, StopCause, TextModel, Token, TokenLogprobs, TokenModel, TokenStream,
    TopLogprob,
};

const END: u32 = 256;
const VOCABULARY: usize = 257;
/// The number of steps for a prompt with `!prefill`.
const PREFILL: usize = 1_000_000;

/// State that tests read and change.
#[derive(Default)]
pub struct State {
    rows: AtomicUsize,
    pub peak: AtomicUsize,
    pub added: AtomicUsize,
    pub sessions: AtomicUsize,
    /// No step ends while the gate is closed.
    gate: AtomicBool,
    pub options: Mutex<Vec<GenerateOptions>>,
    pub prompts: Mutex<Vec<String>>,
    pub closed: AtomicBool,
    /// No grammar is compiled while this is set.
    held: AtomicBool,
    compiling: AtomicUsize,
    /// The compiled grammars, and the number compiled inside a session.
    compiled: Mutex<Vec<Grammar>>,
    pub compiled_in_session: AtomicUsize,
}

impl State {
    pub fn rows(&self) -> usize {
        self.rows.load(Ordering::SeqCst)
    }

    /// Stops all steps.
    pub fn shut(&self) {
        self.gate.store(true, Ordering::SeqCst);
    }

    pub fn open(&self) {
        self.gate.store(false, Ordering::SeqCst);
    }

    /// Sets whether the compilation of grammars is held.
    pub fn hold_grammars(&self, hold: bool) {
        self.held.store(hold, Ordering::SeqCst);
    }

    /// The number of grammars that are being compiled.
    pub fn compiling(&self) -> usize {
        self.compiling.load(Ordering::SeqCst)
    }

    fn compile(&self, options: &GenerateOptions, in_session: bool) {
        let Some(grammar) = &options.constraints.grammar else {
            return;
        };
        if self.compiled.lock().unwrap().contains(grammar) {
            return;
        }
        self.compiled_in_session
            .fetch_add(usize::from(in_session), Ordering::SeqCst);
        self.compiling.fetch_add(1, Ordering::SeqCst);
        while self.held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.compiling.fetch_sub(1, Ordering::SeqCst);
        keep(&self.compiled, grammar.clone());
    }

    pub fn last_options(&self) -> GenerateOptions {
        self.options.lock().unwrap().last().unwrap().clone()
    }

    pub fn last_prompt(&self) -> String {
        self.prompts.lock().unwrap().last().unwrap().clone()
    }
}

/// Records an item. Only the latest items stay, so that the memory of a long run is bounded.
fn keep<T>(list: &Mutex<Vec<T>>, item: T) {
    let mut list = list.lock().unwrap();
    if list.len() == 64 {
        list.remove(0);
    }
    list.push(item);
}

pub fn capabilities() -> Capabilities {
    Capabilities::new()
        .with_streaming()
        .with_chat()
        .with_logits()
        .with_seeds()
        .with_logprobs()
        .with_grammars()
        .with_batch_sessions()
        .with_embeddings()
}

pub struct Script {
    pub state: Arc<State>,
    template: Option<&'static str>,
    specials: &'static [&'static str],
    sampling: SamplingDefaults,
}

impl Script {
    pub fn new() -> Self {
        Self {
            state: Arc::default(),
            template: None,
            specials: &[],
            sampling: SamplingDefaults::default(),
        }
    }

    /// The same model with files that recommend this sampling.
    pub fn recommending(self, sampling: SamplingDefaults) -> Self {
        Self { sampling, ..self }
    }

    /// A model with this chat template and these special tokens.
    pub fn writing(template: &'static str, specials: &'static [&'static str]) -> Self {
        Self {
            template: Some(template),
            specials,
            ..Self::new()
        }
    }
}

fn unsupported<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "not in the script"))
}

impl TextModel for Script {
    fn generate(&self, _: &Prompt, _: &GenerateOptions) -> Result<TokenStream> {
        unsupported()
    }
    fn chat(&self, _: &[Message], _: &GenerateOptions) -> Result<TokenStream> {
        unsupported()
    }
    fn classify(&self, _: &[Prompt], _: &GenerateOptions, _: bool) -> Result<Vec<ClassifyResult>> {
        unsupported()
    }
    fn batch_generate(&self, _: &[Prompt], _: &GenerateOptions) -> Result<Vec<BatchResult>> {
        unsupported()
    }
    fn model_type(&self) -> &str {
        "script"
    }
    fn info(&self) -> ModelInfo {
        let mut info = ModelInfo::default();
        info.architecture = String::from("script");
        info.vocab_size = VOCABULARY + self.specials.len();
        info.hidden_size = 2;
        // A token takes 16 bytes: a key and a value of two numbers.
        (info.num_layers, info.num_kv_heads, info.head_dim) = (1, 1, 2);
        info.context_length = Some(1_000_000);
        info.has_chat_template = true;
        info.sampling = self.sampling;
        info.device = String::from("cpu");
        info
    }
    fn metrics(&self) -> GenerateMetrics {
        GenerateMetrics::default()
    }
    fn close(&self) -> Result<()> {
        self.state.closed.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        self.state.sessions.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Session {
            state: Arc::clone(&self.state),
            specials: self.specials,
            rows: BTreeMap::new(),
            next: 0,
        }))
    }
    fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        let text = format!("{:?}", options.constraints.grammar);
        assert!(!text.contains("!preparepanic"), "asked to when preparing");
        if text.contains("!badgrammar") {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "the grammar is no grammar",
            ));
        }
        self.state.compile(options, false);
        Ok(Prepared::default())
    }
    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }
    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        Some(self)
    }
    fn as_rerank_model(&self) -> Option<&dyn RerankModel> {
        // The tests serve a model without and one with this ability.
        self.template.is_none().then_some(self)
    }
}

impl TokenModel for Script {
    fn encode(&self, text: &str, _: bool) -> Result<Vec<u32>> {
        let (mut ids, mut rest) = (Vec::new(), text);
        while let Some(first) = rest.chars().next() {
            let special = self.specials.iter().position(|s| rest.starts_with(s));
            let n = match special {
                Some(i) => {
                    ids.push(END + 1 + i as u32);
                    self.specials[i].len()
                }
                None => {
                    let n = first.len_utf8();
                    ids.extend(rest[..n].bytes().map(u32::from));
                    n
                }
            };
            rest = &rest[n..];
        }
        Ok(ids)
    }
    fn decode(&self, ids: &[u32]) -> Result<String> {
        let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
    fn render_chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let end = match add_generation_prompt {
            true => ChatEnd::Reply,
            false => ChatEnd::Messages,
        };
        self.render_chat_with(&ChatPrompt::new(messages).with_end(end))
    }
    fn encode_chat_with(&self, prompt: &ChatPrompt) -> Result<Vec<u32>> {
        // Text in a conversation never becomes a special token.
        let text = self.render_chat_with(prompt)?;
        Ok(text.bytes().map(u32::from).collect())
    }
    fn render_chat_with(&self, prompt: &ChatPrompt) -> Result<String> {
        if prompt
            .messages
            .iter()
            .any(|m| m.content.contains("!template"))
        {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                "line 3: no such filter",
            ));
        }
        let mut text = String::new();
        for tool in &prompt.tools {
            text.push_str(&format!("tool {}\n", tool.name));
        }
        for (name, value) in &prompt.template {
            text.push_str(&format!("{name}={value}\n"));
        }
        for m in &prompt.messages {
            text.push_str(&format!("{}: {}\n", m.role, m.content));
            for call in &m.tool_calls {
                text.push_str(&format!("call {} {:?}\n", call.name, call.arguments));
            }
        }
        if prompt.end == ChatEnd::LastMessage {
            text.pop();
        }
        Ok(text)
    }
    fn chat_template(&self) -> Option<&str> {
        self.template
    }
    fn logits(&self, _: &Prompt, _: bool) -> Result<LogitsOutput> {
        unsupported()
    }
    fn eos_tokens(&self) -> Vec<u32> {
        vec![END]
    }
}

/// The score of a document is the number of its bytes that occur in the query.
impl RerankModel for Script {
    fn rerank(
        &self,
        query: &str,
        documents: &[String],
        options: &RerankOptions,
        _: &Interrupt,
    ) -> Result<Ranking> {
        if let Some(long) = documents.iter().find(|d| d.len() > 50 && !options.truncate) {
            let message = format!("the text has {} tokens; at most 50 are read", long.len());
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        let score = |document: &String| {
            let known = document.bytes().filter(|b| query.as_bytes().contains(b));
            let score = known.count() as f32;
            match options.raw_scores {
                true => score,
                false => score / (1.0 + score),
            }
        };
        let tokens = documents.iter().map(|d| d.len() + query.len()).sum();
        Ok(Ranking::new(documents.iter().map(score).collect(), tokens))
    }
}

/// The most tokens of an embedded text.
const EMBEDDED: usize = 900;

impl EmbeddingModel for Script {
    fn embedding_info(&self) -> EmbeddingInfo {
        let mut info = EmbeddingInfo::default();
        info.dimensions = 2;
        info.max_length = Some(EMBEDDED);
        info
    }
    fn embedding_tokens(&self, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>> {
        options.validate(&self.embedding_info())?;
        let ids = match prompt {
            Prompt::Text(text) => self.encode(text, true)?,
            Prompt::Tokens(ids) => ids.clone(),
            _ => return unsupported(),
        };
        if ids.len() > EMBEDDED && !options.truncate {
            let message = format!(
                "the text has {} tokens; at most {EMBEDDED} are read",
                ids.len()
            );
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        Ok(ids)
    }
    fn embed(
        &self,
        prompts: &[Prompt],
        options: &EmbedOptions,
        _: &Interrupt,
    ) -> Result<Vec<Vec<f32>>> {
        let width = options.dimensions.unwrap_or(2);
        let of = |prompt: &Prompt| match prompt {
            Prompt::Tokens(ids) => {
                assert!(
                    !ids.starts_with(b"!embedpanic".map(u32::from).as_slice()),
                    "asked to"
                );
                vec![0.6, ids.len() as f32][..width].to_vec()
            }
            _ => Vec::new(),
        };
        Ok(prompts.iter().map(of).collect())
    }
}

struct Row {
    options: GenerateOptions,
    prompt: Vec<u32>,
    text: String,
    script: VecDeque<u8>,
    said: Vec<u8>,
    ids: Vec<u32>,
    processors: Vec<Box<dyn LogitsProcessor>>,
    tokens: usize,
    prefill: usize,
    specials: &'static [&'static str],
}

struct Session {
    state: Arc<State>,
    specials: &'static [&'static str],
    rows: BTreeMap<RequestId, Row>,
    next: u64,
}

impl Session {
    fn count(&self) {
        self.state.rows.store(self.rows.len(), Ordering::SeqCst);
        self.state.peak.fetch_max(self.rows.len(), Ordering::SeqCst);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.state.rows.store(0, Ordering::SeqCst);
    }
}

impl BatchSession for Session {
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId> {
        options.validate()?;
        let Prompt::Tokens(ids) = prompt else {
            return unsupported();
        };
        let mut bytes = Vec::new();
        for id in ids {
            match u8::try_from(*id) {
                Ok(byte) => bytes.push(byte),
                Err(_) if *id == END => {}
                Err(_) => bytes.extend(self.specials[(id - END - 1) as usize].bytes()),
            }
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(!text.contains("!addpanic"), "asked to when added");
        self.state.compile(options, true);
        if text.contains("!refuse") {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "the grammar has no end",
            ));
        }
        self.state.added.fetch_add(1, Ordering::SeqCst);
        keep(&self.state.options, options.clone());
        keep(&self.state.prompts, text.clone());
        let said = match text.rsplit_once("say:") {
            _ if matches!(options.constraints.grammar, Some(Grammar::JsonSchema(_))) => "{\"a\":1}",
            Some((_, rest)) => rest.lines().next().unwrap_or_default(),
            None => "hello world",
        };
        let id = RequestId::new(self.next);
        self.next += 1;
        let processors = options.constraints.logits_processors.iter();
        let processors = processors.map(LogitsProcessorFactory::make);
        let row = Row {
            script: said.replace('⏎', "\n").into_bytes().into(),
            specials: self.specials,
            options: options.clone(),
            prompt: ids.clone(),
            prefill: if text.contains("!prefill") {
                PREFILL
            } else {
                0
            },
            text,
            said: Vec::new(),
            ids: Vec::new(),
            processors: processors.collect(),
            tokens: 0,
        };
        self.rows.insert(id, row);
        self.count();
        Ok(id)
    }

    fn remove(&mut self, row: RequestId) -> bool {
        let removed = self.rows.remove(&row).is_some();
        self.count();
        removed
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn step(&mut self) -> Result<VecDeque<BatchEvent>> {
        while self.state.gate.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(200));
        assert!(
            !self.rows.values().any(|row| row.text.contains("!panic")),
            "asked to in a step"
        );
        if self.rows.values().any(|row| row.text.contains("!error")) {
            self.rows.clear();
            self.count();
            return Err(
                Error::new(ErrorKind::Engine, "the device is lost").with_path(Path::new("/secret"))
            );
        }
        let mut events = VecDeque::new();
        self.rows.retain(|&id, row| {
            let event = row.step(id);
            let Some(event) = event else { return true };
            let stays = matches!(event, BatchEvent::Token { .. });
            events.push_back(event);
            stays
        });
        self.count();
        Ok(events)
    }
}

impl Row {
    fn done(&self, row: RequestId, reason: FinishReason, stop: Option<StopCause>) -> BatchEvent {
        let mut metrics = GenerateMetrics::default();
        metrics.prompt_tokens = self.prompt.len();
        metrics.cached_tokens = 2.min(self.prompt.len());
        metrics.generated_tokens = self.tokens;
        // Each token after the first takes two milliseconds.
        let steps = u32::try_from(self.tokens.saturating_sub(1)).unwrap();
        metrics.decode_time = Duration::from_millis(2) * steps;
        BatchEvent::Done {
            row,
            reason,
            stop,
            metrics: Box::new(metrics),
        }
    }

    /// The token that the logits processors choose, given the script's token.
    fn processed(&mut self, wanted: u32) -> Result<u32> {
        let mut logits = vec![-1.0; VOCABULARY + self.specials.len()];
        logits[wanted as usize] = 1.0;
        for processor in &mut self.processors {
            processor.process(&self.prompt, &self.ids, &mut logits)?;
        }
        let greatest = (0..).zip(&logits).max_by(|a, b| a.1.total_cmp(b.1));
        Ok(greatest.unwrap().0)
    }

    fn step(&mut self, row: RequestId) -> Option<BatchEvent> {
        if let Err(error) = self.options.check_interrupt() {
            return Some(BatchEvent::Failed { row, error });
        }
        if self.prefill > 0 {
            self.prefill -= 1;
            return None;
        }
        if self.tokens == 3 && self.text.contains("!fail") {
            let error = Error::new(ErrorKind::Engine, "this row alone");
            return Some(BatchEvent::Failed { row, error });
        }
        if self.tokens >= self.options.max_tokens {
            return Some(self.done(row, FinishReason::Length, None));
        }
        let said = String::from_utf8_lossy(&self.said).into_owned();
        if let Some(stop) = self
            .options
            .stop
            .stop_strings
            .iter()
            .find(|s| said.ends_with(s.as_str()))
        {
            let cause = StopCause::String(stop.clone());
            return Some(self.done(row, FinishReason::Stop, Some(cause)));
        }
        let rest = self.script.make_contiguous();
        let special = self
            .specials
            .iter()
            .position(|name| rest.starts_with(name.as_bytes()));
        let long = self.text.contains("!long");
        let wanted = match (special, rest.first()) {
            (Some(i), _) => END + 1 + i as u32,
            (None, _) if long => u32::from(b'x'),
            (None, Some(byte)) => u32::from(*byte),
            (None, None) => END,
        };
        let id = match self.processed(wanted) {
            Ok(id) => id,
            Err(error) => return Some(BatchEvent::Failed { row, error }),
        };
        if id == END {
            return Some(self.done(row, FinishReason::Stop, Some(StopCause::Eos(END))));
        }
        self.ids.push(id);
        let name = id.checked_sub(END + 1).map(|i| self.specials[i as usize]);
        if id == wanted && !long {
            self.script.drain(..name.map_or(1, str::len));
        }
        if let Some(name) = name {
            self.tokens += 1;
            let token = Token::new(id, "").with_bytes(name.as_bytes());
            let token = token.with_special(true);
            return Some(BatchEvent::Token { row, token });
        }
        let byte = u8::try_from(id).unwrap();
        self.said.push(byte);
        self.tokens += 1;
        let text = char::from(byte).to_string();
        let mut token = Token::new(u32::from(byte), text.clone()).with_bytes([byte]);
        if let Some(n) = self.options.output.logprobs {
            let top = (0..n).map(|_| TopLogprob::new(u32::from(byte), text.clone(), -0.5));
            token = token.with_logprobs(TokenLogprobs::new(-0.5, top.collect()));
        }
        Some(BatchEvent::Token { row, token })
    }
}
