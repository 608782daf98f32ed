//! The flags of `mlx convert --method`: learned quantization.

use std::path::{Path, PathBuf};

use metal_backend::quant::{Awq, Calibration, Dwq, Dynamic, Gptq, Method, QuantizeOptions};

use crate::cli::options::load::at_least_one;
use crate::cli::terminal::failure::Failure;

/// A method of learned quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MethodName {
    /// Round columns one after another, and let later columns make up for the errors
    Gptq,
    /// Scale up channels with large activations, and clip ranges
    Awq,
    /// Give more bits to the layers that affect the output most
    Dynamic,
    /// Train scales and biases by distillation
    Dwq,
}

impl MethodName {
    fn name(self) -> &'static str {
        match self {
            Self::Gptq => "gptq",
            Self::Awq => "awq",
            Self::Dynamic => "dynamic",
            Self::Dwq => "dwq",
        }
    }
}

/// Flags of learned quantization. Each needs `--method`.
#[derive(Debug, Clone, clap::Args)]
#[group(requires = "method")]
#[command(next_help_heading = "Learned quantization")]
pub struct LearnedArgs {
    /// Learn the quantization from calibration data (--data); implies --quantize
    #[arg(long, value_name = "METHOD", value_enum)]
    pub method: Option<MethodName>,
    /// Calibration data: a text file, a JSONL or Parquet file as for `mlx train`, or a directory
    /// with train.jsonl
    #[arg(long, visible_alias = "data-path", value_name = "PATH")]
    data: Option<PathBuf>,
    /// Number of calibration sequences; -1 means all [default: 128]
    #[arg(long, hide_short_help = true, value_name = "N")]
    num_samples: Option<i64>,
    /// Number of tokens in a calibration sequence [default: 512]
    #[arg(long, hide_short_help = true, visible_alias = "max-seq-length", value_name = "N", value_parser = at_least_one)]
    sequence_length: Option<usize>,
    /// Seed of the order in which sequences are taken [default: 123]
    #[arg(long, hide_short_help = true, value_name = "N")]
    seed: Option<u32>,
    /// Number of sequences in a forward pass [default: 4; dynamic and dwq: 1]
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = at_least_one)]
    batch_size: Option<usize>,
    /// Bits of matrices outside the blocks, such as the embedding [default: those of --bits]
    #[arg(
        long,
        hide_short_help = true,
        visible_alias = "embed-bits",
        value_name = "N"
    )]
    fallback_bits: Option<i32>,
    /// Group size of matrices outside the blocks [default: that of --group-size]
    #[arg(
        long,
        hide_short_help = true,
        visible_alias = "embed-group-size",
        value_name = "N"
    )]
    fallback_group_size: Option<i32>,
    /// awq: number of scales that are tried for a layer, and of ranges for a group [default: 20]
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = at_least_one)]
    n_grid: Option<usize>,
    /// dynamic: bits of layers with low sensitivity, as --bits [default: 4]
    #[arg(
        long,
        hide_short_help = true,
        value_name = "N",
        conflicts_with = "bits"
    )]
    pub low_bits: Option<i32>,
    /// dynamic: group size of layers with low sensitivity, as --group-size [default: 64]
    #[arg(
        long,
        hide_short_help = true,
        value_name = "N",
        conflicts_with = "group_size"
    )]
    pub low_group_size: Option<i32>,
    /// dynamic: bits of layers with high sensitivity [default: 5]
    #[arg(long, hide_short_help = true, value_name = "N")]
    high_bits: Option<i32>,
    /// dynamic: group size of layers with high sensitivity [default: 64]
    #[arg(long, hide_short_help = true, value_name = "N")]
    high_group_size: Option<i32>,
    /// dynamic: greatest mean bits of a weight in quantized matrices, with scales and biases
    /// [default: halfway between low and high bits]
    #[arg(long, hide_short_help = true, value_name = "BITS")]
    target_bpw: Option<f64>,
    /// dynamic: a JSON file of sensitivities, which is used if it exists and written otherwise
    #[arg(long, hide_short_help = true, value_name = "FILE")]
    sensitivities: Option<PathBuf>,
    /// dwq: learning rate [default: 1e-6]
    #[arg(long, hide_short_help = true, value_name = "RATE")]
    learning_rate: Option<f32>,
    /// dynamic, dwq: recompute blocks in the backward pass, which needs less memory
    #[arg(long, hide_short_help = true)]
    grad_checkpoint: bool,
    /// The backend that runs the model [default: MLX_BACKEND, otherwise the best available]
    #[arg(long, hide_short_help = true, value_name = "NAME")]
    pub backend: Option<String>,
}

impl LearnedArgs {
    /// The options of the method; `None` without a method.
    pub fn options(&self) -> Result<Option<QuantizeOptions>, Failure> {
        let Some(method) = self.method else {
            return Ok(None);
        };
        self.check(method)?;
        let calibration = match &self.data {
            Some(data) => Some(self.calibration(data)?),
            None if self.sensitivities.as_ref().is_some_and(|f| f.exists()) => None,
            None => {
                return Err(Failure::usage(format!(
                    "--method {} needs calibration data: --data FILE, a text file or a JSONL file as for \
                     `mlx train`",
                    method.name()
                )));
            }
        };
        let method = match method {
            MethodName::Gptq => Method::Gptq(Gptq::default()),
            MethodName::Awq => Method::Awq(Awq {
                n_grid: self.n_grid.unwrap_or(Awq::default().n_grid),
            }),
            MethodName::Dynamic => {
                let own = Dynamic::default();
                Method::Dynamic(Dynamic {
                    high_bits: self.high_bits.unwrap_or(own.high_bits),
                    high_group_size: self.high_group_size.unwrap_or(own.high_group_size),
                    target_bpw: self.target_bpw,
                    sensitivities: self.sensitivities.clone(),
                    grad_checkpoint: self.grad_checkpoint,
                })
            }
            MethodName::Dwq => {
                let own = Dwq::default();
                Method::Dwq(Dwq {
                    learning_rate: self.learning_rate.unwrap_or(own.learning_rate),
                    grad_checkpoint: self.grad_checkpoint,
                    ..own
                })
            }
        };
        let mut options = QuantizeOptions::new(method, calibration);
        if let Some(n) = self.batch_size {
            options.batch_size = n;
        }
        options.fallback = (self.fallback_bits, self.fallback_group_size);
        Ok(Some(options))
    }

    /// Refuses flags of other methods.
    fn check(&self, method: MethodName) -> Result<(), Failure> {
        use MethodName::{Awq, Dwq, Dynamic};
        let flags: [(&str, bool, &[MethodName]); 9] = [
            ("--n-grid", self.n_grid.is_some(), &[Awq]),
            ("--low-bits", self.low_bits.is_some(), &[Dynamic]),
            (
                "--low-group-size",
                self.low_group_size.is_some(),
                &[Dynamic],
            ),
            ("--high-bits", self.high_bits.is_some(), &[Dynamic]),
            (
                "--high-group-size",
                self.high_group_size.is_some(),
                &[Dynamic],
            ),
            ("--target-bpw", self.target_bpw.is_some(), &[Dynamic]),
            ("--sensitivities", self.sensitivities.is_some(), &[Dynamic]),
            ("--learning-rate", self.learning_rate.is_some(), &[Dwq]),
            ("--grad-checkpoint", self.grad_checkpoint, &[Dynamic, Dwq]),
        ];
        for (flag, given, methods) in flags {
            if given && !methods.contains(&method) {
                let names: Vec<&str> = methods.iter().map(|m| m.name()).collect();
                return Err(Failure::usage(format!(
                    "{flag} is for --method {}, not {}",
                    names.join(" and "),
                    method.name()
                )));
            }
        }
        Ok(())
    }

    /// The calibration data with the flags' numbers.
    fn calibration(&self, data: &Path) -> Result<Calibration, Failure> {
        let mut calibration = Calibration::new(data);
        if let Some(n) = self.num_samples {
            calibration.num_samples = match usize::try_from(n) {
                Ok(0) => {
                    return Err(Failure::usage(
                        "--num-samples must be 1 or more, or -1 for all",
                    ));
                }
                Ok(n) => Some(n),
                Err(_) => None,
            };
        }
        if let Some(n) = self.sequence_length {
            calibration.sequence_length = n;
        }
        if let Some(seed) = self.seed {
            calibration.seed = seed;
        }
        Ok(calibration)
    }
}
