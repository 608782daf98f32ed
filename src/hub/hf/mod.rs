//! Models of the Hugging Face Hub, named `owner/name`, in the cache that Python's tools also use.
//!
//! Only the files that a model needs are downloaded. A file appears in the cache only when it is
//! complete and verified. Files are stored in `models--owner--name/{blobs,snapshots,refs}`, the
//! layout of `huggingface_hub`. This module reads no weights. `select` determines which files
//! belong together, and `layout` determines their paths.
//!
//! Why not the crate `hf-hub` (1.0): it restarts interrupted files, verifies no hash, has no
//! offline mode, and needs an asynchronous runtime and about 280 crates. This module needs one
//! blocking client (`ureq`).

mod download;
mod http;
mod inventory;
mod layout;
mod names;
mod select;
mod settings;
mod spec;
mod upload;
mod upload_files;

use std::path::{Path, PathBuf};
use std::time::Duration;

use inference::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::progress::Progress;
use download::Fetcher;
use http::Http;
use layout::Repository;

pub use inventory::{CachedModel, Removed};
pub use spec::ModelSpec;
pub use upload::{PushOptions, Pushed};

/// Maximum size of an answer about a repository, in bytes.
const MAX_LISTING: u64 = 64 << 20;
/// Maximum number of files in a repository. No model has more.
const MAX_FILES: usize = 20_000;

/// A hub and the local cache of its files.
#[derive(Clone)]
pub struct HfHub {
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
    offline: bool,
    retry_delay: Duration,
}

impl std::fmt::Debug for HfHub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HfHub")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// The hub's data about a repository at a revision.
#[derive(Debug, Deserialize)]
struct Listing {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

/// A file of a repository.
#[derive(Debug, Clone, Deserialize)]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
    #[serde(rename = "blobId", default)]
    blob: Option<String>,
    #[serde(default)]
    size: Option<u64>,
}

impl HfHub {
    /// The hub and the cache that environment variables determine. `HF_ENDPOINT` is the hub.
    /// `HF_HUB_CACHE` is the cache, otherwise `hub` in `HF_HOME`. `HF_TOKEN` is the token,
    /// otherwise the file `HF_TOKEN_PATH`, otherwise `token` in `HF_HOME`. `HF_HUB_OFFLINE` and
    /// `MLX_OFFLINE` disable the network.
    ///
    /// # Errors
    /// If neither a variable nor a home directory determines the cache, or if a value is invalid.
    pub fn from_env() -> Result<Self> {
        settings::read(&|name| std::env::var_os(name), std::env::home_dir())
    }

    /// A hub at `endpoint` with the cache directory `cache`. Environment variables are ignored.
    ///
    /// # Errors
    /// If `endpoint` is not an `http` or `https` address.
    pub fn new(endpoint: &str, cache: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self {
            cache: cache.into(),
            endpoint: settings::endpoint(endpoint)?,
            token: None,
            offline: false,
            retry_delay: Duration::from_millis(500),
        })
    }

    /// Sets the access token. It is sent only to the endpoint, never to the target of a redirect.
    ///
    /// # Errors
    /// If it contains characters that a header cannot carry.
    pub fn with_token(mut self, token: &str) -> Result<Self> {
        self.token = settings::token(token)?;
        Ok(self)
    }

    /// Sets whether to use only the cache.
    #[must_use]
    pub fn with_offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// Sets the delay before the first retry of a failed request. Each further retry doubles the
    /// delay.
    #[must_use]
    pub fn with_retry_delay(mut self, delay: Duration) -> Self {
        self.retry_delay = delay;
        self
    }

    /// The cache directory.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// The model's path, if the cache contains all files that it needs. Downloads nothing.
    #[must_use]
    pub fn cached(&self, spec: &ModelSpec) -> Option<PathBuf> {
        let repository = Repository::new(&self.cache, spec);
        let commit = repository.commit_of(spec.revision())?;
        select::complete(&repository.snapshot(&commit), spec.file())
    }

    /// The model's path. Downloads the model unless the cache contains all its files.
    ///
    /// # Errors
    /// Those of [`Self::pull`].
    pub fn get(&self, spec: &ModelSpec, progress: &mut dyn Progress) -> Result<PathBuf> {
        match self.cached(spec) {
            Some(path) => Ok(path),
            None => self.pull(spec, false, progress),
        }
    }

    /// Lists the revision's files on the hub, and downloads those that the model needs and the
    /// cache lacks. Returns the snapshot's directory, or the path of a GGUF file in it. Interrupted
    /// downloads continue. `verify` hashes files that are already cached.
    ///
    /// Offline, it returns the cached path.
    ///
    /// # Errors
    /// [`ErrorKind::ModelNotFound`] if the repository, revision or file does not exist or, offline,
    /// is not cached. [`ErrorKind::InvalidModel`] for a repository without a usable model, and for
    /// bytes that differ from the hub's hash. [`ErrorKind::Io`] for refusals, and for failures of
    /// connections and disks.
    pub fn pull(
        &self,
        spec: &ModelSpec,
        verify: bool,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        if self.offline {
            return self.cached(spec).ok_or_else(|| {
                Error::new(
                    ErrorKind::ModelNotFound,
                    format!(
                        "{spec} is not (or not whole) in the cache {}, and HF_HUB_OFFLINE or \
                         MLX_OFFLINE forbids fetching it",
                        self.cache.display()
                    ),
                )
            });
        }
        let pulled = self.pull_online(spec, verify, progress);
        pulled.map_err(|e| e.context(format!("cannot fetch {spec}")))
    }

    fn pull_online(
        &self,
        spec: &ModelSpec,
        verify: bool,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        let http = Http::new(&self.endpoint, self.token.as_deref(), self.retry_delay);
        let listing = self.listing(&http, spec)?;
        let repository = Repository::new(&self.cache, spec);
        let mut fetcher = Fetcher {
            http: &http,
            endpoint: &self.endpoint,
            spec,
            repository: &repository,
            commit: &listing.sha,
            files: &listing.siblings,
            verify,
            progress,
        };
        let names: Vec<&str> = listing.siblings.iter().map(|f| f.name.as_str()).collect();
        let path = match select::choose(&names, spec)? {
            select::Choice::Gguf(name) => fetcher.fetch(&name, "1/1")?,
            select::Choice::Directory { companions, index } => {
                let mut wanted = companions;
                match index {
                    Some(index) => {
                        let path = fetcher.fetch(&index, "index")?;
                        wanted.extend(select::shards(&path, &index, &names)?);
                    }
                    None => wanted.extend(select::loose_weights(&names)),
                }
                let count = wanted.len();
                for (n, name) in wanted.iter().enumerate() {
                    fetcher.fetch(name, &format!("{}/{count}", n + 1))?;
                }
                repository.snapshot(&listing.sha)
            }
        };
        // The reference is written last, so a name in `refs` implies a complete model.
        repository.write_ref(spec.revision(), &listing.sha)?;
        Ok(path)
    }

    fn listing(&self, http: &Http, spec: &ModelSpec) -> Result<Listing> {
        let url = format!(
            "{}/api/models/{}/revision/{}?blobs=true",
            self.endpoint,
            spec.id(),
            http::encode(spec.revision(), false)
        );
        let bytes = http.get_small(&url, MAX_LISTING)?;
        let listing: Listing = serde_json::from_slice(&bytes).map_err(|e| {
            Error::new(
                ErrorKind::Io,
                format!("{url} did not answer with a list of files; is HF_ENDPOINT right?"),
            )
            .with_source(e)
        })?;
        if !names::is_plain(&listing.sha) {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{url} gives the commit {:?}, which is not a commit hash",
                    listing.sha
                ),
            ));
        }
        if listing.siblings.len() > MAX_FILES {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the repository has more than {MAX_FILES} files"),
            ));
        }
        Ok(listing)
    }
}
