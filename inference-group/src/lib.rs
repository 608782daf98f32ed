//! Makes a process a member of a group. The processes of a group are started with one command by
//! `mlx launch`, Python's `mlx.launch` or `mpirun`.
//!
//! [`find`] reads the environment. [`join`] connects to the other members before a model is loaded.
//! From then on, this process ends if another member is lost. In a served group, rank 0 runs the
//! server and sends orders ([`Leader`]); the other ranks [`follow`].

#![forbid(unsafe_code)]

mod end;
mod error;
mod follow;
mod join;
mod lead;
mod link;
mod order;
mod ports;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use inference::Split;
use mlx_rs_core::Array;
use mlx_rs_core::distributed::Group;
use parking_lot::Mutex;

use end::end;
use join::VERSION;

pub use error::{Error, Result};
pub use follow::follow;
pub use lead::{Leader, LedModel};
pub use ports::free_ports;

use link::Links;

/// Set by `mlx launch`. Standard input is then a pipe that closes when the launcher ends.
pub const LAUNCHED: &str = "MLX_LAUNCHED";
/// Seconds that members wait for each other at the start.
pub const JOIN_TIMEOUT: &str = "MLX_JOIN_TIMEOUT";

/// How members divide a model: `tensor` (the default) or `pipeline`.
pub const SPLIT: &str = "MLX_SPLIT";

/// The time limit if [`JOIN_TIMEOUT`] is not set.
const DEFAULT_TIMEOUT: u64 = 60;
/// Maximum size of the address file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// This process as a member of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The number of this process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
    /// How the members divide a model.
    pub split: Split,
    /// The first address of each member in MLX's ring; `None` under MPI, which detects lost
    /// processes itself.
    ring: Option<Vec<String>>,
}

static MEMBER: OnceLock<Member> = OnceLock::new();
static LINKS: OnceLock<Links> = OnceLock::new();

/// This process's membership, once [`find`] has found it. The process may not have joined yet.
pub fn current() -> Option<&'static Member> {
    MEMBER.get()
}

/// Determines from the environment whether this process is a member of a group.
///
/// # Errors
/// If the variables are invalid.
pub fn find() -> Result<()> {
    if let Some(member) = Member::from_environment()? {
        let _ = MEMBER.set(member);
    }
    Ok(())
}

/// Joins the other members, once. Without a group it does nothing. A command calls it directly
/// before loading, after all checks of its flags. If a command refused its flags after some members
/// had joined, exit code and message would depend on which process fails first.
///
/// # Errors
/// If a member does not join in time, or has another version.
pub fn join() -> Result<()> {
    static JOINED: Mutex<bool> = Mutex::new(false);
    let Some(member) = current() else {
        return Ok(());
    };
    let mut joined = JOINED.lock();
    if !*joined {
        member.join()?;
        *joined = true;
    }
    Ok(())
}

impl Member {
    /// Whether rank 0 can send orders to the other ranks.
    pub fn gives_orders(&self) -> bool {
        self.ring.is_some()
    }

    /// Reads the environment: the variables of MLX's rings, or of Open MPI. `None` for a process
    /// without a group.
    fn from_environment() -> Result<Option<Self>> {
        let variable = |name: &str| match std::env::var(name) {
            Ok(value) if value.is_empty() => Ok(None),
            Ok(value) => Ok(Some(value)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(e) => Err(Error::Environment(format!("{name}: {e}"))),
        };
        let split = variable(SPLIT)?;
        let split = split.as_deref().map_or(Ok(Split::Tensor), split_of)?;
        if let (Some(rank), Some(file)) = (variable("MLX_RANK")?, variable("MLX_HOSTFILE")?) {
            let wrong =
                |message: String| Error::Environment(format!("MLX_HOSTFILE: {file}: {message}"));
            let text = read_text(Path::new(&file)).map_err(|e| wrong(e.to_string()))?;
            return Self::on_ring(&rank, &text, split).map_err(wrong);
        }
        let (rank, size) = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
        let (Some(rank), Some(size)) = (variable(rank)?, variable(size)?) else {
            return Ok(None);
        };
        match (rank.parse(), size.parse()) {
            (Ok(rank), Ok(size)) if rank < size => Ok((size > 1).then_some(Self {
                rank,
                size,
                split,
                ring: None,
            })),
            _ => Err(Error::Environment(format!(
                "OMPI_COMM_WORLD_RANK is {rank:?} of {size:?}; start the program with `mpirun`"
            ))),
        }
    }

    /// A member of a ring. `text` is the content of MLX's file, which lists each member's
    /// addresses.
    fn on_ring(rank: &str, text: &str, split: Split) -> Result<Option<Self>, String> {
        let nodes: Vec<Vec<String>> = serde_json::from_str(text)
            .map_err(|e| format!("it is not a list of lists of addresses: {e}"))?;
        let size = nodes.len();
        let rank: usize = rank
            .parse()
            .ok()
            .filter(|rank| *rank < size)
            .ok_or_else(|| format!("MLX_RANK is {rank:?}; it must be 0 to {}", size.max(1) - 1))?;
        let first: Option<Vec<String>> = nodes.into_iter().map(|n| n.into_iter().next()).collect();
        let ring = first.ok_or("a process has no address")?;
        Ok((size > 1).then_some(Self {
            rank,
            size,
            split,
            ring: Some(ring),
        }))
    }

    /// Joins the other members. From then on, this process ends with exit code 1 if another member
    /// is lost. The message names that member.
    fn join(&self) -> Result<()> {
        let timeout = timeout()?;
        if let Some(ring) = &self.ring {
            let links = join::ring(self.rank, ring, timeout)?;
            let links = links.watch(self.rank, ring).map_err(|e| {
                Error::Group(format!("rank {}: cannot watch others: {e}", self.rank))
            })?;
            let _ = LINKS.set(links);
        }
        let done = give_up_after(timeout, self.rank);
        let group = mlx_rs_core::distributed::init(true).map_err(|e| {
            Error::Group(format!(
                "MLX cannot join the other processes: {}",
                e.message()
            ))
        })?;
        drop(done);
        let (rank, size) = (usize::try_from(group.rank()), usize::try_from(group.size()));
        if (rank, size) != (Ok(self.rank), Ok(self.size)) {
            return Err(Error::Group(format!(
                "MLX is process {} of {}, and the environment says {} of {}; is MLX's library \
                 built with what started them?",
                group.rank(),
                group.size(),
                self.rank,
                self.size
            )));
        }
        if self.ring.is_none() {
            same_version(group)?;
        }
        tracing::info!(rank = self.rank, size = self.size, "joined");
        Ok(())
    }
}

/// Compares the versions of the program in all processes. Members of a ring have done so before
/// they joined.
fn same_version(group: Group) -> Result<()> {
    // A hash of the version that fits an `i32`. It only shows whether two versions are equal.
    let mine = VERSION
        .bytes()
        .fold(0i32, |sum, byte| (sum * 31 + i32::from(byte)) % 0x00ff_ffff);
    let all = Array::vector(&[mine])
        .and_then(|vector| group.all_gather(&vector)?.to_vec::<i32>())
        .map_err(|e| Error::Group(format!("the versions cannot be compared: {}", e.message())))?;
    match all.iter().position(|other| *other != mine) {
        None => Ok(()),
        Some(rank) => Err(Error::Group(format!(
            "rank {rank} has another version than this process, which is of {VERSION:?}; install \
             the same everywhere"
        ))),
    }
}

/// The text of MLX's address file. At most [`MAX_FILE`] bytes are read, because the path may be a
/// pipe.
fn read_text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?
        .take(MAX_FILE + 1)
        .read_to_string(&mut text)?;
    if read as u64 > MAX_FILE {
        return Err(std::io::Error::other(format!(
            "it has more than {MAX_FILE} bytes"
        )));
    }
    Ok(text)
}

/// Parses the value of [`SPLIT`].
fn split_of(text: &str) -> Result<Split> {
    match text {
        "tensor" => Ok(Split::Tensor),
        "pipeline" => Ok(Split::Pipeline),
        _ => Err(Error::Environment(format!(
            "{SPLIT} is {text:?}; it must be tensor or pipeline"
        ))),
    }
}

/// Sends a message of rank 0 (an encoded order) to all other ranks.
///
/// # Errors
/// If the other ranks cannot be reached, or if the group has no connections for orders.
pub fn order(bytes: &[u8]) -> inference::Result<()> {
    let fault = |message| inference::Error::new(inference::ErrorKind::Engine, message);
    let links = LINKS
        .get()
        .ok_or_else(|| fault("this process is not part of a ring"))?;
    links
        .order(bytes)
        .map_err(|e| fault("the other processes cannot be reached").with_source(e))
}

/// Waits for the next order of rank 0. Returns `None` after rank 0 has ended.
pub fn next_order() -> Option<Vec<u8>> {
    LINKS.get()?.next_order()
}

/// Tells the other members, or `mpirun`, that this process has finished, so that its end does not
/// count as a loss.
pub fn leave() {
    if let Some(links) = LINKS.get() {
        links.leave();
    } else if current().is_some() {
        mlx_rs_core::distributed::finalize();
    }
}

/// Announces the end of this process after an error that it reported. The threads that watch other
/// members then do not report members that end because of the same error. If another member has
/// finished, which may be the cause, a message on standard error names it.
pub fn fail() {
    if let Some(why) = LINKS.get().and_then(Links::fail) {
        // The launcher that reads the message may have ended, and then `eprintln!` would panic.
        let _ = writeln!(
            std::io::stderr(),
            "error: {why}, and this one still computed; do all run the same command?"
        );
    }
}

/// Makes this process end when the launcher ends.
pub fn follow_launcher() {
    if std::env::var_os(LAUNCHED).is_none() {
        return;
    }
    thread::spawn(|| {
        let mut buffer = [0; 64];
        // The launcher sends no data, so the read returns only when the pipe closes.
        while let Ok(1..) = std::io::stdin().read(&mut buffer) {}
        end("the launcher is gone");
    });
}

/// Ends this process unless the returned value is dropped in time. MLX itself would wait for other
/// members forever.
fn give_up_after(timeout: Duration, rank: usize) -> mpsc::Sender<()> {
    let (done, waiting) = mpsc::channel::<()>();
    thread::spawn(move || {
        if waiting.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            end(&format!(
                "rank {rank} could not join MLX's group within {} s",
                timeout.as_secs()
            ));
        }
    });
    done
}

fn timeout() -> Result<Duration> {
    let seconds = match std::env::var(JOIN_TIMEOUT) {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|n| (1..=86_400).contains(n))
            .ok_or_else(|| {
                Error::Environment(format!(
                    "{JOIN_TIMEOUT} is {text:?}; it must be 1 to 86400 seconds"
                ))
            })?,
        Err(_) => DEFAULT_TIMEOUT,
    };
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_divide_are_known() {
        assert_eq!(split_of("tensor").unwrap(), Split::Tensor);
        assert_eq!(split_of("pipeline").unwrap(), Split::Pipeline);
        let error = split_of("layers").unwrap_err();
        assert!(matches!(&error, Error::Environment(text) if text.contains("tensor or pipeline")));
    }

    #[test]
    fn rings_are_read_as_mlx_reads_them() {
        let text = r#"[["10.0.0.1:5000", "10.0.0.1:5001"], ["10.0.0.2:5000"]]"#;
        let member = Member::on_ring("1", text, Split::Pipeline)
            .unwrap()
            .unwrap();
        assert_eq!((member.rank, member.size), (1, 2));
        assert_eq!(member.split, Split::Pipeline);
        assert_eq!(member.ring.unwrap(), ["10.0.0.1:5000", "10.0.0.2:5000"]);
        let alone = Member::on_ring("0", r#"[["a:1"]]"#, Split::Tensor);
        assert_eq!(alone.unwrap(), None);
        for (rank, text, told) in [
            ("2", text, "0 to 1"),
            ("-1", text, "0 to 1"),
            ("0", "[[], []]", "no address"),
            ("0", "{}", "not a list"),
        ] {
            let error = Member::on_ring(rank, text, Split::Tensor).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }
}
