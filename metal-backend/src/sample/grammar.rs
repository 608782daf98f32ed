//! Grammars over a model's vocabulary, based on the crate `llguidance`. They restrict the next
//! token.
//!
//! The vocabulary becomes a byte trie once per model. Requests share compiled grammars. This module
//! uses no arrays: `penalties::allow` applies the mask, and the sampler advances the matcher.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use inference::kit::panic_text;
use inference::{Error, ErrorKind, Grammar, Result};
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::text::Tokenizer;

/// The maximum supported token length in bytes. The trie's nodes impose it.
const LONGEST_TOKEN: usize = 1000;

/// The maximum number of ids that the trie supports.
const MOST_TOKENS: usize = 0xFF_FFFF;

/// The stack size of threads that compile grammars, in bytes. The system allocates only the used
/// part.
///
/// In unoptimized builds, llguidance 1.9 needs up to 26 KiB per level of a schema, and
/// [`Grammar::validate`] allows 4,096 levels through `$ref`. A Lark grammar may have a chain of
/// 4,000 rules, and each rule needs 16 KiB.
const STACK: usize = 256 << 20;

/// White space between the tokens of JSON: a space, or a newline with at most 40 characters of
/// indentation. Without this limit, a model could produce endless white space.
const JSON_SPACE: &str = r"( |\n[ \t]{0,40})";

/// The number of compiled grammars to keep after their last use.
const RECENT: usize = 8;

/// A compiled grammar in its initial state.
pub struct Compiled {
    grammar: Grammar,
    start: Mutex<llguidance::Matcher>,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled")
            .field("grammar", &self.grammar)
            .finish_non_exhaustive()
    }
}

/// The compiled grammars in use, and the most recently used ones.
#[derive(Default)]
struct Known {
    all: Vec<Weak<Compiled>>,
    recent: VecDeque<Arc<Compiled>>,
}

impl Known {
    fn find(&self, grammar: &Grammar) -> Option<Arc<Compiled>> {
        let mut living = self.all.iter().filter_map(Weak::upgrade);
        living.find(|known| known.grammar == *grammar)
    }

    /// Marks `compiled` as the most recently used.
    fn used(&mut self, compiled: &Arc<Compiled>) {
        self.recent.retain(|known| !Arc::ptr_eq(known, compiled));
        self.recent.push_back(Arc::clone(compiled));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        self.all.retain(|known| known.strong_count() > 0);
    }
}

/// Compiles grammars for one model.
pub struct Compiler {
    tokenizer: Arc<Tokenizer>,
    /// Tokens that end a reply.
    eos: Arc<[u32]>,
    /// The number of logits that the model returns.
    vocabulary: usize,
    /// Created on first use: it is slow to create, and most requests have no grammar.
    factory: OnceLock<Result<ParserFactory>>,
    known: Mutex<Known>,
}

impl Compiler {
    /// Creates a compiler for the vocabulary of `tokenizer`. The model has logits for the first
    /// `vocabulary` ids. `eos` are the tokens that end a reply.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, eos: &[u32], vocabulary: usize) -> Self {
        Self {
            tokenizer,
            eos: eos.into(),
            vocabulary,
            factory: OnceLock::new(),
            known: Mutex::default(),
        }
    }

    /// Returns a matcher in its initial state.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a grammar that is invalid, unsupported, too complex or
    /// empty; [`ErrorKind::Unsupported`] for an unusable vocabulary.
    pub fn compile(&self, grammar: &Grammar) -> Result<Matcher> {
        let compiled = self.prepare(grammar)?;
        // Each reply gets a copy with separate state, because matching changes the state.
        let inner = compiled.start.lock().deep_clone();
        Ok(self.matcher(inner))
    }

    /// Returns the compiled grammar. Later requests reuse it while a reference exists. Any thread
    /// may call this function, and no lock is held during compilation.
    ///
    /// # Errors
    /// The errors of [`Self::compile`].
    pub fn prepare(&self, grammar: &Grammar) -> Result<Arc<Compiled>> {
        let known = || self.known.lock();
        let cached = known().find(grammar);
        let compiled = match cached {
            Some(cached) => cached,
            None => {
                let compiled = Arc::new(Compiled {
                    grammar: grammar.clone(),
                    start: Mutex::new(self.compile_apart(grammar)?.inner),
                });
                known().all.push(Arc::downgrade(&compiled));
                compiled
            }
        };
        known().used(&compiled);
        Ok(compiled)
    }

    fn matcher(&self, inner: llguidance::Matcher) -> Matcher {
        Matcher {
            inner,
            eos: Arc::clone(&self.eos),
            ended: false,
        }
    }

    fn compile_apart(&self, grammar: &Grammar) -> Result<Matcher> {
        grammar.validate()?;
        // The library recurses over a grammar, and the caller's stack may be too small for this
        // recursion.
        let builder = thread::Builder::new().name(String::from("grammar"));
        thread::scope(|scope| {
            let compile = || self.compile_here(grammar);
            let thread = builder.stack_size(STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|e| {
                let message = "no thread can be started to compile the grammar";
                Error::new(ErrorKind::OutOfMemory, message).with_source(e)
            })?;
            let stopped = |_| Error::new(ErrorKind::Engine, "the grammar's compilation panicked");
            thread.join().map_err(stopped)?
        })
    }

    fn compile_here(&self, grammar: &Grammar) -> Result<Matcher> {
        let factory = self
            .factory
            .get_or_init(|| self.factory())
            .as_ref()
            .map_err(Clone::clone)?;
        let source = match grammar {
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(with_space(schema)),
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            other => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("grammars of kind {} are not supported", other.kind()),
                ));
            }
        };
        let refused = |message: String| {
            Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "the {} cannot be used: {}",
                    describe(grammar),
                    message.trim()
                ),
            )
        };
        let inner = guarded(|| llguidance::Matcher::new(factory.create_parser(source)))
            .map_err(|e| refused(e.message().to_owned()))?;
        if let Some(message) = inner.get_error() {
            return Err(refused(message));
        }
        let mut matcher = self.matcher(inner);
        let allowed = matcher
            .allowed()
            .map_err(|e| refused(e.message().to_owned()))?;
        if allowed.iter().flatten().all(|&word| word == 0) {
            return Err(refused(String::from(
                "no token of this model's vocabulary begins a text that it allows",
            )));
        }
        Ok(matcher)
    }

    fn factory(&self) -> Result<ParserFactory> {
        let unusable = |why: String| {
            Error::new(
                ErrorKind::Unsupported,
                format!("grammars do not work with this model's vocabulary: {why}"),
            )
        };
        let size = self.vocabulary.min(MOST_TOKENS);
        let known = |id: &&u32| (**id as usize) < size;
        let eos: Vec<u32> = self.eos.iter().filter(known).copied().collect();
        let Some(&main) = eos.first() else {
            return Err(unusable(String::from("it has no end-of-text token")));
        };
        let words: Vec<Vec<u8>> = (0..size as u32)
            .map(|id| self.word(id, eos.contains(&id)))
            .collect();
        let info = TokRxInfo::new(size as u32, main);
        let factory = guarded(|| {
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&eos);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            ParserFactory::new_simple(&env)
        })
        .map_err(|e| unusable(e.message().to_owned()))?;
        let mut factory = factory.map_err(|e| unusable(e.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(factory)
    }

    /// Returns the bytes of a token in the form that the trie expects. Control tokens start with a
    /// byte that never occurs in text. Tokens that must never be drawn are empty.
    fn word(&self, id: u32, ends: bool) -> Vec<u8> {
        let marker = TokTrie::SPECIAL_TOKEN_MARKER;
        let tokenizer = &self.tokenizer;
        if ends || tokenizer.is_special(id) || tokenizer.is_control(id) {
            let Some(name) = tokenizer.token_text(id) else {
                return Vec::new();
            };
            return [&[marker], name.as_bytes()].concat();
        }
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        if bytes.contains(&marker) || bytes.len() > LONGEST_TOKEN {
            return Vec::new();
        }
        bytes
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler")
            .field("vocabulary", &self.vocabulary)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// Tracks which tokens may come next in one reply.
pub struct Matcher {
    inner: llguidance::Matcher,
    eos: Arc<[u32]>,
    ended: bool,
}

impl Matcher {
    /// Accepts the sampled token. Ignores tokens after the token that ended the reply.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if the grammar does not allow the token.
    pub fn accept(&mut self, id: u32) -> Result<()> {
        if self.ended {
            return Ok(());
        }
        if self.eos.contains(&id) {
            self.ended = true;
            return Ok(());
        }
        self.inner.consume_token(id).map_err(|e| {
            Error::new(
                ErrorKind::InvalidOption,
                format!("token {id} does not fit the grammar: {e}"),
            )
        })
    }

    /// Returns the tokens that may come next, as bits: token `i` is bit `i % 32` of word `i / 32`.
    /// Missing words count as zero. Returns `None` after the end of the reply. If the reply is
    /// complete and cannot continue, only end-of-text tokens are allowed.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if matching exceeds the limits.
    pub fn allowed(&mut self) -> Result<Option<Vec<u32>>> {
        if self.ended {
            return Ok(None);
        }
        let mask = self.inner.compute_mask_or_eos().map_err(|e| {
            Error::new(
                ErrorKind::InvalidOption,
                format!("the grammar cannot be followed any further: {e}"),
            )
        })?;
        Ok(Some(mask.as_slice().to_vec()))
    }

    /// Whether the reply may end at this point.
    pub fn may_end(&mut self) -> bool {
        self.ended || self.inner.is_stopped() || self.inner.is_accepting().unwrap_or(false)
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher")
            .field("ended", &self.ended)
            .field("stop_reason", &self.inner.stop_reason())
            .finish_non_exhaustive()
    }
}

fn describe(grammar: &Grammar) -> &'static str {
    match grammar {
        Grammar::JsonSchema(_) => "JSON schema",
        Grammar::Regex(_) => "regular expression",
        _ => "Lark grammar",
    }
}

/// Returns the schema with limited white space. A schema that has an `x-guidance` setting is not
/// changed.
fn with_space(schema: &Value) -> Value {
    let mut object = match schema {
        Value::Object(object) => object.clone(),
        _ => Map::new(), // `true`; other values were refused
    };
    if !object.contains_key("x-guidance") {
        object.insert(
            String::from("x-guidance"),
            json!({"whitespace_pattern": JSON_SPACE}),
        );
    }
    Value::Object(object)
}

/// Runs code of `llguidance` on untrusted input. A panic becomes an error.
fn guarded<T>(run: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let why = panic_text(panic.as_ref()).unwrap_or("it contradicts itself");
        Error::new(ErrorKind::InvalidOption, why)
    })
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
mod tests;
