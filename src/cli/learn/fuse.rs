//! `mlx fuse`: merges a model and its adapter into one model.

use std::path::{Path, PathBuf};

use metal_backend::train::{fuse, fuse_dequantized};
use rust_mlx::export::{GgufType, export_gguf};
use serde_json::json;

use crate::cli::learn::common::directory;
use crate::cli::options::load::{ModelArgs, find_model};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::Spinner;

/// Merge an adapter into its model
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The adapter's directory, as `mlx train` writes it
    #[arg(long, value_name = "DIR", default_value = "adapters", value_parser = directory)]
    adapter_path: PathBuf,
    /// The directory to create
    #[arg(long, short, visible_alias = "save-path", value_name = "DIR", default_value = "fused_model", value_parser = directory)]
    output: PathBuf,
    /// Make quantized matrices dense, so that the adapter is not rounded; needed for .gguf files
    #[arg(long, visible_alias = "de-quantize")]
    dequantize: bool,
    /// Also write the fused model as a GGUF file; a quantized one needs --dequantize
    #[arg(long)]
    export_gguf: bool,
    /// Name of the GGUF file to write, inside --output [default: `ggml-model-TYPE.gguf`]
    #[arg(long, value_name = "FILE", requires = "export_gguf")]
    gguf_path: Option<PathBuf>,
    #[arg(
        long,
        help = format!("How the GGUF file stores matrices: {}", GgufType::names()),
        value_name = "TYPE",
        default_value = "f16",
        requires = "export_gguf"
    )]
    gguf_type: GgufType,
    /// Print a JSON object about the result
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let model = find_model(args.model.model.as_deref(), console)?;
    let spinner = Spinner::start("fusing", console);
    let changed = make(args, &model);
    drop(spinner);
    let changed = changed?;
    let gguf = args.gguf();
    if args.export_gguf {
        let spinner = Spinner::start("writing the GGUF file", console);
        let exported = export_gguf(&args.output, &gguf, args.gguf_type);
        drop(spinner);
        exported?;
    }
    if args.json {
        let mut told = json!({
            "path": args.output,
            "fused_tensors": changed,
        });
        if args.export_gguf {
            told["gguf"] = json!(gguf);
        }
        return console.json(&told);
    }
    console.note(&format!("{changed} tensors changed"));
    console.line(&args.output.to_string_lossy())
}

impl Args {
    /// The path of the GGUF file. The name contains the type, as in llama.cpp.
    fn gguf(&self) -> PathBuf {
        let usual = || PathBuf::from(format!("ggml-model-{}.gguf", self.gguf_type));
        let name = self.gguf_path.clone().unwrap_or_else(usual);
        self.output.join(name)
    }
}

fn make(args: &Args, model: &Path) -> Result<usize, Failure> {
    let make = if args.dequantize {
        fuse_dequantized
    } else {
        fuse
    };
    Ok(make(model, &args.adapter_path, &args.output)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn the_name_of_the_gguf_file_tells_its_type() {
        let file = |words: &[&str]| {
            let line = ["fuse", "-o", "out", "--export-gguf"].iter().chain(words);
            Program::try_parse_from(line).unwrap().args.gguf()
        };
        assert_eq!(file(&[]), Path::new("out/ggml-model-f16.gguf"));
        for kind in ["q8_0", "bf16", "f32"] {
            let name = format!("out/ggml-model-{kind}.gguf");
            assert_eq!(file(&["--gguf-type", kind]), Path::new(&name));
        }
        let flags = file(&["--gguf-type", "q8_0", "--gguf-path", "mine.gguf"]);
        assert_eq!(flags, Path::new("out/mine.gguf"));
    }
}
