//! The order of this crate's files: each uses only files that stand before it in `ORDER`. So there is
//! no circle between files, and no room uses one above it. Calls of methods are not seen: only paths.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Modules from the bottom up. A room with children stands for its `mod.rs`.
const ORDER: &[&str] = &[
    // What everything may use.
    "sync",
    "once",
    "pool",
    "pool_tests",
    "partition",
    "isa",
    "work",
    "layout",
    "layout::tile",
    "layout::aligned",
    "layout::input_panel",
    "layout::packed",
    // Instruction sets, each with what it adds to those before.
    "simd::prefetch",
    "simd::portable",
    "simd::portable::vmath",
    "simd::portable::dequantize",
    "simd::portable::microkernel",
    "simd::portable::qgemv",
    "simd::portable::softmax",
    "simd::avx2",
    "simd::avx2::vmath",
    "simd::avx2::decode_attention",
    "simd::avx2::dequantize",
    "simd::avx2::microkernel",
    "simd::avx2::qgemv",
    "simd::avx2::transpose",
    "simd::avx512",
    "simd::avx512::vmath",
    "simd::avx512::microkernel",
    "simd::avx512::qgemv",
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
    "simd::neon::f32",
    "simd::neon::qgemv_dotprod",
    // Dispatch by instruction set.
    "simd",
    "simd::vmath",
    "simd::dequantize",
    "simd::microkernel",
    "simd::qgemv",
    "simd::transpose",
    // Operations.
    "gemm",
    "gemm::dense",
    "gemm::product",
    "gemm::activations",
    "gemm::few_rows",
    "gemm::packed_gemm",
    "gemm::amx_qgemm",
    "gemm::amx_gemm_bf16",
    "gemm::prefetch",
    "gemm::run",
    "gemm::gather_rows",
    "gemm::vjp",
    "attention",
    "attention::rope",
    "attention::kv_write",
    "attention::kv_copy",
    "attention::attend",
    "attention::flash_attention",
    "attention::decode_attention",
    "attention::decode_schedule",
    "attention::prefetch",
    "attention::run",
    "sampling",
    "sampling::softmax_pass",
    "sampling::top_k",
    "sampling::top_p",
    "sampling::sample",
    "testing",
    "simd::qgemv_tests",
    "lib",
];

/// The text of each module by its path, without the modules of tests.
fn modules(root: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let relative = path.strip_prefix(root).unwrap().with_extension("");
            let parts: Vec<_> = relative.iter().map(|p| p.to_str().unwrap()).collect();
            let name = parts.join("::");
            let name = name.strip_suffix("::mod").unwrap_or(&name).to_owned();
            found.insert(name, fs::read_to_string(&path).unwrap());
        }
    }
    found
}

/// The paths that begin with `crate::` or `super::` in a file, as paths from the root of the crate.
fn paths(module: &str, text: &str) -> Vec<String> {
    // What a module of tests at the end uses is not part of the file's place.
    let own = text.find("\nmod tests {").unwrap_or(text.len());
    let own = text[..own].find("\npub(crate) mod tests {").unwrap_or(own);
    let code: String = text[..own]
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .fold(String::new(), |all, line| all + line + "\n");
    let parent = |module: &str| {
        module
            .rsplit_once("::")
            .map_or(String::new(), |(p, _)| p.into())
    };
    let mut all = Vec::new();
    for (key, base) in [("crate::", String::new()), ("super::", parent(module))] {
        for (at, _) in code.match_indices(key) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let rest = &code[at + key.len()..];
            let end = rest
                .find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))
                .unwrap_or(rest.len());
            let (mut stem, mut base) = (rest[..end].trim_end_matches(':'), base.clone());
            while let Some(rest) = stem.strip_prefix("super::") {
                (stem, base) = (rest, parent(&base));
            }
            let mut names = vec![stem.to_owned()];
            if let Some(list) = rest[end..].strip_prefix('{') {
                let list = &list[..list.find('}').unwrap_or(list.len())];
                let each = list.split(',').map(str::trim).filter(|n| !n.is_empty());
                names = each.map(|name| format!("{stem}::{name}")).collect();
            }
            for name in names {
                let path = format!("{base}::{name}");
                all.push(path.trim_matches(':').to_owned());
            }
        }
    }
    all
}

/// Each use of a module that does not stand before its user in `order`, and each module without a place.
fn upward(order: &[&str], modules: &BTreeMap<String, String>) -> Vec<String> {
    let place = |module: &str| order.iter().position(|o| *o == module);
    let mut faults = Vec::new();
    for (module, text) in modules {
        let Some(own) = place(module) else {
            faults.push(format!("{module} has no place in the order"));
            continue;
        };
        for path in paths(module, text) {
            // The longest part of the path that is a module; what is below a room's name is its item.
            let mut used = path.as_str();
            while !modules.contains_key(used) {
                let Some((shorter, _)) = used.rsplit_once("::") else {
                    break;
                };
                used = shorter;
            }
            let own_room = module
                .strip_prefix(used)
                .is_some_and(|r| r.starts_with("::"));
            let others = modules.contains_key(used) && used != module;
            // A `mod.rs` that only declares children may be named on the way to a function's module.
            if others && !own_room && place(used).is_some_and(|used| used > own) {
                faults.push(format!("{module} uses {path}, which stands above it"));
            }
        }
    }
    faults
}

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

/// The check itself finds arrows that point up, in lists, by `super`, and in the middle of code.
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
