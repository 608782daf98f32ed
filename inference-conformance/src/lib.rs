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
//! - Each [`Check`] has a name, a description and an [`Outcome`]. [`Check::ALL`] lists all checks.
//! - [`inference::Capabilities`] determine which checks run. Checks of a declared capability are
//!   required, and checks of other capabilities are skipped. A separate check tests that a call of
//!   an undeclared capability returns `Unsupported`. **If a required check is skipped, the report
//!   fails.** For example, the check of chat is skipped if the model has no template, so choose a
//!   model with one.
//! - A panic in the backend is caught, and fails the check. A check that exceeds
//!   [`Suite::with_timeout`] fails, too. The suite then loads the model again and continues.
//! - Each refusal must be an [`inference::Error`] of the kind that the contract names. After a
//!   refused, cancelled or dropped request, the model must reply as before.
//!
//! The traits require `Send` and `Sync`, and [`inference::TokenStream`] must be a fused stream. The
//! checks rely on both: they run in several threads, and read past the end of a stream.
//!
//! [`scripted`] has a backend whose models reply by a script, for tests without an engine.
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

/// Asserts at compile time that these types can be sent to other threads.
const _: () = {
    const fn crosses<T: Send + Sync + ?Sized>() {}
    const fn moves<T: Send>() {}
    crosses::<dyn inference::Backend>();
    crosses::<dyn inference::TextModel>();
    moves::<inference::TokenStream>();
    crosses::<Suite>();
    crosses::<Report>();
};
