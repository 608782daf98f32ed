//! How the terminal behaves while a reply is shown on it.

use super::console::Console;

/// The columns of the terminal on standard output.
#[cfg(unix)]
pub fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

/// Nothing tells.
#[cfg(not(unix))]
pub fn columns() -> Option<usize> {
    None
}

/// While it lives, the terminal draws no `^C` into the reply for the keys that stop it. Other typed
/// text shows as before. A program that is killed in between leaves nothing worse than this behind.
#[must_use]
pub struct NoCaret {
    #[cfg(unix)]
    before: Option<rustix::termios::Termios>,
}

impl NoCaret {
    /// Begins it, where a person types.
    #[cfg(unix)]
    pub fn start(console: &Console<'_>) -> Self {
        use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
        let before = console
            .in_is_terminal
            .then(|| tcgetattr(std::io::stdin()).ok())
            .flatten();
        if let Some(before) = &before {
            let mut during = before.clone();
            during.local_modes.remove(LocalModes::ECHOCTL);
            // A terminal that refuses draws it, which is no reason to stop.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &during);
        }
        Self { before }
    }

    /// There is nothing to change.
    #[cfg(not(unix))]
    pub fn start(_: &Console<'_>) -> Self {
        Self {}
    }
}

#[cfg(unix)]
impl Drop for NoCaret {
    fn drop(&mut self) {
        use rustix::termios::{OptionalActions, tcsetattr};
        if let Some(before) = &self.before {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}
