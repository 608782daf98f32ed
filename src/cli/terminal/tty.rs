//! The terminal's settings while a reply is shown.

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

/// The width is unknown on this system.
#[cfg(not(unix))]
pub fn columns() -> Option<usize> {
    None
}

/// The width is unknown on this system.
#[cfg(not(unix))]
pub fn error_columns() -> Option<usize> {
    None
}

/// The terminal's settings before echo was turned off. They are static, because a second Ctrl-C
/// exits without dropping the guard.
#[cfg(unix)]
static BEFORE: parking_lot::Mutex<Option<rustix::termios::Termios>> = parking_lot::Mutex::new(None);

/// While this guard exists, the terminal does not echo typed keys into the reply. It keeps the keys
/// for the next line.
#[must_use]
pub struct NoEcho(());

impl NoEcho {
    /// Turns echo off, if standard input is a terminal.
    #[cfg(unix)]
    pub fn start(in_is_terminal: bool) -> Self {
        use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
        let before = in_is_terminal
            .then(|| tcgetattr(std::io::stdin()).ok())
            .flatten();
        if let Some(before) = before {
            let mut during = before.clone();
            during.local_modes.remove(LocalModes::ECHO);
            *of_before() = Some(before);
            // If the terminal refuses, it still echoes keys, and the program continues.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &during);
        }
        Self(())
    }

    #[cfg(not(unix))]
    pub fn start(_: bool) -> Self {
        Self(())
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        restore();
    }
}

/// Turns echo on again, if it is off.
#[cfg(unix)]
pub fn restore() {
    use rustix::termios::{OptionalActions, tcsetattr};
    if let Some(before) = of_before().take() {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &before);
    }
}

#[cfg(not(unix))]
pub fn restore() {}

#[cfg(unix)]
fn of_before() -> parking_lot::MutexGuard<'static, Option<rustix::termios::Termios>> {
    BEFORE.lock()
}
