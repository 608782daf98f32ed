//! `mlx completions SHELL` and `mlx man DIR`: what shells and `man` know of the program.

use std::path::{Path, PathBuf};

use clap_complete::Shell;

use super::console::Console;
use super::failure::Failure;

/// Print what a shell needs to complete commands and flags
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

/// Write manual pages, one a subcommand
#[derive(Debug, Clone, clap::Args)]
pub struct ManArgs {
    /// The directory to write to, such as ~/.local/share/man/man1; it is made if need be
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Runs `mlx completions`.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::command(), "mlx", &mut script);
    console.text(&String::from_utf8_lossy(&script))
}

/// Runs `mlx man`.
pub fn man(args: &ManArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let failed =
        |e: std::io::Error| Failure::failed(format!("cannot write to {}: {e}", args.dir.display()));
    std::fs::create_dir_all(&args.dir).map_err(failed)?;
    let mut command = super::command().disable_help_subcommand(true);
    command.build();
    let mut pages = vec![write(&args.dir, command.clone()).map_err(failed)?];
    for subcommand in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        let name = format!("mlx-{}", subcommand.get_name());
        // The page of a subcommand is called by its whole name, as git's are; the program ends
        // soon.
        let page = subcommand.clone().name(&*name.leak());
        pages.push(write(&args.dir, page).map_err(failed)?);
    }
    for page in pages {
        console.line(&page.to_string_lossy())?;
    }
    Ok(())
}

fn write(dir: &Path, command: clap::Command) -> std::io::Result<PathBuf> {
    let path = dir.join(format!("{}.1", command.get_name()));
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    std::fs::write(&path, page)?;
    Ok(path)
}
