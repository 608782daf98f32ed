//! Settings of the Python interpreter, the script and the time limits. These are plain values; this
//! module starts nothing.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The variable that names the Python interpreter.
pub const PYTHON_VARIABLE: &str = "MLXLM_PYTHON";

/// The settings of the Python side. The defaults are those of the registered backend.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The interpreter. `None` means the value of `MLXLM_PYTHON`, otherwise `python3`.
    pub python: Option<PathBuf>,
    /// A bridge script instead of the one in this library, for tests.
    pub script: Option<PathBuf>,
    /// Time limit for starting Python and importing mlx-lm.
    pub start_timeout: Duration,
    /// Time limit for loading a model.
    pub load_timeout: Duration,
    /// Maximum time between two messages of a running request. Between two messages, the bridge
    /// computes at most one step: 512 prompt tokens or one reply token.
    pub silence_timeout: Duration,
    /// Time limit for a cancelled request to end. After it, the process is killed.
    pub cancel_grace: Duration,
    /// Time limit for a process to quit on request. After it, the process is killed.
    pub quit_grace: Duration,
    /// Maximum length of a line from the bridge in bytes.
    pub max_line: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            python: None,
            script: None,
            start_timeout: Duration::from_secs(120),
            load_timeout: Duration::from_secs(1800),
            silence_timeout: Duration::from_secs(600),
            cancel_grace: Duration::from_secs(15),
            quit_grace: Duration::from_secs(2),
            max_line: 16 << 20,
        }
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $with:ident($field:ident: $ty:ty);)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $with(mut self, value: $ty) -> Self {
                self.$field = value;
                self
            }
        )*
    };
}

impl Settings {
    /// Creates the default settings.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets how long the start may take.
        with_start_timeout(start_timeout: Duration);
        /// Sets how long loading may take.
        with_load_timeout(load_timeout: Duration);
        /// Sets how long a request may be silent.
        with_silence_timeout(silence_timeout: Duration);
        /// Sets how long a cancelled request may take to end.
        with_cancel_grace(cancel_grace: Duration);
        /// Sets how long quitting may take.
        with_quit_grace(quit_grace: Duration);
        /// Sets the longest line, in bytes.
        with_max_line(max_line: usize);
    }

    /// Sets the interpreter.
    #[must_use]
    pub fn with_python(mut self, python: impl Into<PathBuf>) -> Self {
        self.python = Some(python.into());
        self
    }

    /// Sets the bridge script.
    #[must_use]
    pub fn with_script(mut self, script: impl Into<PathBuf>) -> Self {
        self.script = Some(script.into());
        self
    }

    /// The interpreter that will be run.
    pub(crate) fn interpreter(&self) -> OsString {
        match &self.python {
            Some(python) => python.clone().into_os_string(),
            None => std::env::var_os(PYTHON_VARIABLE)
                .filter(|value| !value.is_empty())
                .unwrap_or_else(|| OsString::from("python3")),
        }
    }
}
