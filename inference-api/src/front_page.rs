use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use inference::kit::{Clock, Released, StopText};
use inference::{
    Backend, BatchResult, Capabilities, ClassifyResult, Error, ErrorKind, FinishReason,
    GenerateMetrics, GenerateOptions, LoadOptions, Message, ModelInfo, Prompt, Result, TextModel,
    Token, TokenSource, TokenStream,
};

/// A backend whose models recite a text, one token per byte.
pub struct Parrot;

inference::register_backend!("parrot", || Box::new(Parrot));

/// The token that ends a reply; smaller ids are bytes.
const END: u32 = 128;

fn error<T>(kind: ErrorKind, message: impl Into<String>) -> Result<T> {
    Err(Error::new(kind, message))
}

impl Backend for Parrot {
    fn name(&self) -> &str {
        "parrot" // the name under which the backend is registered
    }
    fn available(&self) -> bool {
        true // whether the device exists; if not, `unavailable_reason` must say why
    }
    fn device(&self) -> String {
        String::from("no device at all")
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new().with_streaming()
    }
    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
        options.validate()?; // a program may call the backend without the registry
        options.refuse_all_but("parrot", &["parallel_slots"])?;
        if path.extension().is_none_or(|end| end != "txt") {
            return Err(Error::new(ErrorKind::InvalidModel, "not a .txt file").with_path(path));
        }
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::new(ErrorKind::ModelNotFound, e.to_string()).with_path(path))?;
        if text.is_empty() || !text.is_ascii() {
            return Err(Error::new(ErrorKind::InvalidModel, "not ASCII text").with_path(path));
        }
        Ok(Box::new(ParrotModel(Arc::new(Shared {
            text: text.into_bytes(),
            closed: AtomicBool::new(false),
            metrics: Mutex::default(),
        }))))
    }
}

/// State shared by a model's requests.
struct Shared {
    text: Vec<u8>,
    closed: AtomicBool,
    metrics: Mutex<GenerateMetrics>,
}

impl Shared {
    fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::Acquire) {
            true => error(ErrorKind::Closed, "the model was closed; load it again"),
            false => Ok(()),
        }
    }
}

struct ParrotModel(Arc<Shared>);

/// The options that this backend honors, besides the cancel token and the deadline.
const HONORED: [&str; 7] = [
    "max_tokens",
    "temperature",
    "min_p",
    "seed",
    "stop_strings",
    "stop_tokens",
    "ignore_eos",
];

impl TextModel for ParrotModel {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        options.validate()?;
        options.refuse_all_but("parrot", &HONORED)?; // refuses options without effect here
        self.0.check_open()?;
        let prompt_tokens = match prompt {
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(ids) if ids.iter().all(|id| *id <= END) => ids.len(),
            _ => {
                return error(
                    ErrorKind::InvalidOption,
                    "a token is outside the vocabulary",
                );
            }
        };
        if prompt_tokens == 0 {
            return error(ErrorKind::InvalidOption, "the prompt is empty");
        }
        // Without a seed, each call draws different random numbers.
        let seed = options
            .sampling
            .seed
            .unwrap_or_else(|| RandomState::new().hash_one(()));
        Ok(TokenStream::new(Recital {
            model: Arc::clone(&self.0),
            options: options.clone(),
            at: prompt_tokens,
            random: seed,
            produced: 0,
            text: StopText::new(&options.stop.stop_strings),
            ready: VecDeque::new(),
            finish: None,
            clock: Clock::start(prompt_tokens),
        }))
    }
    fn model_type(&self) -> &str {
        "parrot"
    }
    fn info(&self) -> ModelInfo {
        let mut info = ModelInfo::default();
        info.architecture = String::from("parrot");
        info.vocab_size = END as usize + 1;
        info
    }
    fn metrics(&self) -> GenerateMetrics {
        self.0.metrics.lock().map(|m| m.clone()).unwrap_or_default()
    }
    fn close(&self) -> Result<()> {
        self.0.closed.store(true, Ordering::Release);
        Ok(())
    }
    // The capabilities do not declare the following methods, so these return errors.
    fn chat(&self, _: &[Message], _: &GenerateOptions) -> Result<TokenStream> {
        error(
            ErrorKind::Unsupported,
            "backend `parrot` does not have chat",
        )
    }
    fn classify(&self, _: &[Prompt], _: &GenerateOptions, _: bool) -> Result<Vec<ClassifyResult>> {
        error(
            ErrorKind::Unsupported,
            "backend `parrot` does not have classify",
        )
    }
    fn batch_generate(&self, _: &[Prompt], _: &GenerateOptions) -> Result<Vec<BatchResult>> {
        error(
            ErrorKind::Unsupported,
            "backend `parrot` does not have batch_generate",
        )
    }
}

/// One request. Dropping it ends the request.
struct Recital {
    model: Arc<Shared>,
    options: GenerateOptions,
    at: usize,
    random: u64,
    produced: usize,
    /// Withholds tokens whose text may be part of a stop string.
    text: StopText<u32>,
    ready: VecDeque<Token>,
    finish: Option<FinishReason>,
    clock: Clock,
}

impl Recital {
    /// Returns the next token of the text. Above temperature 0, it is sometimes another token.
    fn draw(&mut self) -> u32 {
        let text = &self.model.text;
        let place = self.at % (text.len() + 1);
        self.at += 1;
        // Splitmix64 (Steele et al. 2014).
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let uniform = (z >> 40) as f32 / (1u64 << 24) as f32;
        // The next token has weight e^(3 / temperature). Each of the 95 printable bytes has weight
        // 1.
        let next = (3.0 / self.options.sampling.temperature.max(1e-6)).exp();
        let others = if self.options.sampling.min_p * next > 1.0 {
            0.0
        } else {
            95.0
        };
        let drawn = uniform * (next + others);
        if self.options.sampling.temperature > 0.0 && drawn < others {
            return 32 + drawn as u32;
        }
        text.get(place).map_or(END, |byte| u32::from(*byte))
    }

    /// Generates one token, or ends the reply.
    fn step(&mut self) -> Result<()> {
        self.options.check_interrupt()?;
        self.model.check_open()?;
        if self.produced == self.options.max_tokens {
            self.end(FinishReason::Length);
            return Ok(());
        }
        let id = self.draw();
        self.clock.token();
        if id == END && !self.options.stop.ignore_eos || self.options.stop.stop_tokens.contains(&id)
        {
            self.end(FinishReason::Stop);
            return Ok(());
        }
        self.produced += 1;
        let text = u8::try_from(id).ok().filter(u8::is_ascii);
        let text = text.map_or(String::new(), |byte| char::from(byte).to_string());
        let released = self.text.push(id, &text, false);
        if self.release(released) {
            self.finish(FinishReason::Stop);
        }
        Ok(())
    }

    /// Queues tokens whose text is final. Returns whether the stop string was found.
    fn release(&mut self, released: Released<u32>) -> bool {
        let tokens = released.ready.into_iter();
        self.ready
            .extend(tokens.map(|(id, text)| Token::new(id, text)));
        released.stopped.is_some()
    }

    fn end(&mut self, reason: FinishReason) {
        let rest = self.text.finish("");
        self.release(rest);
        self.finish(reason);
    }

    fn finish(&mut self, reason: FinishReason) {
        self.finish = Some(reason);
        self.clock.stop();
    }

    fn publish(&self) {
        if let Ok(mut metrics) = self.model.metrics.lock() {
            *metrics = self.metrics();
        }
    }
}

impl Iterator for Recital {
    type Item = Result<Token>;
    fn next(&mut self) -> Option<Result<Token>> {
        loop {
            if let Some(token) = self.ready.pop_front() {
                self.clock.counts().generated_tokens += 1;
                return Some(Ok(token));
            }
            if self.finish.is_some() {
                self.publish();
                return None;
            }
            if let Err(e) = self.step() {
                self.finish(FinishReason::of_error(&e));
                self.publish();
                return Some(Err(e)); // the stream ends after an error
            }
        }
    }
}

impl TokenSource for Recital {
    fn finish_reason(&self) -> Option<FinishReason> {
        self.finish.filter(|_| self.ready.is_empty()) // the reply ends when the last token is read
    }
    fn metrics(&self) -> GenerateMetrics {
        self.clock.metrics()
    }
}

impl Drop for Recital {
    fn drop(&mut self) {
        if self.finish.is_none() {
            self.finish(FinishReason::Cancelled);
            self.publish();
        }
    }
}
