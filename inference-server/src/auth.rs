//! Access checks: the API key, and the headers that distinguish a browser's request from a
//! program's.
//!
//! A server that is reachable only from this machine has no key. A web page could still send it
//! requests through the user's browser, either to `localhost` or to a name that resolves to this
//! machine (DNS rebinding). The checks of `Host` and `Origin` prevent both.

use std::net::IpAddr;
use std::time::Duration;

use axum::http::{HeaderMap, Uri, header};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The configuration that the checks compare requests with.
pub(crate) struct Access {
    /// The digest of the key. Digests have one length, so a comparison does not reveal the key's
    /// length.
    key: Option<[u8; 32]>,
    local: bool,
    origins: Vec<String>,
    /// Serializes refusals, so that only one waits at a time.
    turn: tokio::sync::Mutex<()>,
    pause: Duration,
}

impl Access {
    pub(crate) fn new(config: &crate::config::Config) -> Self {
        Self {
            key: config.api_key.as_deref().map(digest),
            local: config.is_local(),
            origins: config.allowed_origins.clone(),
            turn: tokio::sync::Mutex::new(()),
            pause: config.limits.wrong_key_pause,
        }
    }

    pub(crate) fn allows_key(&self, presented: Option<&str>) -> bool {
        let Some(key) = &self.key else { return true };
        // A missing key is compared as an empty one, so that a missing key and a wrong key take
        // equal time.
        let same: bool = digest(presented.unwrap_or_default()).ct_eq(key).into();
        same && presented.is_some()
    }

    /// Delays the answer to a wrong key. Callers wait one after another, which limits how many keys
    /// can be tried per second.
    pub(crate) async fn pause(&self) {
        let _turn = self.turn.lock().await;
        tokio::time::sleep(self.pause).await;
    }

    /// Whether this server may accept a request for `host`.
    pub(crate) fn allows_host(&self, host: Option<&str>) -> bool {
        !self.local || host.is_some_and(is_local_host)
    }

    pub(crate) fn allows_origin(&self, origin: &str, host: Option<&str>) -> bool {
        let listed = |o: &String| o == "*" || o.eq_ignore_ascii_case(origin);
        if self.origins.iter().any(listed) {
            return true;
        }
        // If this server sent the page, the page's origin contains the host that the request names.
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.is_some() && authority == host
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// Whether an authority, with or without a port, names this machine.
fn is_local_host(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, port)) if port.is_empty() || port.starts_with(':') => host,
            _ => return false,
        },
        None => authority
            .split_once(':')
            .map_or(authority, |(host, _)| host),
    };
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    if name == "localhost" || name.ends_with(".localhost") {
        return true;
    }
    host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The host that a request addresses: the host in its target, or its only `Host` header.
pub(crate) fn host_of<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|h| h.to_str().ok());
    if hosts.next().is_some() {
        return None;
    }
    match uri.authority() {
        // If target and header name different hosts, a proxy and this server could each use another
        // one. So the request is refused.
        Some(target) if host.is_some_and(|h| h != target.as_str()) => None,
        Some(target) => Some(target.as_str()),
        None => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn hosts_of_this_machine() {
        for host in [
            "localhost",
            "localhost:8080",
            "LOCALHOST.",
            "a.localhost:1",
            "127.0.0.1",
            "127.8.9.1:80",
            "[::1]",
            "[::1]:8080",
        ] {
            assert!(is_local_host(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "notlocalhost",
            "10.0.0.1",
            "[::2]:80",
            "[::1]evil",
            "[::1",
        ] {
            assert!(!is_local_host(host), "{host}");
        }
    }

    #[test]
    fn keys_and_origins() {
        let access = Access::new(&Config::new());
        assert!(access.allows_key(None));
        let config = Config::new()
            .with_api_key(String::from("sesame"))
            .with_allowed_origins([String::from("https://chat.example")]);
        let access = Access::new(&config);
        for key in [None, Some(""), Some("sesam"), Some("sesame ")] {
            assert!(!access.allows_key(key), "{key:?}");
        }
        assert!(access.allows_key(Some("sesame")));
        let host = Some("localhost:8080");
        assert!(access.allows_origin("https://chat.example", host));
        assert!(access.allows_origin("http://localhost:8080", host));
        for origin in ["null", "http://localhost:3000", "https://evil.example", ""] {
            assert!(!access.allows_origin(origin, host), "{origin}");
        }
    }

    #[test]
    fn two_hosts_are_none() {
        let uri: Uri = "/v1/models".parse().unwrap();
        let mut headers = HeaderMap::new();
        headers.append(header::HOST, "localhost".parse().unwrap());
        assert_eq!(host_of(&uri, &headers), Some("localhost"));
        let absolute: Uri = "http://evil.example/v1/models".parse().unwrap();
        assert_eq!(host_of(&absolute, &headers), None);
        headers.append(header::HOST, "evil.example".parse().unwrap());
        assert_eq!(host_of(&uri, &headers), None);
    }
}
