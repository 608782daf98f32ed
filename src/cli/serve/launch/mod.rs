//! `mlx launch`: runs one command in several processes, on this machine or on others. MLX connects
//! the processes to a group. The crate `inference-group` has the code of a group's member.

mod hosts;
mod start;
mod supervise;

use std::path::PathBuf;

use inference::Split;

use crate::cli::options::load::at_least_one;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use hosts::Hosts;

/// Subcommands that several processes can run together.
const TOGETHER: [&str; 6] = [
    "generate",
    "logits",
    "perplexity",
    "bench",
    "train",
    "serve",
];

/// Run a command in several processes that share the work, on this machine or on others by ssh
///
/// `mlx launch -n 2 -- generate --prompt "..."` divides a model between two processes of this
/// machine. --hostfile accepts the host files of Python's `mlx.launch`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Names or addresses of machines, separated by commas, in order of rank
    #[arg(
        long,
        value_name = "LIST",
        default_value = "127.0.0.1",
        conflicts_with = "hostfile"
    )]
    hosts: String,
    /// A JSON file with the machines, as for `mlx.launch`
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Number of processes on each machine of --hosts
    #[arg(long, short = 'n', value_name = "N", default_value = "1", value_parser = at_least_one)]
    repeat_hosts: usize,
    /// The first port [default: free ports if all processes run on this machine, otherwise 32323]
    #[arg(long, short = 'p', value_name = "PORT")]
    starting_port: Option<u16>,
    /// Number of connections between neighbors for each address
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    connections_per_ip: usize,
    /// An environment variable for each process, NAME=VALUE; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// The working directory [default: this directory, where it exists]
    #[arg(long, value_name = "DIR")]
    cwd: Option<PathBuf>,
    /// The path of this program on other machines
    #[arg(long, value_name = "PATH", default_value = "mlx")]
    program: String,
    /// Give each process whole layers instead of a part of each layer; each process sends its
    /// output to the next
    #[arg(long)]
    pipeline: bool,
    /// Seconds that processes wait for each other at the start
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = at_least_one)]
    join_timeout: usize,
    /// The command: generate, logits, perplexity, bench, train or serve, with its flags
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
}

/// Parses a command line, and checks that several processes can run it. Returns the command's name.
pub type Check = fn(&[String], Split) -> Result<String, Failure>;

/// Runs the command in several processes. `check` receives the command line first.
pub fn run(args: &Args, check: Check, console: &mut Console<'_>) -> Result<(), Failure> {
    check_command(&args.command, args.pipeline, check)?;
    let hosts = match &args.hostfile {
        Some(path) => Hosts::from_file(path)?,
        None => Hosts::from_list(&args.hosts, args.repeat_hosts).map_err(Failure::usage)?,
    };
    let mut envs = Vec::new();
    for one in hosts.envs.iter().chain(&args.env) {
        envs.push(variable(one)?);
    }
    let (command, key) = without_key(&args.command);
    envs.extend(key);
    let ring = hosts
        .ring(args.starting_port, args.connections_per_ip.min(64))
        .map_err(Failure::usage)?;
    let plan = start::Plan {
        hosts: &hosts,
        ring: &ring,
        envs: &envs,
        cwd: args.cwd.as_deref(),
        program: &args.program,
        join_timeout: args.join_timeout,
        pipeline: args.pipeline,
        command: &command,
        // The flags of this program apply to all processes.
        verbose: console.verbose,
        quiet: console.quiet,
    };
    supervise::run(&plan, console)
}

/// Refuses a command line that is invalid or that several processes cannot run, before any process
/// starts.
fn check_command(command: &[String], pipeline: bool, check: Check) -> Result<(), Failure> {
    let split = if pipeline {
        Split::Pipeline
    } else {
        Split::Tensor
    };
    let name = check(command, split)?;
    if !TOGETHER.contains(&name.as_str()) {
        return Err(Failure::usage(format!(
            "`mlx launch` runs {}; {name:?} is none of them",
            TOGETHER.join(", ")
        )));
    }
    if pipeline && name == "train" {
        return Err(Failure::usage(
            "--pipeline divides a model's layers, and `train` divides its batches; leave it out",
        ));
    }
    if command.iter().any(|arg| arg == "-") {
        return Err(Failure::usage(
            "`-` is standard input, which several processes cannot share; give the text itself",
        ));
    }
    Ok(())
}

/// The command without `--api-key` and its value, because every user of a machine can see a command
/// line. A variable with the key replaces the flag.
fn without_key(command: &[String]) -> (Vec<String>, Option<(String, String)>) {
    const FLAG: &str = "--api-key";
    let serves = command.iter().find(|word| !word.starts_with('-'));
    if serves.is_none_or(|name| name != "serve") {
        return (command.to_vec(), None);
    }
    let (mut rest, mut key) = (Vec::with_capacity(command.len()), None);
    let mut words = command.iter().peekable();
    while let Some(word) = words.next() {
        let value = match word.strip_prefix(FLAG) {
            Some("") => words.next_if(|value| !value.is_empty()),
            Some(value) => value.strip_prefix('=').map(|_| word),
            None => None,
        };
        let value = value.map(|value| value.strip_prefix("--api-key=").unwrap_or(value));
        match value {
            Some(value) if !value.is_empty() => {
                key = Some((String::from("MLX_API_KEY"), value.to_owned()));
            }
            // An empty flag stays, because it is refused later. An empty variable would mean that
            // there is no key.
            _ => rest.push(word.clone()),
        }
    }
    (rest, key)
}

/// The name and the value of a variable.
fn variable(text: &str) -> Result<(String, String), Failure> {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) || !name.chars().all(word)
    {
        return Err(Failure::usage(format!(
            "{text:?} is no variable; it must be NAME=VALUE"
        )));
    }
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(command: &[String], pipeline: bool) -> Result<(), Failure> {
        check_command(command, pipeline, crate::cli::check_launched)
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn commands_are_checked_before_anything_is_started() {
        check(&words("generate --prompt a"), true).unwrap();
        check(&words("-v logits --prompt a"), false).unwrap();
        let train = words("train --train --data d");
        check(&train, false).unwrap();
        let failure = check(&train, true).unwrap_err();
        assert!(failure.report().unwrap().contains("batches"));
        for (wrong, told) in [
            ("ls", "none of them"),
            ("chat", "none of them"),
            ("generate --prompt -", "standard input"),
            ("generate --temp 1", "there is no prompt"),
            ("logits --prompt a --ffn sparse:8", "split and feed_forward"),
            ("bench --ffn sparse:8", "split and feed_forward"),
        ] {
            let failure = check(&words(wrong), false).unwrap_err();
            assert_eq!(failure.exit_code(), 2);
            assert!(failure.report().unwrap().contains(told), "{wrong}");
        }
    }

    #[test]
    fn the_key_of_a_server_goes_as_a_variable() {
        for given in [
            "serve --api-key abc --port 1",
            "serve --api-key=abc --port 1",
        ] {
            let (rest, key) = without_key(&words(given));
            assert_eq!(rest, words("serve --port 1"));
            assert_eq!(key.unwrap(), ("MLX_API_KEY".into(), "abc".into()));
        }
        for other in [
            "generate --prompt --api-key",
            "serve --api-key=",
            "serve --api-keys a",
        ] {
            assert_eq!(without_key(&words(other)), (words(other), None));
        }
    }

    #[test]
    fn variables_have_names() {
        assert_eq!(variable("A_1=b=c").unwrap(), ("A_1".into(), "b=c".into()));
        assert_eq!(variable("A").unwrap(), ("A".into(), String::new()));
        for wrong in ["", "=1", "1A=2", "A B=1", "A;rm=1"] {
            assert!(variable(wrong).is_err(), "{wrong:?}");
        }
    }
}
