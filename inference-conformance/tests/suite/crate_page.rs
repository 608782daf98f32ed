//! Tests that the example backend on the front page of `inference-api` passes the whole suite.

#[path = "../../../inference-api/src/front_page.rs"]
mod front_page;

use std::sync::Arc;

use inference_conformance::Suite;

#[test]
fn the_backend_of_the_front_page_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    let text = "What a piece of work is a man, how noble in reason, how infinite in faculty. ";
    std::fs::write(&path, text).unwrap();
    let report = Suite::new(Arc::new(front_page::Parrot), &path).run();
    report.assert_passed();
}
