//! The registry of loaded models. Every model name in a request is resolved here. A name is never
//! used as a path, and only models that the source lists can be loaded.
//!
//! A request has a [`Lease`] from before its prompt is tokenized to the end of its reply. A model
//! without leases is unloaded when its keep-alive time ends, or when another model needs its
//! memory. Loads and unloads happen one at a time. A model that is due to be unloaded accepts no
//! new requests, so clients of a busy model cannot block other models.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use inference::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, Semaphore, watch};

use super::lease::{KeepAlive, Lease, Outcome, Release};
use super::table::{Table, bare};
use super::{ModelEntry, ModelSource, ServedModel};
use crate::config::Config;
use crate::error::ApiError;
use futures_util::future::BoxFuture;

/// How long a request to delete a model waits for the model's running replies.
const FREE: Duration = Duration::from_secs(10);

/// An owner of model parts, such as running sessions. It must drop these parts before the model is
/// unloaded.
pub(crate) trait Unload: Send + Sync {
    /// Drops all parts of the model with this key. When this is called, no request uses the model.
    fn unload(&self, model: u64) -> BoxFuture<'_, ()>;
}

pub(crate) struct Models {
    table: Mutex<Table>,
    source: Option<Arc<dyn ModelSource>>,
    engine: Arc<dyn Unload>,
    keep: KeepAlive,
    /// Longest keep-alive time that a request may set, unless the operator keeps models forever.
    most_keep: Duration,
    /// Maximum number of loaded models, without the pinned ones.
    most: usize,
    /// Whether the first model answers requests that name an unknown model.
    any: bool,
    /// Locked while a model is loaded or unloaded, so that these operations never overlap.
    turn: tokio::sync::Mutex<()>,
    /// Limits the number of requests that wait for a model.
    waiting: Semaphore,
    /// Signals that a lease has ended or an expiry time has changed.
    changed: Notify,
    /// This registry. A lease may outlive its handler, and reports its end through this pointer.
    me: Weak<Models>,
}

/// A model that requests may name.
pub(crate) struct Listed {
    pub(crate) name: String,
    /// The known information about the model's files; `None` if the source does not list the model.
    pub(crate) entry: Option<ModelEntry>,
    pub(crate) loaded: Option<Arc<ServedModel>>,
    /// How long the model stays loaded if no request arrives; `None` means forever.
    pub(crate) stays: Option<Duration>,
}

impl Models {
    /// A registry of the models that are already loaded and of the models that the source can load.
    /// A loaded model may be unloaded only if the source lists it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if there is no model to serve, or if two models have the same
    /// name.
    pub(crate) fn new(
        loaded: Vec<ServedModel>,
        source: Option<Arc<dyn ModelSource>>,
        config: &Config,
        engine: Arc<dyn Unload>,
    ) -> Result<Arc<Self>> {
        let invalid = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        if loaded.is_empty() && source.is_none() {
            return invalid("there is no model to serve; name at least one".into());
        }
        let listed = source.as_ref().map(|s| s.entries()).unwrap_or_default();
        let mut table = Table::default();
        for model in loaded {
            if table.residents.iter().any(|r| r.model.id == model.id) {
                let id = &model.id;
                return invalid(format!(
                    "two models have the name {id}; serve only one of them"
                ));
            }
            let pinned = !listed.iter().any(|entry| entry.name == model.id);
            table.add(Arc::new(model), pinned, config.keep_alive);
        }
        Ok(Arc::new_cyclic(|me| Self {
            table: Mutex::new(table),
            source,
            engine,
            keep: config.keep_alive,
            most_keep: config.limits.keep_alive,
            most: config.max_models,
            any: config.any_model,
            turn: tokio::sync::Mutex::new(()),
            waiting: Semaphore::new(config.max_queue.max(1)),
            changed: Notify::new(),
            me: Weak::clone(me),
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// The source, for routes that describe, delete or fetch models.
    pub(crate) fn source(&self) -> Option<&Arc<dyn ModelSource>> {
        self.source.as_ref()
    }

    /// All loaded models, for a log.
    pub(crate) fn loaded(&self) -> Vec<Arc<ServedModel>> {
        let table = self.table();
        let models = table.residents.iter().map(|r| Arc::clone(&r.model));
        models.collect()
    }

    /// Leases the model with this name, and loads it if necessary. Without a name, leases the first
    /// model. `keep` is the keep-alive time that the request sets.
    pub(crate) async fn get(
        &self,
        name: Option<&str>,
        keep: Option<KeepAlive>,
    ) -> std::result::Result<Lease, ApiError> {
        let name = match name.filter(|name| !name.is_empty()) {
            Some(name) => name.to_owned(),
            None => self.first().await?,
        };
        let keep = keep.map_or(self.keep, |keep| self.bounded(keep));
        if let Some(lease) = self.lease(&name, keep) {
            return Ok(lease);
        }
        let name = match self.allowed(&name).await {
            Err(_) if self.any => self.first().await?,
            entry => entry?,
        };
        // This limits the number of waiting requests.
        let _waits = self.waiting.try_acquire().map_err(|_| ApiError::busy())?;
        self.loaded_or_load(&name, keep).await
    }

    /// Leases a model of the source, and loads it if necessary.
    async fn loaded_or_load(
        &self,
        name: &str,
        keep: KeepAlive,
    ) -> std::result::Result<Lease, ApiError> {
        let mut outcome = match self.join(name, keep) {
            Joined::Loaded(lease) => return Ok(lease),
            Joined::Loading(outcome) => outcome,
        };
        let done = outcome.wait_for(Option::is_some).await;
        match done.ok().and_then(|done| done.clone()) {
            Some(outcome) => {
                let lease = outcome?;
                self.keep(lease.key(), keep);
                Ok(lease)
            }
            // The loading task always sends an outcome, so a missing outcome is a bug.
            None => Err(ApiError::internal()),
        }
    }

    /// The requested keep-alive time, limited by the configuration. If the operator limits the
    /// time, no client may keep a model forever.
    fn bounded(&self, keep: KeepAlive) -> KeepAlive {
        let Some(usual) = self.keep else { return keep };
        let most = self.most_keep.max(usual);
        Some(keep.map_or(most, |keep| keep.min(most)))
    }

    /// The name of the model for requests without one.
    async fn first(&self) -> std::result::Result<String, ApiError> {
        let first = self.table().residents.first().map(|r| r.model.id.clone());
        if let Some(name) = first {
            return Ok(name);
        }
        let first = self.entries().await.into_iter().next();
        first.map(|entry| entry.name).ok_or_else(|| {
            ApiError::new(
                StatusCode::NOT_FOUND,
                "invalid_request_error",
                "there is no model yet",
            )
            .with_code("model_not_found")
            .with_param("model")
        })
    }

    /// A lease of a model that is loaded.
    fn lease(&self, name: &str, keep: KeepAlive) -> Option<Lease> {
        self.table().lease(name, keep, &self.returns())
    }

    /// Sets the keep-alive time of a model.
    fn keep(&self, key: u64, keep: KeepAlive) {
        let mut table = self.table();
        if let Some(r) = table.residents.iter_mut().find(|r| r.key == key) {
            r.keep = keep;
        }
    }

    /// The pointer through which leases report their end.
    fn returns(&self) -> Weak<dyn Release> {
        self.me.clone()
    }

    async fn entries(&self) -> Vec<ModelEntry> {
        let Some(source) = self.source.clone() else {
            return Vec::new();
        };
        let entries = tokio::task::spawn_blocking(move || source.entries()).await;
        entries.unwrap_or_else(|e| {
            tracing::error!("listing the models failed: {e}");
            Vec::new()
        })
    }

    /// The main name of the entry, if the source lists `name`.
    async fn allowed(&self, name: &str) -> std::result::Result<String, ApiError> {
        let entries = self.entries().await;
        if let Some(name) = own_name(&entries, name) {
            return Ok(name.to_owned());
        }
        let listed = entries.iter().filter(|e| e.same_as.is_none());
        let names: Vec<&str> = listed.map(|e| e.name.as_str()).collect();
        Err(self.not_served(name, &names))
    }

    fn not_served(&self, name: &str, listed: &[&str]) -> ApiError {
        let shown: String = name.chars().take(100).collect();
        let mut names: Vec<String> = self.loaded().iter().map(|m| m.id.clone()).collect();
        for name in listed {
            if !names.iter().any(|n| n == name) {
                names.push((*name).to_owned());
            }
        }
        let message = format!(
            "the model {shown:?} is not served here; there are: {}",
            names.join(", ")
        );
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
            .with_code("model_not_found")
            .with_param("model")
    }

    /// Joins the load of this model that is in progress, or starts one.
    fn join(&self, name: &str, keep: KeepAlive) -> Joined {
        let mut table = self.table();
        if let Some(lease) = table.lease(name, keep, &self.returns()) {
            return Joined::Loaded(lease);
        }
        if let Some(outcome) = table.loading.get(name) {
            return Joined::Loading(outcome.clone());
        }
        let (tell, outcome) = watch::channel(None);
        table.loading.insert(name.to_owned(), outcome.clone());
        drop(table);
        // The load runs in a separate task, because other requests may wait for it. It continues
        // when the client that started it disconnects.
        if let Some(models) = self.me.upgrade() {
            let name = name.to_owned();
            tokio::spawn(async move {
                let done = models.load(&name, keep).await;
                models.table().loading.remove(&name);
                let _ = tell.send(Some(done));
            });
        }
        Joined::Loading(outcome)
    }

    /// Loads a model. If necessary, unloads other models first.
    async fn load(&self, name: &str, keep: KeepAlive) -> std::result::Result<Lease, ApiError> {
        let Some(source) = &self.source else {
            return Err(ApiError::internal());
        };
        if let Some(lease) = self.add_adapter(source, name, keep).await? {
            return Ok(lease);
        }
        let _turn = self.turn.lock().await;
        while self.table().movable() >= self.most.max(1) {
            self.make_room().await?;
        }
        loop {
            let (loader, wanted) = (Arc::clone(source), name.to_owned());
            let started = Instant::now();
            let loaded = tokio::task::spawn_blocking(move || loader.load(&wanted)).await;
            let loaded = loaded.unwrap_or_else(|e| {
                Err(Error::new(ErrorKind::Engine, "loading panicked").with_source(e))
            });
            let error = match loaded {
                Ok(model) => {
                    tracing::info!(model = name, took = ?started.elapsed(), "loaded");
                    let mut table = self.table();
                    let key = table.add(Arc::new(model.with_id(name)), false, keep);
                    return table
                        .lease_of(key, &self.returns())
                        .ok_or_else(ApiError::internal);
                }
                Err(error) => error,
            };
            if error.kind() == ErrorKind::OutOfMemory && self.table().movable() > 0 {
                tracing::info!(model = name, "no memory; another model must go");
                self.make_room().await?;
                continue;
            }
            return Err(not_loaded(name, &error));
        }
    }

    /// Adds an adapter to the model whose weights it shares, and loads this model if necessary.
    /// `None` if the name is not an adapter, or if the model cannot share its weights.
    async fn add_adapter(
        &self,
        source: &Arc<dyn ModelSource>,
        name: &str,
        keep: KeepAlive,
    ) -> std::result::Result<Option<Lease>, ApiError> {
        let (asked, wanted) = (Arc::clone(source), name.to_owned());
        let base = tokio::task::spawn_blocking(move || asked.base_of(&wanted)).await;
        let Ok(Some(base)) = base else {
            return Ok(None);
        };
        let base = self.loaded_or_load(&base, self.keep).await?;
        let _turn = self.turn.lock().await;
        let (loader, wanted, model) = (Arc::clone(source), name.to_owned(), base.clone());
        let added = tokio::task::spawn_blocking(move || {
            loader.add_adapter(&wanted, model.model().as_ref())
        });
        let added = added.await.unwrap_or_else(|e| {
            Err(Error::new(ErrorKind::Engine, "loading panicked").with_source(e))
        });
        match added {
            Ok(()) => {
                tracing::info!(model = name, base = base.id(), "added an adapter");
                let model = Arc::new(ServedModel::sharing(base, name));
                let mut table = self.table();
                let key = table.add(model, false, keep);
                let lease = table.lease_of(key, &self.returns());
                lease.map(Some).ok_or_else(ApiError::internal)
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                tracing::info!(model = name, "is loaded apart: {error}");
                Ok(None)
            }
            Err(error) => Err(not_loaded(name, &error)),
        }
    }

    /// Unloads the least recently used model, after its running requests have ended.
    async fn make_room(&self) -> std::result::Result<(), ApiError> {
        let key = self.table().retire().ok_or_else(ApiError::internal)?;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let adapters = self.table().idle_adapters(key);
            for adapter in adapters {
                self.unload(adapter).await;
            }
            if self.table().is_idle(key) {
                break;
            }
            changed.await;
        }
        self.unload(key).await;
        Ok(())
    }

    /// Unloads a model without leases. The caller has locked `turn`.
    async fn unload(&self, key: u64) {
        let resident = {
            let mut table = self.table();
            match table.residents.iter().position(|r| r.key == key) {
                // A request may have leased the model since the caller checked.
                Some(at) if table.residents[at].leases == 0 => table.residents.remove(at),
                _ => return,
            }
        };
        self.engine.unload(key).await;
        let model = resident.model;
        tracing::info!(model = model.id, "unloaded");
        // Freeing gigabytes blocks for a while, so another thread does it.
        let closed = tokio::task::spawn_blocking(move || {
            if let Err(e) = model.close() {
                tracing::warn!("closing {}: {e}", model.id);
            }
        });
        if let Err(e) = closed.await {
            tracing::error!("closing a model failed: {e}");
        }
    }

    /// Unloads models whose keep-alive time has ended. Runs as long as the server.
    pub(crate) async fn expire(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let (due, next) = self.table().due();
            if let Some(key) = due {
                let _turn = self.turn.lock().await;
                // The model may have been used while this task waited for `turn`.
                if self.table().due().0 == Some(key) {
                    self.unload(key).await;
                }
                continue;
            }
            match next {
                Some(at) => {
                    let _ = tokio::time::timeout_at(at.into(), changed).await;
                }
                None => changed.await,
            }
        }
    }

    /// All models that requests may name: the loaded ones first.
    pub(crate) async fn list(&self) -> Vec<Listed> {
        let mut entries = self.entries().await;
        entries.retain(|entry| entry.same_as.is_none());
        let table = self.table();
        let now = Instant::now();
        let mut all: Vec<Listed> = table
            .residents
            .iter()
            .map(|r| {
                let name = r.model.id.clone();
                let at = entries.iter().position(|e| e.name == name);
                let expires = match r.leases {
                    0 => r.expires(),
                    // The keep-alive time starts when the last request ends.
                    _ => r
                        .keep
                        .filter(|_| !r.pinned)
                        .and_then(|k| now.checked_add(k)),
                };
                Listed {
                    name,
                    entry: (at.map(|at| entries.remove(at))).or_else(|| r.model.files().cloned()),
                    loaded: Some(Arc::clone(&r.model)),
                    stays: expires.map(|at| at.saturating_duration_since(now)),
                }
            })
            .collect();
        all.extend(entries.into_iter().map(|entry| Listed {
            name: entry.name.clone(),
            entry: Some(entry),
            loaded: None,
            stays: None,
        }));
        all
    }

    /// The known information about the model with this name.
    pub(crate) async fn look(&self, name: Option<&str>) -> std::result::Result<Listed, ApiError> {
        let name = match name.filter(|name| !name.is_empty()) {
            Some(name) => name.to_owned(),
            None => self.first().await?,
        };
        let name = match own_name(&self.entries().await, &name) {
            Some(original) => original.to_owned(),
            None => name,
        };
        let mut all = self.list().await;
        let index = all.iter().position(|m| m.name == name);
        let index = index.or_else(|| {
            all.iter()
                .position(|m| Some(m.name.as_str()) == bare(&name))
        });
        match index {
            Some(at) => Ok(all.swap_remove(at)),
            None => {
                let names: Vec<&str> = all.iter().map(|m| m.name.as_str()).collect();
                Err(self.not_served(&name, &names))
            }
        }
    }

    /// Unloads a model, and then deletes its files.
    pub(crate) async fn delete(&self, name: &str) -> std::result::Result<(), ApiError> {
        let source = self.source.as_ref().filter(|source| source.can_delete());
        let Some(source) = source.cloned() else {
            let message = "this server deletes no models; start it with --allow-delete, or use \
                           `mlx rm` on its machine";
            let kind = "invalid_request_error";
            return Err(ApiError::new(StatusCode::FORBIDDEN, kind, message));
        };
        let name = self.look(Some(name)).await?.name;
        let started = Instant::now();
        let _turn = loop {
            let is_loaded = |name: &str| self.table().find(name).is_some();
            if is_loaded(&name) && !self.dismiss(&name) {
                let message =
                    format!("{name} was named when the server started, and cannot be deleted");
                return Err(ApiError::field("model", message));
            }
            // While `turn` is locked, no model is loaded or unloaded.
            let turn = self.turn.lock().await;
            if !is_loaded(&name) {
                break turn;
            }
            drop(turn);
            if started.elapsed() > FREE {
                let message = format!("{name} is in use; try again when its replies have ended");
                return Err(
                    ApiError::new(StatusCode::CONFLICT, "conflict_error", message)
                        .with_param("model"),
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let doomed = name.clone();
        let deleted = tokio::task::spawn_blocking(move || source.delete(&doomed)).await;
        match deleted {
            Ok(Ok(())) => {
                tracing::info!(model = name, "deleted");
                Ok(())
            }
            Ok(Err(e)) if e.kind() == ErrorKind::Unsupported => {
                Err(ApiError::field("model", e.message()))
            }
            Ok(Err(e)) => {
                tracing::error!(model = name, "cannot be deleted: {e}");
                Err(ApiError::internal())
            }
            Err(e) => {
                tracing::error!(model = name, "deleting failed: {e}");
                Err(ApiError::internal())
            }
        }
    }

    /// Marks a model for unloading as soon as no request uses it. Returns whether the model is
    /// loaded and may be unloaded.
    pub(crate) fn dismiss(&self, name: &str) -> bool {
        let mut table = self.table();
        let resident = table.find(name);
        let Some(key) = resident.filter(|r| !r.pinned).map(|r| r.key) else {
            return false;
        };
        table.expire_with_adapters(key);
        drop(table);
        self.changed.notify_waiters();
        true
    }
}

impl Release for Models {
    fn release(&self, key: u64) {
        let mut table = self.table();
        if let Some(r) = table.residents.iter_mut().find(|r| r.key == key) {
            r.leases = r.leases.saturating_sub(1);
            let now = Instant::now();
            (r.idle_since, r.not_before) = (now, now);
        }
        drop(table);
        self.changed.notify_waiters();
    }
}

/// The answer to a request whose model cannot be loaded. The log has the reason.
fn not_loaded(name: &str, error: &Error) -> ApiError {
    tracing::error!(model = name, "cannot be loaded: {error}");
    match error.kind() {
        ErrorKind::OutOfMemory => ApiError::of_engine(error),
        // Messages of loaders contain file names, so clients get only a general message.
        _ => ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "server_error",
            "the model cannot be loaded; the server's log says why",
        )
        .with_code("model_not_loaded")
        .with_param("model"),
    }
}

/// The main name of the model that has this name or alias.
fn own_name<'a>(entries: &'a [ModelEntry], name: &str) -> Option<&'a str> {
    let entry = entries.iter().find(|e| e.name == name);
    // Ollama's clients append a tag to names, so the name without its tag must match, too.
    let entry = entry.or_else(|| entries.iter().find(|e| Some(e.name.as_str()) == bare(name)))?;
    Some(entry.same_as.as_deref().unwrap_or(&entry.name))
}

enum Joined {
    Loaded(Lease),
    Loading(watch::Receiver<Outcome>),
}
