//! The Hugging Face Hub: models by `owner/name`, in the cache that Python's tools also use.
//!
//! It fetches only the files that a model needs. Each is complete and verified, or it does not
//! appear. They go into `models--owner--name/{blobs,snapshots,refs}`, the layout of
//! `huggingface_hub`. No weights are read. `select` knows which files belong together, and `layout`
//! knows the paths.
//!
//! The crate `hf-hub` (1.0) is not used. It restarts interrupted files, verifies no hash and has no
//! offline mode. It needs an asynchronous runtime and some 280 crates. This module needs one
//! blocking client (`ureq`).

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

/// The most bytes of an answer about a repository.
const MAX_LISTING: u64 = 64 << 20;
/// A repository with more files is not a model.
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

/// The hub's data of a repository at a revision.
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
    /// The hub and the cache that these variables name: `HF_ENDPOINT`; `HF_HUB_CACHE`, else `hub`
    /// in `HF_HOME`; `HF_TOKEN`, else the file that `HF_TOKEN_PATH` names, else `token` in
    /// `HF_HOME`; `HF_HUB_OFFLINE` and `MLX_OFFLINE`.
    ///
    /// # Errors
    /// If neither a variable nor a home directory determines the cache, or if a value is invalid.
    pub fn from_env() -> Result<Self> {
        settings::read(&|name| std::env::var_os(name), std::env::home_dir())
    }

    /// A hub at `endpoint` with the cache directory `cache`. The environment is not used.
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

    /// Sets whether only the cache is used.
    #[must_use]
    pub fn with_offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// Sets the wait before a failed request is repeated for the first time. It doubles each time.
    #[must_use]
    pub fn with_retry_delay(mut self, delay: Duration) -> Self {
        self.retry_delay = delay;
        self
    }

    /// The cache directory.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// The model's path in the cache, if all files that it needs are there. Nothing is fetched.
    #[must_use]
    pub fn cached(&self, spec: &ModelSpec) -> Option<PathBuf> {
        let repository = Repository::new(&self.cache, spec);
        let commit = repository.commit_of(spec.revision())?;
        select::complete(&repository.snapshot(&commit), spec.file())
    }

    /// The model's path. It comes from the cache if all its files are there; otherwise they are
    /// fetched.
    ///
    /// # Errors
    /// Those of [`Self::pull`].
    pub fn get(&self, spec: &ModelSpec, progress: &mut dyn Progress) -> Result<PathBuf> {
        match self.cached(spec) {
            Some(path) => Ok(path),
            None => self.pull(spec, false, progress),
        }
    }

    /// Lists the revision's files on the hub, and fetches those that the model needs and the cache
    /// lacks. Returns the model's path: the snapshot's directory, or a GGUF file in it. Interrupted
    /// files continue. `verify` hashes cached files again.
    ///
    /// Offline, it returns the cached path.
    ///
    /// # Errors
    /// [`ErrorKind::ModelNotFound`] if the repository, revision or file does not exist, or if the
    /// cache lacks it offline; [`ErrorKind::InvalidModel`] for a repository without a usable model,
    /// and for bytes that differ from the hub's announcement; [`ErrorKind::Io`] for refusals and
    /// for failures of connections and disks.
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
        // The reference is written last, so that a name in `refs` means a complete model.
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
