//! Checks the order of this crate's files: each uses only files that precede it in `ORDER`, so no
//! cycle can arise. The check reads paths in the source. It does not see method calls.

#[path = "../../../tests/common/layering.rs"]
mod order;

use std::collections::BTreeMap;
use std::path::Path;

use order::{modules, upward};

/// Modules from the bottom up. The name of a module with children means its `mod.rs`.
const ORDER: &[&str] = &[
    // Modules that all others may use.
    "sync",
    "once",
    "memory",
    "pool",
    "pool_tests",
    "partition",
    "isa",
    "prefill_inputs",
    "work",
    "layout",
    "layout::tile",
    "layout::aligned",
    "layout::dense",
    "layout::columns",
    "layout::input_panel",
    "layout::integer_panel",
    "layout::byte_panel",
    "layout::table",
    "layout::float_codes",
    "layout::packed",
    "layout::formats",
    "layout::blocks",
    // Instruction sets. Each extends those before it.
    "simd::prefetch",
    "simd::portable",
    "simd::portable::vmath",
    "simd::portable::dequantize",
    "simd::portable::microkernel",
    "simd::portable::qgemv",
    "simd::portable::quantize_bytes",
    "simd::portable::refine_bytes",
    "simd::portable::softmax",
    "simd::avx2",
    "simd::avx2::float_codes",
    "simd::avx2::pack_blocks",
    "simd::avx2::vmath",
    "simd::avx2::decode_attention",
    "simd::avx2::columns",
    "simd::avx2::dense_rows",
    "simd::avx2::dequantize",
    "simd::avx2::byte_quads",
    "simd::avx2::byte_tile",
    "simd::avx2::flash_attention",
    "simd::avx2::integer_tile",
    "simd::avx2::microkernel",
    "simd::avx2::quantize_inputs",
    "simd::avx2::integer_codes",
    "simd::avx2::qgemv",
    "simd::avx2::integer_pairs",
    "simd::avx2::qgemv_fp8",
    "simd::avx2::transpose",
    "simd::avx512",
    "simd::avx512::vmath",
    "simd::avx512::transpose",
    "simd::avx512::columns",
    "simd::avx512::dense_rows",
    "simd::avx512::byte_tile",
    "simd::avx512::flash_attention",
    "simd::avx512::integer_tile",
    "simd::avx512::microkernel",
    "simd::avx512::qgemv",
    "simd::avx512::integer_pairs",
    "simd::avx512::qgemv_fp8",
    "simd::amx::encoding",
    "simd::amx::asm_macros",
    "simd::amx::tiles",
    "simd::amx::small_m_asm",
    "simd::amx::large_m_asm",
    "simd::amx::activations",
    "simd::amx::scales",
    "simd::amx::bf16",
    "simd::amx::epilogue",
    "simd::amx::large_m",
    "simd::amx::small_m",
    "simd::amx",
    "simd::neon",
    "simd::neon::emulation",
    "simd::neon::intrinsics",
    "simd::neon::f32",
    "simd::neon::qgemv_dotprod",
    // Dispatch by instruction set.
    "simd",
    "simd::vmath",
    "simd::byte_tile",
    "simd::columns",
    "simd::dense_rows",
    "simd::dequantize",
    "simd::microkernel",
    "simd::pack_blocks",
    "simd::flash_attention",
    "simd::integer_tile",
    "simd::qgemv",
    "simd::transpose",
    // Operations.
    "gemm",
    "gemm::dense",
    "gemm::product",
    "gemm::activations",
    "gemm::packed_gemm",
    "gemm::few_rows",
    "gemm::column_product",
    "gemm::integer_gemm",
    "gemm::dense_gemm",
    "gemm::byte_gemm",
    "gemm::amx_qgemm",
    "gemm::amx_gemm_bf16",
    "gemm::prefetch",
    "gemm::run",
    "gemm::greatest",
    "gemm::gather_rows",
    "gemm::elementwise",
    "gemm::gated",
    "gemm::layer_norm",
    "gemm::feature_walk",
    "gemm::vjp",
    "gemm::routes",
    "gemm::experts",
    "gemm::expert_block",
    "attention",
    "attention::kv_packing",
    "attention::kv_type",
    "attention::rope",
    "attention::kv_write",
    "attention::kv_copy",
    "attention::key_blocks",
    "attention::attend",
    "attention::flash_attention",
    "attention::decode_attention",
    "attention::decode_schedule",
    "attention::prefetch",
    "attention::run",
    "recurrence",
    "recurrence::gates",
    "recurrence::step",
    "recurrence::matrix_memory",
    "recurrence::selective",
    "recurrence::diagonal",
    "recurrence::scalar_memory",
    "recurrence::chunk",
    "recurrence::run",
    "sampling",
    "sampling::softmax_pass",
    "sampling::top_k",
    "sampling::top_p",
    "sampling::typical",
    "sampling::sample",
    "sampling::temperature_first",
    "testing::allocations",
    "testing",
    "attention::order_tests",
    "simd::neon::intrinsics_tests",
    "simd::qgemv_tests",
    "gemm::experts_tests",
    "sampling::top_k_tests",
    "sampling::top_p_tests",
    "gemm::format_tests",
    "gemm::byte_gemm_tests",
    "recurrence::run_tests",
    "lib",
];

#[test]
fn files_use_only_what_stands_below_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let modules = modules(&src);
    let faults = upward(ORDER, &modules);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for name in ORDER {
        assert!(modules.contains_key(*name), "{name} is no module any more");
    }
}

/// The check finds forbidden references in `use` lists, through `super`, and inside code.
#[test]
fn arrows_that_point_up_are_found() {
    let order = [
        "isa",
        "layout",
        "layout::tile",
        "simd",
        "simd::vmath",
        "gemm",
        "gemm::run",
    ];
    let faults = |module: &str, text: &str| {
        let mut all: BTreeMap<String, String> = order
            .iter()
            .map(|name| ((*name).to_owned(), String::new()))
            .collect();
        all.insert(module.to_owned(), text.to_owned());
        upward(&order, &all)
    };
    let below = "use crate::layout::tile::{LANES, TileA};\nuse crate::isa::Isa;\n";
    assert_eq!(faults("gemm::run", below), [""; 0]);
    assert_eq!(
        faults("layout::tile", "// use crate::gemm::run;\n"),
        [""; 0]
    );
    for text in [
        "use crate::gemm::run::Scratch;\n",
        "use crate::gemm::{\n    run,\n};\n",
        "fn f() { crate::simd::vmath::dot() }\n",
        "use super::super::gemm::run;\nuse crate::isa;\n",
    ] {
        assert_eq!(faults("layout::tile", text).len(), 1, "{text}");
    }
    assert_eq!(faults("isa", "use super::simd::vmath::dot;\n").len(), 1);
    assert_eq!(faults("unknown", "").len(), 1);
}
