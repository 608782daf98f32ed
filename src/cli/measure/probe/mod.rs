//! `mlx probe`: analyses of a model's hidden states. `extract` writes hidden states to files, and
//! the other subcommands read these files.

mod direction;
mod divergence;
mod extract;
mod layers;
mod linear;
mod spans;

use std::path::{Path, PathBuf};

use inference_probe::activations::{Activations, Metadata, read_metadata};
use inference_probe::files::write_whole;
use inference_probe::report::{self, Analysis, Inputs};
use inference_probe::stimuli::Stimuli;

pub(super) use extract::identity;

use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Extract hidden states of texts, and analyze which information they contain
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Command {
    Extract(Box<extract::Args>),
    Train(linear::Args),
    Cca(layers::CcaArgs),
    Rsa(layers::RsaArgs),
    Direction(Box<direction::Args>),
    Divergence(divergence::Args),
    Report(ReportArgs),
}

/// Combine all results in a folder into summary.json, SVG charts and index.html
#[derive(Debug, Clone, clap::Args)]
struct ReportArgs {
    /// The folder with the results of the other subcommands (`--output DIR/NAME.json`)
    dir: PathBuf,
}

/// The file of hidden states that a subcommand reads.
#[derive(Debug, Clone, clap::Args)]
struct ActivationArgs {
    /// Hidden states of `mlx probe extract`: a .npy file with its _metadata.json
    #[arg(long, short, value_name = "FILE.npy")]
    activations: PathBuf,
}

/// The destination of a result.
#[derive(Debug, Clone, clap::Args)]
struct OutputArgs {
    /// Write the result as JSON to this file [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    match &args.command {
        Command::Extract(args) => extract::run(args, console),
        Command::Train(args) => linear::run(args, console),
        Command::Cca(args) => layers::run_cca(args, console),
        Command::Rsa(args) => layers::run_rsa(args, console),
        Command::Direction(args) => direction::run(args, console),
        Command::Divergence(args) => divergence::run(args, console),
        Command::Report(args) => {
            let report = report::write(&args.dir).map_err(failed)?;
            console.note(&format!("{} results", report.results));
            for file in report.files {
                console.line(&file.display().to_string())?;
            }
            Ok(())
        }
    }
}

pub(super) fn failed(error: inference_probe::Error) -> Failure {
    Failure::Failed(error.into())
}

/// Hidden states with their metadata.
struct Extracted {
    activations: Activations,
    metadata: Metadata,
    path: PathBuf,
}

impl Extracted {
    fn read(path: &Path) -> Result<Self, Failure> {
        let metadata = read_metadata(path).map_err(failed)?;
        let activations = Activations::read(path).map_err(failed)?;
        if activations.shape() != metadata.activation_shape
            || metadata.row_indices.len() != activations.rows()
        {
            return Err(Failure::failed(format!(
                "{}: its shape {:?} is not the one in its metadata",
                path.display(),
                activations.shape()
            )));
        }
        Ok(Self {
            activations,
            metadata,
            path: path.to_owned(),
        })
    }

    /// The value of `field` for each row of the hidden states.
    fn labels(&self, stimuli: &Path, field: &str) -> Result<Vec<String>, Failure> {
        let all = self.stimuli(stimuli)?;
        let labels = all.labels(field).map_err(failed)?;
        self.metadata
            .row_indices
            .iter()
            .map(|row| {
                labels.get(*row).map(ToString::to_string).ok_or_else(|| {
                    Failure::failed(format!(
                        "the metadata name stimulus {row}, but the number of stimuli is {}",
                        labels.len()
                    ))
                })
            })
            .collect()
    }

    /// Reads the stimuli. Fails if the hidden states come from other texts.
    fn stimuli(&self, path: &Path) -> Result<Stimuli, Failure> {
        let stimuli = Stimuli::read(path, self.metadata.template.as_deref()).map_err(failed)?;
        if stimuli.sha256 != self.metadata.stimuli_sha256 {
            return Err(Failure::failed(format!(
                "{} is not the file that {} was extracted from, or was changed since",
                path.display(),
                self.path.display()
            )));
        }
        Ok(stimuli)
    }

    fn inputs(&self) -> Inputs {
        Inputs {
            activations: vec![self.path.clone()],
            activations_sha256: vec![self.metadata.activations_sha256.clone()],
            stimuli_sha256: Some(self.metadata.stimuli_sha256.clone()),
            shape: self.activations.shape(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Writes a result to its file or to standard output, and a table to standard error.
fn put(
    analysis: &Analysis,
    output: &OutputArgs,
    rows: &[Vec<String>],
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    for line in crate::cli::terminal::console::table(rows) {
        console.note(&line);
    }
    let Some(path) = &output.output else {
        return console.json(analysis);
    };
    let mut text = serde_json::to_string(analysis).map_err(|e| Failure::Failed(e.into()))?;
    text.push('\n');
    write_whole(path, text.as_bytes()).map_err(failed)
}
