//! The configuration of the server: address, access and limits.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use inference::{Error, ErrorKind, Result};

use crate::defaults::RequestDefaults;
use crate::limits::Limits;
use crate::tools::ServerTools;

/// The configuration of the server.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The address to listen on. With port 0, the system chooses a free port.
    pub address: SocketAddr,
    /// Clients must send this key. It is required when `address` is reachable from other machines.
    pub api_key: Option<String>,
    /// Maximum number of requests that run concurrently.
    pub parallel: usize,
    /// Maximum number of waiting requests. Further requests are refused.
    pub max_queue: usize,
    /// Maximum total size of the KV caches of running requests, in bytes. `None` sets no limit. A
    /// request counts with its prompt and the maximum length of its reply.
    pub kv_budget: Option<u64>,
    /// How long a model loaded by name stays loaded after its last request. `None` means forever.
    pub keep_alive: Option<Duration>,
    /// Maximum number of models loaded by name. Before the server loads another model, it unloads
    /// one.
    pub max_models: usize,
    /// Whether the first model answers requests for models that are not served.
    pub any_model: bool,
    /// Origins of web pages that may send requests, such as `https://chat.example`; `*` means all.
    pub allowed_origins: Vec<String>,
    /// Whether requests may edit the model's states while it computes.
    pub steering: bool,
    /// Whether `/` serves a chat page to browsers.
    pub ui: bool,
    /// Values for fields that a request leaves out.
    pub defaults: RequestDefaults,
    /// Tools that the server runs for models.
    pub tools: Option<ServerTools>,
    /// Bounds on the requests of clients.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080),
            api_key: None,
            parallel: 8,
            max_queue: 64,
            kv_budget: None,
            keep_alive: Some(Duration::from_secs(300)),
            max_models: 3,
            any_model: false,
            allowed_origins: Vec::new(),
            steering: false,
            ui: true,
            defaults: RequestDefaults::default(),
            tools: None,
            limits: Limits::default(),
        }
    }
}

fn invalid<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOption, message))
}

impl Config {
    /// Creates the defaults: reachable only from this machine, port 8080, 8 requests at a time.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the address to listen on.
    #[must_use]
    pub fn with_address(mut self, address: SocketAddr) -> Self {
        self.address = address;
        self
    }

    /// Sets the key that clients must send.
    #[must_use]
    pub fn with_api_key(mut self, key: impl Into<Option<String>>) -> Self {
        self.api_key = key.into();
        self
    }

    /// Sets how many requests run together.
    #[must_use]
    pub fn with_parallel(mut self, parallel: usize) -> Self {
        self.parallel = parallel;
        self
    }

    /// Sets how many requests may wait.
    #[must_use]
    pub fn with_max_queue(mut self, max_queue: usize) -> Self {
        self.max_queue = max_queue;
        self
    }

    /// Sets the maximum total size of the KV caches of running requests, in bytes.
    #[must_use]
    pub fn with_kv_budget(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.kv_budget = bytes.into();
        self
    }

    /// Sets how long a model loaded by name stays after its last request; `None` keeps it forever.
    #[must_use]
    pub fn with_keep_alive(mut self, keep_alive: impl Into<Option<Duration>>) -> Self {
        self.keep_alive = keep_alive.into();
        self
    }

    /// Sets the tools that the server runs for models.
    #[must_use]
    pub fn with_tools(mut self, tools: impl Into<Option<ServerTools>>) -> Self {
        self.tools = tools.into();
        self
    }

    /// Sets the values for fields that a request leaves out.
    #[must_use]
    pub fn with_defaults(mut self, defaults: RequestDefaults) -> Self {
        self.defaults = defaults;
        self
    }

    /// Sets how many models are loaded by name at a time.
    #[must_use]
    pub fn with_max_models(mut self, max_models: usize) -> Self {
        self.max_models = max_models;
        self
    }

    /// Sets whether the first model answers requests for models that are not served.
    #[must_use]
    pub fn with_any_model(mut self, any_model: bool) -> Self {
        self.any_model = any_model;
        self
    }

    /// Sets the origins of web pages that may send requests.
    #[must_use]
    pub fn with_allowed_origins(mut self, origins: impl Into<Vec<String>>) -> Self {
        self.allowed_origins = origins.into();
        self
    }

    /// Sets whether requests may edit the model's states while it computes.
    #[must_use]
    pub fn with_steering(mut self, steering: bool) -> Self {
        self.steering = steering;
        self
    }

    /// Sets whether `/` serves a chat page to browsers.
    #[must_use]
    pub fn with_ui(mut self, ui: bool) -> Self {
        self.ui = ui;
        self
    }

    /// Sets the limits on clients' requests.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Whether only programs of this machine can connect.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.address.ip().is_loopback()
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] with the fault and the remedy.
    pub fn validate(&self) -> Result<()> {
        self.limits.validate()?;
        self.defaults.validate()?;
        if self.parallel == 0 {
            return invalid("parallel is 0; it must be at least 1");
        }
        if self.max_models == 0 {
            return invalid("max_models is 0; it must be at least 1");
        }
        // tokio's semaphore supports this number, which is far more than is useful.
        if self.parallel.saturating_add(self.max_queue) > 1 << 20 {
            return invalid("parallel and max_queue are more than 1,048,576 together");
        }
        match &self.api_key {
            Some(key) if key.trim().is_empty() => {
                return invalid("the API key is empty; set one, or leave it out");
            }
            Some(key) if !key.bytes().all(|b| b.is_ascii_graphic()) => {
                return invalid(
                    "the API key has characters that are not allowed in a header; use printable ASCII characters",
                );
            }
            None if !self.is_local() => {
                return invalid(format!(
                    "{} can be reached from other machines; set an API key, or listen on 127.0.0.1",
                    self.address
                ));
            }
            _ => {}
        }
        for origin in &self.allowed_origins {
            let bare = origin
                .split_once("://")
                .is_some_and(|(_, host)| !host.is_empty() && !host.contains('/'));
            if origin != "*" && !(bare && origin.bytes().all(|b| b.is_ascii_graphic())) {
                return invalid(format!(
                    "the origin {origin:?} is not valid; write scheme and host, such as https://chat.example"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_needs_no_key() {
        Config::new().validate().unwrap();
        let open = Config::new().with_address("0.0.0.0:8080".parse().unwrap());
        let error = open.validate().unwrap_err();
        assert!(error.message().contains("API key"), "{error}");
        open.with_api_key(String::from("k")).validate().unwrap();
    }

    #[test]
    fn bad_values_are_named() {
        for (config, says) in [
            (Config::new().with_parallel(0), "parallel"),
            (Config::new().with_max_models(0), "max_models"),
            (Config::new().with_api_key(String::from(" ")), "key"),
            (Config::new().with_api_key(String::from("é")), "key"),
            (
                Config::new().with_allowed_origins([String::from("chat.example")]),
                "chat.example",
            ),
            (
                Config::new().with_allowed_origins([String::from("http://a/b")]),
                "http://a/b",
            ),
        ] {
            let error = config.validate().unwrap_err();
            assert!(error.message().contains(says), "{error}");
        }
        let origins = ["*", "https://a.example:8443"].map(String::from);
        Config::new()
            .with_allowed_origins(origins)
            .validate()
            .unwrap();
    }
}
