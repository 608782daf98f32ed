//! The backend for the suite's tests. It wraps the conforming backend `echo` of `examples/plugin/`,
//! and breaks one promise at a time. Without a fault, the wrapper conforms. It also declares
//! training and attention, so that each check runs.

#![allow(dead_code, reason = "each test binary uses a part")]

mod grammar;
mod inside;
mod model;
mod session;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock, Weak};

use inference::{Backend, Capabilities, Error, ErrorKind, LoadOptions, Result, TextModel};
use inference_conformance::scripted::ScriptedAdapter;
use parking_lot::Mutex;

use model::{Model, State};

/// The broken promise: the check that must fail, and how the mock breaks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    NameWithSpaces,
    Unavailable,
    NeverLoads,
    TypeIsNotArchitecture,
    TraitDeclaredInVain,
    UndeclaredWorks,
    MissingPathLoads,
    MissingPathHangs,
    NoiseLoads,
    NoisePanics,
    BadLoadOptionsPass,
    AdapterIgnored,
    FormatNotDeclared,
    ContextEndsReply,
    WholeReplyFirst,
    OtherText,
    EndKnownTooEarly,
    ZeroTokensIsOne,
    GivesUpEarly,
    EosInReply,
    StopTokensIgnored,
    StopStringsIgnored,
    HeldBackLost,
    StopCauseWrong,
    SeedMovesGreedy,
    TopKIgnored,
    PenaltyIgnored,
    PresenceIgnored,
    FrequencyIgnored,
    BiasIgnored,
    BannedComes,
    ForcedNotCounted,
    MinTokensIgnored,
    XtcIgnored,
    ProcessorNotCalled,
    ProcessorErrorLost,
    LogprobsAlways,
    LogprobsUnsorted,
    LogprobsOfTemperature,
    GrammarIgnored,
    GrammarCutShort,
    BrokenGrammarPasses,
    UndeclaredGrammar,
    SeedIgnored,
    SeedsAllOne,
    UnseededIsSeeded,
    CancelledGivesToken,
    CancelIgnored,
    DeadlineGivesToken,
    DeadlineIgnored,
    DropLeaks,
    DecodeTakesTooLong,
    CountsOneMore,
    FiguresGoDown,
    ModelFiguresMissing,
    NanIsGreedy,
    LogitsOutliveDeadline,
    ForeignIdsPass,
    EmptyTextPanics,
    ChatIgnoresMaxTokens,
    ChatTakesNan,
    ClassifyOutOfOrder,
    ClassifyLogitsShort,
    ClassifyLogitsAlways,
    ClassifyNothingFails,
    ClassifyNotCancelled,
    BatchOutOfOrder,
    BatchFailsWhole,
    BatchOutlivesDeadline,
    SessionMixesRows,
    SessionRemovesNothing,
    SessionFailsWhole,
    SessionNotCancelled,
    UndeclaredSession,
    DecodesAnything,
    IdsReversed,
    LogitsShapeSwapped,
    LogitsNegated,
    TokenLogitsMissing,
    ConversationLost,
    ConversationOfOtherIds,
    LoraRankZero,
    AdapterNotReadBack,
    AttentionTooShort,
    StatesSorted,
    StatesBeyondPass,
    EmbedOutOfOrder,
    EmbedLongPasses,
    RerankOutOfOrder,
    CacheChanged,
    CacheDamagedLoads,
    CacheOfCancelled,
    EditsIgnored,
    /// Requests with an unknown adapter run without one.
    UnknownAdapterIgnored,
    /// An adapter stays after it is dropped.
    AdapterNotDropped,
    /// Adapters work without being declared.
    UndeclaredAdapters,
    UndeclaredAttention,
    UndeclaredCache,
    UndeclaredEdits,
    UndeclaredEmbeddings,
    UndeclaredLogits,
    UndeclaredReranking,
    UndeclaredStates,
    UndeclaredTraining,
    ClosedEmbeds,
    MixesRequests,
    BoundToThread,
    OneStreamAThread,
    CloseClosesAll,
    ModelsStay,
    CloseTwiceFails,
    ClosedIsEngine,
    CloseEndsSilently,
    DropEndsSilently,
}

/// The fixture that `echo` loads.
pub fn tales() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/plugin/models/tales")
}

/// The fixture with an additional file, which makes it look like a model of the format that the
/// mock declares.
pub fn tales_of_a_format() -> PathBuf {
    static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conformance-tales");
        std::fs::create_dir_all(&dir).unwrap();
        // The file is written under another name and then renamed, because several test binaries
        // may run concurrently.
        let aside = dir.join(format!("{}.part", std::process::id()));
        std::fs::copy(tales().join("corpus.txt"), &aside).unwrap();
        std::fs::rename(&aside, dir.join("corpus.txt")).unwrap();
        std::fs::write(dir.join("model.safetensors"), "").unwrap();
        dir
    });
    DIR.clone()
}

/// The wrapper around `echo`.
pub struct Mock {
    fault: Fault,
    loaded: Mutex<Vec<Weak<State>>>,
    /// The memory that its models report, in bytes.
    bytes_in_use: Arc<AtomicU64>,
}

impl Mock {
    pub fn with(fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            fault,
            loaded: Mutex::default(),
            bytes_in_use: Arc::default(),
        })
    }
}

impl Backend for Mock {
    fn name(&self) -> &str {
        match self.fault {
            Fault::NameWithSpaces => "My Backend",
            _ => "mock",
        }
    }

    fn available(&self) -> bool {
        self.fault != Fault::Unavailable
    }

    fn unavailable_reason(&self) -> Option<String> {
        (!self.available()).then(|| String::from("its device is on the moon"))
    }

    fn device(&self) -> String {
        echo_backend::Echo.device()
    }

    fn capabilities(&self) -> Capabilities {
        let mut c = echo_backend::Echo
            .capabilities()
            .with_training()
            .with_attention_inspection()
            .with_adapters()
            .with_safetensors()
            .with_grammars()
            .with_batch_sessions()
            .with_embeddings()
            .with_reranking()
            .with_hidden_states()
            .with_prompt_cache()
            .with_steering()
            .with_named_adapters();
        match self.fault {
            Fault::UndeclaredWorks => c.classify = false,
            Fault::UndeclaredGrammar => c.grammars = false,
            Fault::UndeclaredSession => c.batch_sessions = false,
            Fault::UndeclaredAttention => c.attention_inspection = false,
            Fault::UndeclaredCache => c.prompt_cache = false,
            Fault::UndeclaredEdits => c.steering = false,
            Fault::UndeclaredAdapters => c.named_adapters = false,
            Fault::UndeclaredEmbeddings => c.embeddings = false,
            Fault::UndeclaredLogits => c.logits = false,
            Fault::UndeclaredReranking => c.reranking = false,
            Fault::UndeclaredStates => c.hidden_states = false,
            Fault::UndeclaredTraining => c.training = false,
            Fault::FormatNotDeclared => (c.safetensors, c.gguf) = (false, true),
            _ => {}
        }
        c
    }

    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
        let (mut path, mut options) = (path.to_owned(), options.clone());
        let there = path.join("corpus.txt").is_file();
        match self.fault {
            Fault::NeverLoads
                if there && options.validate().is_ok() && options.adapter_path.is_none() =>
            {
                return Err(Error::new(ErrorKind::Engine, "the mock never loads"));
            }
            Fault::MissingPathLoads if !path.exists() => path = tales(),
            Fault::MissingPathHangs if !path.exists() => loop {
                std::thread::park();
            },
            Fault::NoiseLoads if !there && path.exists() => path = tales(),
            Fault::NoisePanics if path.is_file() => panic!("index out of bounds"),
            Fault::BadLoadOptionsPass if options.validate().is_err() => {
                options = LoadOptions::new();
            }
            Fault::AdapterIgnored if options.validate().is_ok() => options.adapter_path = None,
            _ => {}
        }
        if options.validate().is_ok()
            && let Some(adapter) = options.adapter_path.take()
        {
            if !adapter.join(ScriptedAdapter::FILE).is_file() {
                let missing = Error::new(ErrorKind::ModelNotFound, "there is no adapter here");
                return Err(missing.with_path(adapter));
            }
            if self.fault == Fault::AdapterNotReadBack {
                return Err(Error::new(
                    ErrorKind::InvalidModel,
                    "the adapter has no end",
                ));
            }
        }
        let inner = echo_backend::Echo.load_model(&path, &options)?;
        let bounded = options.context_len;
        let model = Model::new(inner, self.fault, &self.bytes_in_use, bounded);
        let mut loaded = self.loaded.lock();
        if self.fault == Fault::CloseClosesAll {
            model.state.others.lock().clone_from(&loaded);
            for other in loaded.iter().filter_map(Weak::upgrade) {
                other.others.lock().push(Arc::downgrade(&model.state));
            }
        }
        loaded.push(Arc::downgrade(&model.state));
        Ok(Box::new(model))
    }
}
