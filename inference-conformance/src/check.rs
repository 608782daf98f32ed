//! The list of checks: their names and descriptions, and when each is required. `checks/` has their
//! code.

use std::fmt;
use std::str::FromStr;

use inference::{Capabilities, Error, ErrorKind};
use serde::{Deserialize, Serialize};

use crate::checks::{
    adapters, classify, close, edits, errors, generate, grammars, interrupt, load, many, meta,
    prompt_cache, sampling, sessions, steering, stop, threads, tokens, training, undeclared,
    vectors,
};
use crate::context::{Context, Verdict};

/// When a check runs, and whether it is required.
#[derive(Clone, Copy)]
pub(crate) enum Need {
    /// Required for every backend.
    Always,
    /// Required for backends that declare the capability of this name.
    Declared(&'static str, fn(&Capabilities) -> bool),
    /// Runs if the model allows it. A skip is not a failure.
    WherePossible,
    /// Tests more than the contract promises. It runs only if the caller requires it.
    OnRequest,
}

pub(crate) struct Definition {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    pub(crate) need: Need,
    pub(crate) run: fn(&Context) -> Verdict,
}

macro_rules! capability {
    ($field:ident) => {
        Need::Declared(stringify!($field), |c| c.$field)
    };
}

macro_rules! checks {
    ($($variant:ident $name:literal $description:literal $need:expr, $run:path;)*) => {
        /// A promise of the contract that the suite checks.
        #[non_exhaustive]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(into = "String", try_from = "String")]
        pub enum Check {
            $(#[doc = $description] $variant,)*
        }

        impl Check {
            /// All checks, in the order in which they run.
            pub const ALL: &'static [Check] = &[$(Check::$variant),*];

            pub(crate) fn definition(self) -> Definition {
                match self {
                    $(Check::$variant => Definition {
                        name: $name,
                        description: $description,
                        need: $need,
                        run: $run,
                    },)*
                }
            }
        }
    };
}

checks! {
    BackendIdentity "backend_identity"
        "the backend has a plain, constant name and a device, and is available"
        Need::Always, meta::identity;
    Load "load"
        "the model loads with the options given"
        Need::Always, load::load;
    ModelInfo "model_info"
        "model type and info agree with each other, are plausible and stay the same"
        Need::Always, meta::info;
    DeclaredTraits "declared_traits"
        "a declared capability that is a trait is there on the model"
        Need::Always, meta::declared_traits;
    Undeclared "undeclared"
        "a call without its capability answers with an error of kind unsupported"
        Need::Always, undeclared::undeclared;
    LoadMissing "load_missing"
        "a path with nothing at it is an error that names it"
        Need::Always, load::missing;
    LoadNotAModel "load_not_a_model"
        "an empty directory and a file of noise are errors"
        Need::Always, load::not_a_model;
    LoadOptions "load_options"
        "bad load options are refused as invalid"
        Need::Always, load::bad_options;
    LoadAdapter "load_adapter"
        "an adapter that is missing or cannot be applied is an error, never ignored"
        Need::Always, load::adapter;
    Formats "formats"
        "the format of the model that loads is one that is declared"
        Need::WherePossible, load::formats;
    ContextLen "context_len"
        "beyond context_len a reply goes on, and below it nothing changes"
        Need::WherePossible, load::context_len;
    Streaming "streaming"
        "tokens are handed out as they are generated, not when the reply is complete"
        capability!(streaming), generate::streaming;
    StreamText "stream_text"
        "the texts of the tokens, one after another, are the same output each time"
        Need::Always, generate::stream_text;
    StreamEnd "stream_end"
        "a stream says why it ended only once it has, and stays ended"
        Need::Always, generate::stream_end;
    MaxTokens "max_tokens"
        "max_tokens 0, 1 and n give exactly that many tokens and end with length"
        Need::Always, generate::max_tokens;
    IgnoreEos "ignore_eos"
        "with ignore_eos a reply goes on to max_tokens"
        Need::Always, generate::ignore_eos;
    Eos "eos"
        "the end-of-text token ends a reply with stop and is not part of it"
        Need::WherePossible, stop::eos;
    StopTokens "stop_tokens"
        "a stop token ends a reply with stop and is not part of it"
        Need::Always, stop::tokens;
    StopStrings "stop_strings"
        "a stop string, also one across tokens, ends a reply before it with stop"
        Need::Always, stop::strings;
    StopHeldBack "stop_held_back"
        "text held back for a stop string that does not come is handed out at the end"
        Need::Always, stop::held_back;
    StopCause "stop_cause"
        "the reported stop cause is the stop token or string that ended the reply"
        Need::WherePossible, stop::cause;
    Greedy "greedy"
        "greedy replies are always the same, whatever the seed"
        Need::Always, sampling::greedy_replies;
    Filters "filters"
        "top_k 1, a tiny top_p and min_p 1 leave only the greedy reply"
        Need::Always, sampling::filters;
    RepeatPenalty "repeat_penalty"
        "a repeat penalty changes a reply that repeats itself"
        Need::WherePossible, steering::repeat_penalty;
    PresencePenalty "presence_penalty"
        "under a huge presence penalty no token comes twice"
        Need::WherePossible, steering::presence_penalty;
    FrequencyPenalty "frequency_penalty"
        "under a huge frequency penalty no token comes twice"
        Need::WherePossible, steering::frequency_penalty;
    LogitBias "logit_bias"
        "a token with a huge bias always comes, one with a huge negative bias never"
        Need::WherePossible, steering::logit_bias;
    BannedTokens "banned_tokens"
        "banned tokens do not come"
        Need::WherePossible, steering::banned_tokens;
    ForcedTokens "forced_tokens"
        "a reply begins with its forced tokens, which count"
        Need::WherePossible, steering::forced_tokens;
    MinTokens "min_tokens"
        "before min_tokens neither the end of text nor a stop token ends a reply"
        Need::WherePossible, steering::min_tokens;
    Xtc "xtc"
        "XTC at probability 1 leaves out the most probable token, at temperature 0 nothing"
        Need::WherePossible, steering::xtc;
    Processors "processors"
        "a logits processor decides what comes, sees the reply so far, and ends it by an error"
        Need::WherePossible, steering::processors;
    Logprobs "logprobs"
        "tokens carry log-probabilities of the model's own distribution when asked, and only then"
        capability!(logprobs), steering::logprobs;
    Grammars "grammars"
        "a reply with a grammar matches it as a whole; a broken one is refused as invalid"
        capability!(grammars), grammars::grammars;
    Seeds "seeds"
        "the same seed gives the same sampled reply"
        capability!(seeds), sampling::seeds;
    SeedsDiffer "seeds_differ"
        "different seeds give different sampled replies"
        capability!(seeds), sampling::seeds_differ;
    Unseeded "unseeded"
        "without a seed, sampled replies differ from call to call"
        Need::Always, sampling::unseeded;
    CancelBefore "cancel_before"
        "a request cancelled before it starts gives no token but one error of kind cancelled"
        Need::Always, interrupt::cancel_before;
    CancelDuring "cancel_during"
        "cancelling from another thread ends a running request with one error of kind cancelled"
        Need::Always, interrupt::cancel_during;
    DeadlinePast "deadline_past"
        "a deadline that has passed gives no token but one error of kind deadline_exceeded"
        Need::Always, interrupt::deadline_past;
    DeadlineDuring "deadline_during"
        "a deadline ends a running request with one error of kind deadline_exceeded"
        Need::Always, interrupt::deadline_during;
    DropStream "drop_stream"
        "streams dropped half way leave no trace: the model answers as before, memory stays"
        Need::Always, interrupt::drop_stream;
    Metrics "metrics"
        "counts match the reply, times fit together and only grow, rates are numbers"
        Need::Always, generate::metrics;
    ModelMetrics "model_metrics"
        "the model's figures are those of the request that ended last"
        Need::Always, generate::model_metrics;
    InvalidOptions "invalid_options"
        "generate refuses every bad option as invalid, at the call"
        Need::Always, errors::options;
    InvalidPrompts "invalid_prompts"
        "no ids, and ids outside the vocabulary, are refused as invalid"
        Need::Always, errors::prompts;
    EmptyText "empty_text"
        "an empty text is refused as invalid or continued, and harms nothing"
        Need::Always, errors::empty_text;
    Chat "chat"
        "a conversation is answered, by the rules of generate"
        capability!(chat), many::chat;
    ChatErrors "chat_errors"
        "chat refuses bad options as invalid, and odd conversations harm nothing"
        capability!(chat), many::chat_errors;
    Classify "classify"
        "classify gives each prompt's next token, in order, as generate alone does"
        capability!(classify), classify::equals_solo;
    ClassifyLogits "classify_logits"
        "classify returns logits of the whole vocabulary when asked, and only then"
        capability!(classify), classify::logits;
    ClassifyErrors "classify_errors"
        "classify refuses bad options and any bad prompt; no prompts are no results"
        capability!(classify), classify::errors;
    ClassifyInterrupted "classify_interrupted"
        "classify that is cancelled, or out of time, fails with that kind"
        capability!(classify), classify::interrupted;
    Batch "batch"
        "batch_generate gives each prompt the same as generate alone, in order"
        capability!(batch_generate), many::batch;
    BatchErrors "batch_errors"
        "a bad prompt of a batch has its own error and spares the others; bad options fail the call"
        capability!(batch_generate), many::batch_errors;
    BatchInterrupted "batch_interrupted"
        "batch_generate that is cancelled, or out of time, says so and gives no whole reply"
        capability!(batch_generate), many::batch_interrupted;
    Session "session"
        "requests that join a batch session while others run get the same as from generate alone"
        capability!(batch_sessions), sessions::replies;
    SessionRemoved "session_removed"
        "a request that is removed from a session gives no more, and the others go on"
        capability!(batch_sessions), sessions::removed;
    SessionErrors "session_errors"
        "a session refuses bad requests, and one that fails in the middle fails alone"
        capability!(batch_sessions), sessions::errors;
    SessionStopped "session_stopped"
        "requests of a session that are cancelled, or out of time, say so, and the others go on"
        capability!(batch_sessions), sessions::stopped;
    EncodeDecode "encode_decode"
        "text survives encode and decode; ids outside the vocabulary are refused"
        capability!(logits), tokens::encode_decode;
    PromptForms "prompt_forms"
        "a text and its ids are the same prompt"
        capability!(logits), tokens::prompt_forms;
    Logits "logits"
        "logits have the documented shape, are numbers, and the last row is the same with and without all"
        capability!(logits), tokens::logits;
    LogitsGreedy "logits_greedy"
        "greedy takes the token with the greatest logit"
        capability!(logits), tokens::logits_greedy;
    TokenLogits "token_logits"
        "tokens carry the logits they were drawn from when asked, and only then"
        capability!(logits), tokens::token_logits;
    PrepareChat "prepare_chat"
        "the prepared conversation holds what was said, grows by the generation prompt, and its ids are what chat runs"
        Need::WherePossible, tokens::prepare_chat;
    Training "training"
        "LoRA applies, names its parameters and saves; a bad configuration is refused as invalid"
        capability!(training), training::training;
    AdapterSaved "adapter_saved"
        "an adapter that training saved can be loaded with the model"
        Need::Declared("training` and `adapters", |c| c.training && c.adapters),
        training::adapter_saved;
    Attention "attention"
        "the attention snapshot has the shapes it says"
        capability!(attention_inspection), training::attention;
    HiddenStates "hidden_states"
        "hidden states at several positions and of several prompts are those of each alone"
        capability!(hidden_states), vectors::hidden_states;
    Embeddings "embeddings"
        "each prompt has the vector that it has alone, of the documented length; bad options are refused"
        capability!(embeddings), vectors::embeddings;
    Reranking "reranking"
        "each document has the score that it has alone, from 0 to 1"
        Need::WherePossible, vectors::reranking;
    PromptCache "prompt_cache"
        "a saved prompt loads in a new model, and continues as the whole prompt does"
        capability!(prompt_cache), prompt_cache::prompt_cache;
    Edits "edits"
        "an edit of activations changes the reply; no edits change nothing, and a bad one is refused"
        capability!(steering), edits::edits;
    NamedAdapters "named_adapters"
        "requests that name different adapters get the replies that they have alone"
        capability!(named_adapters), adapters::named;
    CallsInterrupted "calls_interrupted"
        "logits, vectors, scores, states and attention that are cancelled, or out of time, fail with that kind"
        Need::WherePossible, interrupt::calls;
    Concurrent "concurrent"
        "callers in several threads get the same as alone"
        Need::Always, threads::concurrent;
    Crossing "crossing"
        "a stream can be started in one thread and read in another"
        Need::Always, threads::crossing;
    Interleaved "interleaved"
        "several streams of one model can be read in turn by one thread"
        Need::OnRequest, threads::interleaved;
    Reload "reload"
        "a model loaded twice is two models: equal answers, closed separately"
        Need::Always, close::reload;
    DroppedModels "dropped_models"
        "models that are loaded and dropped, again and again, leave no memory in use"
        Need::WherePossible, close::dropped_models;
    CloseTwice "close_twice"
        "closing twice is fine"
        Need::Always, close::twice;
    ClosedCalls "closed_calls"
        "every call after close fails with kind closed"
        Need::Always, close::calls;
    CloseEndsStreams "close_ends_streams"
        "close ends running streams with one error of kind closed"
        Need::Always, close::streams;
    DropModel "drop_model"
        "a stream whose model is dropped continues unchanged, or ends with an error"
        Need::Always, close::drop_model;
}

impl Check {
    /// The check's name, such as `stop_strings`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.definition().name
    }

    /// The tested promise of the contract, in one line.
    #[must_use]
    pub fn description(self) -> &'static str {
        self.definition().description
    }

    /// Whether a backend with these capabilities must pass the check.
    #[must_use]
    pub fn is_required(self, capabilities: &Capabilities) -> bool {
        match self.definition().need {
            Need::Always => true,
            Need::Declared(_, declared) => declared(capabilities),
            Need::WherePossible | Need::OnRequest => false,
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Check {
    type Err = Error;

    fn from_str(name: &str) -> inference::Result<Self> {
        let check = Check::ALL.iter().find(|c| c.name() == name);
        check.copied().ok_or_else(|| {
            let names: Vec<_> = Check::ALL.iter().map(|c| c.name()).collect();
            Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "no check is named `{name}`; there are: {}",
                    names.join(", ")
                ),
            )
        })
    }
}

impl From<Check> for String {
    fn from(check: Check) -> String {
        check.name().to_owned()
    }
}

impl TryFrom<String> for Check {
    type Error = Error;

    fn try_from(name: String) -> inference::Result<Self> {
        name.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_parse() {
        let names: BTreeSet<_> = Check::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Check::ALL.len());
        for check in Check::ALL {
            assert_eq!(check.name().parse::<Check>().unwrap(), *check);
            assert!(!check.description().is_empty());
        }
        let e = "stop_string".parse::<Check>().unwrap_err();
        assert!(e.message().contains("stop_strings"), "{e}");
    }

    #[test]
    fn capabilities_decide_what_is_required() {
        let none = Capabilities::new();
        assert!(Check::Load.is_required(&none));
        assert!(!Check::Chat.is_required(&none));
        assert!(Check::Chat.is_required(&none.with_chat()));
        assert!(!Check::Interleaved.is_required(&none.with_streaming()));
    }
}
