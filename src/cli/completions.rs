//! `mlx completions SHELL` and `mlx man DIR`: shell completions and manual pages.

use std::path::{Path, PathBuf};

use clap_complete::Shell;

use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Print a script that completes commands and flags in a shell
///
/// bash: `mlx completions bash > ~/.local/share/bash-completion/completions/mlx`. zsh: into a file
/// `_mlx` in a directory of `fpath`. fish:
/// `mlx completions fish > ~/.config/fish/completions/mlx.fish`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Write manual pages, one per subcommand
#[derive(Debug, Clone, clap::Args)]
pub struct ManArgs {
    /// The directory to write to, such as ~/.local/share/man/man1; it is created if missing
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Runs `mlx completions`.
pub fn run(
    args: &Args,
    mut command: clap::Command,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "mlx", &mut script);
    console.text(&String::from_utf8_lossy(&script))
}

/// Runs `mlx man`.
pub fn man(
    args: &ManArgs,
    command: clap::Command,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let failed =
        |e: std::io::Error| Failure::failed(format!("cannot write to {}: {e}", args.dir.display()));
    std::fs::create_dir_all(&args.dir).map_err(failed)?;
    let mut command = without_help(command);
    command.build();
    let mut pages = Vec::new();
    write(&args.dir, &command, &mut pages).map_err(failed)?;
    for page in pages {
        console.line(&page.to_string_lossy())?;
    }
    Ok(())
}

/// The command with all its subcommands, but without `help`, which needs no page.
fn without_help(command: clap::Command) -> clap::Command {
    let command = command.disable_help_subcommand(true);
    command.mut_subcommands(without_help)
}

/// Writes the page of a command, and the pages of its subcommands. A page's name is the whole
/// command, such as `mlx-vindex-walk.1`, as for git's pages.
fn write(dir: &Path, command: &clap::Command, pages: &mut Vec<PathBuf>) -> std::io::Result<()> {
    pages.push(clap_mangen::Man::new(command.clone()).generate_to(dir)?);
    for subcommand in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        write(dir, subcommand, pages)?;
    }
    Ok(())
}
