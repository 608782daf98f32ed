//! Requests to the hub. This module follows redirects itself, so that only the hub receives the
//! token and only the hub's headers are trusted. A temporary failure is retried; other failures are
//! final.

use std::io::Read;
use std::time::Duration;

use inference::{Error, ErrorKind, Result};
use ureq::Agent;
use ureq::http::{HeaderMap, Response, StatusCode};

/// The maximum number of consecutive redirects.
const MAX_REDIRECTS: usize = 10;
/// After this number of consecutive failures without a received byte, a request fails.
pub(super) const ATTEMPTS: u32 = 5;
/// Maximum delay before a retry.
const MAX_DELAY: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(20);
/// Timeout for a server that sends no data.
const SILENCE: Duration = Duration::from_secs(60);

/// A failed request.
#[derive(Debug)]
pub(super) struct Fault {
    /// The error for the user.
    pub error: Error,
    /// Minimum delay before a retry; `None` if the request must not be retried.
    pub again: Option<Duration>,
    /// Status code of the answer; 0 without an answer.
    pub status: u16,
}

impl Fault {
    /// A temporary fault, which is retried.
    pub(super) fn passing(error: Error) -> Self {
        Self {
            error,
            again: Some(Duration::ZERO),
            status: 0,
        }
    }

    /// A permanent fault.
    pub(super) fn lasting(error: Error) -> Self {
        Self {
            error,
            again: None,
            status: 0,
        }
    }
}

/// The body of a request.
pub(super) enum Body<'a> {
    /// Bytes in memory.
    Bytes(&'a [u8]),
    /// A part of a file.
    File {
        /// The path of the file.
        path: &'a std::path::Path,
        /// The first byte of the part.
        from: u64,
        /// The number of bytes.
        len: u64,
    },
}

/// Which redirects are followed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Follow {
    /// Follow all redirects.
    All,
    /// Follow redirects to the same host. A redirect to another host is returned as the answer.
    SameHost,
}

/// A client of one hub.
pub(super) struct Http {
    agent: Agent,
    /// Scheme, host and port to which the token may be sent.
    origin: String,
    token: Option<String>,
    retry_delay: Duration,
}

impl Http {
    pub(super) fn new(endpoint: &str, token: Option<&str>, retry_delay: Duration) -> Self {
        use ureq::tls::{RootCerts, TlsConfig};
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::PlatformVerifier)
            .build();
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .user_agent(concat!("rust-mlx/", env!("CARGO_PKG_VERSION")))
            // With compression, lengths and ranges would refer to compressed data.
            .accept_encoding("identity")
            .tls_config(tls)
            .build();
        Self {
            agent: config.into(),
            origin: origin(endpoint).unwrap_or_default().to_owned(),
            token: token.map(str::to_owned),
            retry_delay,
        }
    }

    /// Calls `attempt`, and retries it after temporary faults.
    pub(super) fn patiently<T>(&self, mut attempt: impl FnMut() -> Result<T, Fault>) -> Result<T> {
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(fault) => {
                    failures += 1;
                    self.wait(fault, failures)?;
                }
            }
        }
    }

    /// Waits before a retry. `failures` is the number of consecutive failures.
    ///
    /// # Errors
    /// The error of the fault, if the request must not be retried.
    pub(super) fn wait(&self, fault: Fault, failures: u32) -> Result<()> {
        let Some(asked) = fault.again.filter(|_| failures < ATTEMPTS) else {
            return Err(fault.error);
        };
        let delay = self.retry_delay.saturating_mul(1 << (failures - 1).min(10));
        let delay = delay.max(asked).min(MAX_DELAY);
        tracing::info!(?delay, "repeating: {}", fault.error);
        std::thread::sleep(delay);
        Ok(())
    }

    /// The body of a small answer. Retries after temporary faults.
    pub(super) fn get_small(&self, url: &str, most: u64) -> Result<Vec<u8>> {
        self.patiently(|| {
            let (_, answer) = self.request("GET", url, None, Follow::All)?;
            let mut bytes = Vec::new();
            let mut reader = answer.into_body().into_reader().take(most + 1);
            reader.read_to_end(&mut bytes).map_err(|e| broken(url, e))?;
            if bytes.len() as u64 > most {
                let error = Error::new(
                    ErrorKind::Io,
                    format!("the answer of {} is too long", shown(url)),
                );
                return Err(Fault::lasting(error));
            }
            Ok(bytes)
        })
    }

    /// Sends one request. Returns the hub's own headers (also those before a redirect to another
    /// host) and the last answer. `from` is the first requested byte.
    pub(super) fn request(
        &self,
        method: &str,
        url: &str,
        from: Option<u64>,
        follow: Follow,
    ) -> Result<(HeaderMap, Response<ureq::Body>), Fault> {
        let mut url = url.to_owned();
        let mut headers = HeaderMap::new();
        for _ in 0..=MAX_REDIRECTS {
            let same = origin(&url) == Some(self.origin.as_str());
            let answer = self.once(method, &url, from, same)?;
            let status = answer.status();
            if same {
                for (name, value) in answer.headers() {
                    headers.insert(name.clone(), value.clone());
                }
            }
            if !status.is_redirection() || status == StatusCode::NOT_MODIFIED {
                return if status.is_success() {
                    Ok((headers, answer))
                } else {
                    Err(self.refused(&url, status, answer.headers()))
                };
            }
            let target = answer
                .headers()
                .get("location")
                .and_then(|l| l.to_str().ok())
                .and_then(|l| join(&url, l));
            let Some(target) = target else {
                let error = Error::new(
                    ErrorKind::Io,
                    format!("{} redirects without a valid address", shown(&url)),
                );
                return Err(Fault::lasting(error));
            };
            if url.starts_with("https://") && !target.starts_with("https://") {
                let error = Error::new(
                    ErrorKind::Io,
                    format!(
                        "{} redirects from https to http, which is not followed",
                        shown(&url)
                    ),
                );
                return Err(Fault::lasting(error));
            }
            if follow == Follow::SameHost && origin(&target) != origin(&url) {
                // This length belongs to the body of the redirect, not to the file.
                headers.remove("content-length");
                return Ok((headers, answer));
            }
            url = target;
        }
        let error = Error::new(
            ErrorKind::Io,
            format!("{} redirects too many times", shown(&url)),
        );
        Err(Fault::lasting(error))
    }

    fn once(
        &self,
        method: &str,
        url: &str,
        from: Option<u64>,
        with_token: bool,
    ) -> Result<Response<ureq::Body>, Fault> {
        tracing::debug!(method, url = %shown(url), from, "request");
        let mut request = ureq::http::Request::builder().method(method).uri(url);
        if let Some(token) = self.token.as_ref().filter(|_| with_token) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some(from) = from {
            request = request.header("range", format!("bytes={from}-"));
        }
        let request = request.body(()).map_err(|e| {
            let error = Error::new(ErrorKind::Io, format!("cannot ask {}", shown(url)));
            Fault::lasting(error.with_source(e))
        })?;
        self.agent.run(request).map_err(|e| {
            let passing = matches!(
                e,
                ureq::Error::Io(_)
                    | ureq::Error::Timeout(_)
                    | ureq::Error::ConnectionFailed
                    | ureq::Error::Protocol(_)
            );
            let error = no_answer(url, &e, "; offline, set HF_HUB_OFFLINE=1 to use the cache");
            if passing {
                Fault::passing(error)
            } else {
                Fault::lasting(error)
            }
        })
    }

    /// Sends one request with a body. A redirect is an error, because the body must go only to the
    /// given address.
    pub(super) fn send(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: &Body<'_>,
        with_token: bool,
    ) -> Result<Response<ureq::Body>, Fault> {
        tracing::debug!(method, url = %shown(url), "request");
        let lasting = |error: Error| Fault::lasting(error);
        let (reader, length) = body.reader()?;
        let mut request = ureq::http::Request::builder().method(method).uri(url);
        let same = origin(url) == Some(self.origin.as_str());
        if let Some(token) = self.token.as_ref().filter(|_| with_token && same) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request
            .header("content-length", length)
            .body(ureq::SendBody::from_owned_reader(reader))
            .map_err(|e| {
                let error = Error::new(ErrorKind::Io, format!("cannot ask {}", shown(url)));
                lasting(error.with_source(e))
            })?;
        let answer = self
            .agent
            .run(request)
            .map_err(|e| Fault::passing(no_answer(url, &e, "")))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        Err(self.refused(url, status, answer.headers()))
    }

    /// Sends a small body to the hub, and returns the answer as JSON; `null` for an empty answer.
    /// Retries after temporary faults.
    pub(super) fn ask(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        most: u64,
    ) -> Result<serde_json::Value> {
        self.patiently(|| {
            let answer = self.send(method, url, headers, &Body::Bytes(body), true)?;
            let mut bytes = Vec::new();
            let mut reader = answer.into_body().into_reader().take(most);
            reader.read_to_end(&mut bytes).map_err(|e| broken(url, e))?;
            Ok(serde_json::from_slice(&bytes).unwrap_or_default())
        })
    }

    /// The fault for an error status.
    fn refused(&self, url: &str, status: StatusCode, headers: &HeaderMap) -> Fault {
        let code = status.as_u16();
        let header = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
        let how = if self.token.is_some() {
            "the token was sent and does not allow it"
        } else {
            "no token was sent: set HF_TOKEN, or put it into the file token in HF_HOME"
        };
        let reason = header("x-error-code").unwrap_or_default();
        let (kind, message) = match (code, reason) {
            (401 | 403, "GatedRepo") => (
                ErrorKind::Io,
                format!("the repository is gated: accept its terms on its page first; {how}"),
            ),
            (401, _) => (
                ErrorKind::ModelNotFound,
                format!("there is no such repository, or it is private; {how}"),
            ),
            (403, _) => (ErrorKind::Io, format!("access is refused; {how}")),
            (404, "RevisionNotFound") => (
                ErrorKind::ModelNotFound,
                "the repository has no such branch, tag or commit".to_owned(),
            ),
            (404, "EntryNotFound") => (
                ErrorKind::ModelNotFound,
                "the repository has no such file".to_owned(),
            ),
            (404, _) => (
                ErrorKind::ModelNotFound,
                format!("there is no such repository or revision, or it is private; {how}"),
            ),
            (429, _) => (
                ErrorKind::Io,
                "too many requests; try again later".to_owned(),
            ),
            _ => (ErrorKind::Io, "the server failed".to_owned()),
        };
        let again = match code {
            408 | 429 | 500 | 502 | 503 | 504 => {
                let asked = header("retry-after").and_then(|s| s.trim().parse().ok());
                Some(asked.map_or(Duration::ZERO, Duration::from_secs))
            }
            _ => None,
        };
        let error = Error::new(
            kind,
            format!("{message} (HTTP status {code} from {})", shown(url)),
        );
        Fault {
            error,
            again,
            status: code,
        }
    }
}

/// The fault for a connection that broke during a transfer.
pub(super) fn broken(url: &str, e: std::io::Error) -> Fault {
    let error = Error::new(
        ErrorKind::Io,
        format!("the connection to {} broke: {e}", shown(url)),
    );
    Fault::passing(error.with_source(e))
}

/// A URL for messages and logs, without password, query and fragment. The query of a signed URL is
/// a secret.
pub(super) fn shown(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let host = rest.split('/').next().unwrap_or_default();
    match host.rfind('@') {
        Some(at) => format!("{scheme}://{}", &rest[at + 1..]),
        None => url.to_owned(),
    }
}

/// The error for a request without an answer. `e` is not kept as source, because its text may
/// contain the whole URL.
fn no_answer(url: &str, e: &ureq::Error, hint: &str) -> Error {
    let shown = shown(url);
    let mut why = e.to_string().replace(url, &shown);
    let path = url.strip_prefix(origin(url).unwrap_or_default());
    if let Some(query) = path.and_then(|path| path.split_once('?')).map(|(_, q)| q)
        && !query.is_empty()
    {
        why = why.replace(query, "...");
    }
    Error::new(
        ErrorKind::Io,
        format!("no answer from {shown}: {why}{hint}"),
    )
}

/// The scheme, host and port of an address.
fn origin(url: &str) -> Option<&str> {
    let start = url.find("://")? + 3;
    let end = url[start..]
        .find(['/', '?', '#'])
        .map_or(url.len(), |n| start + n);
    Some(&url[..end])
}

/// The target of a redirect.
fn join(url: &str, location: &str) -> Option<String> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return Some(location.to_owned());
    }
    let scheme = url.split_once("://")?.0;
    if let Some(rest) = location.strip_prefix("//") {
        return Some(format!("{scheme}://{rest}"));
    }
    location
        .starts_with('/')
        .then(|| format!("{}{location}", origin(url).unwrap_or_default()))
}

/// Percent-encodes all but unreserved characters. If `path` is set, `/` stays as separator.
pub(super) fn encode(text: &str, path: bool) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(byte));
            }
            b'/' if path => out.push('/'),
            _ => {
                // Writing to a String cannot fail.
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_addresses_are_in_no_message() {
        assert_eq!(shown("https://h/a/b?X-Sig=1#f"), "https://h/a/b");
        assert_eq!(shown("https://user:pw@h/a@b"), "https://h/a@b");
        assert_eq!(shown("https://h/a"), "https://h/a");

        use std::io::{BufRead, BufReader, Write};
        // A hub that redirects to a store. The store refuses, truncates its answer, or does not
        // exist.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let origin = format!("http://{}", listener.local_addr().unwrap());
        let gone = {
            let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            format!("http://{}", other.local_addr().unwrap())
        };
        let base = origin.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let first = lines.next().and_then(Result::ok).unwrap_or_default();
                while lines.next().is_some_and(|l| l.is_ok_and(|l| !l.is_empty())) {}
                let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
                let to = |url: String| format!("302 X\r\nLocation: {url}\r\nContent-Length: 0");
                let head = match path.split('?').next().unwrap_or_default() {
                    "/to-refusal" => to(format!("{base}/refused?sig=SECRET")),
                    "/to-cut" => to(format!("{base}/cut?sig=SECRET")),
                    "/to-gone" => to(format!("{gone}/x?sig=SECRET")),
                    "/to-bad" => to(String::from("http://bad host/x?sig=SECRET")),
                    "/to-loop" => to(format!("{base}/to-loop?sig=SECRET")),
                    "/cut" => String::from("200 X\r\nContent-Length: 9"),
                    _ => String::from("403 X\r\nContent-Length: 0"),
                };
                let _ = write!(stream, "HTTP/1.1 {head}\r\nConnection: close\r\n\r\n");
            }
        });
        let http = Http::new(&origin, None, Duration::ZERO);
        for (path, told) in [
            ("/to-refusal", "/refused)"),
            ("/to-cut", "broke"),
            ("/to-gone", "no answer"),
            ("/to-bad", "bad host"),
            ("/to-loop", "too many times"),
        ] {
            let error = http.get_small(&format!("{origin}{path}"), 64).unwrap_err();
            let mut chain = format!("{error:?} {error}");
            let mut source = std::error::Error::source(&error);
            while let Some(e) = source {
                chain += &format!(" {e:?} {e}");
                source = e.source();
            }
            assert!(!chain.contains("SECRET"), "{path}: {chain}");
            assert!(error.to_string().contains(told), "{path}: {error}");
        }
        let body = Body::Bytes(b"x");
        let url = format!("{origin}/refused?sig=SECRET");
        let fault = http.send("PUT", &url, &[], &body, false).err().unwrap();
        let text = format!("{:?}", fault.error);
        assert!(
            text.contains("/refused") && !text.contains("SECRET"),
            "{text}"
        );
    }

    #[test]
    fn addresses_are_taken_apart_and_joined() {
        assert_eq!(origin("http://h:1/a/b?c"), Some("http://h:1"));
        assert_eq!(origin("https://h"), Some("https://h"));
        assert_eq!(origin("h/a"), None);
        let at = "https://h/a/b";
        assert_eq!(join(at, "/c").as_deref(), Some("https://h/c"));
        assert_eq!(join(at, "//o/c").as_deref(), Some("https://o/c"));
        assert_eq!(join(at, "http://o/c").as_deref(), Some("http://o/c"));
        assert_eq!(join(at, "file:///etc/passwd"), None);
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(encode("a b/ü.gguf", true), "a%20b/%C3%BC.gguf");
    }
}
