//! A model for tests that reads its reply from the prompt. Each byte is a token; token 256 ends a
//! text.
//!
//! The reply is the text after the last `say:` in the prompt, up to a line feed; without `say:` it
//! is `hello world`. Commands anywhere in the prompt make the model misbehave. `!long` generates
//! until it is stopped. `!prefill` computes the prompt in many steps. `!fail` fails one request at
//! its third token, and `!memory` fails it there for lack of memory. `!error` fails the whole step.
//! `!panic` panics in a step, and `!addpanic` panics when the request is added. `!refuse` is
//! refused as invalid. In a grammar, `!badgrammar` is refused and `!preparepanic` panics; both
//! happen during preparation.
//!
//! `⏎` in a reply is a line feed. With [`Script::writing`], the model has a chat template and
//! special tokens. A reply writes a special token by its name.

use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inference::{
    Capabilities, ChatEnd, ChatPrompt, EmbeddingInfo, Error, ErrorKind, GenerateMetrics,
    GenerateOptions, Grammar, RerankOptions, Result, SamplingDefaults, TextModel,
};
use inference_conformance::scripted::{Asked, Control, Reply, Scripted, Step, Vocabulary};

/// Number of prefill steps for a prompt with `!prefill`.
const PREFILL: usize = 1_000_000;

/// State that tests read and change.
#[derive(Default)]
pub struct State {
    control: Arc<Control>,
    grammars: Arc<Grammars>,
}

/// The requests and sessions of the model.
impl Deref for State {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

/// State of grammar compilation.
#[derive(Default)]
struct Grammars {
    /// While this is set, no grammar is compiled.
    paused: AtomicBool,
    compiling: AtomicUsize,
    compiled: Mutex<Vec<Grammar>>,
    /// Number of grammars compiled inside a generation session, which blocks other requests.
    in_session: AtomicUsize,
}

impl State {
    /// Pauses or resumes grammar compilation.
    pub fn hold_grammars(&self, hold: bool) {
        self.grammars.paused.store(hold, Ordering::SeqCst);
    }

    /// The number of grammars that are being compiled.
    pub fn compiling(&self) -> usize {
        self.grammars.compiling.load(Ordering::SeqCst)
    }

    /// The number of grammars that were not compiled during the preparation of their requests, but
    /// later, in the generation session, where compiling blocks other requests.
    pub fn compiled_in_session(&self) -> usize {
        self.grammars.in_session.load(Ordering::SeqCst)
    }

    pub fn last_options(&self) -> GenerateOptions {
        self.last().unwrap().options
    }

    pub fn last_prompt(&self) -> String {
        self.last().unwrap().text
    }
}

impl Grammars {
    fn compile(&self, options: &GenerateOptions, in_session: bool) {
        let Some(grammar) = &options.constraints.grammar else {
            return;
        };
        if self.compiled.lock().unwrap().contains(grammar) {
            return;
        }
        self.in_session
            .fetch_add(usize::from(in_session), Ordering::SeqCst);
        self.compiling.fetch_add(1, Ordering::SeqCst);
        while self.paused.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.compiling.fetch_sub(1, Ordering::SeqCst);
        self.compiled.lock().unwrap().push(grammar.clone());
    }
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
    model: Scripted,
}

impl Script {
    /// A model without a template. It also ranks documents.
    pub fn new() -> Self {
        let script = Self::with_specials(&[]);
        let model = script.model.with_reranking(score);
        Self { model, ..script }
    }

    /// Allows adding adapters to this model.
    pub fn with_adapters(self) -> Self {
        let model = self.model.with_training();
        Self { model, ..self }
    }

    /// Makes the model's files recommend these sampling options.
    pub fn recommending(self, sampling: SamplingDefaults) -> Self {
        let model = self.model.with_info(|info| info.sampling = sampling);
        Self { model, ..self }
    }

    /// A model with this chat template and these special tokens.
    pub fn writing(template: &'static str, specials: &'static [&'static str]) -> Self {
        let script = Self::with_specials(specials);
        let model = script.model.with_template(template);
        Self { model, ..script }
    }

    fn with_specials(specials: &'static [&'static str]) -> Self {
        let vocabulary = Vocabulary::new().with_specials(specials.iter().copied());
        let grammars = Arc::<Grammars>::default();
        let (spelling, in_session) = (vocabulary.clone(), Arc::clone(&grammars));
        let before = Arc::clone(&grammars);
        let mut embedding = EmbeddingInfo::default();
        (embedding.dimensions, embedding.max_length) = (2, Some(900));
        let model = Scripted::computed(move |asked| {
            assert!(!asked.text.contains("!addpanic"), "asked to when added");
            in_session.compile(&asked.options, true);
            reply(asked, &spelling)
        });
        let model = model
            .with_vocabulary(vocabulary)
            .with_pace(Duration::from_micros(200))
            .with_metrics(measure)
            .with_rendering(render)
            .with_preparation(move |options| prepare(options, &before))
            .with_embeddings(embedding, embed)
            .with_info(|info| {
                info.architecture = String::from("script");
                info.hidden_size = 2;
                // A key and a value of two elements each, in 16 bits.
                (info.num_layers, info.num_kv_heads, info.head_dim) = (1, 1, 2);
                info.cache_bytes_per_token = Some(8);
                info.context_length = Some(1_000_000);
                info.has_chat_template = true;
            });
        let control = Arc::clone(model.control());
        let state = Arc::new(State { control, grammars });
        Self { state, model }
    }

    pub fn into_model(self) -> Arc<dyn TextModel> {
        Arc::new(self.model)
    }
}

fn reply(asked: &Asked, vocabulary: &Vocabulary) -> Result<Reply> {
    let has = |word: &str| asked.text.contains(word);
    if has("!refuse") {
        let message = "the grammar has no end";
        return Err(Error::new(ErrorKind::InvalidOption, message));
    }
    let said = match asked.text.rsplit_once("say:") {
        _ if matches!(
            asked.options.constraints.grammar,
            Some(Grammar::JsonSchema(_))
        ) =>
        {
            "{\"a\":1}"
        }
        Some((_, rest)) => rest.lines().next().unwrap_or_default(),
        None => "hello world",
    };
    let mut reply = match has("!long") {
        true => Reply::ids(std::iter::repeat(u32::from(b'x'))),
        false => Reply::ids(vocabulary.encode(&said.replace('⏎', "\n"))),
    };
    if has("!fail") {
        let error = Error::new(ErrorKind::Engine, "this row alone");
        reply = reply.after(3, Step::Fail(error));
    }
    if has("!memory") {
        let error = Error::new(ErrorKind::OutOfMemory, "there is not enough memory");
        reply = reply.after(3, Step::Fail(error));
    }
    if has("!panic") {
        reply = reply.after(0, Step::Panic(String::from("asked to in a step")));
    }
    if has("!error") {
        let error = Error::new(ErrorKind::Engine, "the device is lost");
        reply = reply.after(0, Step::FailAll(error.with_path(Path::new("/secret"))));
    }
    match has("!prefill") {
        true => Ok(reply.idle(PREFILL)),
        false => Ok(reply),
    }
}

fn measure(metrics: &mut GenerateMetrics) {
    metrics.cached_tokens = 2.min(metrics.prompt_tokens);
    // Each token after the first adds two milliseconds.
    let steps = u32::try_from(metrics.generated_tokens.saturating_sub(1)).unwrap();
    metrics.decode_time = Duration::from_millis(2) * steps;
}

fn prepare(options: &GenerateOptions, grammars: &Grammars) -> Result<()> {
    let text = format!("{:?}", options.constraints.grammar);
    assert!(!text.contains("!preparepanic"), "asked to when preparing");
    if text.contains("!badgrammar") {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the grammar is no grammar",
        ));
    }
    grammars.compile(options, false);
    Ok(())
}

fn render(prompt: &ChatPrompt) -> Result<String> {
    let broken = |m: &inference::Message| m.content.contains("!template");
    if prompt.messages.iter().any(broken) {
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

/// The score of a document is the number of its bytes that occur in the query.
fn score(query: &str, document: &str, options: &RerankOptions) -> Result<f32> {
    if document.len() > 50 && !options.truncate {
        let tokens = document.len();
        let message = format!("the text has {tokens} tokens; at most 50 are read");
        return Err(Error::new(ErrorKind::InvalidOption, message));
    }
    let known = document.bytes().filter(|b| query.as_bytes().contains(b));
    let score = known.count() as f32;
    Ok(match options.raw_scores {
        true => score,
        false => score / (1.0 + score),
    })
}

/// Vectors of length 5 or 2, so that normalization is exact in floating point.
fn embed(ids: &[u32]) -> Vec<f32> {
    let panics: Vec<u32> = b"!embedpanic".iter().copied().map(u32::from).collect();
    assert!(!ids.starts_with(&panics), "asked to");
    match ids.len() % 3 {
        1 => vec![3.0, 4.0],
        2 => vec![4.0, 3.0],
        _ => vec![0.0, 2.0],
    }
}
