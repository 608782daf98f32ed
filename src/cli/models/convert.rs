//! `mlx convert`: converts a checkpoint to an MLX directory, or to a GGUF file.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use inference::{CancelToken, Error, ErrorKind, Interrupt, LoadOptions};
use inference_formats::{Gguf, ModelConfig, ModelFiles, gguf_config, locate};
use metal_backend::convert::{
    ConvertOptions, ConvertReport, FloatType, Quantization, Recipe, convert,
};
use metal_backend::quant::{QuantizeOptions, quantize};
use rust_mlx::export::{Exported, GgufType, check_family, check_output, export_gguf};
use rust_mlx::hub::{Progress, Stage};
use rust_mlx::mlx::QuantMode;
use serde_json::json;

use crate::cli::models::learned::LearnedArgs;
use crate::cli::options::cache::size;
use crate::cli::options::load::{ModelArgs, choose_backend, find_model};
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_signals;
use crate::cli::terminal::progress::{HubProgress, Spinner, StepProgress};

/// Convert a model to an MLX directory (copy, cast, quantize or dequantize its weights) or to GGUF
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("quantizing").args(["quantize", "method"]).multiple(true)))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The directory to create, or the file with --gguf-type [default: mlx_model, or
    /// ggml-model-TYPE.gguf]
    #[arg(long, short, visible_alias = "mlx-path", value_name = "PATH")]
    output: Option<PathBuf>,
    /// Quantize matrices, by default to 4 bits in groups of 64
    #[arg(long, short = 'q', visible_short_alias = 'Q')]
    quantize: bool,
    /// Bits of a weight: 2, 3, 4, 5, 6 or 8
    #[arg(
        long,
        visible_alias = "q-bits",
        value_name = "N",
        requires = "quantizing"
    )]
    bits: Option<i32>,
    /// Adjacent weights that share a scale: 32, 64 or 128
    #[arg(
        long,
        visible_alias = "q-group-size",
        value_name = "N",
        requires = "quantizing"
    )]
    group_size: Option<i32>,
    /// The quantization format: affine, mxfp4, mxfp8 or nvfp4
    #[arg(long, visible_alias = "q-mode", value_name = "MODE", requires = "quantizing", value_parser = mode)]
    mode: Option<QuantMode>,
    /// Different bits for different layers: mixed_2_6, mixed_3_4, mixed_3_6 or mixed_4_6
    #[arg(long, visible_alias = "recipe", value_name = "RECIPE", requires = "quantizing", value_parser = recipe)]
    quant_predicate: Option<Recipe>,
    /// Make quantized matrices dense
    #[arg(long, short, conflicts_with = "quantizing")]
    dequantize: bool,
    /// Store floats as float32, float16 or bfloat16 [default: unchanged]
    #[arg(long, value_name = "TYPE", value_parser = float_type)]
    dtype: Option<FloatType>,
    /// Maximum size of a weight file, such as 5GiB or 500MB
    #[arg(long, value_name = "SIZE", default_value = "5GiB", value_parser = size)]
    max_shard_size: u64,
    /// Replace the output directory if it is not empty
    #[arg(long)]
    force: bool,
    #[arg(
        long,
        help = format!("Write a GGUF file, with matrices as {}", GgufType::names()),
        value_name = "TYPE",
        conflicts_with_all = ["quantizing", "dtype", "max_shard_size", "force"]
    )]
    gguf_type: Option<GgufType>,
    /// Print a JSON object about the result
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    learned: LearnedArgs,
}

fn mode(text: &str) -> Result<QuantMode, String> {
    QuantMode::from_name(text).ok_or_else(|| "must be affine, mxfp4, mxfp8 or nvfp4".to_owned())
}

fn recipe(text: &str) -> Result<Recipe, String> {
    Recipe::from_name(text).ok_or_else(|| {
        let all: Vec<_> = Recipe::ALL.iter().map(|r| r.name()).collect();
        format!("must be one of {}", all.join(", "))
    })
}

fn float_type(text: &str) -> Result<FloatType, String> {
    FloatType::from_name(text).ok_or_else(|| "must be float32, float16 or bfloat16".to_owned())
}

impl Args {
    fn output(&self) -> PathBuf {
        let usual = || match self.gguf_type {
            Some(kind) => PathBuf::from(format!("ggml-model-{kind}.gguf")),
            None => PathBuf::from("mlx_model"),
        };
        self.output.clone().unwrap_or_else(usual)
    }

    fn options(&self) -> ConvertOptions {
        let mut options = ConvertOptions::new()
            .with_dequantize(self.dequantize)
            .with_max_shard_bytes(self.max_shard_size)
            .with_force(self.force);
        options.dtype = self.dtype;
        let quantizes = self.quantize || self.learned.method.is_some();
        options.quantize = quantizes.then(|| Quantization {
            mode: self.mode.unwrap_or_default(),
            bits: self.bits.or(self.learned.low_bits),
            group_size: self.group_size.or(self.learned.low_group_size),
            recipe: self.quant_predicate,
        });
        options
    }
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let options = args.options();
    options
        .validate()
        .map_err(|e| Failure::usage(e.message()))?;
    let learned = args.learned.options()?;
    let path = find_model(args.model.model.as_deref(), console)?;
    if let Some(kind) = args.gguf_type {
        return to_gguf(&path, args, kind, console);
    }
    if let Some(learned) = learned {
        let report = learn(&path, args, &options, &learned, console)?;
        return print(args, &report, console);
    }
    let report = to_directory(&path, &args.output(), &options, console)?;
    print(args, &report, console)
}

fn to_directory(
    path: &Path,
    output: &Path,
    options: &ConvertOptions,
    console: &mut Console<'_>,
) -> Result<ConvertReport, Failure> {
    let mut progress = HubProgress::new(console);
    let mut begun = false;
    let made = convert(path, output, options, &mut |done, total| {
        if !begun {
            progress.begin(Stage::Converting, &output.to_string_lossy(), total);
            begun = true;
        }
        progress.advance(done);
    });
    progress.end();
    Ok(made?)
}

/// Writes a GGUF file. With `--dequantize`, a dense directory is made first, beside the file.
fn to_gguf(
    path: &Path,
    args: &Args,
    kind: GgufType,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let output = args.output();
    if path.is_file() && !args.dequantize {
        let message = "the model is a GGUF file already; --dequantize makes a dense one of it";
        return Err(Failure::usage(message));
    }
    refuse_early(path, &output)?;
    let exported = if args.dequantize {
        // Ctrl-C ends the command after the current step, so that the directory is removed.
        let cancel = CancelToken::new();
        let _guard = console
            .catches_interrupts
            .then(|| cancel_on_signals(&cancel));
        let interrupt = Interrupt::new().with_cancel(cancel);
        let work = work_directory(&output)?;
        // `general.name` is the name of the model's directory.
        let dense = work.path().join(name(path));
        // Other types would round the products of codes and scales.
        let options = args.options().with_dtype(FloatType::F32);
        let report = to_directory(path, &dense, &options, console)?;
        interrupt.check()?;
        for note in &report.notes {
            console.note(&format!("note: {note}"));
        }
        export(&dense, &output, kind, console)?
    } else {
        export(path, &output, kind, console)?
    };
    if args.json {
        return console.json(&json!({
            "path": output.to_string_lossy(),
            "tensors": exported.tensors,
            "bytes": exported.bytes,
        }));
    }
    console.note(&format!(
        "{} tensors in {}",
        exported.tensors,
        bytes(exported.bytes)
    ));
    console.line(&output.to_string_lossy())
}

/// Refuses what the export would refuse after a long conversion.
fn refuse_early(path: &Path, output: &Path) -> Result<(), Failure> {
    check_output(output)?;
    let config = match locate(path)? {
        ModelFiles::Directory(dir) => ModelConfig::from_file(&dir.join("config.json"))?,
        ModelFiles::Gguf(file) => gguf_config::config(&Gguf::open(&file)?)?,
    };
    Ok(check_family(
        config.model_type.as_deref().unwrap_or_default(),
    )?)
}

/// The name of a model: that of its directory, or of its file without the extension.
fn name(path: &Path) -> &OsStr {
    let name = match path.is_file() {
        true => path.file_stem(),
        false => path.file_name(),
    };
    name.unwrap_or(OsStr::new("model"))
}

/// A new directory beside `output`, which is removed when the value is dropped.
fn work_directory(output: &Path) -> Result<tempfile::TempDir, Failure> {
    let beside = output.parent().filter(|dir| !dir.as_os_str().is_empty());
    let mut names = tempfile::Builder::new();
    names.prefix(".unfinished-mlx-");
    let made = names.tempdir_in(beside.unwrap_or(Path::new(".")));
    Ok(made.map_err(|e| {
        let message = format!("cannot make a directory beside the file: {e}");
        Error::new(ErrorKind::Io, message).with_path(output)
    })?)
}

fn export(
    model: &Path,
    output: &Path,
    kind: GgufType,
    console: &Console<'_>,
) -> Result<Exported, Failure> {
    let _spinner = Spinner::start("writing the GGUF file", console);
    Ok(export_gguf(model, output, kind)?)
}

/// Converts by a learned method.
fn learn(
    path: &Path,
    args: &Args,
    convert: &ConvertOptions,
    learned: &QuantizeOptions,
    console: &mut Console<'_>,
) -> Result<ConvertReport, Failure> {
    let cancel = CancelToken::new();
    let _guard = console
        .catches_interrupts
        .then(|| cancel_on_signals(&cancel));
    let backend = choose_backend(args.learned.backend.as_deref())?;
    let load = LoadOptions::new().with_backend(backend.name());
    let mut progress = StepProgress::new(console);
    let mut show = |stage, done, total| progress.at(stage, done, total);
    let made = quantize(
        path,
        &args.output(),
        convert,
        learned,
        &load,
        &cancel,
        &mut show,
    );
    progress.end();
    Ok(made?)
}

fn print(args: &Args, report: &ConvertReport, console: &mut Console<'_>) -> Result<(), Failure> {
    for note in &report.notes {
        console.note(&format!("note: {note}"));
    }
    if args.json {
        return console.json(&json!({
            "path": args.output().to_string_lossy(),
            "parameters": report.parameters,
            "bytes": report.bytes,
            "files": report.shards,
            "quantized_matrices": report.quantized,
            "bits_per_weight": report.bits_per_weight(),
            "notes": report.notes,
        }));
    }
    console.note(&format!(
        "{:.1} M weights in {} ({:.3} bits a weight)",
        report.parameters as f64 / 1e6,
        bytes(report.bytes),
        report.bits_per_weight()
    ));
    console.line(&args.output().to_string_lossy())
}
