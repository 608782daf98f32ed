//! `mlx bench --together N`: compares requests that run together with requests that run one after
//! another, and measures the cost of sampling. `mod.rs` measures a single request.
//!
//! The two sides of a comparison alternate, so that other load on the machine affects both equally.
//! The report has medians.

use std::time::Instant;

use inference::{ChatPrompt, ErrorKind, GenerateOptions, Message, Prompt, TextModel};
use serde_json::{Value, json};

use crate::cli::measure::bench::{median, prompt_ids};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::TokenBar;

/// Number of prompt tokens when a reply is measured.
const PROMPT: usize = 32;
/// Number of prompt tokens when a prompt is classified.
const SHORT: usize = 16;
/// Number of tokens in the common instruction before each classified prompt.
const INSTRUCTION: usize = 64;

/// The question at the end of each classified conversation.
const QUESTION: &str = "Positive or negative?";
const TEXTS: [&str; 16] = [
    "I loved every minute of it.",
    "Terrible.",
    "The plot made no sense at all.",
    "A masterpiece!",
    "Boring and far too long.",
    "Great acting, weak story.",
    "I would watch it again.",
    "Not worth the money.",
    "My kids laughed all evening.",
    "The ending ruined it.",
    "Simply wonderful.",
    "I fell asleep.",
    "Best film of the year.",
    "It was fine, I guess.",
    "Awful sound and worse jokes.",
    "A warm, funny little film.",
];

/// `count` short conversations. `None` if the model has no chat template, or if the backend does
/// not report the tokens.
///
/// # Errors
/// If the template refuses the conversations.
pub fn chats(model: &dyn TextModel, count: usize) -> inference::Result<Option<Vec<Vec<u32>>>> {
    let Some(tokens) = model
        .as_token_model()
        .filter(|_| model.info().has_chat_template)
    else {
        return Ok(None);
    };
    let texts = TEXTS.iter().cycle().take(count).enumerate();
    let chat = |(i, text): (usize, &&str)| {
        let asked = match i / TEXTS.len() {
            0 => format!("{QUESTION} {text}"),
            again => format!("{QUESTION} {text} ({again})"),
        };
        let chat = ChatPrompt::new([Message::user(asked)]);
        tokens.prepare_chat(&chat).map(|prepared| prepared.ids)
    };
    match texts.map(chat).collect() {
        Ok(chats) => Ok(Some(chats)),
        Err(e) if e.kind() == ErrorKind::Unsupported => Ok(None),
        Err(e) => Err(e),
    }
}

/// The size of the measurement.
pub struct Size {
    /// Number of concurrent requests. Twice as many prompts are classified.
    pub requests: usize,
    /// Number of tokens of each reply.
    pub tokens: usize,
    /// Number of measured rounds.
    pub repeat: usize,
    /// The conversations that are classified.
    pub chats: Option<Vec<Vec<u32>>>,
}

impl Size {
    /// Number of tokens that the model will process, for the progress bar.
    pub fn work(&self) -> u64 {
        let pair = PROMPT.saturating_add(self.tokens).saturating_mul(2);
        let batch = pair.saturating_mul(self.requests);
        let classify = self
            .requests
            .saturating_mul(4 * (SHORT + SHORT + INSTRUCTION));
        let chats: usize = self.chats.iter().flatten().map(Vec::len).sum();
        let classify = classify.saturating_add(chats.saturating_mul(2));
        let round = batch.saturating_add(classify).saturating_add(pair);
        round.saturating_mul(self.repeat.saturating_add(1)) as u64
    }
}

/// Options with every filter that the device can sample with.
fn chain() -> GenerateOptions {
    GenerateOptions::default()
        .with_temperature(0.8)
        .with_seed(1)
        .with_top_p(0.95)
        .with_min_p(0.02)
        .with_top_k(40)
        .with_xtc_probability(0.5)
        .with_repeat_penalty(1.1)
        .with_presence_penalty(0.2)
        .with_frequency_penalty(0.2)
        .with_logit_bias([(5, 1.0), (6, -1.0)])
}

fn exactly(options: &GenerateOptions, tokens: usize) -> GenerateOptions {
    options
        .clone()
        .with_max_tokens(tokens)
        .with_ignore_eos(true)
        .with_num_draft_tokens(0)
        .with_cache_prompt(false)
}

/// The times of two ways to do the same work, in seconds.
#[derive(Default)]
struct Pair {
    one: Vec<f64>,
    other: Vec<f64>,
}

impl Pair {
    fn medians(&self) -> (f64, f64) {
        let of = |values: &[f64]| median(values.iter().copied());
        (of(&self.one), of(&self.other))
    }
}

fn seconds(f: &mut dyn FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Measures both ways in alternating order. The first round is a warm-up.
fn measure(
    repeat: usize,
    one: &mut dyn FnMut() -> Result<f64, Failure>,
    other: &mut dyn FnMut() -> Result<f64, Failure>,
) -> Result<Pair, Failure> {
    let mut pair = Pair::default();
    for round in 0..=repeat {
        let (a, b) = if round % 2 == 0 {
            let a = one()?;
            (a, other()?)
        } else {
            let b = other()?;
            (one()?, b)
        };
        if round > 0 {
            pair.one.push(a);
            pair.other.push(b);
        }
    }
    Ok(pair)
}

/// Runs all measurements.
pub fn run(
    model: &dyn TextModel,
    size: &Size,
    eos: &[u32],
    bar: &TokenBar,
) -> Result<Value, Failure> {
    let vocab = model.info().vocab_size;
    let n = size.requests;
    let ids = prompt_ids(n.saturating_mul(PROMPT), vocab, eos)?;
    let prompts: Vec<Prompt> = ids
        .chunks(PROMPT)
        .map(|part| Prompt::Tokens(part.to_vec()))
        .collect();
    let greedy = exactly(&GenerateOptions::default(), size.tokens);
    let each = (PROMPT + size.tokens) as u64;

    // The method `generate` runs single requests; here it runs one request after another.
    let reply = |prompt: &Prompt, options: &GenerateOptions| -> Result<f64, Failure> {
        let mut stream = model.generate(prompt, options)?;
        let mut count = 0;
        for token in stream.by_ref() {
            token?;
            count += 1;
        }
        expect_count(count, size.tokens)?;
        bar.advance(each);
        // Decode time excludes the first token, which prefill computes.
        Ok(stream.metrics().decode_time.as_secs_f64() / (count - 1).max(1) as f64)
    };
    let batch = measure(
        size.repeat,
        &mut || {
            seconds(&mut || {
                prompts
                    .iter()
                    .try_for_each(|p| reply(p, &greedy).map(|_| ()))
            })
        },
        &mut || {
            seconds(&mut || {
                for result in model.batch_generate(&prompts, &greedy)? {
                    if let Some(error) = result.error {
                        return Err(error.into());
                    }
                    expect_count(result.tokens.len(), size.tokens)?;
                    bar.advance(each);
                }
                Ok(())
            })
        },
    )?;

    let ids = prompt_ids(n.saturating_mul(2 * SHORT), vocab, eos)?;
    let instruction = prompt_ids(INSTRUCTION, vocab, eos)?;
    let options = GenerateOptions::default();
    let classify = |prompts: &[Vec<u32>]| -> Result<Value, Failure> {
        let asked = |prompts: &[Prompt], tokens: usize| -> Result<(), Failure> {
            let results = model.classify(prompts, &options, false)?;
            expect_count(results.len(), prompts.len())?;
            bar.advance(tokens as u64);
            Ok(())
        };
        let all: Vec<Prompt> = prompts.iter().cloned().map(Prompt::Tokens).collect();
        let total = prompts.iter().map(Vec::len).sum();
        let measured = measure(
            size.repeat,
            &mut || {
                seconds(&mut || {
                    (all.chunks(1).zip(prompts)).try_for_each(|(one, ids)| asked(one, ids.len()))
                })
            },
            &mut || seconds(&mut || asked(&all, total)),
        )?;
        let (one_by_one, at_once) = measured.medians();
        Ok(json!({
            "prompts": all.len(),
            "sequential_seconds": one_by_one,
            "together_seconds": at_once,
            "speedup": one_by_one / at_once,
        }))
    };
    let short = |before: &[u32]| -> Result<Value, Failure> {
        let prompts: Vec<Vec<u32>> = (ids.chunks(SHORT))
            .map(|ending| [before, ending].concat())
            .collect();
        let mut measured = classify(&prompts)?;
        measured["prompt_tokens"] = (before.len() + SHORT).into();
        measured["tokens_alike"] = before.len().into();
        Ok(measured)
    };
    let classified = short(&[])?;
    let instructed = short(&instruction)?;
    let chats = match &size.chats {
        Some(chats) => {
            let mut measured = classify(chats)?;
            measured["prompt_tokens"] = json!([
                chats.iter().map(Vec::len).min(),
                chats.iter().map(Vec::len).max(),
            ]);
            // The report contains the tokens, so that other programs can be measured with equal
            // prompts.
            measured["tokens"] = json!(chats);
            measured
        }
        None => Value::Null,
    };

    let sampled = exactly(&chain(), size.tokens);
    let sampling = measure(
        size.repeat,
        &mut || reply(&prompts[0], &greedy),
        &mut || reply(&prompts[0], &sampled),
    )?;

    let tokens = (n * size.tokens) as f64;
    let (sequential, together) = batch.medians();
    let (greedy_token, sampled_token) = sampling.medians();
    Ok(json!({
        "requests": n,
        "prompt_tokens": PROMPT,
        "generated_tokens": size.tokens,
        "rounds": size.repeat,
        "batch": {
            "sequential_tokens_per_second": tokens / sequential,
            "together_tokens_per_second": tokens / together,
            "speedup": sequential / together,
        },
        "classify": classified,
        "classify_alike": instructed,
        "classify_chats": chats,
        "sampling": {
            "greedy_seconds_per_token": greedy_token,
            "chain_seconds_per_token": sampled_token,
            "overhead": sampled_token / greedy_token - 1.0,
        },
    }))
}

fn expect_count(count: usize, wanted: usize) -> Result<(), Failure> {
    if count == wanted {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "the model gave {count} instead of {wanted}; the numbers would mean nothing"
    )))
}
