//! How the terminal behaves while a reply is shown on it.

use crate::cli::terminal::console::Console;

/// The columns of the terminal on standard output.
#[cfg(unix)]
pub fn columns() -> Option<usize> {
    columns_of(std::io::stdout())
}

/// The columns of the terminal on standard error.
#[cfg(unix)]
pub fn error_columns() -> Option<usize> {
    columns_of(std::io::stderr())
}

#[cfg(unix)]
fn columns_of(stream: impl std::os::fd::AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

/// Nothing tells.
#[cfg(not(unix))]
pub fn columns() -> Option<usize> {
    None
}

/// Nothing tells.
#[cfg(not(unix))]
pub fn error_columns() -> Option<usize> {
    None
}

/// How the terminal was before it stopped to show keys. A program that exits by a second Ctrl-C
/// drops nothing, so this is not in the guard.
#[cfg(unix)]
static BEFORE: std::sync::Mutex<Option<rustix::termios::Termios>> = std::sync::Mutex::new(None);

/// While it lives, typed keys are not drawn into the reply. The terminal keeps them: the next line
/// begins with them.
#[must_use]
pub struct NoEcho(());

impl NoEcho {
    /// Begins it, where a person types.
    #[cfg(unix)]
    pub fn start(console: &Console<'_>) -> Self {
        use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
        let before = console
            .in_is_terminal
            .then(|| tcgetattr(std::io::stdin()).ok())
            .flatten();
        if let Some(before) = before {
            let mut during = before.clone();
            during.local_modes.remove(LocalModes::ECHO);
            *of_before() = Some(before);
            // A terminal that refuses shows them, which is no reason to stop.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &during);
        }
        Self(())
    }

    /// There is nothing to change.
    #[cfg(not(unix))]
    pub fn start(_: &Console<'_>) -> Self {
        Self(())
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        restore();
    }
}

/// Lets the terminal show keys again, if it does not.
#[cfg(unix)]
pub fn restore() {
    use rustix::termios::{OptionalActions, tcsetattr};
    if let Some(before) = of_before().take() {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &before);
    }
}

/// There is nothing to restore.
#[cfg(not(unix))]
pub fn restore() {}

#[cfg(unix)]
fn of_before() -> std::sync::MutexGuard<'static, Option<rustix::termios::Termios>> {
    BEFORE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
