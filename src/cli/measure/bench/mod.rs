//! `mlx bench`: measures loading, prefill and decode, and prints JSON.
//!
//! The prompt has pseudo-random ids that are equal on every run and machine. Sampling is greedy and
//! does not stop early, so each run does equal work.

mod many;
mod plans;
mod profile;

use std::time::Instant;

use inference::{BatchEvent, GenerateOptions, Prompt, TextModel};
use serde_json::{Value, json};

use crate::cli::measure::bandwidth::read_bandwidth;
use crate::cli::measure::bench::many::Size;
use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load};
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::TokenBar;

/// Measure loading, prefill and decode speed and memory; prints JSON
///
/// Several plans can be compared, such as `--ffn dense,walk:64,walk:256 --vindex DIR`. The model is
/// then loaded once per plan, and the runs alternate.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Length of the prompt in tokens
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    pub prompt_tokens: usize,
    /// Tokens to generate in each run
    #[arg(long, alias = "generation-tokens", value_name = "N", default_value = "128", value_parser = at_least_one)]
    pub generate_tokens: usize,
    /// Number of measured runs; the medians are reported
    #[arg(long, alias = "num-trials", value_name = "N", default_value = "3", value_parser = at_least_one)]
    pub repeat: usize,
    /// Number of warm-up runs before the measured ones
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warmup: usize,
    /// Positions of the measured prompt in one forward pass
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    pub prefill_step_size: usize,
    /// Also decode N requests together, each with a prompt of 16 tokens; reports all their tokens
    /// per second
    #[arg(long, alias = "batch-size", value_name = "N", value_parser = at_least_one)]
    pub batch: Option<usize>,
    /// Also compare N requests together with N one after another, the same for classification of
    /// twice as many prompts, and measure the cost of sampling
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub together: Option<usize>,
    /// Also measure how fast all cores together read memory, and which part of that rate decode
    /// reaches (it reads all weights once per token)
    #[arg(long)]
    pub bandwidth: bool,
    /// Also measure the parts of a decode step (norm, qkv, attention, mlp, head, sampling) per
    /// layer; half of the --generate-tokens steps run in parts, the other half does not
    #[arg(long)]
    pub profile: bool,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Number of tokens of a warm-up run. They suffice to run every kernel.
pub const WARMUP_TOKENS: usize = 8;

/// Number of prompt tokens of each request in a batch.
const BATCH_PROMPT: usize = 16;

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    if let Some(plans) = args.load.feed_forward.several() {
        return plans::run(args, plans, console);
    }
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let measured = measure(args, model, console)?;
    let mut object = json!({
        "model": loaded.path.to_string_lossy(),
        "backend": loaded.backend.name(),
        "device": model.info().device,
        "prompts": model.info().prompts,
        "cache": model.info().cache,
        "prompt_tokens": args.prompt_tokens,
        "prefill_step_size": args.prefill_step_size,
        "generated_tokens": args.generate_tokens,
        "load_seconds": loaded.load_seconds,
        "weight_bytes": model.info().weight_bytes,
    });
    if let Some(requests) = args.together {
        object["together"] = args.many(model, requests, console)?;
    }
    // Time from the start of loading to the first token of the first run.
    let first = loaded.load_seconds + measured.first_token_seconds;
    if let (Value::Object(object), Value::Object(more)) = (&mut object, measured.json(first)) {
        object.extend(more);
        if let Some(rows) = args.batch {
            let rate = together(args, rows, model)?;
            console.note(&format!("{rows} requests together: {rate:.1} tok/s"));
            object.insert("batch_rows".into(), json!(rows));
            object.insert("batch_tokens_per_second".into(), json!(rate));
        }
        if args.profile {
            let prompt = prompt(args, model)?;
            let profile = profile::run(model, &prompt, args.generate_tokens, console)?;
            object.insert("profile".into(), profile);
        }
    }
    // This measurement is last, because it needs memory in addition to the model's.
    if args.bandwidth {
        let bandwidth = read_bandwidth();
        let read = model.info().weight_bytes as f64 * measured.decode_tokens_per_second();
        console.note(&format!(
            "memory: {:.1} GB/s; decode reads weights at {:.0} % of that",
            bandwidth / 1e9,
            100.0 * read / bandwidth
        ));
        object["read_bytes_per_second"] = json!(bandwidth);
        object["decode_share_of_bandwidth"] = json!(read / bandwidth);
    }
    console.json(&object)
}

impl Args {
    fn many(
        &self,
        model: &dyn TextModel,
        requests: usize,
        console: &mut Console<'_>,
    ) -> Result<Value, Failure> {
        if self.generate_tokens < 2 {
            return Err(Failure::usage(
                "--together needs --generate-tokens of 2 or more: the first belongs to the prefill",
            ));
        }
        let size = Size {
            requests,
            tokens: self.generate_tokens,
            repeat: self.repeat,
            chats: many::chats(model, requests.saturating_mul(2))?,
        };
        let bar = TokenBar::start("measuring together", size.work(), console);
        many::run(model, &size, &eos_tokens(model), &bar)
    }
}

pub fn eos_tokens(model: &dyn TextModel) -> Vec<u32> {
    model
        .as_token_model()
        .map(inference::TokenModel::eos_tokens)
        .unwrap_or_default()
}

/// One measured run.
#[derive(serde::Serialize)]
struct Run {
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    time_to_first_token_seconds: f64,
    total_seconds: f64,
}

struct Measured {
    /// Time from the start to the first token of the very first run in seconds. That run may be a
    /// warm-up run.
    first_token_seconds: f64,
    runs: Vec<Run>,
    peak_memory_bytes: u64,
    /// 0 where the backend does not measure it.
    decode_peak_memory_bytes: u64,
}

impl Measured {
    fn decode_tokens_per_second(&self) -> f64 {
        median(self.runs.iter().map(|run| run.decode_tokens_per_second))
    }

    fn json(&self, start_to_first_token: f64) -> Value {
        json!({
            "start_to_first_token_seconds": start_to_first_token,
            "runs": self.runs,
            "prefill_tokens_per_second": median(self.runs.iter().map(|run| run.prefill_tokens_per_second)),
            "decode_tokens_per_second": self.decode_tokens_per_second(),
            "peak_memory_bytes": self.peak_memory_bytes,
            "decode_peak_memory_bytes": self.decode_peak_memory_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
        })
    }
}

/// The prompt of each run.
fn prompt(args: &Args, model: &dyn TextModel) -> Result<Prompt, Failure> {
    let vocab = model.info().vocab_size;
    let ids = prompt_ids(args.prompt_tokens, vocab, &eos_tokens(model))?;
    Ok(Prompt::Tokens(ids))
}

fn measure(
    args: &Args,
    model: &dyn TextModel,
    console: &mut Console<'_>,
) -> Result<Measured, Failure> {
    let info = model.info();
    if let Some(prompts) = &info.prompts {
        console.note(&format!("prompts: inputs as {prompts}"));
    }
    if let Some(cache) = &info.cache {
        console.note(&format!("cache: keys and values as {cache}"));
    }
    let needed = args.prompt_tokens.saturating_add(match args.profile {
        true => profile::positions(args.generate_tokens).max(args.generate_tokens),
        false => args.generate_tokens,
    });
    if let Some(room) = info.context_length.filter(|&room| room < needed) {
        return Err(Failure::failed(format!(
            "--prompt-tokens and --generate-tokens are {needed} tokens together, and the model's context holds {room}"
        )));
    }
    let prompt = prompt(args, model)?;
    let mut measured = Measured {
        first_token_seconds: 0.0,
        runs: Vec::with_capacity(args.repeat.min(1024)),
        peak_memory_bytes: 0,
        decode_peak_memory_bytes: 0,
    };
    let warm = args.generate_tokens.min(WARMUP_TOKENS);
    let total = (args.prompt_tokens.saturating_add(warm)).saturating_mul(args.warmup);
    let each = args.prompt_tokens.saturating_add(args.generate_tokens);
    let total = total.saturating_add(each.saturating_mul(args.repeat));
    let bar = TokenBar::start("measuring", total as u64, console);
    for number in 0..args.warmup.saturating_add(args.repeat) {
        let is_warmup = number < args.warmup;
        let tokens = if is_warmup {
            warm
        } else {
            args.generate_tokens
        };
        let metrics = generate(args, model, (&prompt, tokens), &bar)?;
        let run = Run {
            prefill_tokens_per_second: metrics.prefill_tokens_per_second(),
            decode_tokens_per_second: metrics.decode_tokens_per_second(),
            time_to_first_token_seconds: metrics.time_to_first_token.as_secs_f64(),
            total_seconds: metrics.total_time.as_secs_f64(),
        };
        if number == 0 {
            measured.first_token_seconds = run.time_to_first_token_seconds;
        }
        measured.peak_memory_bytes = measured.peak_memory_bytes.max(metrics.peak_memory_bytes);
        measured.decode_peak_memory_bytes =
            (measured.decode_peak_memory_bytes).max(metrics.decode_peak_memory_bytes);
        if !is_warmup {
            measured.runs.push(run);
        }
    }
    drop(bar);
    for (number, run) in measured.runs.iter().enumerate() {
        console.note(&format!(
            "run {}: prefill {:.1} tok/s, decode {:.1} tok/s, first token after {:.3} s",
            number + 1,
            run.prefill_tokens_per_second,
            run.decode_tokens_per_second,
            run.time_to_first_token_seconds,
        ));
    }
    let peak = bytes(measured.peak_memory_bytes);
    console.note(&match measured.decode_peak_memory_bytes {
        0 => format!("peak memory: {peak}"),
        decode => format!("peak memory: {peak}, in decode {}", bytes(decode)),
    });
    Ok(measured)
}

/// Tokens per second of `rows` requests together. The measurement starts after each request has its
/// first token.
fn together(args: &Args, rows: usize, model: &dyn TextModel) -> Result<f64, Failure> {
    let info = model.info();
    let eos = model
        .as_token_model()
        .map(inference::TokenModel::eos_tokens)
        .unwrap_or_default();
    let ids = prompt_ids(rows.saturating_mul(BATCH_PROMPT), info.vocab_size, &eos)?;
    let mut options = GenerateOptions::default();
    options.prefill.cache_prompt = false;
    options.max_tokens = args.generate_tokens.max(2);
    options.stop.ignore_eos = true;
    let mut session = model.batch_session()?;
    let mut waiting = std::collections::HashSet::new();
    for prompt in ids.chunks(BATCH_PROMPT) {
        waiting.insert(session.add(&Prompt::Tokens(prompt.to_vec()), &options)?);
    }
    let (mut began, mut counted) = (None, 0usize);
    while !session.is_empty() {
        let all_run = waiting.is_empty();
        for event in session.step()? {
            match event {
                BatchEvent::Token { row, .. } => {
                    waiting.remove(&row);
                    counted += usize::from(all_run);
                }
                BatchEvent::Failed { error, .. } => return Err(error.into()),
                _ => {}
            }
        }
        if waiting.is_empty() && began.is_none() {
            began = Some(Instant::now());
        }
    }
    let seconds = began.map_or(0.0, |began| began.elapsed().as_secs_f64());
    if counted == 0 || seconds <= 0.0 {
        return Err(Failure::failed(format!(
            "no step had all {rows} requests in it; generate more tokens or take a smaller --batch"
        )));
    }
    Ok(counted as f64 / seconds)
}

/// Generates exactly `tokens` tokens.
pub fn generate(
    args: &Args,
    model: &dyn TextModel,
    (prompt, tokens): (&Prompt, usize),
    bar: &TokenBar,
) -> Result<inference::GenerateMetrics, Failure> {
    let mut options = GenerateOptions::default();
    options.prefill.prefill_step_size = args.prefill_step_size;
    // Without reuse, every run computes its prompt.
    options.prefill.cache_prompt = false;
    options.max_tokens = tokens;
    options.stop.ignore_eos = true;
    let mut stream = model.generate(prompt, &options)?;
    let mut count = 0;
    for token in stream.by_ref() {
        token?;
        if count == 0 {
            bar.advance(stream_prompt_len(prompt));
        }
        count += 1;
        bar.advance(1);
    }
    if count != tokens {
        return Err(Failure::failed(format!(
            "the model generated {count} tokens instead of {tokens}; the numbers would mean nothing"
        )));
    }
    Ok(stream.metrics())
}

fn stream_prompt_len(prompt: &Prompt) -> u64 {
    match prompt {
        Prompt::Tokens(ids) => ids.len() as u64,
        _ => 0,
    }
}

/// Returns `n` ids below `vocab`, without end-of-text tokens. The ids are equal at each call. The
/// generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
pub fn prompt_ids(n: usize, vocab: usize, avoid: &[u32]) -> Result<Vec<u32>, Failure> {
    let usable = u32::try_from(vocab).unwrap_or(u32::MAX);
    if !(0..usable).any(|id| !avoid.contains(&id)) {
        return Err(Failure::failed(format!(
            "a vocabulary of {vocab} tokens is too small to make a prompt"
        )));
    }
    let mut state = 0x6d6c_7862_656e_6368_u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let mut ids = Vec::new();
    while ids.len() < n {
        // The value is below `usable`, so it fits into u32.
        let id = (next() % u64::from(usable)) as u32;
        if !avoid.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// The median, or 0 if there are no values.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Peak resident memory of this process so far in bytes, if the system reports it.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    parse_peak_rss(&status)
}

fn parse_peak_rss(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::{self, Streams};
    use inference_conformance::scripted::{Scripted, Step};

    fn args(prompt_tokens: usize, generate_tokens: usize, repeat: usize) -> Args {
        Args {
            model: ModelArgs::default(),
            prompt_tokens,
            generate_tokens,
            repeat,
            warmup: 1,
            prefill_step_size: 512,
            batch: None,
            together: None,
            bandwidth: false,
            profile: false,
            load: LoadArgs::none(),
        }
    }

    #[test]
    fn every_run_is_reported_and_the_prompt_is_always_the_same() {
        let model = mock::base(&["a"; 4]);
        let mut streams = Streams::new("");
        let measured = measure(&args(5, 4, 3), &model, &mut streams.console()).unwrap();
        let value = measured.json(0.25);
        assert_eq!(value["runs"].as_array().unwrap().len(), 3);
        assert_eq!(value["start_to_first_token_seconds"], 0.25);
        assert!(
            value["decode_tokens_per_second"].as_f64().unwrap() > 0.0,
            "{value}"
        );
        let asked = model.asked();
        assert_eq!(asked.len(), 4);
        assert!(asked.iter().all(|prompt| *prompt == asked[0]), "{asked:?}");
        assert_eq!(streams.err().lines().count(), 4);
    }

    #[test]
    fn conversations_are_measured_where_the_model_has_a_template() {
        let chats = |model: &Scripted| many::chats(model, 2).unwrap();
        assert!(chats(&mock::base(&["a"])).is_none());
        assert!(chats(&mock::base(&["a"]).opaque()).is_none());
        // The model has a chat template, but the backend does not report token ids.
        assert!(chats(&mock::instruct(&["a"]).opaque()).is_none());
        let prepared = chats(&mock::instruct(&["a"])).unwrap();
        assert_eq!(prepared.len(), 2);
        assert_ne!(prepared[0], prepared[1]);
    }

    #[test]
    fn a_model_that_stops_short_or_has_no_room_is_an_error() {
        let mut streams = Streams::new("");
        let model = mock::base(&["a"; 3]).after(3, Step::End);
        let failure = measure(&args(5, 9, 1), &model, &mut streams.console()).map(|_| ());
        assert!(
            failure
                .unwrap_err()
                .report()
                .unwrap()
                .contains("3 tokens instead of 8")
        );
        let failure = measure(&args(5000, 9, 1), &model, &mut streams.console()).map(|_| ());
        let text = failure.unwrap_err().report().unwrap();
        assert!(text.contains("5009") && text.contains("1024"), "{text}");
    }

    #[test]
    fn prompt_ids_are_fixed_in_range_and_avoid_the_end_of_text() {
        let ids = prompt_ids(1000, 50, &[0, 7]).unwrap();
        assert_eq!(ids, prompt_ids(1000, 50, &[0, 7]).unwrap());
        assert!(ids.iter().all(|&id| id < 50 && id != 0 && id != 7));
        assert!(ids.iter().collect::<std::collections::HashSet<_>>().len() > 40);
        assert!(prompt_ids(1, 0, &[]).is_err());
        assert!(prompt_ids(1, 2, &[0, 1]).is_err());
    }

    #[test]
    fn medians_and_memory_are_read_right() {
        assert_eq!(median([].into_iter()), 0.0);
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), 2.5);
        assert_eq!(
            parse_peak_rss("VmPeak: 9 kB\nVmHWM:\t  2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(parse_peak_rss("VmHWM: lots"), None);
        if cfg!(target_os = "linux") {
            assert!(peak_rss_bytes().unwrap() > 1 << 20);
        }
    }
}
