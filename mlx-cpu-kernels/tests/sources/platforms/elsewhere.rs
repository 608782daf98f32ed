//! The table `ELSEWHERE` of `platforms.rs`.

const MACOS: &str = "nothing: Rust has no standard library for macOS here; docs/building.md has the \
                     first steps on a Mac";
const AARCH64: &str = "tools/other_processors.py in .ci/run";
const EMULATED: &str = "emulated in tests";
const NO_WINDOWS: &str = "nothing: MLX is for Linux and macOS, which are both unix";
const NO_BIG_ENDIAN: &str = "nothing: no processor that MLX runs on is big-endian";
const FEATURES: &str = "tools/features.py in .ci/run";

/// For each condition, what compiles the code, and the files that contain the condition.
pub const ELSEWHERE: &[(&str, &str, &[&str])] = &[
    // Code that detects instruction sets, and code with the NEON instructions themselves.
    (
        "target_arch = \"aarch64\"",
        AARCH64,
        &[
            "mlx-cpu-kernels/src/isa.rs",
            "mlx-cpu-kernels/src/simd/neon/intrinsics.rs",
        ],
    ),
    // These files have the condition on attributes only, so a plain build compiles their code.
    (
        "target_arch = \"aarch64\"",
        EMULATED,
        &[
            "mlx-cpu-kernels/src/simd/neon/f32.rs",
            "mlx-cpu-kernels/src/simd/neon/intrinsics_tests.rs",
            "mlx-cpu-kernels/src/simd/neon/qgemv_dotprod.rs",
        ],
    ),
    (
        "not(target_arch = \"x86_64\")",
        AARCH64,
        &[
            "mlx-cpu-kernels/src/attention/decode_attention.rs",
            "mlx-cpu-kernels/src/gemm/column_product.rs",
            "mlx-cpu-kernels/src/isa.rs",
            "mlx-cpu-kernels/src/layout/formats.rs",
            "mlx-cpu-kernels/src/simd/dequantize.rs",
            "mlx-cpu-kernels/src/simd/prefetch.rs",
        ],
    ),
    (
        "not(any(target_arch = \"x86_64\", target_arch = \"aarch64\"))",
        "nothing: an attribute for lints on processors that MLX does not run on",
        &["mlx-cpu-kernels/src/layout/input_panel.rs"],
    ),
    (
        "all(target_arch = \"x86_64\", not(target_os = \"linux\"))",
        "nothing: one function that returns false; MLX has no build for such a system",
        &["mlx-cpu-kernels/src/isa.rs"],
    ),
    (
        "not(target_os = \"linux\")",
        MACOS,
        &[
            "mlx-rs-core/src/array/filled.rs",
            "mlx-rs-core/src/deadlock.rs",
            "mlx-rs-core/src/library.rs",
        ],
    ),
    (
        "not(all(target_os = \"linux\", target_env = \"gnu\"))",
        MACOS,
        &["mlx-rs-core/src/memory.rs"],
    ),
    (
        "target_os = \"macos\"",
        MACOS,
        &[
            "mlx-rs-core/src/memory.rs",
            "mlx-rs-core/src/quirks.rs",
            "src/hub/cache.rs",
            "tests/dependents/registration.rs",
        ],
    ),
    (
        "target_os = \"macos\"",
        "nothing: a value in a build script, which runs on the machine that builds",
        &["mlx-sys/build/env.rs"],
    ),
    (
        "not(unix)",
        NO_WINDOWS,
        &[
            "inference-formats/Cargo.toml",
            "inference-formats/src/atomic.rs",
            "inference-formats/src/files/mod.rs",
            "metal-backend/src/convert/write.rs",
            "mlx-rs-core/src/io/mapped_file.rs",
            "mlx-rs-core/src/transforms/compile.rs",
            "mlx-rs-core/src/transforms/export.rs",
            "mlx-sys/build/link.rs",
            "mlx-sys/build/nvidia.rs",
            "src/cli/terminal/lines.rs",
            "src/cli/terminal/tty.rs",
            "src/cli/learn/train/mod.rs",
            "src/hub/hf/layout.rs",
            "src/hub/space.rs",
        ],
    ),
    (
        "target_endian = \"big\"",
        NO_BIG_ENDIAN,
        &[
            "inference-formats/src/lib.rs",
            "mlx-rs-core/src/cpu/dense.rs",
            "mlx-rs-core/src/io/mapped_file.rs",
            "mlx-rs-core/src/io/npy.rs",
            "mlx-rs-core/src/io/values.rs",
        ],
    ),
    (
        "not(any(target_os = \"linux\", target_os = \"macos\"))",
        "nothing: MLX has no build for such a system",
        &["mlx-rs-core/src/memory.rs"],
    ),
    (
        "not(feature = \"metal-backend\")",
        FEATURES,
        &["inference-python/src/train.rs"],
    ),
    (
        "not(feature = \"otel\")",
        FEATURES,
        &["inference-server/src/telemetry/mod.rs"],
    ),
    (
        "feature = \"parquet\"",
        "cargo test --workspace --features parquet --test train in .ci/run",
        &[
            "metal-backend/src/train/dataset/load.rs",
            "metal-backend/src/train/dataset/mod.rs",
            "tests/train/parquet.rs",
        ],
    ),
    (
        "not(feature = \"mcp\")",
        FEATURES,
        &["src/cli/options/mcp/mod.rs"],
    ),
    (
        "not(all(unix, feature = \"serve\", feature = \"mlx-backend\"))",
        FEATURES,
        &["src/cli/options/mcp/mod.rs"],
    ),
    (
        "not(feature = \"serve\")",
        FEATURES,
        &["src/cli/compat_tests.rs"],
    ),
    (
        "not(feature = \"mlx-backend\")",
        FEATURES,
        &[
            "src/cli/models/backends.rs",
            "src/cli/options/dialog.rs",
            "src/cli/models/inspect.rs",
            "src/cli/measure/perplexity.rs",
            "src/cli/talk/reply.rs",
            "src/cli/serve/models.rs",
            "src/cli/talk/session/mod.rs",
            "src/cli/options/tools.rs",
            "src/cli/version.rs",
            "src/cli/measure/vindex/mod.rs",
            "src/cli/measure/vindex/build.rs",
            "src/cli/measure/vindex/sweep.rs",
        ],
    ),
    (
        "not(feature = \"probe\")",
        FEATURES,
        &["src/cli/talk/embed.rs"],
    ),
];
