//! Supervises the processes of a group until all have ended. It forwards their output and signals,
//! and ends all processes when one fails. No process outlives this program: each process reads from
//! a pipe that closes when this program ends.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::start::Plan;
use crate::cli::terminal::console::{Console, write_failed};
use crate::cli::terminal::failure::Failure;

/// Polling interval.
const PAUSE: Duration = Duration::from_millis(20);
/// How long the other processes may continue after a failure, so that they can report.
const GRACE: Duration = Duration::from_secs(5);
/// How long a training run may save, and a server may complete replies, after a signal.
const SAVING: Duration = Duration::from_secs(120);
/// How long the other processes may continue after rank 0 has ended.
const AFTER_FIRST: Duration = Duration::from_secs(30);

/// A process of the group.
struct Process {
    rank: usize,
    place: String,
    is_local: bool,
    child: Child,
    /// The process ends when this pipe closes.
    stdin: Option<ChildStdin>,
    ended: Option<ExitStatus>,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Polls whether the process has ended.
    fn look(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    fn signal(&self, signal: Signal) {
        if self.ended.is_some() {
            return;
        }
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // The process may have ended in the meantime, so an error is ignored.
            let _ = kill_process_group(pid, signal);
        }
    }
}

/// All processes. Dropping this value ends those that still run.
struct Processes(Vec<Process>);

impl Processes {
    fn running(&mut self) -> io::Result<usize> {
        let mut running = 0;
        for process in &mut self.0 {
            running += usize::from(process.look()?.is_none());
        }
        Ok(running)
    }

    fn signal(&self, signal: Signal) {
        self.0.iter().for_each(|process| process.signal(signal));
    }

    /// Forwards a user's signal. If there are local processes, only these receive it: a signal
    /// would end ssh and its remote process immediately. Training processes inform each other.
    fn interrupt(&self, signal: Signal) {
        let here = self.0.iter().any(|p| p.is_local && p.ended.is_none());
        let reached = self.0.iter().filter(|p| p.is_local || !here);
        reached.for_each(|process| process.signal(signal));
    }

    /// Waits until all processes have ended, but at most `time`. Returns whether all have ended.
    fn wait(&mut self, time: Duration) -> io::Result<bool> {
        let until = Instant::now() + time;
        loop {
            if self.running()? == 0 {
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Asks all processes to end, and kills those that do not.
    fn stop(&mut self) {
        self.signal(Signal::TERM);
        for process in &mut self.0 {
            process.stdin = None;
        }
        if !matches!(self.wait(GRACE), Ok(true)) {
            self.signal(Signal::KILL);
            for process in &mut self.0 {
                if process.ended.is_none() {
                    process.ended = process.child.wait().ok();
                }
            }
        }
        for reader in self.0.iter_mut().flat_map(|p| p.readers.drain(..)) {
            let _ = reader.join();
        }
    }

    /// The process that caused the failure. A process that was killed or refused its options has
    /// priority over one with exit code 1, which may only have lost its connection.
    fn failed(&self) -> Option<(&Process, ExitStatus)> {
        let ended = self.0.iter().filter_map(|p| Some((p, p.ended?)));
        telling(ended)
    }
}

/// The most informative exit status. An exit code other than 0 and 1, or a signal, has priority
/// over exit code 1.
fn telling<T>(ended: impl Iterator<Item = (T, ExitStatus)>) -> Option<(T, ExitStatus)> {
    let mut first = None;
    for (process, status) in ended.filter(|(_, status)| !status.success()) {
        if status.code() != Some(1) {
            return Some((process, status));
        }
        first = first.or(Some((process, status)));
    }
    first
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts the processes of a plan, and returns when all have ended.
///
/// # Errors
/// If a process cannot start. If a process fails, the error has its exit code.
pub fn run(plan: &Plan<'_>, console: &mut Console<'_>) -> Result<(), Failure> {
    let system = |e: io::Error| Failure::failed(format!("cannot run the processes: {e}"));
    let (interrupted, terminated) = (flag(SIGINT)?, flag(SIGTERM)?);
    let mut hostfile = tempfile::NamedTempFile::new().map_err(system)?;
    hostfile
        .write_all(plan.hostfile().as_bytes())
        .and_then(|()| hostfile.flush())
        .map_err(system)?;
    let mut all = Processes(Vec::new());
    let (printed, result) = mpsc::channel();
    for (rank, host) in plan.hosts.all.iter().enumerate() {
        let place = host
            .ssh
            .clone()
            .unwrap_or_else(|| String::from("this machine"));
        let child = plan.start(rank, host, hostfile.path()).map_err(|e| {
            let program = host.ssh.as_ref().map_or("the program", |_| "ssh");
            Failure::failed(format!(
                "rank {rank} on {place}: cannot start {program}: {e}"
            ))
        })?;
        let process = watched(rank, place, child, &printed);
        all.0.push(Process {
            is_local: host.ssh.is_none(),
            ..process
        });
    }
    drop(printed);
    let mut first_done: Option<Instant> = None;
    loop {
        let running = all.running().map_err(system)?;
        for (flag, signal, code) in [
            (&interrupted, Signal::INT, 130),
            (&terminated, Signal::TERM, 143),
        ] {
            if flag.load(Ordering::Relaxed) {
                all.interrupt(signal);
                let runs = |name: &str| plan.command.iter().any(|word| word == name);
                let serves = runs("serve");
                // A training run saves before it ends, and a server completes its replies. Both
                // need more time.
                let patient = runs("train") || runs("lora") || serves;
                let until = Instant::now() + if patient { SAVING } else { GRACE };
                // A further signal ends the waiting time.
                flag.store(false, Ordering::Relaxed);
                while Instant::now() < until
                    && !flag.load(Ordering::Relaxed)
                    && !matches!(all.wait(PAUSE), Ok(true))
                {}
                let done = all.running().map_err(system)? == 0 && all.failed().is_none();
                all.stop();
                // A server normally ends by a signal, so this is not a failure.
                if serves && done {
                    return print(&result, console);
                }
                let message = String::from("interrupted; all processes were ended");
                return Err(Failure::Interrupted { message, code });
            }
        }
        if all.failed().is_some() {
            // Other processes may fail shortly afterwards, and one of them may be the cause.
            let _ = all.wait(Duration::from_millis(300));
            let failure = report(&mut all, console);
            print(&result, console)?;
            return Err(failure);
        }
        if running == 0 {
            break;
        }
        let first = all.0.first().is_some_and(|p| p.ended.is_some());
        if first && first_done.get_or_insert_with(Instant::now).elapsed() > AFTER_FIRST {
            let late = all.0.iter().find(|p| p.ended.is_none());
            let rank = late.map_or(0, |p| p.rank);
            return Err(Failure::failed(format!(
                "rank {rank} did not end within {} s after rank 0 had",
                AFTER_FIRST.as_secs()
            )));
        }
        match result.recv_timeout(PAUSE) {
            Ok(bytes) => write(&bytes, console)?,
            Err(RecvTimeoutError::Timeout) => {}
            // Rank 0 has closed its output but is still running.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(PAUSE),
        }
    }
    all.stop();
    print(&result, console)
}

/// Prints the output that has arrived so far.
fn print(result: &Receiver<Vec<u8>>, console: &mut Console<'_>) -> Result<(), Failure> {
    result
        .try_iter()
        .try_for_each(|bytes| write(&bytes, console))
}

/// Writes output bytes unchanged.
fn write(bytes: &[u8], console: &mut Console<'_>) -> Result<(), Failure> {
    let written = console
        .out
        .write_all(bytes)
        .and_then(|()| console.out.flush());
    written.map_err(write_failed)
}

/// Ends all processes, and returns the failure of the one that caused it.
fn report(all: &mut Processes, console: &mut Console<'_>) -> Failure {
    let (text, code, rank) = match all.failed() {
        Some((process, status)) => {
            let how = match (status.code(), status.signal()) {
                (Some(code), _) => format!("ended with exit code {code}"),
                (None, signal) => format!("was ended by signal {}", signal.unwrap_or(0)),
            };
            let code = status.code().or_else(|| status.signal().map(|s| 128 + s));
            let text = format!("rank {} on {} {how}", process.rank, process.place);
            (
                text,
                code.and_then(|c| u8::try_from(c).ok()).unwrap_or(1),
                process.rank,
            )
        }
        None => (String::from("a process failed"), 1, 0),
    };
    let others = all
        .0
        .iter()
        .filter(|p| p.ended.is_none() && p.rank != rank)
        .count();
    if others > 0 {
        console.note(&format!("{text}; ending the others"));
    }
    all.stop();
    Failure::Interrupted {
        message: text,
        code,
    }
}

fn flag(signal: i32) -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal, Arc::clone(&flag))
        .map_err(|e| Failure::failed(format!("cannot catch signals: {e}")))?;
    Ok(flag)
}

/// Starts to forward the output of a process. Bytes of rank 0 stay unchanged; lines of other ranks
/// go to standard error.
fn watched(rank: usize, place: String, mut child: Child, printed: &Sender<Vec<u8>>) -> Process {
    let stdin = child.stdin.take();
    let mut readers = Vec::new();
    if let Some(out) = child.stdout.take() {
        // Only the console may write to standard output, so bytes are sent to it.
        let printed = printed.clone();
        readers.push(thread::spawn(move || match rank {
            0 => copy(out, |bytes| {
                let _ = printed.send(bytes.to_vec());
            }),
            _ => lines(out, rank),
        }));
    }
    if let Some(err) = child.stderr.take() {
        readers.push(thread::spawn(move || match rank {
            0 => copy(err, |bytes| {
                // Without standard error no message can be shown, so an error is ignored.
                let _ = io::stderr().write_all(bytes);
            }),
            _ => lines(err, rank),
        }));
    }
    Process {
        rank,
        place,
        is_local: true,
        child,
        stdin,
        ended: None,
        readers,
    }
}

/// Forwards bytes as soon as they arrive.
fn copy(mut from: impl Read, to: impl Fn(&[u8])) {
    let mut buffer = [0; 8192];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        to(&buffer[..n]);
    }
}

/// Forwards lines to standard error, each with the rank of its process.
fn lines(from: impl Read, rank: usize) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while let Ok(1..) = from.read_until(b'\n', &mut line) {
        let text = String::from_utf8_lossy(&line);
        let _ = writeln!(
            io::stderr(),
            "[rank {rank}] {}",
            text.trim_end_matches(['\n', '\r'])
        );
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// An exit status for this exit code, as `wait` returns it.
    fn exit(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    #[test]
    fn a_rank_that_refuses_its_options_comes_before_one_that_lost_it() {
        let told = |all: &[ExitStatus]| telling(all.iter().copied().enumerate()).map(|(i, _)| i);
        assert_eq!(told(&[exit(1), exit(2)]), Some(1));
        assert_eq!(told(&[exit(1), exit(0), ExitStatus::from_raw(9)]), Some(2));
        assert_eq!(told(&[exit(0), exit(1), exit(1)]), Some(1));
        assert_eq!(told(&[exit(0), exit(0)]), None);
    }
}
