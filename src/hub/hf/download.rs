//! Downloads one file of a repository into the cache. The file appears only when complete and
//! verified. A download continues an interrupted one.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use ureq::http::HeaderMap;

use super::http::{Fault, Follow, Http, broken, encode};
use super::layout::{Repository, failed};
use super::names::{is_plain, is_safe_name};
use super::{ModelSpec, Sibling};
use crate::hub::progress::{Progress, Stage};
use crate::hub::space;

/// Fetches files of one commit.
pub(super) struct Fetcher<'a> {
    pub http: &'a Http,
    pub endpoint: &'a str,
    pub spec: &'a ModelSpec,
    pub repository: &'a Repository,
    pub commit: &'a str,
    pub files: &'a [Sibling],
    /// Whether to hash files that are already cached.
    pub verify: bool,
    pub progress: &'a mut dyn Progress,
}

/// Maximum size of a file in bytes, if neither the server nor the file list announces its size.
const MAX_UNANNOUNCED: u64 = 256 << 20;

/// The hub's metadata of a file.
#[derive(Debug)]
struct Announced {
    /// The ETag, which is the file's name in the cache.
    etag: String,
    size: Option<u64>,
    hash: Hash,
}

/// The expected hash of the content.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Hash {
    /// SHA-256 of the bytes, used for large files.
    Sha256(String),
    /// Git's blob hash, used for small files: SHA-1 over length and content.
    Git(String),
    /// The hub announces no hash.
    Unknown,
}

enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
    None,
}

impl Hasher {
    fn new(hash: &Hash, size: Option<u64>) -> Self {
        match (hash, size) {
            (Hash::Sha256(_), _) => Hasher::Sha256(Sha256::new()),
            (Hash::Git(_), Some(size)) => {
                let mut sha = Sha1::new();
                sha.update(format!("blob {size}\0"));
                Hasher::Git(sha)
            }
            _ => Hasher::None,
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(sha) => sha.update(bytes),
            Hasher::Git(sha) => sha.update(bytes),
            Hasher::None => {}
        }
    }

    /// The digest in hexadecimal, if one is computed.
    fn finish(self) -> Option<String> {
        let digest = match self {
            Hasher::Sha256(sha) => sha.finalize().to_vec(),
            Hasher::Git(sha) => sha.finalize().to_vec(),
            Hasher::None => return None,
        };
        Some(digest.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl Fetcher<'_> {
    /// Downloads the file `name` and returns its path in the snapshot. `place` is its number among
    /// all files, for progress messages.
    pub(super) fn fetch(&mut self, name: &str, place: &str) -> Result<PathBuf> {
        if !is_safe_name(name) {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!(
                    "the repository has a file {name:?}, which is refused because it leads out of its directory"
                ),
            ));
        }
        let url = format!(
            "{}/{}/resolve/{}/{}",
            self.endpoint,
            self.spec.id(),
            encode(self.commit, false),
            encode(name, true)
        );
        let announced = self
            .http
            .patiently(|| {
                let (headers, _) = self.http.request("HEAD", &url, None, Follow::SameHost)?;
                self.announced(&url, name, &headers).map_err(Fault::lasting)
            })
            .map_err(|e| e.context(name.to_owned()))?;
        let label = format!("{}/{name} ({place})", self.spec.id());
        let etag = &announced.etag;
        let blob = self.repository.blob(etag);
        let lock = self.repository.lock(etag, self.progress)?;
        if !self.is_there(&blob, &announced, &label)? {
            self.download(&url, &announced, &label)
                .map_err(|e| e.context(name.to_owned()))?;
        }
        drop(lock);
        self.repository.link(self.commit, name, etag)
    }

    fn announced(&self, url: &str, name: &str, headers: &HeaderMap) -> Result<Announced> {
        let header = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
        let number = |name: &str| header(name).and_then(|v| v.trim().parse::<u64>().ok());
        let etag = header("x-linked-etag").or_else(|| header("etag"));
        let etag = etag.unwrap_or_default().trim();
        let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
        // The ETag becomes a file name, so it must be safe.
        if !is_plain(etag) {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{url} answers with the ETag {etag:?}, which cannot name a file of the cache"
                ),
            ));
        }
        if let Some(commit) = header("x-repo-commit").filter(|c| *c != self.commit) {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{url} answers for commit {commit:?}, but the request was for {}",
                    self.commit
                ),
            ));
        }
        let is_hex = |n: usize| etag.len() == n && etag.bytes().all(|b| b.is_ascii_hexdigit());
        let listed = self.files.iter().find(|f| f.name == name);
        let size = number("x-linked-size")
            .or_else(|| number("content-length"))
            .or_else(|| listed.and_then(|f| f.size));
        let hash = if is_hex(64) {
            Hash::Sha256(etag.to_ascii_lowercase())
        } else if is_hex(40)
            && listed.and_then(|f| f.blob.as_deref()) == Some(etag)
            && size.is_some()
        {
            // Another server may use a similar ETag. Only the hub's file list confirms that it is
            // git's hash.
            Hash::Git(etag.to_ascii_lowercase())
        } else {
            Hash::Unknown
        };
        Ok(Announced {
            etag: etag.to_owned(),
            size,
            hash,
        })
    }

    /// Whether the cache has the content.
    fn is_there(&mut self, blob: &Path, announced: &Announced, label: &str) -> Result<bool> {
        let Ok(metadata) = fs::metadata(blob) else {
            return Ok(false);
        };
        if announced.size.is_some_and(|size| size != metadata.len()) {
            tracing::warn!(path = %blob.display(), "the cached file has the wrong length");
            return Ok(false);
        }
        if !self.verify {
            return Ok(true);
        }
        self.progress.begin(Stage::Verifying, label, metadata.len());
        let mut hasher = Hasher::new(&announced.hash, announced.size);
        let read = feed(&mut hasher, blob, self.progress);
        self.progress.end();
        read.map_err(|e| failed("cannot read the cached file", blob, e))?;
        let right = is_right(hasher, &announced.hash).is_ok();
        if !right {
            tracing::warn!(path = %blob.display(), "the cached file is damaged");
        }
        Ok(right)
    }

    /// Downloads the content. The caller has the lock.
    fn download(&mut self, url: &str, announced: &Announced, label: &str) -> Result<()> {
        let partial = self.repository.partial(&announced.etag);
        let blob = self.repository.blob(&announced.etag);
        let resumed = fs::metadata(&partial).is_ok_and(|m| m.len() > 0);
        let mut done = self.download_from(url, announced, label, &partial);
        if resumed
            && done
                .as_ref()
                .is_err_and(|e| e.kind() == ErrorKind::InvalidModel)
        {
            tracing::warn!(path = %partial.display(), "what an earlier run left was not a part of it");
            done = self.download_from(url, announced, label, &partial);
        }
        done?;
        fs::rename(&partial, &blob).map_err(|e| failed("cannot keep the file", &blob, e))?;
        if let Some(Ok(dir)) = blob.parent().map(File::open) {
            let _ = dir.sync_all();
        }
        Ok(())
    }

    /// Completes the file `partial` and verifies it. A wrong file is deleted.
    fn download_from(
        &mut self,
        url: &str,
        announced: &Announced,
        label: &str,
        partial: &Path,
    ) -> Result<()> {
        self.progress
            .begin(Stage::Downloading, label, announced.size.unwrap_or(0));
        let filled = self.fill(url, announced, partial);
        self.progress.end();
        let checked = filled.and_then(|hasher| {
            is_right(hasher, &announced.hash).map_err(|actual| {
                Error::new(
                    ErrorKind::InvalidModel,
                    format!(
                        "the download has the hash {actual}, not {} as announced",
                        announced.etag
                    ),
                )
            })
        });
        if checked
            .as_ref()
            .is_err_and(|e| e.kind() == ErrorKind::InvalidModel)
            && let Err(e) = fs::remove_file(partial)
        {
            tracing::warn!(path = %partial.display(), "cannot remove it: {e}");
        }
        checked
    }

    fn fill(&mut self, url: &str, announced: &Announced, partial: &Path) -> Result<Hasher> {
        let partial_bytes = fs::metadata(partial).map_or(0, |metadata| metadata.len());
        let wanted = announced.size.unwrap_or(MAX_UNANNOUNCED);
        space::check(partial, wanted.saturating_sub(partial_bytes))?;
        let cannot = |e| failed("cannot write the file", partial, e);
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true);
        let mut sink = Sink {
            file: options.open(partial).map_err(cannot)?,
            path: partial,
            hasher: Hasher::new(&announced.hash, announced.size),
            announced,
            length: 0,
        };
        sink.take_over(self.progress).map_err(cannot)?;
        let mut failures = 0;
        while announced.size.is_none_or(|size| sink.length < size) {
            let before = sink.length;
            match self.transfer(url, &mut sink) {
                Ok(()) => break,
                Err(fault) => {
                    failures = if sink.length > before {
                        1
                    } else {
                        failures + 1
                    };
                    self.http.wait(fault, failures)?;
                }
            }
        }
        if let Some(size) = announced.size.filter(|size| *size != sink.length) {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!(
                    "{} bytes were received, but {size} were announced",
                    sink.length
                ),
            ));
        }
        sink.file.sync_all().map_err(cannot)?;
        Ok(sink.hasher)
    }

    /// Sends one request for the missing part, and writes the part as it arrives.
    fn transfer(&mut self, url: &str, sink: &mut Sink<'_>) -> Result<(), Fault> {
        let from = (sink.length > 0).then_some(sink.length);
        let answer = self.http.request("GET", url, from, Follow::All);
        let answer = match answer {
            // The server has no bytes from this position on, so the local part belongs to another
            // file.
            Err(fault) if fault.status == 416 => {
                sink.restart()?;
                return Err(Fault::passing(fault.error));
            }
            other => other?.1,
        };
        if from.is_some() {
            let start = answer
                .headers()
                .get("content-range")
                .and_then(|v| range_start(v.to_str().ok()?));
            if answer.status().as_u16() != 206 || start != from {
                // The server sent the whole file instead of the requested range.
                sink.restart()?;
                if answer.status().as_u16() == 206 {
                    let error = Error::new(
                        ErrorKind::Io,
                        format!("{url} sends another byte range than the requested one"),
                    );
                    return Err(Fault::passing(error));
                }
            }
        }
        let mut reader = answer.into_body().into_reader();
        let mut buffer = vec![0u8; 1 << 17];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) if sink.is_short() => {
                    return Err(broken(url, std::io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(0) => return Ok(()),
                Ok(n) => {
                    sink.write(&buffer[..n])?;
                    self.progress.advance(sink.length);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(url, e)),
            }
        }
    }
}

/// The file that is being written, with the hash of its content.
struct Sink<'a> {
    file: File,
    path: &'a Path,
    hasher: Hasher,
    announced: &'a Announced,
    length: u64,
}

impl Sink<'_> {
    /// Hashes the part that an earlier run downloaded, and moves to its end.
    fn take_over(&mut self, progress: &mut dyn Progress) -> std::io::Result<()> {
        let mut buffer = vec![0u8; 1 << 17];
        loop {
            let n = self.file.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            self.hasher.update(&buffer[..n]);
            self.length += n as u64;
            progress.advance(self.length);
        }
        if self.announced.size.is_some_and(|size| self.length > size) {
            self.empty()?;
        }
        Ok(())
    }

    fn empty(&mut self) -> std::io::Result<()> {
        use std::io::Seek;
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.hasher = Hasher::new(&self.announced.hash, self.announced.size);
        self.length = 0;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), Fault> {
        self.empty()
            .map_err(|e| Fault::lasting(failed("cannot write the file", self.path, e)))
    }

    fn is_short(&self) -> bool {
        self.announced.size.is_some_and(|size| self.length < size)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let length = self.length + bytes.len() as u64;
        if let Some(size) = self.announced.size.filter(|size| length > *size) {
            return Err(Fault::lasting(Error::new(
                ErrorKind::InvalidModel,
                format!("more bytes were received than the {size} that were announced"),
            )));
        }
        if self.announced.size.is_none() && length > MAX_UNANNOUNCED {
            return Err(Fault::lasting(Error::new(
                ErrorKind::InvalidModel,
                format!(
                    "the server does not say how long the file is, and sent more than \
                     {MAX_UNANNOUNCED} bytes; download it by other means"
                ),
            )));
        }
        self.file
            .write_all(bytes)
            .map_err(|e| Fault::lasting(failed("cannot write the file", self.path, e)))?;
        self.hasher.update(bytes);
        self.length = length;
        Ok(())
    }
}

/// Compares the digest. The error contains the actual digest.
fn is_right(hasher: Hasher, hash: &Hash) -> Result<(), String> {
    match (hasher.finish(), hash) {
        (Some(actual), Hash::Sha256(wanted) | Hash::Git(wanted)) if actual != *wanted => {
            Err(actual)
        }
        _ => Ok(()),
    }
}

fn feed(hasher: &mut Hasher, path: &Path, progress: &mut dyn Progress) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0u8; 1 << 20];
    let mut done = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(()),
            n => {
                hasher.update(&buffer[..n]);
                done += n as u64;
                progress.advance(done);
            }
        }
    }
}

/// The first byte position in a header like `bytes 5-9/10`.
fn range_start(text: &str) -> Option<u64> {
    text.trim()
        .strip_prefix("bytes ")?
        .split_once('-')?
        .0
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn git_and_sha_hashes_are_the_published_ones() {
        // The expected hashes come from `printf hello | git hash-object --stdin`, and for "abc"
        // from FIPS 180-4.
        let git = Hash::Git("b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0".into());
        let mut hasher = Hasher::new(&git, Some(5));
        hasher.update(b"hello");
        assert_eq!(is_right(hasher, &git), Ok(()));
        let sha =
            Hash::Sha256("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".into());
        for (text, right) in [("abc", true), ("abd", false)] {
            let mut hasher = Hasher::new(&sha, None);
            hasher.update(text.as_bytes());
            assert_eq!(is_right(hasher, &sha).is_ok(), right);
        }
        assert!(is_right(Hasher::new(&Hash::Unknown, None), &Hash::Unknown).is_ok());
    }

    #[test]
    fn a_file_without_a_length_has_a_bound() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let announced = Announced {
            etag: String::from("e"),
            size: None,
            hash: Hash::Unknown,
        };
        let mut sink = Sink {
            file: file.reopen().unwrap(),
            path: file.path(),
            hasher: Hasher::None,
            announced: &announced,
            length: MAX_UNANNOUNCED - 3,
        };
        sink.write(b"abc").unwrap();
        let fault = sink.write(b"d").unwrap_err();
        assert_eq!(fault.error.kind(), ErrorKind::InvalidModel);
        assert!(fault.again.is_none());
        assert!(fault.error.to_string().contains("does not say how long"));
        assert_eq!(file.as_file().metadata().unwrap().len(), 3);
    }

    #[test]
    fn the_list_says_a_length_that_the_answer_lacks() {
        let dir = tempfile::tempdir().unwrap();
        let spec = ModelSpec::parse("own/tiny").unwrap();
        let listed = |size| Sibling {
            name: String::from("a.json"),
            blob: None,
            size,
        };
        let size = |listed: Sibling, headers: &[(&'static str, &'static str)]| {
            let fetcher = Fetcher {
                http: &Http::new("http://h", None, std::time::Duration::ZERO),
                endpoint: "http://h",
                spec: &spec,
                repository: &Repository::new(dir.path(), &spec),
                commit: "c",
                files: &[listed],
                verify: false,
                progress: &mut crate::hub::Silent,
            };
            let mut all = HeaderMap::new();
            for (name, value) in headers.iter().chain(&[("etag", "\"e\"")]) {
                all.insert(*name, value.parse().unwrap());
            }
            fetcher
                .announced("http://h/x", "a.json", &all)
                .unwrap()
                .size
        };
        assert_eq!(size(listed(Some(7)), &[]), Some(7));
        assert_eq!(size(listed(Some(7)), &[("content-length", "9")]), Some(9));
        assert_eq!(size(listed(None), &[]), None);
    }

    #[test]
    fn ranges_are_read() {
        assert_eq!(range_start("bytes 5-9/10"), Some(5));
        assert_eq!(range_start("bytes */10"), None);
        assert_eq!(range_start(""), None);
    }
}
