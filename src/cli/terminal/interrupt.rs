//! Ctrl-C while a reply is generated: the first stops the reply, the next the program.
//!
//! Outside of a reply Ctrl-C keeps its usual meaning, until the first reply has begun. From then on
//! it ends the program with 130, a shell's code for the signal. `train` treats SIGTERM in the same
//! way, with 143. A job that a cluster or a container ends must not lose its training. So does
//! `serve`, whose end by the first signal is a good one: exit 0.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use inference::CancelToken;

/// What a shell gives for SIGINT.
const INTERRUPTED: u8 = 130;
/// What a shell gives for SIGTERM.
#[cfg(all(unix, any(feature = "mlx-backend", feature = "serve")))]
const TERMINATED: u8 = 143;

static CURRENT: Mutex<Option<CancelToken>> = Mutex::new(None);
static HANDLER: Once = Once::new();
#[cfg(all(unix, any(feature = "mlx-backend", feature = "serve")))]
static TERM_HANDLER: Once = Once::new();
/// The exit code of the signal that cancelled last.
static CODE: AtomicU8 = AtomicU8::new(INTERRUPTED);

/// While it lives, Ctrl-C cancels the token it was made for.
pub struct Guard(());

/// Lets Ctrl-C cancel `token` until the guard is dropped.
pub fn cancel_on_interrupt(token: &CancelToken) -> Guard {
    *current() = Some(token.clone());
    HANDLER.call_once(|| {
        if let Err(e) = ctrlc::set_handler(|| on_signal(INTERRUPTED)) {
            tracing::warn!("Ctrl-C ends the program instead of the reply: {e}");
        }
    });
    Guard(())
}

/// Lets Ctrl-C and SIGTERM cancel `token` until the guard is dropped.
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

/// The exit code for what the last signal cancelled.
#[cfg(feature = "mlx-backend")]
pub fn exit_code() -> u8 {
    CODE.load(Ordering::Relaxed)
}

impl Drop for Guard {
    fn drop(&mut self) {
        *current() = None;
    }
}

fn current() -> std::sync::MutexGuard<'static, Option<CancelToken>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
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
