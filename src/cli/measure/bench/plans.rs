//! `mlx bench` with several feed-forward plans. Each plan has its own loaded model. Runs of the
//! plans alternate, so that other load on the machine affects all plans equally.

use inference::{FeedForwardPlan, Prompt, TextModel};
use serde_json::{Value, json};

use crate::cli::measure::bench::{Args, WARMUP_TOKENS, eos_tokens, generate, median, prompt_ids};
use crate::cli::options::load::{Loaded, find_model, load_with};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::TokenBar;

/// The speeds of one plan, one value per run.
#[derive(Default)]
struct Speeds {
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// Measures the plans and prints JSON. Ratios are to the first plan.
pub fn run(
    args: &Args,
    plans: &[FeedForwardPlan],
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    if args.batch.is_some() || args.together.is_some() || args.bandwidth {
        return Err(Failure::usage(
            "--batch, --together and --bandwidth measure one plan; leave them out, or give one plan to --ffn",
        ));
    }
    let backend = args.load.backend()?;
    let path = find_model(args.model.model.as_deref(), console)?;
    let mut models: Vec<Loaded> = Vec::new();
    for plan in plans {
        let mut load = args.load.clone();
        load.feed_forward = args.load.feed_forward.only(plan);
        models.push(load_with(backend.clone(), &path, &load, None, console)?);
    }
    let Some(first) = models.first() else {
        return Err(Failure::usage("--ffn is empty"));
    };
    let info = first.model.info();
    let eos = eos_tokens(first.model.as_ref());
    let prompt = Prompt::Tokens(prompt_ids(args.prompt_tokens, info.vocab_size, &eos)?);
    let speeds = measure(args, &models, &prompt, console)?;
    let mut shown: Vec<Value> = Vec::new();
    for ((plan, model), plan_speeds) in plans.iter().zip(&models).zip(&speeds) {
        let first = &speeds[0];
        let ratio = |plan_speeds: &[f64], first: &[f64]| {
            // Each ratio compares two runs that are adjacent in time.
            median(plan_speeds.iter().zip(first).map(|(a, b)| a / b))
        };
        let [prefill, decode] =
            [&plan_speeds.prefill, &plan_speeds.decode].map(|all| median(all.iter().copied()));
        console.note(&format!(
            "{plan}: prefill {prefill:.1} tok/s, decode {decode:.1} tok/s"
        ));
        shown.push(json!({
            "ffn": plan.to_string(),
            "load_seconds": model.load_seconds,
            "weight_bytes": model.model.info().weight_bytes,
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode,
            "prefill_ratio": ratio(&plan_speeds.prefill, &first.prefill),
            "decode_ratio": ratio(&plan_speeds.decode, &first.decode),
            "prefill_runs": plan_speeds.prefill,
            "decode_runs": plan_speeds.decode,
        }));
    }
    console.json(&json!({
        "model": path.to_string_lossy(),
        "backend": backend.name(),
        "device": info.device,
        "prompt_tokens": args.prompt_tokens,
        "generated_tokens": args.generate_tokens,
        "plans": shown,
    }))
}

fn measure(
    args: &Args,
    models: &[Loaded],
    prompt: &Prompt,
    console: &mut Console<'_>,
) -> Result<Vec<Speeds>, Failure> {
    let mut speeds: Vec<Speeds> = models.iter().map(|_| Speeds::default()).collect();
    let warm = args.generate_tokens.min(WARMUP_TOKENS);
    let run = args.prompt_tokens.saturating_add(args.generate_tokens);
    let rounds = args.warmup.saturating_add(args.repeat);
    let total = run.saturating_mul(rounds).saturating_mul(models.len());
    let bar = TokenBar::start("measuring", total as u64, console);
    for round in 0..rounds {
        for (model, speed) in models.iter().zip(&mut speeds) {
            let model: &dyn TextModel = model.model.as_ref();
            if round < args.warmup {
                generate(args, model, (prompt, warm), &bar)?;
                continue;
            }
            let metrics = generate(args, model, (prompt, args.generate_tokens), &bar)?;
            speed.prefill.push(metrics.prefill_tokens_per_second());
            speed.decode.push(metrics.decode_tokens_per_second());
        }
    }
    Ok(speeds)
}
