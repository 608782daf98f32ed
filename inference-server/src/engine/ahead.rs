//! Slow work before a request starts, such as compiling a grammar. A separate thread does this
//! work, so that running replies continue. One thread is enough, and leaves the other cores to the
//! engine.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use inference::{Error, ErrorKind, FinishReason, Result};
use tokio::sync::mpsc;

use super::scheduler::shielded;
use super::{Command, Event, Job, Ready, Shared};

/// A request before its preparation, and the sender of its events.
pub(super) type Waiting = (Box<Job>, mpsc::Sender<Event>);

/// Starts the thread, which prepares requests and sends them to `commands`. The thread ends when
/// all senders to it are dropped.
///
/// # Errors
/// If the system cannot start a thread.
pub(super) fn start(commands: Sender<Command>, shared: Arc<Shared>) -> Result<Sender<Waiting>> {
    let (sender, receiver) = channel::<Waiting>();
    let run = move || {
        for (job, out) in receiver {
            prepare(job, out, &commands, &shared);
        }
    };
    std::thread::Builder::new()
        .name(String::from("prepare"))
        .spawn(run)
        .map_err(|e| {
            let message = "no thread to prepare requests";
            Error::new(ErrorKind::Engine, message).with_source(e)
        })?;
    Ok(sender)
}

fn prepare(job: Box<Job>, out: mpsc::Sender<Event>, commands: &Sender<Command>, shared: &Shared) {
    // Clients may have disconnected while earlier requests were being prepared.
    let interrupted = job.options.check_interrupt();
    let prepared = interrupted.and_then(|()| {
        let model = job.model.model();
        shielded("preparing a request", || model.prepare(&job.options)).flatten()
    });
    match prepared {
        Ok(prepared) => {
            let _ = commands.send(Command::Generate(Ready { job, prepared }, out));
        }
        Err(error) => {
            let reason = FinishReason::of_error(&error).as_str();
            shared.metrics.ended(reason, job.arrived.elapsed());
            let _ = out.try_send(Event::Failed(error));
        }
    }
}
