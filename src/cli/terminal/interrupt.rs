//! Ctrl-C during a reply: the first Ctrl-C stops the reply, and the second one ends the program.
//!
//! Before the first reply, Ctrl-C ends the program as usual. Later, outside of a reply, Ctrl-C ends
//! the program with 130, the exit code that shells use for this signal. `train` and `convert` also
//! handle SIGTERM, with exit code 143. So a job ended by a cluster or a container saves its
//! training, and an interrupted conversion leaves no files. `serve` handles both signals, too, and
//! exits with 0 after the first one.

use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use inference::CancelToken;
use parking_lot::Mutex;

/// The exit code that shells use for SIGINT.
const INTERRUPTED: u8 = 130;
/// The exit code that shells use for SIGTERM.
#[cfg(all(unix, any(feature = "mlx-backend", feature = "serve")))]
const TERMINATED: u8 = 143;

static CURRENT: Mutex<Option<CancelToken>> = Mutex::new(None);
static HANDLER: Once = Once::new();
#[cfg(all(unix, any(feature = "mlx-backend", feature = "serve")))]
static TERM_HANDLER: Once = Once::new();
/// The exit code for the last signal that set the token.
static CODE: AtomicU8 = AtomicU8::new(INTERRUPTED);

/// While this guard exists, Ctrl-C cancels the guard's token.
pub struct Guard(());

/// Makes Ctrl-C cancel `token` until the guard is dropped.
pub fn cancel_on_interrupt(token: &CancelToken) -> Guard {
    *current() = Some(token.clone());
    HANDLER.call_once(|| {
        if let Err(e) = ctrlc::set_handler(|| on_signal(INTERRUPTED)) {
            tracing::warn!("Ctrl-C ends the program instead of the reply: {e}");
        }
    });
    Guard(())
}

/// Makes Ctrl-C and SIGTERM cancel `token` until the guard is dropped.
#[cfg(any(feature = "mlx-backend", feature = "serve"))]
pub fn cancel_on_signals(token: &CancelToken) -> Guard {
    let guard = cancel_on_interrupt(token);
    #[cfg(unix)]
    TERM_HANDLER.call_once(|| {
        let watched = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM]);
        match watched {
            Ok(mut signals) => {
                std::thread::spawn(move || {
                    for _ in signals.forever() {
                        on_signal(TERMINATED);
                    }
                });
            }
            Err(e) => tracing::warn!("SIGTERM ends the program at once: {e}"),
        }
    });
    guard
}

/// The exit code for the last signal that set the token.
pub fn exit_code() -> u8 {
    CODE.load(Ordering::Relaxed)
}

impl Drop for Guard {
    fn drop(&mut self) {
        *current() = None;
    }
}

fn current() -> parking_lot::MutexGuard<'static, Option<CancelToken>> {
    CURRENT.lock()
}

fn on_signal(code: u8) {
    match &*current() {
        Some(token) if !token.is_cancelled() => {
            CODE.store(code, Ordering::Relaxed);
            token.cancel();
        }
        _ => {
            crate::cli::terminal::tty::restore();
            std::process::exit(i32::from(code))
        }
    }
}
