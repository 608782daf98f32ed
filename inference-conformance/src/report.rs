//! The results of the suite: a table for people, JSON for programs, and an assertion for tests.

use std::fmt;
use std::path::PathBuf;

use inference::Capabilities;
use serde::{Deserialize, Serialize};

use crate::check::Check;

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", content = "reason", rename_all = "snake_case")]
pub enum Outcome {
    /// The backend keeps the promise.
    Passed,
    /// The backend breaks the promise. The text describes how.
    Failed(String),
    /// The promise was not tested. The text has the reason.
    Skipped(String),
}

/// A check with its outcome.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckResult {
    /// The check.
    #[serde(rename = "name")]
    pub check: Check,
    /// The promise, in one line.
    pub description: String,
    /// Whether a skip of this check fails the report.
    pub required: bool,
    /// The outcome of the check.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// The duration of the check.
    pub seconds: f64,
}

impl CheckResult {
    /// Whether this result fails the report: the check failed, or was skipped although required.
    #[must_use]
    pub fn is_problem(&self) -> bool {
        match self.outcome {
            Outcome::Passed => false,
            Outcome::Failed(_) => true,
            Outcome::Skipped(_) => self.required,
        }
    }
}

/// The results of the suite for a backend.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The backend's name.
    pub backend: String,
    /// The model that was used.
    pub model: PathBuf,
    /// The capabilities that the backend declares.
    pub capabilities: Capabilities,
    /// Every check, in order.
    pub checks: Vec<CheckResult>,
}

impl Report {
    /// Whether no check failed and no required check was skipped.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.problems().next().is_none()
    }

    /// The results that fail the report.
    pub fn problems(&self) -> impl Iterator<Item = &CheckResult> {
        self.checks.iter().filter(|c| c.is_problem())
    }

    /// The outcome of a check; `None` if the suite did not contain it (see
    /// [`Suite::only`](crate::Suite::only)).
    #[must_use]
    pub fn outcome(&self, check: Check) -> Option<&Outcome> {
        let entry = self.checks.iter().find(|c| c.check == check);
        entry.map(|c| &c.outcome)
    }

    /// Asserts in a test that the report passed.
    ///
    /// # Panics
    /// If the report did not pass; the message is the table.
    #[track_caller]
    pub fn assert_passed(&self) {
        assert!(self.passed(), "the backend does not conform\n{self}");
    }
}

impl fmt::Display for Report {
    /// A table with one line per check: outcome, name and description. If the check did not pass,
    /// the reason replaces the description.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let capabilities = self.capabilities.names().join(", ");
        writeln!(f, "backend      {}", self.backend)?;
        writeln!(f, "model        {}", self.model.display())?;
        writeln!(f, "capabilities {capabilities}\n")?;
        let names = self.checks.iter().map(|c| c.check.name().len());
        let width = names.max().unwrap_or_default();
        let (mut passed, mut failed, mut skipped) = (0, 0, 0);
        for c in &self.checks {
            let (word, text) = match &c.outcome {
                Outcome::Passed => {
                    passed += 1;
                    ("passed", c.description.clone())
                }
                Outcome::Failed(reason) => {
                    failed += 1;
                    ("FAILED", one_line(reason))
                }
                Outcome::Skipped(reason) => {
                    skipped += 1;
                    let word = if c.required { "MISSING" } else { "skipped" };
                    (word, one_line(reason))
                }
            };
            writeln!(f, "{word:<8} {:<width$}  {text}", c.check)?;
        }
        let verdict = if self.passed() {
            "conforms"
        } else {
            "does NOT conform"
        };
        write!(
            f,
            "\n{passed} passed, {failed} failed, {skipped} skipped: `{}` {verdict}",
            self.backend
        )
    }
}

/// Reasons may contain multi-line text from models, which must not break the table.
fn one_line(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let control = c.is_control();
            let escaped = control.then(|| c.escape_default());
            escaped.into_iter().flatten().chain((!control).then_some(c))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(check: Check, required: bool, outcome: Outcome) -> CheckResult {
        CheckResult {
            check,
            description: check.description().to_owned(),
            required,
            outcome,
            seconds: 0.5,
        }
    }

    fn report(checks: Vec<CheckResult>) -> Report {
        Report {
            backend: "b".into(),
            model: "m".into(),
            capabilities: Capabilities::new().with_chat(),
            checks,
        }
    }

    #[test]
    fn a_required_skip_fails_and_another_does_not() {
        let skipped = || Outcome::Skipped("no\ntemplate".into());
        let fine = report(vec![
            result(Check::Load, true, Outcome::Passed),
            result(Check::Eos, false, skipped()),
        ]);
        assert!(fine.passed());
        fine.assert_passed();
        let table = fine.to_string();
        assert!(table.contains("skipped  eos   no\\ntemplate"), "{table}");
        assert!(
            table.ends_with("1 passed, 0 failed, 1 skipped: `b` conforms"),
            "{table}"
        );

        let missing = report(vec![result(Check::Chat, true, skipped())]);
        assert!(!missing.passed());
        assert_eq!(missing.problems().count(), 1);
        assert!(missing.to_string().contains("MISSING"));
        assert!(missing.to_string().contains("does NOT conform"));
        let failed = report(vec![result(Check::Eos, false, Outcome::Failed("x".into()))]);
        assert!(!failed.passed());
    }

    #[test]
    #[should_panic(expected = "does not conform")]
    fn the_assertion_panics() {
        report(vec![result(Check::Load, true, Outcome::Failed("x".into()))]).assert_passed();
    }
}
