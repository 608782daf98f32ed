//! Every public function has an example and documents its errors. Every operation is compared with
//! numpy and gets hostile arguments. This test reads the sources and the tests. It fails on a
//! function without an example, and on a `Result` without a section `# Errors`. It also fails on an
//! operation that no test of its kind names. It does not check that examples and tests are correct;
//! running them does.

#[path = "../support/sources.rs"]
mod sources;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use sources::{Function, all, functions};

/// Functions that need no separate example, with the reason.
const WITHOUT_EXAMPLES: [(&str, &str); 1] = [(
    "src/array/convert.rs: from_literal",
    "hidden: `array!` is its face",
)];

impl Function {
    /// Whether the function's documentation, or that of its type, has an example that calls it.
    /// Names with `$` are patterns of macros, whose rows have the examples.
    fn shown(&self) -> bool {
        let calls = [format!(".{}(", self.name), format!("::{}(", self.name)];
        self.docs.contains("```")
            || self.name.starts_with('$')
            || self.of_type.contains("```")
                && calls.iter().any(|c| self.of_type.contains(c.as_str()))
    }

    fn says_how_it_fails(&self) -> bool {
        let signature = self.signature.split(" where ").next().unwrap_or_default();
        let returned = signature.rsplit_once("->").map_or("", |s| s.1);
        let fails = returned.contains("Result<") && !returned.contains("impl Fn");
        self.row || !fails || self.docs.contains("# Errors")
    }
}

#[test]
fn every_public_function_has_an_example_and_says_how_it_fails() {
    let (mut faults, mut count, mut used) = (Vec::new(), 0, [false; WITHOUT_EXAMPLES.len()]);
    for f in all() {
        count += 1;
        if !f.says_how_it_fails() {
            faults.push(format!("{}: {} has no section `# Errors`", f.place, f.name));
        }
        if f.shown() {
            continue;
        }
        let name = format!("{}: {}", f.place, f.name);
        match WITHOUT_EXAMPLES
            .iter()
            .position(|(p, _)| name.starts_with(p))
        {
            Some(allowed) => used[allowed] = true,
            None => faults.push(format!("{name} has no example")),
        }
    }
    for ((place, _), used) in WITHOUT_EXAMPLES.iter().zip(used) {
        if !used {
            faults.push(format!("{place} is excused, but needs no excuse"));
        }
    }
    assert!(count > 400, "only {count} functions were read");
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

#[test]
fn the_reader_finds_what_is_missing() {
    let text = "
/// ```
/// Thing::new();
/// ```
pub struct Thing;
impl<'a> Thing<'a> {
    /// Shown by the type.
    pub fn new() -> Self {}
    /// Says nothing.
    #[must_use]
    pub fn lost(
        &self,
    ) -> Result<Array> {}
}
made! {
    /// Half of it.
    one, two = mlx_one, mlx_two;
    /// ```
    /// ```
    three = mlx_three;
}
";
    let all = functions("x", text);
    let names: Vec<&str> = all.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["new", "lost", "one", "two", "three"]);
    let shown: Vec<bool> = all.iter().map(Function::shown).collect();
    assert_eq!(shown, [true, false, false, false, true]);
    let told: Vec<bool> = all.iter().map(Function::says_how_it_fails).collect();
    assert_eq!(told, [true, false, true, true, true]);
}

/// The files that define operations.
const OPERATIONS: [&str; 6] = [
    "src/ops/",
    "src/fast.rs",
    "src/fft.rs",
    "src/linalg",
    "src/random",
    "src/indexing/",
];

/// Operations without golden values from numpy, with the test that checks their values instead.
const WITHOUT_GOLDEN: [(&[&str], &str); 5] = [
    (
        &["eigh", "eig", "eigvals", "svd", "qr"],
        "tests/arrays/linalg.rs: signs and order are free, so products are compared",
    ),
    (
        &[
            "normal",
            "gumbel",
            "normal_with",
            "laplace",
            "truncated_normal",
            "multivariate_normal",
            "randint",
            "bernoulli",
            "categorical",
            "categorical_samples",
            "categorical_shaped",
            "permutation",
            "permutation_of",
            "split_into",
            "from_array",
            "next_key",
        ],
        "tests/arrays/random.rs: numbers of MLX's own generator, and their distributions",
    ),
    (
        &[
            "quantize",
            "validate",
            "gather_matmul",
            "take_rows",
            "nbytes",
            "from_name",
        ],
        "tests/arrays/soundness_gather.rs: against loops over their parts",
    ),
    (
        &["matmul_quantized"],
        "needs CUDA; its refusals are in tests/limits/edges.rs",
    ),
    (
        &["scaled_dot_product_attention"],
        "the golden calls it as what it is, the one with sinks, without any",
    ),
];

/// Operations whose arguments cannot be invalid.
const HARMLESS: [&str; 3] = ["array", "nbytes", "from_name"];

fn words(files: &[&str]) -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut words = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(root.join(file)).unwrap();
        let code = text.lines().filter(|l| !l.trim_start().starts_with("//"));
        for line in code {
            let parts = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            words.extend(parts.filter(|w| !w.is_empty()).map(str::to_owned));
        }
    }
    words
}

/// The operations that none of `files` contains as a word.
fn unnamed(files: &[&str]) -> Vec<String> {
    let known = words(files);
    let mut missing: Vec<String> = all()
        .into_iter()
        .filter(|f| OPERATIONS.iter().any(|o| f.place.starts_with(o)) && !f.name.starts_with('$'))
        .map(|f| f.name)
        .filter(|name| !known.contains(name))
        .collect();
    missing.sort();
    missing.dedup();
    missing
}

#[test]
fn every_operation_is_held_against_numpy() {
    let files = [
        "ops_numpy/calls.rs",
        "support/operations.rs",
        "ops_numpy/aliases.rs",
        "arrays/indexing.rs",
    ];
    let mut missing = unnamed(&files);
    for name in WITHOUT_GOLDEN.iter().flat_map(|(names, _)| names.iter()) {
        let before = missing.len();
        missing.retain(|m| m != name);
        assert!(
            missing.len() < before,
            "{name} is excused, but needs no excuse"
        );
    }
    assert!(missing.is_empty(), "no golden test names {missing:?}");
}

#[test]
fn every_operation_meets_hostile_arguments() {
    let mut missing = unnamed(&[
        "limits/edges.rs",
        "arrays/hazards.rs",
        "arrays/indexing.rs",
        "arrays/linalg.rs",
        "arrays/properties.rs",
        "arrays/random.rs",
        "arrays/soundness_gather.rs",
        "limits/soundness_ops.rs",
        "support/operations.rs",
    ]);
    missing.retain(|m| !HARMLESS.contains(&m.as_str()));
    assert!(
        missing.is_empty(),
        "no test of hostile arguments names {missing:?}"
    );
}
