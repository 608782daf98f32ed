//! The conformance suite on this workspace's backends. What the suite checks and how it fails is
//! tested in `inference-conformance` itself.

use std::path::Path;

use inference_conformance::{Check, Report, Suite};
use metal_backend as _; // keeps the linker from dropping the registration

/// A path below `tests/fixtures`.
fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// Another backend is one more test: its name, and a model it loads. For `mlx_lm`, which runs in a
/// Python process, that is (with `use mlxlm_backend as _;` above, and `MLXLM_PYTHON` naming a Python
/// that can import mlx_lm, installed by the test into an environment of its own or by hand):
///
/// ```ignore
/// #[test]
/// #[ignore = "needs MLXLM_PYTHON, a Python with mlx-lm"]
/// fn mlx_lm_conforms() {
///     conforms("mlx_lm", "tiny/llama", &[]).assert_passed();
/// }
/// ```
fn conforms(backend: &str, model: &str, more: &[Check]) -> Report {
    let mut suite = Suite::registered(backend, fixture(model)).unwrap();
    for &check in more {
        suite = suite.require(check);
    }
    let report = suite.run();
    println!("{report}");
    report
}

/// What the engine keeps beyond what its capabilities ask for.
const MORE: [Check; 4] = [
    Check::ContextLen,
    Check::Eos,
    Check::RenderChat,
    Check::Interleaved,
];

#[test]
fn cpu_conforms_on_a_directory() {
    conforms("cpu", "tiny/llama", &MORE).assert_passed();
}

#[test]
fn cpu_conforms_on_a_quantized_model() {
    conforms("cpu", "tiny/qwen3-q8", &MORE).assert_passed();
}

#[test]
fn cpu_conforms_on_a_gguf_file() {
    conforms("cpu", "tiny/llama-gguf/model.gguf", &MORE).assert_passed();
}
