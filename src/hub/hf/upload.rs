//! Uploads a directory to a repository of the hub as one commit. Large files go to the store that
//! the hub names. The store identifies files by SHA-256, and receives only files that it lacks.
//!
//! The requests are those of `huggingface_hub` (`create_repo`, `preupload`, Git LFS's batch
//! interface, `commit`).

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use inference::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::http::{Body, Fault, Http, encode, shown};
use super::upload_files::{Upload, files, unread};
use super::{HfHub, ModelSpec};
use crate::hub::digest;
use crate::hub::progress::{Progress, Stage};

/// Number of first bytes that the hub needs to detect text files.
const SAMPLE: u64 = 512;
/// The maximum size of the hub's answer in bytes.
const MAX_ANSWER: u64 = 64 << 20;
/// Maximum size of a file that is included in the commit request itself, in bytes.
const MAX_TEXT: u64 = 10 << 20;

/// The options of an upload.
#[non_exhaustive]
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// Whether a new repository is private.
    pub private: bool,
    /// The first line of the commit.
    pub message: String,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self {
            private: false,
            message: String::from("Upload with mlx push"),
        }
    }
}

/// The result of an upload.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The page of the commit, or of the repository.
    pub url: String,
    /// The number of files in the commit.
    pub files: usize,
    /// Number of bytes sent to the store.
    pub sent: u64,
}

#[derive(Deserialize)]
struct Preupload {
    files: Vec<Mode>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mode {
    path: String,
    upload_mode: String,
    #[serde(default)]
    should_ignore: bool,
}

#[derive(Deserialize)]
struct Batch {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    #[serde(default)]
    actions: Option<Actions>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Actions {
    upload: Action,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Map<String, Value>,
}

impl HfHub {
    /// Uploads one file, or the files of a directory, as one commit to the repository of `spec`. A
    /// missing repository is created. Hidden files, subdirectories, and files that only resumed
    /// training needs are not uploaded.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if the hub is offline, if there is no token, or if the
    /// directory has no files. [`ErrorKind::Io`] for refusals, failed connections and unreadable
    /// files.
    pub fn push(
        &self,
        spec: &ModelSpec,
        path: &Path,
        options: &PushOptions,
        progress: &mut dyn Progress,
    ) -> Result<Pushed> {
        let bad = |message: &str| Err(Error::new(ErrorKind::InvalidOption, message));
        if self.offline {
            return bad("HF_HUB_OFFLINE or MLX_OFFLINE forbids uploading");
        }
        if self.token.is_none() {
            return bad(
                "uploading needs a token: set HF_TOKEN, or put it into the file token in HF_HOME",
            );
        }
        if spec.file().is_some() {
            return bad("a repository is named as owner/name, without a file");
        }
        let files = files(path)?;
        let pushed = self.push_online(spec, &files, options, progress);
        pushed.map_err(|e| e.context(format!("cannot upload to {spec}")))
    }

    fn push_online(
        &self,
        spec: &ModelSpec,
        files: &[Upload],
        options: &PushOptions,
        progress: &mut dyn Progress,
    ) -> Result<Pushed> {
        let http = Http::new(&self.endpoint, self.token.as_deref(), self.retry_delay);
        self.create(&http, spec, options.private)?;
        let revision = encode(spec.revision(), false);
        let modes = self.modes(&http, spec, &revision, files)?;
        let mut lines = vec![json!({"key": "header", "value": {
            "summary": options.message, "description": "",
        }})];
        let (mut large, mut count) = (Vec::new(), 0);
        for file in files {
            let mode = modes.iter().find(|mode| mode.path == file.name);
            if mode.is_some_and(|mode| mode.should_ignore) {
                continue;
            }
            count += 1;
            match mode.map(|mode| mode.upload_mode.as_str()) {
                Some("regular") if file.size <= MAX_TEXT => {
                    let content = std::fs::read(&file.path).map_err(|e| unread(&file.path, e))?;
                    lines.push(json!({"key": "file", "value": {
                        "path": file.name, "encoding": "base64", "content": BASE64.encode(content),
                    }}));
                }
                Some("regular" | "lfs") => {
                    progress.begin(Stage::Verifying, &file.name, file.size);
                    let oid = digest::of_file(&file.path, progress);
                    progress.end();
                    let oid = oid?;
                    lines.push(json!({"key": "lfsFile", "value": {
                        "path": file.name, "algo": "sha256", "oid": oid, "size": file.size,
                    }}));
                    large.push((file, oid));
                }
                other => {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        format!(
                            "the hub asks for {} in the upload mode {other:?}, which is not supported",
                            file.name
                        ),
                    ));
                }
            }
        }
        let sent = self.store(&http, spec, &large, progress)?;
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let url = format!(
            "{}/api/models/{}/commit/{revision}",
            self.endpoint,
            spec.id()
        );
        let kind = [("content-type", "application/x-ndjson")];
        let answer = http.ask("POST", &url, &kind, text.as_bytes(), MAX_ANSWER)?;
        let page = answer["commitUrl"].as_str().map(str::to_owned);
        Ok(Pushed {
            url: page.unwrap_or_else(|| format!("{}/{}", self.endpoint, spec.id())),
            files: count,
            sent,
        })
    }

    /// Creates the repository unless it exists.
    fn create(&self, http: &Http, spec: &ModelSpec, private: bool) -> Result<()> {
        let id = spec.id();
        let Some((owner, name)) = id.split_once('/') else {
            return Ok(());
        };
        let url = format!("{}/api/repos/create", self.endpoint);
        let body =
            json!({"type": "model", "name": name, "organization": owner, "private": private});
        let body = body.to_string();
        let made = http.patiently(|| {
            let kind = [("content-type", "application/json")];
            match http.send("POST", &url, &kind, &Body::Bytes(body.as_bytes()), true) {
                // The repository exists already.
                Err(fault) if fault.status == 409 => Ok(()),
                other => other.map(drop),
            }
        });
        // A user with write access may lack the right to create repositories. If the repository
        // does not exist, the commit fails.
        match made {
            Err(e) if e.to_string().contains("HTTP status 403") => Ok(()),
            made => made,
        }
    }

    /// Determines which files are part of the commit request, and which go to the store.
    fn modes(
        &self,
        http: &Http,
        spec: &ModelSpec,
        revision: &str,
        files: &[Upload],
    ) -> Result<Vec<Mode>> {
        let mut asked = Vec::with_capacity(files.len());
        for file in files {
            let mut sample = Vec::new();
            File::open(&file.path)
                .and_then(|f| f.take(SAMPLE).read_to_end(&mut sample))
                .map_err(|e| unread(&file.path, e))?;
            asked.push(
                json!({"path": file.name, "size": file.size, "sample": BASE64.encode(sample)}),
            );
        }
        let url = format!(
            "{}/api/models/{}/preupload/{revision}",
            self.endpoint,
            spec.id()
        );
        let body = json!({"files": asked}).to_string();
        let kind = [("content-type", "application/json")];
        let answer = http.ask("POST", &url, &kind, body.as_bytes(), MAX_ANSWER)?;
        let modes: Preupload = serde_json::from_value(answer).map_err(|e| strange(&url, &e))?;
        Ok(modes.files)
    }

    /// Sends the files that the store lacks. Returns the number of bytes sent.
    fn store(
        &self,
        http: &Http,
        spec: &ModelSpec,
        files: &[(&Upload, String)],
        progress: &mut dyn Progress,
    ) -> Result<u64> {
        if files.is_empty() {
            return Ok(0);
        }
        let objects: Vec<Value> = files
            .iter()
            .map(|(file, oid)| json!({"oid": oid, "size": file.size}))
            .collect();
        let url = format!("{}/{}.git/info/lfs/objects/batch", self.endpoint, spec.id());
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "hash_algo": "sha256",
            "ref": {"name": spec.revision()},
            "objects": objects,
        });
        let kind = [
            ("content-type", "application/vnd.git-lfs+json"),
            ("accept", "application/vnd.git-lfs+json"),
        ];
        let answer = http.ask("POST", &url, &kind, body.to_string().as_bytes(), MAX_ANSWER)?;
        let batch: Batch = serde_json::from_value(answer).map_err(|e| strange(&url, &e))?;
        let mut sent = 0;
        for (file, oid) in files {
            let Some(object) = batch.objects.iter().find(|object| object.oid == *oid) else {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!("the store did not answer for {}", file.name),
                ));
            };
            if let Some(error) = &object.error {
                let message = error["message"].as_str().unwrap_or("it was refused");
                return Err(Error::new(
                    ErrorKind::Io,
                    format!("{}: {message}", file.name),
                ));
            }
            // An object without actions is already in the store.
            let Some(actions) = &object.actions else {
                continue;
            };
            progress.begin(Stage::Uploading, &file.name, file.size);
            let done = send_file(http, file, oid, &actions.upload, progress);
            progress.end();
            done?;
            if let Some(verify) = &actions.verify {
                let body = json!({"oid": oid, "size": file.size}).to_string();
                let kind = [("content-type", "application/vnd.git-lfs+json")];
                http.ask("POST", &verify.href, &kind, body.as_bytes(), MAX_ANSWER)?;
            }
            sent += file.size;
        }
        Ok(sent)
    }
}

/// Sends a file to the store, whole or in the parts that the store requires.
fn send_file(
    http: &Http,
    file: &Upload,
    oid: &str,
    action: &Action,
    progress: &mut dyn Progress,
) -> Result<()> {
    let put = |url: &str, from: u64, len: u64, headers: &[(&str, &str)]| -> Result<String> {
        http.patiently(|| {
            let body = Body::File {
                path: &file.path,
                from,
                len,
            };
            // The store's URLs are signed. Only the hub may receive the token.
            let answer = http.send("PUT", url, headers, &body, false)?;
            let etag = answer.headers().get("etag");
            Ok(etag
                .and_then(|e| e.to_str().ok())
                .unwrap_or_default()
                .to_owned())
        })
    };
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let chunk = action.header.get("chunk_size").map(text);
    let Some(chunk) = chunk else {
        let headers: Vec<(String, String)> = action
            .header
            .iter()
            .map(|(name, value)| (name.clone(), text(value)))
            .collect();
        let headers: Vec<(&str, &str)> = headers
            .iter()
            .map(|(n, v)| (n.as_str(), v.as_str()))
            .collect();
        put(&action.href, 0, file.size, &headers)?;
        progress.advance(file.size);
        return Ok(());
    };
    let chunk = chunk
        .parse::<u64>()
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Io,
                format!("the store asks for parts of {chunk} bytes, which is not a valid size"),
            )
        })?;
    let mut parts: Vec<(u64, String)> = action
        .header
        .iter()
        .filter_map(|(name, url)| Some((name.parse().ok()?, text(url))))
        .collect();
    parts.sort_unstable();
    if parts.len() as u64 != file.size.div_ceil(chunk) {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "the store asks for {} parts of {chunk} bytes, which do not make {} bytes",
                parts.len(),
                file.size
            ),
        ));
    }
    let mut done = Vec::with_capacity(parts.len());
    for (at, (number, url)) in (0u64..).zip(&parts) {
        let from = at * chunk;
        let len = chunk.min(file.size - from);
        let etag = put(url, from, len, &[])?;
        done.push(json!({"partNumber": number, "etag": etag}));
        progress.advance(from + len);
    }
    let body = json!({"oid": oid, "parts": done}).to_string();
    let kind = [("content-type", "application/vnd.git-lfs+json")];
    http.ask("POST", &action.href, &kind, body.as_bytes(), MAX_ANSWER)?;
    Ok(())
}

fn strange(url: &str, e: &serde_json::Error) -> Error {
    Error::new(
        ErrorKind::Io,
        format!(
            "{} did not answer as a hub does ({e}); is HF_ENDPOINT right?",
            shown(url)
        ),
    )
}

impl Body<'_> {
    /// A reader of the content, and the content's length.
    pub(super) fn reader(&self) -> std::result::Result<(Box<dyn Read + Send + Sync>, u64), Fault> {
        match *self {
            Self::Bytes(bytes) => {
                let bytes = bytes.to_vec();
                let n = bytes.len() as u64;
                Ok((Box::new(std::io::Cursor::new(bytes)), n))
            }
            Self::File { path, from, len } => {
                let open = || {
                    let mut file = File::open(path)?;
                    file.seek(SeekFrom::Start(from))?;
                    Ok(file)
                };
                let file = open().map_err(|e| Fault::lasting(unread(path, e)))?;
                Ok((Box::new(file.take(len)), len))
            }
        }
    }
}
