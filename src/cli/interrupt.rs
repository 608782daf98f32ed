//! Ctrl-C while a reply is generated: the first stops the reply, the next the program.
//!
//! Outside of a reply Ctrl-C keeps its usual meaning, until the first reply has begun; from then
//! on it ends the program with 130, the code a shell gives for the signal.

use std::sync::{Mutex, Once, PoisonError};

use inference::CancelToken;

static CURRENT: Mutex<Option<CancelToken>> = Mutex::new(None);
static HANDLER: Once = Once::new();

/// While it lives, Ctrl-C cancels the token it was made for.
pub struct Guard(());

/// Lets Ctrl-C cancel `token` until the guard is dropped.
pub fn cancel_on_interrupt(token: &CancelToken) -> Guard {
    *current() = Some(token.clone());
    HANDLER.call_once(|| {
        if let Err(e) = ctrlc::set_handler(on_interrupt) {
            tracing::warn!("Ctrl-C ends the program instead of the reply: {e}");
        }
    });
    Guard(())
}

impl Drop for Guard {
    fn drop(&mut self) {
        *current() = None;
    }
}

fn current() -> std::sync::MutexGuard<'static, Option<CancelToken>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn on_interrupt() {
    match &*current() {
        Some(token) if !token.is_cancelled() => token.cancel(),
        _ => std::process::exit(130),
    }
}
