//! The Hugging Face Hub: models by `owner/name`, in the cache that Python's tools share.
//!
//! It fetches the files a model needs and nothing else, each whole and checked or not at all. They
//! go into `models--owner--name/{blobs,snapshots,refs}`, the layout of `huggingface_hub`. It reads
//! no weights; which files belong together is in `select`, what the disk looks like in `layout`.
//!
//! The crate `hf-hub` (1.0) is not used. It starts an interrupted file anew, checks no hash and has
//! no offline mode. It needs an asynchronous runtime and some 280 crates. This is one blocking
//! client (`ureq`) and the rules above.

mod download;
mod http;
mod inventory;
mod layout;
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

/// The longest answer to a question about a repository, in bytes.
const MAX_LISTING: u64 = 64 << 20;
/// More files than this are no model.
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

/// What the hub says about a repository at a revision.
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
    /// The hub and the cache that the environment names. The variables are `HF_ENDPOINT`;
    /// `HF_HUB_CACHE`, else `hub` in `HF_HOME`; `HF_TOKEN`, else the file that `HF_TOKEN_PATH`
    /// names, else `token` in `HF_HOME`; `HF_HUB_OFFLINE` and `MLX_OFFLINE`.
    ///
    /// # Errors
    /// When no variable and no home directory says where the cache is, or a value cannot be used.
    pub fn from_env() -> Result<Self> {
        settings::read(&|name| std::env::var_os(name), std::env::home_dir())
    }

    /// A hub at `endpoint` with the cache directory `cache`, nothing else from the environment.
    ///
    /// # Errors
    /// When `endpoint` is not an `http` or `https` address.
    pub fn new(endpoint: &str, cache: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self {
            cache: cache.into(),
            endpoint: settings::endpoint(endpoint)?,
            token: None,
            offline: false,
            retry_delay: Duration::from_millis(500),
        })
    }

    /// Sets the access token. It is sent to the endpoint only, never to where that redirects.
    ///
    /// # Errors
    /// When it holds what no header can.
    pub fn with_token(mut self, token: &str) -> Result<Self> {
        self.token = settings::token(token)?;
        Ok(self)
    }

    /// Whether to use the cache only.
    #[must_use]
    pub fn with_offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// How long to wait before the first repetition of a failed request; it doubles each time.
    #[must_use]
    pub fn with_retry_delay(mut self, delay: Duration) -> Self {
        self.retry_delay = delay;
        self
    }

    /// The cache directory.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Where the model is in the cache, if all files it needs are there. Nothing is fetched.
    #[must_use]
    pub fn cached(&self, spec: &ModelSpec) -> Option<PathBuf> {
        let repository = Repository::new(&self.cache, spec);
        let commit = repository.commit_of(spec.revision())?;
        select::complete(&repository.snapshot(&commit), spec.file())
    }

    /// The model's path, from the cache when all its files are there, else fetched.
    ///
    /// # Errors
    /// As [`Self::pull`].
    pub fn get(&self, spec: &ModelSpec, progress: &mut dyn Progress) -> Result<PathBuf> {
        match self.cached(spec) {
            Some(path) => Ok(path),
            None => self.pull(spec, false, progress),
        }
    }

    /// Asks the hub for the files of the revision and fetches those that the model needs and the
    /// cache lacks. Returns the model's path: the snapshot's directory, or a GGUF file in it.
    /// Interrupted files go on where they stopped. `verify` hashes cached files again.
    ///
    /// Offline it is the cached path.
    ///
    /// # Errors
    /// [`ErrorKind::ModelNotFound`] when there is no such repository, revision or file, or offline
    /// when the cache lacks it; [`ErrorKind::InvalidModel`] for a repository without a usable model
    /// and for bytes that are not what the hub announced; [`ErrorKind::Io`] for refusals, failing
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
        // Last, so that a name in `refs` means that all of it is there.
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
        if !layout::is_plain(&listing.sha) {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{url} gives {:?} for a commit", listing.sha),
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
