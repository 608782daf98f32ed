//! The flags that choose tokens, and the flags that end a reply.

use std::time::{Duration, Instant};

use clap::builder::NonEmptyStringValueParser;
use inference::{
    GenerateOptions, LogitBias, Parameter, ParameterValue, ParameterValues, SamplerOrder,
    SamplingDefaults,
};

use crate::cli::options::grammar::GrammarArgs;
use crate::cli::options::load::count;
use crate::cli::options::parameters::{Otherwise, ParameterFlags};
use crate::cli::options::preset::Preset;
use crate::cli::terminal::failure::Failure;

/// Maximum number of tokens in a reply, unless the caller sets another limit.
const MAX_TOKENS: usize = 256;

/// The defaults of options that neither a flag nor a preset sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Habit {
    /// Choose the most likely token at each step, as in mlx-lm.
    Greedy,
    /// Use the recommendations of the model's files, otherwise Ollama's defaults.
    Ollama,
}

impl Habit {
    /// The initial options for a model whose files recommend `model`.
    pub fn options(self, model: &SamplingDefaults) -> GenerateOptions {
        let mut options = GenerateOptions::default();
        if self == Habit::Ollama {
            for parameter in Parameter::all() {
                let value = ParameterValues::recommended(model)
                    .get(parameter.name())
                    .or_else(|| ollama(parameter));
                // The model's files were checked for the range, so this error is not expected.
                if let Some(Err(e)) = value.map(|value| parameter.set(&mut options, value)) {
                    tracing::warn!("{e}");
                }
            }
        }
        options
    }
}

/// Returns Ollama's default of a parameter, as in the server's Ollama routes.
fn ollama(parameter: &Parameter) -> Option<ParameterValue> {
    Some(match parameter.name() {
        "temperature" => ParameterValue::Real(0.8),
        "top_k" => ParameterValue::Count(40),
        "top_p" => ParameterValue::Real(0.9),
        "repeat_penalty" => ParameterValue::Real(1.1),
        _ => return None,
    })
}

/// Adds the default to a flag's help text.
#[derive(Debug)]
pub struct GreedyUnlessRun;

impl Otherwise for GreedyUnlessRun {
    fn note(parameter: &Parameter) -> String {
        let usual = parameter.default_value();
        match ollama(parameter) {
            Some(value) => {
                format!("[default: {usual}; in `run` the model's own, else {value}]")
            }
            None => format!("[default: {usual}]"),
        }
    }
}

/// How tokens are chosen and when to stop. By default, the most likely token is chosen; `run`
/// follows [`Habit`].
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Stop after this many tokens [default: 256; in a chat, at the end of the model's context]
    #[arg(
        long,
        short = 'n',
        visible_alias = "n-predict",
        alias = "predict",
        value_name = "N",
        value_parser = count
    )]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub parameters: ParameterFlags<GreedyUnlessRun>,
    /// mlx-lm's minimal number of tokens that filters keep; only mlx-lm's default, 1, is supported
    #[arg(long, value_name = "N", hide = true, value_parser = one)]
    pub min_tokens_to_keep: Option<usize>,
    /// Apply the temperature before the filters, in the order of transformers: temperature,
    /// top-n-sigma, top-k, top-p, min-p, typical-p, XTC. The default is top-n-sigma, typical-p,
    /// top-p, min-p, XTC, top-k, temperature
    #[arg(long)]
    pub temperature_first: bool,
    /// Add BIAS to the logit of token ID: `15043=1.5`; may be given several times
    #[arg(long, value_name = "ID=BIAS")]
    pub logit_bias: Vec<LogitBias>,
    /// Never choose these tokens: `1,2,3`
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub banned_tokens: Vec<u32>,
    /// Begin the reply with these tokens: `1,2,3`
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub forced_tokens: Vec<u32>,
    /// Do not choose tokens that end the reply before it has this many tokens [default: 0]
    #[arg(long, value_name = "N", value_parser = count)]
    pub min_tokens: Option<usize>,
    /// Seed of the random choices; with one seed, a prompt always gets one reply
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop at this text, which the reply does not contain; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Do not stop at the model's end-of-text tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Stop this many seconds after generation begins
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    pub deadline: Option<Duration>,
    #[command(flatten)]
    pub grammar: GrammarArgs,
}

impl SamplingArgs {
    /// The checked options of the flags. [`start`](Self::start) sets the deadline.
    pub fn options(&self) -> Result<GenerateOptions, Failure> {
        self.of_preset(None)
    }

    /// Returns the options of the flags. Options without a given flag come from the preset.
    pub fn of_preset(&self, preset: Option<&Preset>) -> Result<GenerateOptions, Failure> {
        let mut options = GenerateOptions::default();
        options.max_tokens = MAX_TOKENS;
        if let Some(preset) = preset {
            preset.apply(&mut options)?;
        }
        self.over(options)
    }

    /// Sets the already checked flags for filters and penalties in `options`. Grammar files are not
    /// read again, because a grammar may come from a pipe.
    pub fn choices_over(&self, options: GenerateOptions) -> Result<GenerateOptions, Failure> {
        let flags = Self {
            grammar: GrammarArgs::default(),
            min_tokens: None,
            ..self.clone()
        };
        flags.over(options)
    }

    /// Returns `options`, in which the given flags replace values.
    pub fn over(&self, mut options: GenerateOptions) -> Result<GenerateOptions, Failure> {
        put(&mut options.max_tokens, self.max_tokens);
        self.parameters
            .values
            .apply(&mut options)
            .map_err(|e| Failure::usage(e.to_string()))?;
        if self.temperature_first {
            options.sampling.sampler_order = SamplerOrder::TemperatureFirst;
        }
        put(&mut options.stop.min_tokens, self.min_tokens);
        options
            .constraints
            .logit_bias
            .extend(self.logit_bias.iter().map(|b| (b.id, b.bias)));
        options
            .constraints
            .banned_tokens
            .extend(&self.banned_tokens);
        options
            .constraints
            .forced_tokens
            .extend(&self.forced_tokens);
        options.constraints.grammar = self.grammar.grammar()?.or(options.constraints.grammar);
        options.sampling.seed = self.seed.or(options.sampling.seed);
        options.stop.stop_strings.extend(self.stop.iter().cloned());
        options.stop.ignore_eos |= self.ignore_eos;
        options
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))?;
        Ok(options)
    }

    /// The deadline of a generation that begins now.
    pub fn start(&self) -> Option<Instant> {
        self.deadline
            .and_then(|seconds| Instant::now().checked_add(seconds))
    }
}

/// Overwrites `place` if the flag is given.
fn put<T>(place: &mut T, flag: Option<T>) {
    if let Some(value) = flag {
        *place = value;
    }
}

/// Parses the only allowed value of `--min-tokens-to-keep`.
fn one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(1) => Ok(1),
        _ => {
            Err("must be 1 here: min-p keeps the most likely token and no other for certain".into())
        }
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
        assert_eq!(
            (options.max_tokens, options.sampling.temperature),
            (256, 0.0)
        );
        assert_eq!(
            (options.sampling.top_p, options.penalties.repeat_penalty),
            (1.0, 1.0)
        );
        assert_eq!(
            (options.sampling.seed, options.stop.ignore_eos),
            (None, false)
        );
    }

    #[test]
    fn run_draws_as_the_model_recommends_else_as_ollama() {
        let none = SamplingDefaults::default();
        let greedy = GenerateOptions::default();
        assert_eq!(Habit::Greedy.options(&none).sampling, greedy.sampling);
        let usual = Habit::Ollama.options(&none);
        assert_eq!(
            (usual.sampling.temperature, usual.sampling.top_k),
            (0.8, 40)
        );
        assert_eq!(
            (usual.sampling.top_p, usual.penalties.repeat_penalty),
            (0.9, 1.1)
        );
        let mut model = none;
        (model.temperature, model.top_k) = (Some(0.6), Some(20));
        assert_eq!(Habit::Greedy.options(&model).sampling, greedy.sampling);
        let defaults = Habit::Ollama.options(&model);
        assert_eq!(
            (defaults.sampling.temperature, defaults.sampling.top_k),
            (0.6, 20)
        );
        // A flag overrides both.
        let line = ["mlx", "--temp", "0", "--regex", "a", "--min-tokens", "300"];
        let flags = Program::try_parse_from(line).unwrap().sampling;
        let over = flags.choices_over(defaults).unwrap();
        assert_eq!((over.sampling.temperature, over.sampling.top_k), (0.0, 20));
        assert!(over.constraints.grammar.is_none());
    }

    #[test]
    fn every_spelling_reaches_its_option() {
        for args in [["--max-tokens", "7"], ["--n-predict", "7"], ["-n", "7"]] {
            assert_eq!(options(&args).unwrap().max_tokens, 7);
        }
        for name in ["--temp", "--temperature"] {
            assert_eq!(options(&[name, "0.5"]).unwrap().sampling.temperature, 0.5);
        }
        for name in ["--repeat-penalty", "--repetition-penalty"] {
            assert_eq!(
                options(&[name, "1.5"]).unwrap().penalties.repeat_penalty,
                1.5
            );
        }
        let o = options(&[
            "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--seed", "3",
        ])
        .unwrap();
        assert_eq!(
            (
                o.sampling.top_p,
                o.sampling.top_k,
                o.sampling.min_p,
                o.sampling.seed
            ),
            (0.9, 40, 0.1, Some(3))
        );
        for name in [
            "--repeat-window",
            "--repeat-last-n",
            "--repetition-context-size",
        ] {
            assert_eq!(options(&[name, "5"]).unwrap().penalties.repeat_window, 5);
        }
        let o = options(&[
            "--presence-penalty",
            "-0.5",
            "--frequency-penalty",
            "0.25",
            "--xtc-probability",
            "0.5",
            "--xtc-threshold",
            "0.2",
            "--min-tokens",
            "4",
            "--logit-bias",
            "5=-1.5",
            "--logit-bias",
            "6+2",
            "--banned-tokens",
            "1,2",
            "--forced-tokens",
            "3",
            "--regex",
            "a+",
        ])
        .unwrap();
        assert_eq!(
            (o.penalties.presence_penalty, o.penalties.frequency_penalty),
            (-0.5, 0.25)
        );
        assert_eq!(
            (o.sampling.xtc_probability, o.sampling.xtc_threshold),
            (0.5, 0.2)
        );
        assert_eq!(o.constraints.logit_bias, [(5, -1.5), (6, 2.0)].into());
        assert_eq!(
            (o.constraints.banned_tokens, o.constraints.forced_tokens),
            (vec![1, 2], vec![3])
        );
        assert_eq!(
            (o.stop.min_tokens, o.constraints.grammar.is_some()),
            (4, true)
        );
        let order = |args: &[&str]| options(args).unwrap().sampling.sampler_order;
        assert_eq!(order(&[]), SamplerOrder::NucleusFirst);
        assert_eq!(
            order(&["--temperature-first"]),
            SamplerOrder::TemperatureFirst
        );
        let o = options(&["--stop", "a", "--stop", "-b", "--ignore-eos"]).unwrap();
        assert_eq!(
            (o.stop.stop_strings, o.stop.ignore_eos),
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
            ["--presence-penalty", "nan"],
            ["--frequency-penalty", "inf"],
            ["--xtc-probability", "1.5"],
            ["--xtc-threshold", "0.6"],
            ["--logit-bias", "5"],
            ["--logit-bias", "5=inf"],
            ["--banned-tokens", "1,,2"],
            ["--forced-tokens", "-1"],
            ["--min-tokens", "257"],
            ["--json-schema", "nonsense"],
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
