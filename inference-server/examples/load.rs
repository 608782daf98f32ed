//! Load generator for a server with `/v1/completions`. Clients read streams, and the program prints
//! their measured times as JSON. It works with any server of OpenAI's API that accepts token ids
//! and `ignore_eos`. So one program measures both `mlx serve` and llama-server.
//!
//!     cargo run --release -p rust-mlx-inference-server --example load -- --url http://127.0.0.1:8080
//!
//! Each client is a thread that sends one request after another. Each prompt has new random ids;
//! `--shared N` makes the first N ids of all prompts equal. `--text` sends words instead of ids.
//! With `--long N`, a prompt of N tokens arrives while all clients read their replies.
//!
//! Times are in seconds. `together` covers the time in which all clients of the first round receive
//! tokens. It starts when the last of these clients gets its first token, and ends with the round's
//! first complete reply. For replies of equal length, `mlx bench --batch` measures the same period.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A request fails if no byte arrives within this time.
const SILENCE: Duration = Duration::from_secs(300);
/// The range of random prompt ids. Most vocabularies contain these ids, and few of them are special
/// tokens.
const IDS: std::ops::Range<u64> = 1000..30_000;

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message.into())
}

/// The requests to send.
#[derive(Debug, Clone)]
struct Load {
    host: String,
    model: Option<String>,
    clients: usize,
    requests: usize,
    prompt: usize,
    reply: usize,
    shared: usize,
    long: usize,
    text: bool,
    seed: u64,
}

impl Load {
    fn of_flags(mut flags: impl Iterator<Item = String>) -> Result<Self> {
        let mut load = Self {
            host: String::from("127.0.0.1:8080"),
            model: None,
            clients: 8,
            requests: 4,
            prompt: 128,
            reply: 128,
            shared: 0,
            long: 0,
            text: false,
            seed: 1,
        };
        while let Some(flag) = flags.next() {
            if flag == "--text" {
                load.text = true;
                continue;
            }
            let value = flags.next();
            let value = value.ok_or_else(|| bad(format!("{flag} needs a value")))?;
            match flag.as_str() {
                "--url" => {
                    let host = value.strip_prefix("http://");
                    let host = host.ok_or_else(|| bad("--url must begin with http://"))?;
                    load.host = host.trim_end_matches('/').to_owned();
                }
                "--model" => load.model = Some(value),
                "--clients" => load.clients = at_least(&flag, &value, 1)?,
                "--requests" => load.requests = at_least(&flag, &value, 1)?,
                "--prompt-tokens" => load.prompt = at_least(&flag, &value, 1)?,
                "--reply-tokens" => load.reply = at_least(&flag, &value, 2)?,
                "--shared" => load.shared = at_least(&flag, &value, 0)?,
                "--long" => load.long = at_least(&flag, &value, 0)?,
                "--seed" => load.seed = at_least(&flag, &value, 0)?,
                _ => return Err(bad(format!("there is no flag {flag}"))),
            }
        }
        Ok(load)
    }

    /// The JSON body of a request with `tokens` unshared prompt tokens.
    fn body(&self, number: u64, tokens: usize, reply: usize) -> String {
        let ids: Vec<u64> = (0..self.shared)
            .map(|i| (self.seed, i))
            .chain((0..tokens).map(|i| (self.seed ^ (number + 1) << 32, i)))
            .map(|(seed, i)| random_id(seed, i as u64))
            .collect();
        let prompt = match self.text {
            true => {
                let words: Vec<String> = ids.iter().map(|id| format!("{:x}", id % 16)).collect();
                json!(words.join(" "))
            }
            false => json!(ids),
        };
        let mut body = json!({
            "prompt": prompt,
            "max_tokens": reply,
            "stream": true,
            "stream_options": {"include_usage": true},
            "temperature": 0,
            "ignore_eos": true,
            "cache_prompt": self.shared > 0,
        });
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        body.to_string()
    }
}

fn at_least<T: FromStr + PartialOrd + std::fmt::Display>(
    flag: &str,
    value: &str,
    least: T,
) -> Result<T> {
    let number = value.parse().ok().filter(|n| *n >= least);
    number.ok_or_else(|| bad(format!("{flag} must be a number of at least {least}")))
}

/// The `i`th id of a sequence: SplitMix64 (Steele, Lea and Flood, 2014).
fn random_id(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    IDS.start + (z ^ (z >> 31)) % (IDS.end - IDS.start)
}

/// The times of one request.
#[derive(Debug, Clone)]
struct Seen {
    sent: Instant,
    /// The arrival time of each piece of text.
    pieces: Vec<Instant>,
    prompt: u64,
    cached: u64,
    generated: u64,
}

impl Seen {
    fn first(&self) -> Duration {
        self.pieces.first().map_or(SILENCE, |at| *at - self.sent)
    }

    fn gaps(&self) -> impl Iterator<Item = (Instant, Duration)> + '_ {
        self.pieces.windows(2).map(|two| (two[1], two[1] - two[0]))
    }
}

/// Decodes an HTTP body with chunked encoding (RFC 9112, section 7.1).
struct Chunked<R> {
    inner: R,
    left: usize,
    begun: bool,
}

impl<R: BufRead> Read for Chunked<R> {
    fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        if self.left == 0 {
            let mut line = String::new();
            if self.begun {
                // Reads the line end after a chunk.
                self.inner.read_line(&mut line)?;
                line.clear();
            }
            self.begun = true;
            self.inner.read_line(&mut line)?;
            let size = line.split(';').next().unwrap_or_default().trim();
            self.left = usize::from_str_radix(size, 16)
                .map_err(|_| Error::new(ErrorKind::InvalidData, "a chunk without its size"))?;
            if self.left == 0 {
                return Ok(0);
            }
        }
        let most = to.len().min(self.left);
        let n = self.inner.read(&mut to[..most])?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.left -= n;
        Ok(n)
    }
}

/// Sends a request and reads its stream. The first piece of text increments `begun`.
fn ask(host: &str, body: &str, begun: &AtomicUsize) -> Result<Seen> {
    let mut stream = TcpStream::connect(host)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    let sent = Instant::now();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut reader = BufReader::new(stream);
    let (mut head, mut line) = (String::new(), String::new());
    while reader.read_line(&mut line)? > 0 && line != "\r\n" {
        head.push_str(&line.to_ascii_lowercase());
        line.clear();
    }
    if head.split(' ').nth(1) != Some("200") {
        let mut said = String::new();
        let _ = reader.take(500).read_to_string(&mut said);
        return Err(Error::other(format!("{head}{said}")));
    }
    let mut seen = Seen {
        sent,
        pieces: Vec::new(),
        prompt: 0,
        cached: 0,
        generated: 0,
    };
    let body: Box<dyn Read> = if head.contains("transfer-encoding: chunked") {
        let (left, begun) = (0, false);
        Box::new(Chunked {
            inner: reader,
            left,
            begun,
        })
    } else {
        Box::new(reader)
    };
    let mut done = false;
    for line in BufReader::new(body).lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            done = true;
            break;
        }
        let chunk: Value = serde_json::from_str(data)?;
        if chunk.get("error").is_some() {
            return Err(Error::other(chunk.to_string()));
        }
        if chunk["choices"][0]["text"]
            .as_str()
            .is_some_and(|t| !t.is_empty())
        {
            seen.pieces.push(Instant::now());
            if seen.pieces.len() == 1 {
                begun.fetch_add(1, Ordering::SeqCst);
            }
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            seen.prompt = usage["prompt_tokens"].as_u64().unwrap_or(0);
            seen.generated = usage["completion_tokens"].as_u64().unwrap_or(0);
            let details = &usage["prompt_tokens_details"]["cached_tokens"];
            seen.cached = details.as_u64().unwrap_or(0);
        }
    }
    match done && !seen.pieces.is_empty() {
        true => Ok(seen),
        false => Err(Error::other("the stream ended before its reply did")),
    }
}

/// The results of all requests of one client, in order.
type Replies = Vec<Result<Seen>>;

fn run(load: &Load) -> Result<Value> {
    let begun = Arc::new(AtomicUsize::new(0));
    let start = Arc::new(Barrier::new(load.clients + 1));
    let clients: Vec<_> = (0..load.clients)
        .map(|client| {
            let (load, begun, start) = (load.clone(), Arc::clone(&begun), Arc::clone(&start));
            std::thread::spawn(move || -> Replies {
                let number = |request| (request * load.clients + client) as u64;
                let body = |request| load.body(number(request), load.prompt, load.reply);
                let bodies: Vec<String> = (0..load.requests).map(body).collect();
                start.wait();
                bodies
                    .iter()
                    .map(|body| ask(&load.host, body, &begun))
                    .collect()
            })
        })
        .collect();
    let long_body = load.body(u64::from(u32::MAX), load.long, 2);
    start.wait();
    let began = Instant::now();
    let long = match load.long {
        0 => None,
        _ => {
            while begun.load(Ordering::SeqCst) < load.clients
                && !clients.iter().all(std::thread::JoinHandle::is_finished)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            Some(ask(&load.host, &long_body, &AtomicUsize::new(0)))
        }
    };
    let joined = clients.into_iter().map(std::thread::JoinHandle::join);
    let replies: std::result::Result<Vec<Replies>, _> = joined.collect();
    let replies = replies.map_err(|_| Error::other("a client panicked"))?;
    let took = began.elapsed();
    Ok(report(load, &replies, long, took))
}

fn report(load: &Load, replies: &[Replies], long: Option<Result<Seen>>, took: Duration) -> Value {
    let seen: Vec<&Seen> = replies
        .iter()
        .flatten()
        .filter_map(|r| r.as_ref().ok())
        .collect();
    let mut errors: Vec<String> = replies
        .iter()
        .flatten()
        .filter_map(|r| r.as_ref().err().map(ToString::to_string))
        .collect();
    let sum = |of: fn(&Seen) -> u64| seen.iter().map(|s| of(s)).sum::<u64>();
    let generated = sum(|s| s.generated);
    let gaps = |from: Option<(Instant, Instant)>| {
        let inside = move |at: &Instant| from.is_none_or(|(a, b)| (a..=b).contains(at));
        let all = seen.iter().flat_map(|s| s.gaps());
        percentiles(
            all.filter(|(at, _)| inside(at))
                .map(|(_, gap)| gap)
                .collect(),
        )
    };
    let during = match long {
        None => Value::Null,
        Some(Ok(long)) => {
            let end = long.pieces.first().copied().unwrap_or(long.sent);
            json!({
                "prompt_tokens": long.prompt,
                "ttft": long.first().as_secs_f64(),
                "itl": gaps(Some((long.sent, end))),
            })
        }
        Some(Err(e)) => {
            errors.push(format!("the long prompt: {e}"));
            Value::Null
        }
    };
    let failed = errors.len();
    errors.truncate(3);
    json!({
        "clients": load.clients,
        "requests": load.clients * load.requests,
        "failed": failed,
        "errors": errors,
        "seconds": took.as_secs_f64(),
        "prompt_tokens": sum(|s| s.prompt),
        "cached_tokens": sum(|s| s.cached),
        "output_tokens": generated,
        "output_tokens_per_second": generated as f64 / took.as_secs_f64(),
        "together_tokens_per_second": together(replies),
        "ttft": percentiles(seen.iter().map(|s| s.first()).collect()),
        "itl": gaps(None),
        "during_long_prompt": during,
    })
}

/// Tokens per second of the first round while all its replies are in progress. A piece of text may
/// have several tokens, so each piece counts as its reply's average number of tokens.
fn together(replies: &[Replies]) -> Option<f64> {
    let first: Option<Vec<&Seen>> = replies
        .iter()
        .map(|all| all.first()?.as_ref().ok())
        .collect();
    let first = first?;
    let from = *first.iter().filter_map(|s| s.pieces.first()).max()?;
    let to = *first.iter().filter_map(|s| s.pieces.last()).min()?;
    let tokens: f64 = first
        .iter()
        .map(|s| {
            let inside = s
                .pieces
                .iter()
                .filter(|at| **at > from && **at <= to)
                .count();
            inside as f64 * s.generated as f64 / s.pieces.len() as f64
        })
        .sum();
    (to > from).then(|| tokens / (to - from).as_secs_f64())
}

fn percentiles(mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    // The smallest value that at least this fraction of all values does not exceed.
    let at = |part: f64| {
        let rank = (part * times.len() as f64).ceil() as usize;
        times.get(rank.saturating_sub(1)).map(Duration::as_secs_f64)
    };
    json!({"p50": at(0.5), "p99": at(0.99), "max": at(1.0)})
}

fn main() -> ExitCode {
    let load = match Load::of_flags(std::env::args().skip(1)) {
        Ok(load) => load,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::from(2);
        }
    };
    match run(&load) {
        Ok(report) => {
            println!("{report:#}");
            ExitCode::from(u8::from(report["failed"] != 0))
        }
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
