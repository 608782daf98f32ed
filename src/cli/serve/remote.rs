//! `mlx ps` and `mlx stop NAME`: list the models of a running server, and unload a model. Both use
//! Ollama's protocol, so they also work with ollama's server.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use ureq::Agent;

use crate::cli::terminal::console::{Console, bytes, table};
use crate::cli::terminal::failure::Failure;

/// The default address of `mlx serve`.
const DEFAULT: &str = "http://127.0.0.1:8080";
/// Maximum size of an answer in bytes.
const MAX_ANSWER: u64 = 16 << 20;
/// The time limits for a connection and for an answer.
const CONNECT: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(60);
/// Start of the expiry time that a server reports for models that stay loaded.
const FOREVER: &str = "9999-";
/// How long `mlx stop` waits for running replies.
const PATIENCE: Duration = Duration::from_secs(30);

/// The flags that select a server.
#[derive(Debug, Clone, clap::Args)]
pub struct ServerArgs {
    /// The server's address, such as 127.0.0.1:8080 [default: MLX_SERVER, otherwise 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    server: Option<String>,
    /// The server's API key; prefer the variable MLX_API_KEY, which other users cannot see
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
}

/// List the models that a running server has loaded
#[derive(Debug, Clone, clap::Args)]
pub struct PsArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// Unload a model of a running server
#[derive(Debug, Clone, clap::Args)]
pub struct StopArgs {
    /// The model's name, as `mlx ps` prints it
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `mlx ps`.
pub fn ps(args: &PsArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let models = Remote::new(&args.server)?.models()?;
    if args.json {
        return console.json(&models);
    }
    let mut rows = vec![
        ["NAME", "SIZE", "DEVICE", "CONTEXT", "UNTIL"]
            .map(String::from)
            .to_vec(),
    ];
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    for model in &models {
        let number = |name: &str| model[name].as_u64();
        let device = match (number("size_vram"), number("size")) {
            (Some(0), _) => "CPU",
            (Some(n), Some(all)) if n < all => "CPU and GPU",
            (Some(_), _) => "GPU",
            (None, _) => "",
        };
        let until = model["expires_at"].as_str().unwrap_or_default();
        rows.push(vec![
            name_of(model).to_owned(),
            number("size").map(bytes).unwrap_or_default(),
            device.to_owned(),
            number("context_length").map_or_else(String::new, |n| n.to_string()),
            until_text(until, now),
        ]);
    }
    for line in table(&rows) {
        console.line(&line)?;
    }
    Ok(())
}

/// Runs `mlx stop`.
pub fn stop(args: &StopArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let remote = Remote::new(&args.server)?;
    let name = args.name.as_str();
    let bare = |name: &str| name.strip_suffix(":latest").unwrap_or(name).to_owned();
    let holds = |models: &[Value]| {
        models
            .iter()
            .any(|model| bare(name_of(model)) == bare(name))
    };
    let models = remote.models()?;
    if !holds(&models) {
        let names: Vec<&str> = models.iter().map(name_of).collect();
        let loaded = match names.is_empty() {
            true => String::from("no model"),
            false => names.join(", "),
        };
        return Err(Failure::failed(format!(
            "the server does not hold {name:?}; it holds {loaded}"
        )));
    }
    let ask = json!({"model": name, "keep_alive": 0, "stream": false});
    remote.call("POST", "/api/generate", Some(&ask))?;
    let started = std::time::Instant::now();
    loop {
        let models = remote.models()?;
        if !holds(&models) {
            break;
        }
        // A server that may unload the model sets an expiry time after the request. A model without
        // one is never unloaded.
        let matching = models.iter().find(|m| bare(name_of(m)) == bare(name));
        if matching.is_some_and(stays) {
            return Err(Failure::failed(format!(
                "{name:?} stays: the server was started with it; `mlx serve --keep-alive 5m` unloads \
                 such models, too"
            )));
        }
        // Running replies complete first, so the model may stay for a while.
        if started.elapsed() > PATIENCE {
            return Err(Failure::failed(format!(
                "the server still holds {name:?}, because replies still run"
            )));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    console.note(&format!("{name} is unloaded"));
    Ok(())
}

/// Whether the server never unloads this model.
fn stays(model: &Value) -> bool {
    let expires = model["expires_at"].as_str();
    expires.is_some_and(|at| at.starts_with(FOREVER))
}

fn name_of(model: &Value) -> &str {
    model["name"]
        .as_str()
        .or(model["model"].as_str())
        .unwrap_or_default()
}

/// A running server.
struct Remote {
    agent: Agent,
    base: String,
    key: Option<String>,
}

impl Remote {
    fn new(args: &ServerArgs) -> Result<Self, Failure> {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let given = args.server.clone().or_else(|| variable("MLX_SERVER"));
        let base = address(given.as_deref().unwrap_or(DEFAULT)).map_err(Failure::usage)?;
        let key = args.api_key.clone().or_else(|| variable("MLX_API_KEY"));
        if key
            .as_deref()
            .is_some_and(|key| !key.chars().all(|c| c.is_ascii_graphic()))
        {
            return Err(Failure::usage(
                "the API key has characters that no header can hold",
            ));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER))
            .timeout_per_read(Some(ANSWER))
            .user_agent(concat!("rust-mlx/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Self {
            agent: config.into(),
            base,
            key,
        })
    }

    /// The models in the answer of `/api/ps`.
    fn models(&self) -> Result<Vec<Value>, Failure> {
        let answer = self.call("GET", "/api/ps", None)?;
        match answer.get("models").and_then(Value::as_array) {
            Some(models) => Ok(models.clone()),
            None => Err(Failure::failed(format!(
                "{} does not answer as `mlx serve` does",
                self.base
            ))),
        }
    }

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        use std::io::Read as _;
        let fail = |why: String| {
            Failure::failed(format!(
                "{}: {why}; is `mlx serve` running there? --server or MLX_SERVER names another address",
                self.base
            ))
        };
        let url = format!("{}{path}", self.base);
        let mut request = ureq::http::Request::builder().method(method).uri(&url);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
        if !body.is_empty() {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(body).map_err(|e| fail(e.to_string()))?;
        let answer = self.agent.run(request).map_err(|e| fail(e.to_string()))?;
        let status = answer.status();
        let mut text = Vec::new();
        answer
            .into_body()
            .into_reader()
            .take(MAX_ANSWER)
            .read_to_end(&mut text)
            .map_err(|e| fail(e.to_string()))?;
        let value: Value = serde_json::from_slice(&text).unwrap_or(Value::Null);
        if status.is_success() {
            return Ok(value);
        }
        let error = &value["error"];
        let said = error.as_str().or(error["message"].as_str());
        Err(Failure::failed(match (status.as_u16(), said) {
            (401 | 403, _) => format!("{} refuses access; give its key in MLX_API_KEY", self.base),
            (_, Some(said)) => format!("{}: {said}", self.base),
            (code, None) => format!("{} answers with status {code}", self.base),
        }))
    }
}

/// Parses an address to an origin: `host:port` means `http://host:port`.
fn address(text: &str) -> Result<String, String> {
    let text = text.trim();
    let bare = text.strip_suffix('/').filter(|bare| !bare.ends_with('/'));
    let text = bare.unwrap_or(text);
    let url = match text.contains("://") {
        true => text.to_owned(),
        false => format!("http://{text}"),
    };
    let host = url.strip_prefix("http://").or(url.strip_prefix("https://"));
    let fine = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '?' | '#' | '@');
    match host {
        Some(host) if !host.is_empty() && host.chars().all(fine) => Ok(url),
        _ => Err(format!(
            "{text:?} is no address of a server; it must be like 127.0.0.1:8080 or http://host:8080"
        )),
    }
}

/// The time at which a model is unloaded, as text.
fn until_text(expires: &str, now: u64) -> String {
    let Some(at) = seconds(expires) else {
        return expires.to_owned();
    };
    let left = at.saturating_sub(now);
    match left {
        0 => String::from("now"),
        1..=89 => format!("{left} seconds"),
        90..=5399 => format!("{} minutes", (left + 30) / 60),
        5400..=172_799 => format!("{} hours", (left + 1800) / 3600),
        // If a model stays loaded, the server reports a time in the far future.
        _ => String::from("forever"),
    }
}

/// Parses an RFC 3339 time without fractions to seconds since 1970.
fn seconds(text: &str) -> Option<u64> {
    let number = |range: std::ops::Range<usize>| text.get(range)?.parse::<i64>().ok();
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    // Converts the civil calendar to days. The years start in March.
    let (y, m) = match month {
        1 | 2 => (year - 1, month + 9),
        _ => (year, month - 3),
    };
    let (era, of_era) = (y.div_euclid(400), y.rem_euclid(400));
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + (153 * m + 2) / 5 + day
        - 719_469;
    let zone = match text
        .get(19..)?
        .trim_start_matches(|c: char| c == '.' || c.is_ascii_digit())
    {
        "" | "Z" | "z" => 0,
        zone => {
            let sign = if zone.starts_with('-') { -1 } else { 1 };
            let part = |range: std::ops::Range<usize>| zone.get(range)?.parse::<i64>().ok();
            sign * (part(1..3)? * 3600 + part(4..6)? * 60)
        }
    };
    u64::try_from(days * 86_400 + hour * 3600 + minute * 60 + second - zone).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_origins() {
        for (text, origin) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://host:1/", "http://host:1"),
            ("https://host", "https://host"),
            ("[::1]:8080", "http://[::1]:8080"),
        ] {
            assert_eq!(address(text).unwrap(), origin);
        }
        for bad in [
            "",
            "ftp://x",
            "http://",
            "http://u@h",
            "http://h/path",
            "h?x",
        ] {
            assert!(address(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_stays_is_known_by_its_time() {
        assert!(stays(&json!({"expires_at": "9999-12-31T23:59:59Z"})));
        assert!(!stays(&json!({"expires_at": "2026-11-23T13:10:00Z"})));
        assert!(!stays(&json!({})));
    }

    #[test]
    fn times_are_told_from_now() {
        assert_eq!(seconds("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(seconds("2000-03-01T00:00:00Z"), Some(951_868_800));
        assert_eq!(seconds("2026-11-23T13:10:00.25+01:00"), Some(1_795_435_800));
        assert_eq!(seconds("2026-11-23T07:10:00-05:00"), Some(1_795_435_800));
        assert_eq!(seconds("soon"), None);
        let now = 951_868_800;
        for (expires, text) in [
            ("2000-02-29T23:59:00Z", "now"),
            ("2000-03-01T00:00:30Z", "30 seconds"),
            ("2000-03-01T00:04:50Z", "5 minutes"),
            ("2000-03-01T03:00:00Z", "3 hours"),
            ("9999-12-31T23:59:59Z", "forever"),
            ("later", "later"),
        ] {
            assert_eq!(until_text(expires, now), text);
        }
    }
}
