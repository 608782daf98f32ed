//! Starts one process of a group, on this machine or by ssh.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::hosts::{Host, Hosts};
use inference_group::{JOIN_TIMEOUT, LAUNCHED, SPLIT};

/// Connection timeout of ssh in seconds.
const SSH_TIMEOUT: usize = 20;

/// The parameters that all processes share.
pub struct Plan<'a> {
    /// The machines of the processes.
    pub hosts: &'a Hosts,
    /// The addresses of the processes.
    pub ring: &'a [Vec<String>],
    /// Variables for each process.
    pub envs: &'a [(String, String)],
    /// The directory to run in.
    pub cwd: Option<&'a Path>,
    /// The program on other machines.
    pub program: &'a str,
    /// Seconds that processes wait for each other.
    pub join_timeout: usize,
    /// Whether each process computes whole layers.
    pub pipeline: bool,
    /// The subcommand with its flags.
    pub command: &'a [String],
    /// Whether the processes get `--verbose`.
    pub verbose: bool,
    /// Whether the processes get `--quiet`.
    pub quiet: bool,
}

impl Plan<'_> {
    pub fn processes(&self) -> usize {
        self.hosts.all.len()
    }

    /// The content of the file with the addresses, which MLX reads.
    pub fn hostfile(&self) -> String {
        serde_json::json!(self.ring).to_string()
    }

    /// Starts process `rank` in a separate process group. So a terminal's Ctrl-C reaches the
    /// process only through this program. Its standard input is a pipe, and the process ends when
    /// the pipe closes. `hostfile` is the local path of the addresses.
    ///
    /// # Errors
    /// Those of the system.
    pub fn start(&self, rank: usize, host: &Host, hostfile: &Path) -> io::Result<Child> {
        let (mut command, first) = match &host.ssh {
            None => (self.local(rank, hostfile)?, None),
            Some(name) => (remote(name), Some(one_line(&self.script(rank)))),
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        if let (Some(line), Some(input)) = (first, &mut child.stdin) {
            // If ssh has already ended, it has printed the reason.
            match input.write_all(line.as_bytes()) {
                Err(e) if e.kind() != io::ErrorKind::BrokenPipe => return Err(e),
                _ => {}
            }
        }
        Ok(child)
    }

    fn local(&self, rank: usize, hostfile: &Path) -> io::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(self.arguments());
        for (name, value) in self.variables(rank) {
            command.env(name, value);
        }
        if self.processes() > 1 {
            command.env("MLX_HOSTFILE", hostfile);
        }
        let together = self.hosts.all.iter().filter(|h| h.ssh.is_none()).count();
        if std::env::var_os("MLX_NUM_THREADS").is_none() {
            // Thread pools that each use all cores would slow each other down, so each process gets
            // a share.
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            command.env(
                "MLX_NUM_THREADS",
                (cores / together.max(1)).max(1).to_string(),
            );
        }
        // Variables of the command line override the thread count.
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        if let Some(dir) = self.cwd {
            command.current_dir(dir);
        }
        Ok(command)
    }

    /// The shell script for another machine. It contains variables, which may be secrets. When the
    /// program ends, the script deletes the file with the addresses.
    fn script(&self, rank: usize) -> String {
        let mut script = String::from("f=$(mktemp) || exit 1; ");
        script += &format!("printf %s {} > \"$f\"; ", quoted(&self.hostfile()));
        let here = std::env::current_dir().ok();
        match (self.cwd, here) {
            (Some(dir), _) => {
                let dir = quoted(&dir.to_string_lossy());
                script += &format!("cd {dir} || {{ rm -f \"$f\"; exit 1; }}; ");
            }
            (None, Some(dir)) => {
                script += &format!("cd {} 2>/dev/null; ", quoted(&dir.to_string_lossy()));
            }
            (None, None) => {}
        }
        for (name, value) in self.variables(rank) {
            script += &format!("export {name}={}; ", quoted(&value));
        }
        for (name, value) in self.envs {
            script += &format!("export {name}={}; ", quoted(value));
        }
        if self.processes() > 1 {
            script += "export MLX_HOSTFILE=\"$f\"; ";
        }
        script += &quoted(self.program);
        for argument in self.arguments() {
            script += " ";
            script += &quoted(&argument);
        }
        script + "; c=$?; rm -f \"$f\"; exit $c"
    }

    fn arguments(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.verbose {
            all.push(String::from("-v"));
        }
        if self.quiet {
            all.push(String::from("--quiet"));
        }
        all.extend(self.command.iter().cloned());
        all
    }

    fn variables(&self, rank: usize) -> Vec<(&'static str, String)> {
        let mut all = vec![(LAUNCHED, String::from("1"))];
        if self.processes() > 1 {
            all.push(("MLX_RANK", rank.to_string()));
            all.push((JOIN_TIMEOUT, self.join_timeout.to_string()));
            let split = if self.pipeline { "pipeline" } else { "tensor" };
            all.push((SPLIT, String::from(split)));
        }
        all
    }
}

/// The remote shell command. It runs the first line of its standard input, and leaves the rest to
/// the program. Other users of that machine can see the command line, so the script is not in it.
const SHELL: &str = r#"sh -c 'IFS= read -r s && eval "$(printf %b "$s")"'"#;

fn remote(host: &str) -> Command {
    let mut command = Command::new("ssh");
    command.args(["-T", "-o", "BatchMode=yes", "-o"]);
    command.arg(format!("ConnectTimeout={SSH_TIMEOUT}"));
    command.arg("--").arg(host).arg(SHELL);
    command
}

/// Encodes a script as a single line for [`SHELL`].
fn one_line(script: &str) -> String {
    let line = script.replace('\\', r"\\").replace('\n', r"\n");
    line + "\n"
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_a_shell_as_they_are() {
        for word in ["", "a b", "it's", "$HOME `x` \"y\" \\ \n*", "--"] {
            let script = format!("printf %s {}", quoted(word));
            let out = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), word);
        }
    }

    #[test]
    fn secrets_reach_other_machines_on_standard_input_alone() {
        let secret = "it's \\n a\n\"$SECRET\" \\\\ %s\\101";
        let hosts = Hosts::from_list("other", 1).unwrap();
        let envs = [(String::from("A_KEY"), secret.to_owned())];
        let command = ["-c", "printf '%s|' \"$A_KEY\"; cat"].map(str::to_owned);
        let plan = Plan {
            hosts: &hosts,
            ring: &[],
            envs: &envs,
            cwd: None,
            program: "sh",
            join_timeout: 60,
            pipeline: false,
            command: &command,
            verbose: false,
            quiet: false,
        };
        let ssh = remote("other");
        let shown: Vec<_> = ssh.get_args().map(|arg| arg.to_string_lossy()).collect();
        assert!(!shown.iter().any(|arg| arg.contains("SECRET")), "{shown:?}");
        let line = one_line(&plan.script(0));
        assert_eq!(line.matches('\n').count(), 1);
        let mut there = Command::new("sh")
            .args(["-c", shown.last().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = there.stdin.take().unwrap();
        input.write_all(line.as_bytes()).unwrap();
        input.write_all(b"the rest").unwrap();
        drop(input);
        let out = there.wait_with_output().unwrap();
        assert!(out.status.success());
        let heard = String::from_utf8(out.stdout).unwrap();
        assert_eq!(heard, format!("{secret}|the rest"));
    }
}
