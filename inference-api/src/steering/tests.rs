use std::path::Path;

use serde_json::{Value, json};

use super::{EditOperation, EditPositions, Hook, LayerHooks, Numbers, Steering, SteeringShape};
use crate::error::ErrorKind;
use crate::options::GenerateOptions;

fn read(edits: Value) -> Result<Steering, String> {
    serde_json::from_value(json!({ "edits": edits })).map_err(|e| e.to_string())
}

#[test]
fn what_is_written_is_read_again() {
    let steering = read(json!([
        {"layers": "all", "hook": "resid_pre", "op": "add", "vector": [1.5, -2], "coefficient": 3},
        {"layers": "2-", "hook": "z", "heads": [3, 0], "positions": "last", "op": "zero"},
        {"layers": [1, 4], "hook": "mlp_post", "neurons": [7], "positions": "prompt", "op": "scale",
         "factor": 0.5},
        {"layers": "1-3", "hook": "attn_out", "positions": "reply", "op": "replace", "vector": [0]},
        {"layers": 5, "hook": "resid_mid", "positions": [2, 9], "op": "patch", "prompt": "Rome",
         "from": [1, 0]},
        {"layers": "6", "hook": "mlp_out", "positions": "4-6", "op": "patch", "tokens": [3]},
    ]))
    .unwrap();
    let edits = steering.edits();
    assert_eq!(edits[0].positions, EditPositions::At(Numbers::All));
    assert_eq!(
        (edits[1].layers.has(1), edits[1].layers.has(2)),
        (false, true)
    );
    assert_eq!(edits[1].operation, EditOperation::Scale(0.0));
    assert_eq!(edits[1].units, Some(vec![3, 0]));
    assert_eq!(edits[5].layers, Numbers::List(vec![6]));
    let written = serde_json::to_string(&steering).unwrap();
    assert_eq!(
        serde_json::from_str::<Steering>(&written).unwrap(),
        steering
    );
    // A backend without edits must refuse the option by its name.
    let options = GenerateOptions::new().with_steering(steering.clone());
    options.validate().unwrap();
    let text = serde_json::to_string(&options).unwrap();
    let again: GenerateOptions = serde_json::from_str(&text).unwrap();
    assert_eq!(again.steering, Some(steering));
    let refused = options.refuse_all_but("mine", &["max_tokens"]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.to_string().contains("steering"), "{refused}");
    GenerateOptions::new().refuse_all_but("mine", &[]).unwrap();
}

#[test]
fn positions_are_those_of_their_words() {
    let at = |positions: EditPositions| -> Vec<usize> {
        (0..8).filter(|&n| positions.has(n, 5)).collect()
    };
    assert_eq!(at(EditPositions::Prompt), [0, 1, 2, 3, 4]);
    assert_eq!(at(EditPositions::Last), [4]);
    assert_eq!(at(EditPositions::Reply), [4, 5, 6, 7]);
    assert_eq!(at(EditPositions::At(Numbers::Range(2, Some(3)))), [2, 3]);
    assert_eq!(at(EditPositions::At(Numbers::Range(6, None))), [6, 7]);
    assert_eq!(at(EditPositions::At(Numbers::List(vec![7, 0]))), [0, 7]);
}

#[test]
fn what_is_wrong_is_said_with_edit_and_field() {
    let good = json!({"layers": 0, "hook": "z", "op": "zero"});
    let zero = |field: &str, value: Value| {
        let mut edit = good.clone();
        edit[field] = value;
        json!([good, edit])
    };
    for (edits, wanted) in [
        (json!([]), "edits is empty"),
        (zero("hooks", json!(1)), "unknown field `hooks`"),
        (
            zero("hook", json!("resid")),
            "hook `resid` is not one of resid_pre, z,",
        ),
        (zero("op", json!("cut")), "unknown variant `cut`"),
        (zero("layers", json!("some")), "edits[1].layers is `some`"),
        (
            zero("layers", json!("5-3")),
            "edits[1].layers is 5-3, which ends before it begins",
        ),
        (zero("layers", json!([])), "edits[1].layers is empty"),
        (zero("layers", json!(-1)), "a number, a list of numbers"),
        (
            zero("positions", json!("first")),
            "edits[1].positions is `first`",
        ),
        (
            zero("factor", json!(2)),
            "edits[1].factor does not go with op zero",
        ),
        (
            zero("vector", json!([1])),
            "edits[1].vector does not go with op zero",
        ),
        (
            zero("heads", json!([])),
            "edits[1] lists no heads or neurons",
        ),
        (
            zero("neurons", json!([1])),
            "edits[1].neurons does not go with hook z",
        ),
        (
            zero("op", json!("scale")),
            "edits[1] has no factor, which op scale needs",
        ),
        (zero("op", json!("add")), "edits[1] has no vector"),
        (
            zero("op", json!("patch")),
            "edits[1] has no prompt or tokens",
        ),
        (
            json!([{"layers": 0, "hook": "z", "op": "add", "vector": [0, 1e39]}]),
            "edits[0].vector[1] is inf",
        ),
        (
            json!([{"layers": 0, "hook": "z", "op": "patch", "prompt": "a", "from": [1]}]),
            "edits[0].from has 1 positions",
        ),
        (
            json!([{"layers": 0, "hook": "z", "op": "patch", "prompt": "a", "tokens": [1]}]),
            "both prompt and tokens",
        ),
        (
            json!([{"layers": 0, "hook": "z", "op": "add", "vector": {"file": "v.npy"}}]),
            "file `v.npy` cannot be read here",
        ),
    ] {
        let message = read(edits).unwrap_err();
        assert!(message.contains(wanted), "{message}");
    }
    let many = vec![good.clone(); Steering::MOST_EDITS + 1];
    assert!(read(json!(many)).unwrap_err().contains("at most 1024"));
    let long = json!([{"layers": 0, "hook": "z", "op": "add",
                       "vector": vec![0; Steering::MOST_NUMBERS + 1]}]);
    assert!(read(long).unwrap_err().contains("at most 16777216"));
}

#[test]
fn a_model_says_what_it_has() {
    let attention_block = LayerHooks {
        attn_out: true,
        resid_mid: true,
        mlp_out: true,
        heads: Some((2, 3)),
        neurons: Some(5),
    };
    let bare = LayerHooks::default();
    let shape = SteeringShape::new(4, vec![attention_block, bare]);
    let checked = |edit: Value| read(json!([edit])).unwrap().check(&shape);
    for fits in [
        json!({"layers": 0, "hook": "z", "heads": [1], "op": "add", "vector": [1, 2, 3]}),
        json!({"layers": 0, "hook": "mlp_post", "op": "replace", "vector": [1, 2, 3, 4, 5]}),
        json!({"layers": "all", "hook": "resid_post", "op": "add", "vector": [1, 2, 3, 4]}),
        json!({"layers": "1-", "hook": "resid_pre", "op": "zero"}),
    ] {
        checked(fits).unwrap();
    }
    for (edit, wanted) in [
        (
            json!({"layers": "all", "hook": "mlp_out", "op": "zero"}),
            "edits[0].hook is mlp_out, which layer 1 does not have; it has resid_pre, resid_post",
        ),
        (
            json!({"layers": "2-", "hook": "z", "op": "zero"}),
            "edits[0].layers names layer 2; the model has layers 0 to 1",
        ),
        (
            json!({"layers": "0-2", "hook": "resid_pre", "op": "zero"}),
            "edits[0].layers names layer 2",
        ),
        (
            json!({"layers": 0, "hook": "z", "heads": [1, 0, 1], "op": "zero"}),
            "names head or neuron 1 twice",
        ),
        (
            json!({"layers": 0, "hook": "z", "op": "add", "vector": [1]}),
            "edits[0].vector has 1 numbers; z of layer 0 needs 6",
        ),
    ] {
        let error = checked(edit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

/// A numpy file of format version 1 with this shape.
fn npy(shape: &str, values: &[f32]) -> Vec<u8> {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.bytes());
    file.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    file
}

fn safetensors(tensors: &[(&str, &str, &[usize], usize)]) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, dtype, shape, bytes) in tensors {
        let place = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
        header.insert((*name).to_owned(), place);
        end += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend((0..end / 4).flat_map(|i| (i as f32).to_le_bytes()));
    file
}

#[test]
fn vectors_stand_in_files_beside_the_list() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    write("one.npy", &npy("(3,)", &[1.0, 2.0, 3.0]));
    write("rows.npy", &npy("(2, 2)", &[1.0, 2.0, 3.0, 4.0]));
    write("short.npy", &npy("(3,)", &[1.0]));
    write("one.safetensors", &safetensors(&[("v", "F32", &[3], 12)]));
    let two = [("a", "F32", &[2, 2][..], 16), ("b", "BF16", &[2][..], 4)];
    write("two.safetensors", &safetensors(&two));
    let read = |vector: Value| {
        let path = dir.path().join("edits.json");
        let edits = json!({"edits": [{"layers": 0, "hook": "resid_post", "op": "replace",
                                      "vector": vector}]});
        std::fs::write(&path, edits.to_string()).unwrap();
        Steering::read(&path)
    };
    let vector = |reference: Value| {
        let steering = read(reference).unwrap();
        match &steering.edits()[0].operation {
            EditOperation::Replace(vector) => vector.to_vec(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(vector(json!({"file": "one.npy"})), [1.0, 2.0, 3.0]);
    assert_eq!(vector(json!({"file": "rows.npy", "row": 1})), [3.0, 4.0]);
    assert_eq!(vector(json!({"file": "one.safetensors"})), [0.0, 1.0, 2.0]);
    let second = json!({"file": "two.safetensors", "tensor": "a", "row": 1});
    assert_eq!(vector(second), [2.0, 3.0]);
    for (reference, wanted) in [
        (json!({"file": "none.npy"}), "edits[0].vector"),
        (json!({"file": "short.npy"}), "4 bytes"),
        (json!({"file": "rows.npy"}), "shape [2, 2] with no row"),
        (json!({"file": "rows.npy", "row": 2}), "with row 2"),
        (
            json!({"file": "one.npy", "tensor": "v"}),
            "leave tensor out",
        ),
        (
            json!({"file": "two.safetensors"}),
            "tensor must name one of a, b",
        ),
        (
            json!({"file": "one.safetensors", "tensor": "w"}),
            "no tensor `w`; there are v",
        ),
        (
            json!({"file": "two.safetensors", "tensor": "b"}),
            "save it as F32",
        ),
        (json!({"file": "one.bin"}), ".npy or .safetensors"),
        (
            json!({"file": "one.npy", "line": 1}),
            "a list of numbers, or",
        ),
    ] {
        let error = read(reference).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
    let missing = Steering::read(Path::new("no/such/edits.json")).unwrap_err();
    assert!(missing.path().is_some(), "{missing}");
}

#[test]
fn hooks_have_names_of_their_own() {
    for hook in Hook::ALL {
        let name = serde_json::to_value(hook).unwrap();
        assert_eq!(name, json!(hook.to_string()));
        assert_eq!(serde_json::from_value::<Hook>(name).unwrap(), hook);
    }
}
