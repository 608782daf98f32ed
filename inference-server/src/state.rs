//! State that the handlers of all routes share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use inference::Result;

use crate::auth::Access;
use crate::config::Config;
use crate::defaults::RequestDefaults;
use crate::engine::{Engine, EngineOptions};
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::models::{ModelSource, Models, ServedModel, Unload};
use crate::tools::ServerTools;

/// State that handlers share.
#[derive(Clone)]
pub(crate) struct App(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) models: Arc<Models>,
    pub(crate) engine: Arc<Engine>,
    /// The maximum number of requests that run together.
    pub(crate) parallel: usize,
    pub(crate) limits: Limits,
    /// Values for fields that a request leaves out.
    pub(crate) defaults: RequestDefaults,
    /// Tools that the server runs for models.
    pub(crate) tools: Option<ServerTools>,
    /// Limits the memory of all bodies and their parsed values, in bytes.
    pub(crate) bodies: Arc<tokio::sync::Semaphore>,
    /// Allows one download at a time.
    pub(crate) pulls: Arc<tokio::sync::Semaphore>,
    pub(crate) access: Access,
    pub(crate) metrics: Arc<Metrics>,
    /// Whether requests may edit the model's states.
    pub(crate) steering: bool,
    /// The text of `/openapi.json`.
    pub(crate) description: String,
    /// Whether `/` serves the chat page.
    pub(crate) ui: bool,
    /// Origins of web pages that may send requests.
    pub(crate) origins: Vec<String>,
    names: AtomicU64,
    /// A random hash, which makes the ids of answers hard to predict.
    hasher: std::hash::RandomState,
}

impl std::ops::Deref for App {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl App {
    pub(crate) fn new(
        config: &Config,
        models: Vec<ServedModel>,
        source: Option<Arc<dyn ModelSource>>,
        description: String,
    ) -> Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let options = EngineOptions {
            parallel: config.parallel,
            max_queue: config.max_queue,
            kv_budget: config.kv_budget,
            buffered: config.limits.buffered_tokens,
            stall: config.limits.stall,
        };
        let engine = Arc::new(Engine::start(&options, Arc::clone(&metrics))?);
        let unload = Arc::clone(&engine) as Arc<dyn Unload>;
        let models = Models::new(models, source, config, unload)?;
        Ok(Self(Arc::new(Inner {
            models,
            engine,
            parallel: config.parallel,
            limits: config.limits.clone(),
            defaults: config.defaults.clone(),
            tools: config.tools.clone(),
            bodies: Arc::new(tokio::sync::Semaphore::new(config.limits.all_bodies_bytes)),
            pulls: Arc::new(tokio::sync::Semaphore::new(1)),
            access: Access::new(config),
            metrics,
            steering: config.steering,
            description,
            ui: config.ui,
            origins: config.allowed_origins.clone(),
            names: AtomicU64::new(0),
            hasher: std::hash::RandomState::new(),
        })))
    }

    /// A new id for an answer: `prefix` and 24 hexadecimal digits.
    pub(crate) fn name(&self, prefix: &str) -> String {
        use std::hash::BuildHasher;
        let n = self.names.fetch_add(1, Ordering::Relaxed);
        let noise = self.hasher.hash_one(n);
        format!("{prefix}{noise:016x}{:08x}", n & 0xFFFF_FFFF)
    }
}
