//! Why a command stopped, and the resulting exit code.

use std::error::Error as StdError;

use inference::ErrorKind;

use super::interrupt::exit_code;

/// Why a command stopped early.
#[derive(Debug)]
pub enum Failure {
    /// The command line is invalid: exit code 2.
    Usage(String),
    /// The reader of standard output closed the pipe, which is not an error: exit code 0.
    PipeClosed,
    /// A signal stopped the command after it saved everything. Exit code 130 for Ctrl-C, 143 for
    /// SIGTERM.
    Interrupted {
        /// The message about the saved files.
        message: String,
        /// The exit code that a shell reports for the signal.
        code: u8,
    },
    /// Any other failure: exit code 1.
    Failed(anyhow::Error),
}

impl Failure {
    /// An error of the command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::Usage(message.into())
    }

    /// A failure during the run.
    pub fn failed(message: impl Into<String>) -> Self {
        Failure::Failed(anyhow::Error::msg(message.into()))
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::PipeClosed => 0,
            Failure::Interrupted { code, .. } => *code,
            Failure::Failed(_) => 1,
        }
    }

    /// The message for the user, if there is one.
    pub fn report(&self) -> Option<String> {
        match self {
            Failure::Usage(message) => {
                Some(format!("{message}\n\nFor more information, try '--help'."))
            }
            Failure::PipeClosed => None,
            Failure::Interrupted { message, .. } => Some(message.clone()),
            Failure::Failed(error) => Some(chain(error.as_ref())),
        }
    }
}

impl From<inference::Error> for Failure {
    fn from(error: inference::Error) -> Self {
        match error.kind() {
            // Only signals cancel requests in this program.
            ErrorKind::Cancelled => Failure::Interrupted {
                message: chain(&error),
                code: exit_code(),
            },
            ErrorKind::UnknownBackend => Failure::Usage(chain(&error)),
            _ => Failure::Failed(error.into()),
        }
    }
}

#[cfg(all(unix, feature = "mlx-backend"))]
impl From<inference_group::Error> for Failure {
    fn from(error: inference_group::Error) -> Self {
        match error {
            inference_group::Error::Environment(message) => Failure::Usage(message),
            inference_group::Error::Group(message) => Failure::failed(message),
            inference_group::Error::Model(error) => error.into(),
        }
    }
}

#[cfg(feature = "mlx-backend")]
impl From<inference_formats::Error> for Failure {
    fn from(error: inference_formats::Error) -> Self {
        inference::Error::from(error).into()
    }
}

/// Converts an error about options that only a model can check, such as a grammar. It is a usage
/// error, like errors about other options.
pub fn of_options(error: inference::Error) -> Failure {
    match error.kind() {
        ErrorKind::InvalidOption => Failure::Usage(chain(&error)),
        _ => error.into(),
    }
}

/// An error and its causes in one line. A cause is omitted if the text already contains it.
pub fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use inference::Error;

    #[test]
    fn causes_are_told_once() {
        let io = std::io::Error::other("disk on fire");
        let inner = Error::new(ErrorKind::Io, "cannot read").with_source(io);
        let outer = Error::new(ErrorKind::Io, "cannot read").with_source(inner);
        assert_eq!(chain(&outer), "cannot read: disk on fire");
    }
}
