//! The flags that say how tokens are chosen and when to stop.

use std::time::{Duration, Instant};

use clap::builder::NonEmptyStringValueParser;
use inference::GenerateOptions;

use super::failure::Failure;

/// How tokens are chosen and when to stop. Greedy unless told otherwise.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Stop after this many tokens
    #[arg(
        long,
        short = 'n',
        visible_alias = "n-predict",
        value_name = "N",
        default_value_t = 256
    )]
    pub max_tokens: usize,
    /// Temperature; 0 takes the most likely token each time
    #[arg(
        long,
        visible_alias = "temperature",
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub temp: f32,
    /// Choose among the most likely tokens that together have this probability; 1 is off
    #[arg(
        long,
        value_name = "P",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub top_p: f32,
    /// Choose among this many of the most likely tokens; 0 is off
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,
    /// Leave out tokens less likely than this share of the most likely one; 0 is off
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub min_p: f32,
    /// Make recent tokens less likely by this factor; 1 is off
    #[arg(
        long,
        visible_alias = "repetition-penalty",
        value_name = "X",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub repeat_penalty: f32,
    /// Seed of the random choices; the same seed gives the same reply
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop at this text, which is left out of the reply; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Do not stop at the model's end-of-text tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Stop this many seconds after generation begins
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    pub deadline: Option<Duration>,
}

impl SamplingArgs {
    /// The options they amount to, checked. The deadline is set by [`start`](Self::start).
    pub fn options(&self) -> Result<GenerateOptions, Failure> {
        let mut options = GenerateOptions::default();
        options.max_tokens = self.max_tokens;
        options.temperature = self.temp;
        options.top_p = self.top_p;
        options.top_k = self.top_k;
        options.min_p = self.min_p;
        options.repeat_penalty = self.repeat_penalty;
        options.seed = self.seed;
        options.stop = self.stop.clone();
        options.ignore_eos = self.ignore_eos;
        options
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))?;
        Ok(options)
    }

    /// The moment at which a generation that begins now must stop.
    pub fn start(&self) -> Option<Instant> {
        self.deadline
            .and_then(|seconds| Instant::now().checked_add(seconds))
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if value <= 0.0 {
        return Err("must be more than 0 seconds".into());
    }
    Duration::try_from_secs_f64(value).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn options(args: &[&str]) -> Result<GenerateOptions, Failure> {
        let args = std::iter::once(&"mlx").chain(args);
        let parsed = Program::try_parse_from(args).map_err(|e| Failure::usage(e.to_string()))?;
        parsed.sampling.options()
    }

    #[test]
    fn defaults_are_greedy_and_256_tokens() {
        let options = options(&[]).unwrap();
        assert_eq!((options.max_tokens, options.temperature), (256, 0.0));
        assert_eq!((options.top_p, options.repeat_penalty), (1.0, 1.0));
        assert_eq!((options.seed, options.ignore_eos), (None, false));
    }

    #[test]
    fn every_spelling_reaches_its_option() {
        for args in [["--max-tokens", "7"], ["--n-predict", "7"], ["-n", "7"]] {
            assert_eq!(options(&args).unwrap().max_tokens, 7);
        }
        for name in ["--temp", "--temperature"] {
            assert_eq!(options(&[name, "0.5"]).unwrap().temperature, 0.5);
        }
        for name in ["--repeat-penalty", "--repetition-penalty"] {
            assert_eq!(options(&[name, "1.5"]).unwrap().repeat_penalty, 1.5);
        }
        let o = options(&[
            "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--seed", "3",
        ])
        .unwrap();
        assert_eq!((o.top_p, o.top_k, o.min_p, o.seed), (0.9, 40, 0.1, Some(3)));
        let o = options(&["--stop", "a", "--stop", "-b", "--ignore-eos"]).unwrap();
        assert_eq!(
            (o.stop, o.ignore_eos),
            (vec!["a".into(), "-b".into()], true)
        );
    }

    #[test]
    fn bad_values_are_usage_errors() {
        for args in [
            ["--temp", "-1"],
            ["--temp", "nan"],
            ["--temp", "inf"],
            ["--temp", "x"],
            ["--top-p", "1.5"],
            ["--top-p", "-0.1"],
            ["--min-p", "2"],
            ["--min-p", "-1"],
            ["--top-k", "-1"],
            ["--repeat-penalty", "0"],
            ["--repeat-penalty", "-2"],
            ["--seed", "-1"],
            ["--max-tokens", "-5"],
            ["--max-tokens", "1e3"],
            ["--stop", ""],
            ["--deadline", "0"],
            ["--deadline", "-1"],
            ["--deadline", "nan"],
            ["--deadline", "1e300"],
        ] {
            let failure = options(&args).map(|_| ()).expect_err(&args.join(" "));
            assert_eq!(failure.exit_code(), 2, "{args:?}");
        }
    }
}
