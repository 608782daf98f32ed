//! The test that every backend needs: it runs the conformance suite.

use echo_backend as _; // linked for its registration
use inference_conformance::{Check, Suite};

#[test]
fn echo_keeps_the_contract() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales");
    let report = Suite::registered("echo", model)
        .unwrap()
        .require(Check::ContextLen)
        .require(Check::Eos)
        .require(Check::PrepareChat)
        .require(Check::Interleaved)
        .run();
    println!("{report}");
    report.assert_passed();
}
