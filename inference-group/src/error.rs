//! Errors of a process that cannot join or stay in its group.

/// The error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An environment variable is invalid. The program that starts the processes must change it.
    #[error("{0}")]
    Environment(String),
    /// A member did not join, was lost, or has other results than this process.
    #[error("{0}")]
    Group(String),
    /// A model failed.
    #[error(transparent)]
    Model(#[from] inference::Error),
}

/// The result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
