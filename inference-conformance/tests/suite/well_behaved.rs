//! Tests that a correct backend passes, and that the suite's settings and report work as
//! documented.

use std::sync::Arc;

use crate::mock::{Fault, Mock, tales, tales_of_a_format};
use inference::{Backend, Capabilities, LoadOptions, Result, TextModel};
use inference_conformance::scripted::ScriptedBackend;
use inference_conformance::{Check, Outcome, Report, Suite};

fn honest() -> Suite {
    Suite::new(Mock::with(Fault::None), tales_of_a_format())
}

#[test]
fn an_honest_backend_passes_every_check() {
    let mut suite = honest();
    for check in Check::ALL {
        suite = suite.require(*check);
    }
    let report = suite.run();
    report.assert_passed();
    assert_eq!(report.checks.len(), Check::ALL.len());
    assert!(
        report.checks.iter().all(|c| c.outcome == Outcome::Passed),
        "{report}"
    );

    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["backend"], "mock");
    assert_eq!(json["checks"][0]["name"], "backend_identity");
    assert_eq!(json["checks"][0]["outcome"], "passed");
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
    let table = report.to_string();
    for check in Check::ALL {
        assert!(table.contains(check.name()) && table.contains(check.description()));
    }
    assert!(table.ends_with("`mock` conforms"), "{table}");
}

#[test]
fn the_suite_works_with_the_registry_and_says_what_is_linked() {
    use echo_backend as _;
    let report = Suite::registered("echo", tales())
        .unwrap()
        .with_load_options(LoadOptions::new().with_context_len(10_000_000))
        .with_prompts(["The bear", "The bear"])
        .run();
    report.assert_passed();
    let e = Suite::registered("ecko", tales()).err().unwrap();
    assert!(e.message().contains("echo"), "{e}");
}

/// A backend that declares no capability, although its models have some.
fn plain() -> ScriptedBackend {
    ScriptedBackend::new("plain")
        .with_capabilities(Capabilities::new().with_streaming())
        .loading(|path, options| echo_backend::Echo.load_model(path, options))
}

#[test]
fn a_check_that_is_required_cannot_be_left_out() {
    let quick = || honest().only([Check::Load, Check::Chat]);
    assert_eq!(quick().run().checks.len(), 2);
    let report = quick().skip(Check::Chat, "its template is broken").run();
    report.assert_passed();
    let skipped = Outcome::Skipped(String::from("left out: its template is broken"));
    assert_eq!(report.outcome(Check::Chat), Some(&skipped));
    let report = quick().skip(Check::Chat, "lazy").require(Check::Chat).run();
    assert!(!report.passed());
    assert!(
        report.to_string().contains("MISSING  chat  left out: lazy"),
        "{report}"
    );
}

#[test]
fn what_is_not_declared_is_skipped_unless_required() {
    let checks = [Check::Classify, Check::Interleaved, Check::Undeclared];
    let suite = || Suite::new(Arc::new(plain()), tales()).only(checks);
    let report = suite().run();
    let Some(Outcome::Skipped(reason)) = report.outcome(Check::Classify) else {
        panic!("{report}");
    };
    assert!(reason.contains("`classify`"), "{reason}");
    // The call works although the capability is not declared, which breaks another promise.
    assert!(matches!(
        report.outcome(Check::Undeclared),
        Some(Outcome::Failed(_))
    ));
    let report = suite()
        .require(Check::Classify)
        .require(Check::Interleaved)
        .run();
    assert_eq!(report.outcome(Check::Classify), Some(&Outcome::Passed));
    assert_eq!(report.outcome(Check::Interleaved), Some(&Outcome::Passed));
}

/// A backend that panics on every request.
struct Explosive;

impl Backend for Explosive {
    fn name(&self) -> &str {
        panic!("no name")
    }
    fn available(&self) -> bool {
        panic!("no")
    }
    fn device(&self) -> String {
        panic!("no")
    }
    fn capabilities(&self) -> Capabilities {
        panic!("no")
    }
    fn load_model(&self, _: &std::path::Path, _: &LoadOptions) -> Result<Box<dyn TextModel>> {
        panic!("no")
    }
}

#[test]
fn a_backend_that_panics_at_once_is_a_report() {
    let report = Suite::new(Arc::new(Explosive), "nowhere").run();
    assert!(!report.passed());
    assert!(report.to_string().contains("panicked: no name"), "{report}");
}
