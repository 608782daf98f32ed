//! Tests that the table of GGUF types in `docs/architectures.md` matches the table in the code.

use std::collections::BTreeMap;

use inference_formats::quantization::{BlockType, Layout, TYPES};

/// Columns of a type: bits per weight in the file and in memory, and the form in MLX.
type Columns = [String; 3];

/// The values of `count` types in a table cell. A cell with a single value applies to all types.
fn values(cell: &str, count: usize) -> Vec<String> {
    let values: Vec<_> = cell.split(", ").map(str::to_owned).collect();
    match values.as_slice() {
        [one] => vec![one.clone(); count],
        all => {
            assert_eq!(all.len(), count, "{cell}");
            values
        }
    }
}

fn documented() -> BTreeMap<String, Columns> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/architectures.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, table) = text
        .split_once("| Type | In the file | In memory | In MLX's form |")
        .unwrap();
    let mut types = BTreeMap::new();
    for line in table.lines().skip(2) {
        let cells: Vec<_> = line.trim().trim_matches('|').split(" | ").collect();
        let [names, file, memory, form] = cells[..] else {
            break;
        };
        let names: Vec<_> = names.trim().split(", ").collect();
        let of = |cell: &str| values(cell.trim(), names.len());
        let (file, memory, form) = (of(file), of(memory), of(form));
        for (i, name) in names.iter().enumerate() {
            let memory = match memory[i].as_str() {
                "the same" => file[i].clone(),
                other => other.to_owned(),
            };
            let columns = [file[i].clone(), memory, form[i].clone()];
            let before = types.insert((*name).to_owned(), columns);
            assert!(before.is_none(), "{name} is there twice");
        }
    }
    types
}

/// Bits per weight in memory, as the kernels store the type.
fn in_memory(row: &BlockType) -> f64 {
    match row.layout() {
        Layout::Floats => 32.0,
        // Each group of 32 weights has a float16 scale and a float16 bias.
        Layout::Affine { bits } => f64::from(bits) + 1.0,
        packed => packed.bytes(256) as f64 / 32.0,
    }
}

#[test]
fn the_documentation_has_every_type_with_its_bits() {
    let mut documented = documented();
    for row in TYPES.iter().filter(|row| row.weights > 1) {
        let name = row.name;
        let Some([file, memory, form]) = documented.remove(name) else {
            panic!("docs/architectures.md lacks {name}");
        };
        for (said, exact) in [(file, row.bits_per_weight()), (memory, in_memory(row))] {
            let number: f64 = said.parse().unwrap_or_else(|_| panic!("{name}: {said}"));
            assert!((number - exact).abs() <= 0.00501, "{name}: {said}, {exact}");
        }
        let expected = match (row.layout(), row.layout().affine_bits()) {
            (Layout::Powers, _) => "mxfp4".to_owned(),
            (_, Some(bits)) => bits.to_string(),
            _ => "floats".to_owned(),
        };
        assert_eq!(form, expected, "{name}");
    }
    assert!(documented.is_empty(), "no such types: {documented:?}");
}
