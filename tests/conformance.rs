//! Runs the conformance suite on the backends of this workspace. The suite's own tests are in
//! `inference-conformance`.

use std::path::Path;

use echo_backend as _; // linked for their registrations
use inference_conformance::{Check, Report, Suite};
use metal_backend as _;
use parking_lot::Mutex;

/// A path below `tests/fixtures`.
fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// Runs the whole suite on a linked backend. To add a backend, link its crate above, and add a test
/// with its name and a model.
fn conforms(backend: &str, model: &str, more: &[Check]) -> Report {
    // Tests run one at a time, because a check measures the memory of the whole process.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let mut suite = Suite::registered(backend, fixture(model)).unwrap();
    for &check in more {
        suite = suite.require(check);
    }
    // An engine without log-probabilities predates the options in this list.
    if backend == "cpu" && !inference::backend(backend).unwrap().capabilities().logprobs {
        for check in STEERING.into_iter().chain([Check::Undeclared]) {
            suite = suite.skip(check, "the engine does not have these options yet");
        }
    } else {
        for check in STEERING {
            suite = suite.require(check);
        }
    }
    let report = suite.run();
    println!("{report}");
    report
}

/// Checks that this workspace's backends must pass even where a backend does not declare the
/// capability.
const MORE: [Check; 5] = [
    Check::ContextLen,
    Check::Eos,
    Check::Interleaved,
    Check::PrepareChat,
    Check::RepeatPenalty,
];

/// Checks that only the engine must pass, in addition to `MORE`.
const ENGINE: [Check; 7] = [
    Check::ContextLen,
    Check::DroppedModels,
    Check::Eos,
    Check::Formats,
    Check::Interleaved,
    Check::PrepareChat,
    Check::RepeatPenalty,
];

#[test]
fn cpu_conforms_on_a_directory() {
    conforms("cpu", "tiny/llama", &ENGINE).assert_passed();
}

#[test]
fn cpu_conforms_on_a_quantized_model() {
    conforms("cpu", "tiny/qwen3-q8", &ENGINE).assert_passed();
}

#[test]
fn cpu_conforms_on_a_gguf_file() {
    conforms("cpu", "tiny/llama-gguf/model.gguf", &ENGINE).assert_passed();
}

/// Options that change which tokens the sampler draws.
const STEERING: [Check; 8] = [
    Check::BannedTokens,
    Check::ForcedTokens,
    Check::FrequencyPenalty,
    Check::LogitBias,
    Check::MinTokens,
    Check::PresencePenalty,
    Check::Processors,
    Check::Xtc,
];

/// The echo backend of `examples/plugin/`, written as a third party would, without a neural
/// network.
#[test]
fn echo_conforms() {
    conforms("echo", "../../examples/plugin/models/tales", &MORE).assert_passed();
}
