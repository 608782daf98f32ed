//! Tests that the report and the loader use the same estimate of memory. The memory budget applies
//! to the whole process, so this test runs in a separate process.

use std::path::{Path, PathBuf};

use inference::{ErrorKind, LoadOptions};
use metal_backend::model_report::ModelReport;
use mlx_rs_core::memory;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures")
        .join(name)
}

#[test]
fn a_model_is_refused_when_the_reported_bytes_exceed_the_budget() {
    crate::alone::alone(
        "memory_estimate::a_model_is_refused_when_the_reported_bytes_exceed_the_budget",
        a_model_is_refused_when_the_reported_bytes_exceed_the_budget_alone,
    );
}

fn a_model_is_refused_when_the_reported_bytes_exceed_the_budget_alone() {
    let options = LoadOptions::new().with_backend("cpu");
    for name in [
        "tiny/llama",
        "tiny/llama-bf16",
        "tiny/llama-q4",
        "tiny/mixtral",
        "tiny/gpt-oss-mxfp4",
        "tiny/llama-gptq",
        "tiny/llama-gptq-order",
        "tiny/llama-awq",
        "tiny/llama-fp8",
        "tiny/qwen2-gguf",
        "gguf/gemma.gguf",
    ] {
        let path = fixture(name);
        let needed = ModelReport::read(&path, Some("cpu"), None).unwrap();
        let needed = needed.memory.weights;
        let before = memory::set_budget(needed - 1);
        let refused = inference::load_model(&path, &options).err();
        memory::set_budget(needed);
        let loaded = inference::load_model(&path, &options).map(drop);
        memory::set_budget(before);
        let e = refused.unwrap_or_else(|| panic!("{name} was loaded"));
        assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{name}: {e}");
        let says = format!("need about {needed} bytes");
        assert!(e.message().contains(&says), "{name}: {e}");
        assert!(loaded.is_ok(), "{name}: {loaded:?}");
    }
}
