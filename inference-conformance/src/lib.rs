//! Checks whether a backend conforms to the contract (`inference-api`).
//!
//! The author of a backend runs the suite in a test, on a small model:
//!
//! ```no_run
//! use inference_conformance::{Check, Suite};
//!
//! # fn main() -> inference::Result<()> {
//! // use my_backend as _;
//! let report = Suite::registered("mine", "tests/fixtures/tiny")?
//!     .require(Check::Interleaved) // more than the contract asks for
//!     .run();
//! println!("{report}");
//! report.assert_passed();
//! # Ok(()) }
//! ```
//!
//! - Each [`Check`] has a name, a description and an [`Outcome`]. [`Check::ALL`] lists all of them.
//! - [`inference::Capabilities`] decides the checks. Checks of a declared capability are required,
//!   and others are skipped. A separate check tests that a call without its capability returns
//!   `Unsupported`. **A required check that is skipped fails the report**, such as chat on a model
//!   without a template. Give the suite a model that has one.
//! - A panic in the backend is caught and fails the check. So does a check that does not end within
//!   [`Suite::with_timeout`]. The suite then loads the model again and continues.
//! - Every refusal must be an [`inference::Error`] of the kind that the contract names. A request
//!   that was refused, cancelled or dropped must leave a model that answers as before.
//!
//! The traits require `Send` and `Sync`, and [`inference::TokenStream`] must be a fused stream. The
//! checks rely on both: they run in threads and read past the end.
//!
//! [`scripted`] has a backend whose models reply by a script, for tests that need no engine.
//!
//! This crate does not depend on a backend, and does not measure speed.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod check;
mod checks;
mod context;
mod probe;
mod report;
pub mod scripted;
mod suite;

pub use check::Check;
pub use report::{CheckResult, Outcome, Report};
pub use suite::Suite;

/// Checked at compile time: these types may be sent to other threads.
const _: () = {
    const fn crosses<T: Send + Sync + ?Sized>() {}
    const fn moves<T: Send>() {}
    crosses::<dyn inference::Backend>();
    crosses::<dyn inference::TextModel>();
    moves::<inference::TokenStream>();
    crosses::<Suite>();
    crosses::<Report>();
};
