//! Tests of vindexes on disk: a vindex must be complete or absent, and all damage must be detected.

use std::path::Path;

use inference_probe::vindex::{
    About, Activation, Biases, Build, Experts, Layer, Level, MatrixFile, Numbers, TensorKind,
    Tokens, Vindex, Writer,
};

use sha2::{Digest as _, Sha256};

const HIDDEN: usize = 5;

fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn about() -> About {
    About {
        model: String::from("tiny"),
        identity: String::from("0123"),
        family: String::from("llama"),
        hidden_size: HIDDEN,
        vocab_size: 9,
    }
}

/// Layers with and without a gate, with and without biases.
fn layers() -> Vec<(Layer, Vec<Tokens>)> {
    let tokens = |n: usize| (0..n).map(|f| vec![(f as u32, 1.5); f % 3]).collect();
    let gated = Layer {
        activation: Activation::Silu,
        gate: noise(7 * HIDDEN, 1),
        up: Some(noise(7 * HIDDEN, 2)),
        down: noise(7 * HIDDEN, 3),
        biases: None,
        experts: None,
    };
    let plain = Layer {
        activation: Activation::GeluTanh,
        gate: noise(4 * HIDDEN, 4),
        up: None,
        down: noise(4 * HIDDEN, 5),
        biases: Some(Biases {
            gate: noise(4, 6),
            up: None,
            down: noise(HIDDEN, 7),
        }),
        experts: None,
    };
    let both = Layer {
        biases: Some(Biases {
            gate: noise(7, 8),
            up: Some(noise(7, 9)),
            down: noise(HIDDEN, 10),
        }),
        activation: Activation::Relu,
        ..gated.clone()
    };
    vec![(gated, tokens(7)), (plain, tokens(4)), (both, tokens(7))]
}

fn write(path: &Path) {
    let mut writer = Writer::create(path, about(), 2).unwrap();
    for (layer, tokens) in layers() {
        writer.push(&layer, &tokens).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vindex");
    write(&path);
    let vindex = Vindex::open(&path).unwrap();
    vindex.verify().unwrap();
    assert_eq!(vindex.about(), &about());
    assert_eq!(vindex.layers().len(), 3);
    for (i, (layer, tokens)) in layers().into_iter().enumerate() {
        assert_eq!(vindex.layer(i).unwrap(), layer);
        assert_eq!(vindex.tokens(i).unwrap(), tokens);
    }
    assert!(
        vindex
            .layer(3)
            .unwrap_err()
            .to_string()
            .contains("there are 3")
    );
    // numpy can read the file if it knows the sizes.
    let gates = std::fs::read(path.join("gate_vectors.bin")).unwrap();
    assert_eq!(gates.len(), 4 * HIDDEN * (7 + 4 + 7));
    let first = f32::from_le_bytes(gates[..4].try_into().unwrap());
    assert_eq!(first, layers()[0].0.gate[0]);
    let on_disk: u64 = std::fs::read_dir(&path)
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.file_name() != "index.json")
        .map(|e| e.metadata().unwrap().len())
        .sum();
    assert_eq!(vindex.nbytes(), on_disk);
}

#[test]
fn layers_whose_tokens_are_found_meanwhile_are_the_same_files() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    write(&one);
    let mut writer = Writer::create(&two, about(), 2).unwrap();
    for (layer, tokens) in layers() {
        // A failure must leave no trace, whether the tokens cannot be computed or their number is
        // wrong.
        let failed = writer.push_with(&layer, || Err("no tokens"));
        assert_eq!(failed.unwrap_err(), "no tokens");
        let written = writer.push_with(&layer, || Ok::<_, ()>(tokens));
        written.unwrap().unwrap();
    }
    let (layer, _) = &layers()[0];
    let wrong = writer.push_with(layer, || Ok::<_, ()>(Vec::new()));
    assert!(
        wrong
            .unwrap()
            .unwrap_err()
            .to_string()
            .contains("0 features")
    );
    let mut cut = layer.clone();
    cut.down.pop();
    assert!(
        writer
            .push_with(&cut, || Ok::<_, ()>(Vec::new()))
            .unwrap()
            .is_err()
    );
    writer.finish().unwrap();
    for entry in std::fs::read_dir(&one).unwrap() {
        let name = entry.unwrap().file_name();
        let read = |dir: &Path| std::fs::read(dir.join(&name)).unwrap();
        assert!(read(&one) == read(&two), "{name:?}");
    }
}

/// Writes a vindex with the files of all levels, and a layer with experts.
fn write_some(path: &Path, build: Build, from: usize, to: usize) -> Writer {
    let mut writer = Writer::begin(path, about(), build).unwrap();
    assert_eq!(writer.layers(), from);
    if !writer.has_tensor("embed") {
        writer.push_file("tokenizer.json", b"{}").unwrap();
        let table = noise(9 * HIDDEN, 30);
        let kind = TensorKind::Embedding;
        writer
            .push_tensor("embed", kind, &[9, HIDDEN], &table)
            .unwrap();
    }
    for (i, (mut layer, tokens)) in layers().into_iter().enumerate().take(to).skip(from) {
        for (kind, n) in [(TensorKind::Norm, 1), (TensorKind::Attention, HIDDEN)] {
            let name = format!("{kind:?}.{i}");
            let values = noise(n * HIDDEN, 40);
            writer
                .push_tensor(&name, kind, &[n, HIDDEN], &values)
                .unwrap();
        }
        if i == 1 {
            layer.experts = Some(Experts {
                count: 2,
                features: 2,
            });
            layer.biases.as_mut().unwrap().down = noise(2 * HIDDEN, 7);
        }
        writer.push(&layer, &tokens).unwrap();
    }
    writer
}

fn write_all(path: &Path, build: Build, from: usize) -> Writer {
    write_some(path, build, from, usize::MAX)
}

fn all() -> Build {
    Build {
        down_top_k: 2,
        level: Level::All,
        ..Build::default()
    }
}

#[test]
fn levels_have_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    for level in [Level::Browse, Level::Inference, Level::All] {
        let path = dir.path().join(level.name());
        let build = Build { level, ..all() };
        write_all(&path, build, 0).finish().unwrap();
        let vindex = Vindex::open(&path).unwrap();
        vindex.verify().unwrap();
        assert_eq!(vindex.level(), level);
        let up = vindex.matrix(0, MatrixFile::Up).unwrap();
        assert_eq!(up.is_some(), level != Level::Browse);
        match level {
            Level::Browse => {
                let error = vindex.layer(0).unwrap_err().to_string();
                assert!(error.contains("level browse"), "{error}");
            }
            _ => assert_eq!(vindex.layer(0).unwrap(), layers()[0].0),
        }
        // Gate rows suffice for a search, for many states at once.
        let states = noise(3 * HIDDEN, 50);
        let nearest = vindex.nearest(2, &states, 4).unwrap();
        for (hits, x) in nearest.iter().zip(states.chunks(HIDDEN)) {
            assert_eq!(hits, &layers()[2].0.nearest(x, 4).unwrap());
        }
        assert!(vindex.nearest(2, &states[1..], 4).is_err());
        let table = vindex.tensor("embed").unwrap().unwrap();
        assert_eq!(table, noise(9 * HIDDEN, 30));
        assert_eq!(vindex.tensor("Attention.2").unwrap().unwrap().len(), 25);
        assert!(vindex.tensor("nothing").unwrap().is_none());
        assert_eq!(vindex.file("tokenizer.json").unwrap().unwrap(), b"{}");
        assert!(vindex.file("nothing").unwrap().is_none());
        let experts = vindex.layers()[1].experts.unwrap();
        assert_eq!((experts.count, experts.features), (2, 2));
        if level != Level::Browse {
            let layer = vindex.layer(1).unwrap();
            assert_eq!(layer.biases.as_ref().unwrap().down.len(), 2 * HIDDEN);
            let error = layer.walk(&noise(HIDDEN, 1), 3).unwrap_err().to_string();
            assert!(error.contains("router"), "{error}");
        }
    }
}

#[test]
fn half_precision_is_the_nearest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("half");
    let build = Build {
        numbers: Numbers::Float16,
        ..all()
    };
    write_all(&path, build, 0).finish().unwrap();
    let vindex = Vindex::open(&path).unwrap();
    let (ours, exact) = (vindex.layer(0).unwrap(), layers().remove(0).0);
    let mut changed = 0;
    for (a, b) in ours.gate.iter().zip(&exact.gate) {
        assert!((a - b).abs() <= b.abs() / 2048.0 + 1e-7, "{a} {b}");
        changed += usize::from(a != b);
    }
    assert!(changed > 10, "they are not rounded");
    // Biases do not change.
    let biases = vindex.biases(2).unwrap().unwrap();
    assert_eq!(biases.gate, layers()[2].0.biases.as_ref().unwrap().gate);
    let bytes = std::fs::metadata(path.join("gate_vectors.bin"))
        .unwrap()
        .len();
    assert_eq!(bytes, 2 * (7 + 4 + 7) * HIDDEN as u64);
    let mut writer = Writer::begin(&dir.path().join("b"), about(), build).unwrap();
    let great = [1.0, 1e6];
    let error = writer
        .push_tensor("x", TensorKind::Norm, &[2], &great)
        .unwrap_err();
    assert!(error.to_string().contains("float32"), "{error}");
}

/// A resumed build must write the same bytes as an uninterrupted build. This must hold for an
/// interruption after any number of layers. An interrupted build without `resume` must leave no
/// files.
#[test]
fn an_interrupted_build_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let uninterrupted = dir.path().join("whole");
    write_all(&uninterrupted, all(), 0).finish().unwrap();
    let read = |dir: &Path| {
        let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
        let mut all: Vec<_> = entries
            .map(|p| {
                (
                    p.file_name().unwrap().to_owned(),
                    std::fs::read(&p).unwrap(),
                )
            })
            .collect();
        all.sort();
        all
    };
    let resume = Build {
        resume: true,
        ..all()
    };
    for stop in 0..=3 {
        let path = dir.path().join(format!("stopped-{stop}"));
        let partial = dir.path().join(format!("stopped-{stop}.partial"));
        let mut writer = write_some(&path, resume, 0, stop);
        // Everything after the last complete layer is written again.
        let kind = TensorKind::Attention;
        writer.push_tensor("torn", kind, &[1], &[1.0]).unwrap();
        drop(writer);
        assert!(partial.is_dir() && !path.exists());
        // An interrupted write can leave bytes that are not in the journal.
        let mut torn = std::fs::read(partial.join("gate_vectors.bin")).unwrap();
        torn.extend([1, 2, 3]);
        std::fs::write(partial.join("gate_vectors.bin"), torn).unwrap();
        // A build with other settings must be refused here, and must not change the files.
        let other = Build {
            level: Level::Browse,
            ..resume
        };
        if stop > 0 {
            let error = Writer::begin(&path, about(), other).map(drop).unwrap_err();
            assert!(
                error.to_string().contains("another model or kind"),
                "{error}"
            );
        }
        let writer = write_all(&path, resume, stop);
        // Two concurrent builds must be refused, too.
        let error = Writer::begin(&path, about(), resume).map(drop).unwrap_err();
        assert!(error.to_string().contains("another process"), "{error}");
        writer.finish().unwrap();
        assert!(!partial.exists());
        assert_eq!(read(&path), read(&uninterrupted), "{stop}");
    }
    // Without `resume`, the files of another interrupted build are replaced, and none may remain.
    let path = dir.path().join("c");
    drop(write_all(&path, resume, 0));
    drop(write_all(&path, all(), 0));
    assert!(!path.exists() && !dir.path().join("c.partial").exists());
    // A damaged build must not be continued.
    drop(write_all(&path, resume, 0));
    let file = dir.path().join("c.partial/embeddings.bin");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[5] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let error = Writer::begin(&path, about(), resume).map(drop).unwrap_err();
    assert!(error.to_string().contains("damaged"), "{error}");
    assert!(file.exists());
    // A directory that no build made must not be touched.
    let mine = dir.path().join("d.partial");
    std::fs::create_dir(&mine).unwrap();
    std::fs::write(mine.join("text"), "mine").unwrap();
    let error = Writer::begin(&dir.path().join("d"), about(), all());
    assert!(error.is_err() && mine.join("text").exists());
}

/// A vindex without newer features must be written and read as in earlier versions.
#[test]
fn the_first_version_is_read_and_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vindex");
    write(&path);
    let text = std::fs::read_to_string(path.join("index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys: Vec<&str> = (index["index"].as_object().unwrap().keys())
        .map(String::as_str)
        .collect();
    assert_eq!(keys, ["version", "about", "down_top_k", "layers"]);
    assert_eq!(index["index"]["version"], 1);
    // The hash of version 1: these fields in this order.
    let of = |i: usize| {
        let l = &index["index"]["layers"][i];
        format!(
            r#"{{"num_features":{},"activation":{},"gated":{},"biased":{},"meta":{},"sha256":{}}}"#,
            l["num_features"], l["activation"], l["gated"], l["biased"], l["meta"], l["sha256"]
        )
    };
    let json = format!(
        r#"{{"version":1,"about":{{"model":"tiny","identity":"0123","family":"llama","hidden_size":5,"vocab_size":9}},"down_top_k":2,"layers":[{},{},{}]}}"#,
        of(0),
        of(1),
        of(2)
    );
    let digest = Sha256::digest(json.as_bytes());
    let digest: String = digest.iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(index["sha256"], digest.as_str());
    assert_eq!(Vindex::open(&path).unwrap().level(), Level::Inference);
}

#[test]
fn an_unfinished_one_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vindex");
    let mut writer = Writer::create(&path, about(), 2).unwrap();
    let (layer, tokens) = layers().remove(0);
    writer.push(&layer, &tokens).unwrap();
    assert!(!path.exists());
    drop(writer);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    // A complete vindex must not be overwritten.
    write(&path);
    assert!(Writer::create(&path, about(), 2).is_err());
    let empty = Writer::create(&dir.path().join("b"), about(), 2).unwrap();
    assert!(empty.finish().is_err());
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (layer, tokens) = layers().remove(0);
    let push = |layer: &Layer, tokens: &[Tokens]| {
        let path = dir.path().join("x");
        Writer::create(&path, about(), 2)
            .unwrap()
            .push(layer, tokens)
    };
    push(&layer, &tokens).unwrap();
    let changed = |change: &dyn Fn(&mut Layer)| {
        let mut layer = layer.clone();
        change(&mut layer);
        push(&layer, &tokens).unwrap_err()
    };
    changed(&|l| l.gate.truncate(3));
    changed(&|l| l.down.truncate(3));
    changed(&|l| l.up = Some(vec![0.0; 3]));
    changed(&|l| l.gate.clear());
    changed(&|l| {
        l.biases = Some(Biases {
            gate: vec![0.0; 7],
            up: None,
            down: vec![0.0; HIDDEN],
        });
    });
    push(&layer, &tokens[1..]).unwrap_err();
    push(&layer, &vec![vec![(0, 0.0); 3]; 7]).unwrap_err();
    let mut wide = about();
    wide.hidden_size = 0;
    assert!(Writer::create(&dir.path().join("y"), wide, 2).is_err());
    assert!(Writer::create(&dir.path().join("y"), about(), 256).is_err());
}

/// Changing any byte of any file must cause an error, at the latest when the byte is read.
#[test]
fn no_damaged_byte_goes_unseen() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.vindex");
    write_all(&path, all(), 0).finish().unwrap();
    let mut bytes_seen = 0;
    for entry in std::fs::read_dir(&path).unwrap() {
        let file = entry.unwrap().path();
        let original = std::fs::read(&file).unwrap();
        for at in 0..original.len() {
            let mut bytes = original.clone();
            bytes[at] ^= 1 << (at % 8);
            std::fs::write(&file, &bytes).unwrap();
            let result = Vindex::open(&path).and_then(|v| v.verify());
            // White space in the index may be replaced by other white space.
            let harmless = original[at].is_ascii_whitespace() && bytes[at].is_ascii_whitespace();
            assert!(result.is_err() || harmless, "{}, byte {at}", file.display());
            bytes_seen += 1;
        }
        for length in [0, 1, original.len() / 2, original.len().saturating_sub(1)] {
            if length == original.len() {
                continue;
            }
            std::fs::write(&file, &original[..length]).unwrap();
            assert!(Vindex::open(&path).is_err(), "{}, {length}", file.display());
        }
        let longer = [original.as_slice(), &[0]].concat();
        std::fs::write(&file, &longer).unwrap();
        assert!(Vindex::open(&path).is_err(), "{}", file.display());
        std::fs::remove_file(&file).unwrap();
        assert!(Vindex::open(&path).is_err(), "{}", file.display());
        std::fs::write(&file, &original).unwrap();
    }
    Vindex::open(&path).unwrap().verify().unwrap();
    assert!(bytes_seen > 2000, "{bytes_seen}");
}

#[test]
fn the_nearest_come_first_and_all_are_the_whole_part() {
    let x = noise(HIDDEN, 20);
    for (layer, tokens) in layers() {
        let features = tokens.len();
        let all = layer.nearest(&x, usize::MAX).unwrap();
        assert_eq!(all.len(), features);
        assert!(all.windows(2).all(|w| w[0].gate.abs() >= w[1].gate.abs()));
        for k in 0..features {
            assert_eq!(layer.nearest(&x, k).unwrap(), all[..k]);
        }
        // The definition, computed term by term.
        let bias = layer.biases.as_ref();
        let mut expected: Vec<f64> = match bias {
            Some(b) => b.down.iter().map(|v| f64::from(*v)).collect(),
            None => vec![0.0; HIDDEN],
        };
        for f in 0..features {
            let product = |rows: &[f32]| -> f64 {
                let row = &rows[f * HIDDEN..(f + 1) * HIDDEN];
                row.iter()
                    .zip(&x)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum()
            };
            let gate = product(&layer.gate) + bias.map_or(0.0, |b| f64::from(b.gate[f]));
            let opened = match layer.activation {
                Activation::Silu => gate / (1.0 + (-gate).exp()),
                Activation::Relu => gate.max(0.0),
                _ => {
                    let inner = 0.797_884_560_802_865_4 * (gate + 0.044_715 * gate * gate * gate);
                    0.5 * gate * (1.0 + inner.tanh())
                }
            };
            let up_bias = bias
                .and_then(|b| b.up.as_ref())
                .map_or(0.0, |b| f64::from(b[f]));
            let up = layer.up.as_ref().map_or(1.0, |up| product(up) + up_bias);
            for (h, sum) in expected.iter_mut().enumerate() {
                *sum += opened * up * f64::from(layer.down[f * HIDDEN + h]);
            }
        }
        let (y, taken) = layer.walk(&x, usize::MAX).unwrap();
        assert_eq!(taken.len(), features);
        for (y, expected) in y.iter().zip(&expected) {
            assert!((f64::from(*y) - expected).abs() < 1e-6, "{y} {expected}");
        }
        // Without features, only the bias remains.
        let (y, _) = layer.walk(&x, 0).unwrap();
        assert_eq!(y, bias.map_or(vec![0.0; HIDDEN], |b| b.down.clone()));
        assert!(layer.nearest(&x[1..], 1).is_err());
    }
}

/// Compares the exact GELU with values of scipy.special.erf.
#[test]
fn the_exact_gelu() {
    let layer = Layer {
        activation: Activation::Gelu,
        gate: vec![1.0],
        up: None,
        down: vec![1.0],
        biases: None,
        experts: None,
    };
    for (x, expected) in [
        (-3.0f32, -0.004_049_694),
        (-0.5, -0.154_268_77),
        (0.0, 0.0),
        (0.5, 0.345_731_23),
        (3.0, 2.995_950_3),
        (9.0, 9.0),
        (-9.0, 0.0),
    ] {
        let (y, _) = layer.walk(&[x], 1).unwrap();
        assert!((y[0] - expected).abs() < 1e-6, "{x}: {} {expected}", y[0]);
    }
}
