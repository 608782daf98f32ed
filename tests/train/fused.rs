//! Tests of fusing adapters into quantized models, through the program.

use std::path::Path;

use inference::{CancelToken, GenerateOptions, Interrupt, LoadOptions, Message, Prompt};
use metal_backend::train::{Run, Start};

use crate::common::{fixture, max_difference};
use crate::{config, cpu, mlx, stderr};

/// A quantized model can be trained directly. After fusing into a dense model, it must reply as
/// trained.
#[test]
fn a_quantized_model_is_fused_dense() {
    let dirs = tempfile::tempdir().unwrap();
    let adapters = dirs.path().join("a");
    let mut options = config(&adapters, "iters: 3");
    options.val_batches = 0;
    let base = fixture("tiny/llama-q4");
    let mut run = Run::prepare(&base, &cpu(), options, Start::Fresh).unwrap();
    run.train(&CancelToken::new(), &mut |_| {}).unwrap();
    let fused = dirs.path().join("fused");
    let [base, adapters, fused] = [&base, &adapters, &fused].map(|p| p.to_str().unwrap());
    let output = mlx(
        "fuse",
        &[
            "--model",
            base,
            "--adapter-path",
            adapters,
            "--output",
            fused,
            "--de-quantize",
        ],
    );
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(Path::new(fused).join("config.json")).unwrap();
    assert!(!text.contains("quantization"), "{text}");
    let say = |options: &LoadOptions, path: &str| {
        let model = inference::load_model(path, options).unwrap();
        let options = GenerateOptions::new().with_max_tokens(8);
        let stream = model.chat(&[Message::user("hi")], &options).unwrap();
        stream.collect_output().unwrap().tokens
    };
    assert_eq!(
        say(&cpu(), fused),
        say(&cpu().with_adapter_path(adapters), base)
    );
}

/// The logits after a short prompt, with or without an adapter.
fn logits(path: &Path, adapter: Option<&Path>) -> Vec<f32> {
    // The type of caches depends on the file, so it is named.
    let options = cpu().with_kv_bits(32);
    let options = match adapter {
        Some(adapter) => options.with_adapter_path(adapter),
        None => options,
    };
    let model =
        inference::load_model(path, &options).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let tokens = model.as_token_model().unwrap();
    let prompt = Prompt::Tokens(vec![5, 17, 99, 4, 31, 8]);
    tokens
        .logits(&prompt, true, &Interrupt::new())
        .unwrap()
        .logits
}

/// A GGUF model can be trained directly. `mlx fuse --dequantize` must make an equal directory of
/// it.
#[test]
fn a_gguf_file_is_fused_dense() {
    // Packed blocks are converted to float32, so only the order of sums differs. In the other file,
    // llama.cpp's converter changed names, norms and tables. There, float16 weights are rounded,
    // and so are their sums with the adapter at 8 bits or more.
    for (name, share) in [
        ("tiny/llama-gguf/model.gguf", 1e-4),
        ("gguf/gemma3-text.gguf", 0.02),
    ] {
        let (base, dirs) = (fixture(name), tempfile::tempdir().unwrap());
        let (adapters, fused) = (dirs.path().join("a"), dirs.path().join("fused"));
        let mut options = config(&adapters, "iters: 3");
        options.val_batches = 0;
        let mut run = Run::prepare(&base, &cpu(), options, Start::Fresh).unwrap();
        run.train(&CancelToken::new(), &mut |_| {}).unwrap();
        let fuse = |more: &[&str]| {
            let [base, adapters, fused] = [&base, &adapters, &fused].map(|p| p.to_str().unwrap());
            let args = ["--model", base, "--adapter-path", adapters, "-o", fused];
            mlx("fuse", &[&args[..], more].concat())
        };
        // The fused weights cannot be stored in the original format, and the failed command must
        // leave no files.
        let refused = fuse(&[]);
        assert_eq!(refused.status.code(), Some(1), "{name}");
        assert!(
            stderr(&refused).contains("--dequantize"),
            "{}",
            stderr(&refused)
        );
        assert!(!fused.exists());
        let made = fuse(&["--dequantize"]);
        assert!(made.status.success(), "{name}: {}", stderr(&made));
        let text = std::fs::read_to_string(fused.join("config.json")).unwrap();
        assert!(!text.contains("quantization"), "{text}");

        let apart = logits(&base, Some(&adapters));
        let moved = max_difference(&apart, &logits(&base, None));
        let error = max_difference(&apart, &logits(&fused, None));
        println!("{name}: the adapter moves logits by {moved}, fusing by {error}");
        assert!(moved > 0.2, "{name}: {moved}");
        assert!(error < share * moved, "{name}: {error} of {moved}");
        let left = std::fs::read_dir(dirs.path()).unwrap().count();
        assert_eq!(left, 2, "only the adapter and the fused model");
    }
}
