//! Tests training of encoders on pairs of related texts. Compares losses and parameters with
//! sentence-transformers on torch (`tools/golden/contrastive.py`), and gradients with finite
//! differences.

use std::path::PathBuf;

use inference::{EmbedOptions, ErrorKind, Interrupt, LoadOptions, LoraConfig, Prompt, TextModel};
use metal_backend::train::{
    self, AdapterKind, OptimizerConfig, Params, RelatedTexts, Trainer, Tuning,
};
use mlx_rs_core::Array;
use serde_json::Value;

use crate::training_common::{
    at_rate, cpu, distance, disturb, fixtures, floats, length, read, tiny,
};

/// The encoders, each with names of projections that adapters can train.
const ENCODERS: [(&str, &[&str]); 8] = [
    ("bert", &["query", "key", "intermediate.dense"]),
    ("bert-dense", &["value", "output.dense"]),
    ("roberta", &["query", "value"]),
    ("xlm-roberta", &["query", "output.dense"]),
    ("modernbert", &["Wqkv", "Wi", "Wo"]),
    ("nomic-bert", &["Wqkv", "fc11", "fc12", "fc2"]),
    ("jina-bert-code", &["query", "up_gated_layer", "down_layer"]),
    ("embeddinggemma", &["q_proj", "k_proj", "gate_proj"]),
];

fn encoder(name: &str) -> PathBuf {
    fixtures().join("encoders").join(name)
}

fn load(name: &str, lora: &LoraConfig, kind: AdapterKind, tuning: Tuning) -> Trainer {
    Trainer::load(&encoder(name), &cpu(), lora, kind, tuning)
        .unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn plain_sgd(rate: f32) -> Tuning {
    Tuning {
        optimizer: OptimizerConfig::Sgd {
            momentum: 0.0,
            weight_decay: 0.0,
            dampening: 0.0,
            nesterov: false,
        },
        ..at_rate(rate)
    }
}

fn ids(model: &dyn TextModel, text: &str) -> Vec<u32> {
    let embedder = model.as_embedding_model().unwrap();
    embedder
        .embedding_tokens(&Prompt::from(text), &EmbedOptions::new())
        .unwrap()
}

fn example(
    model: &dyn TextModel,
    anchor: &str,
    positive: &str,
    negatives: &[&str],
) -> RelatedTexts {
    RelatedTexts {
        anchor: ids(model, anchor),
        positive: ids(model, positive),
        negatives: negatives.iter().map(|text| ids(model, text)).collect(),
    }
}

/// Questions with their answers.
const PAIRS: [(&str, &str); 4] = [
    ("Where does water go?", "Rivers carry water to the sea."),
    ("What is bread made of?", "flour, water, salt and yeast"),
    ("the capital of France", "Paris"),
    ("Who sleeps?", "A cat on the window sill."),
];

fn pairs(model: &dyn TextModel) -> Vec<RelatedTexts> {
    PAIRS
        .iter()
        .map(|(anchor, positive)| example(model, anchor, positive, &[]))
        .collect()
}

fn vectors(model: &dyn TextModel, texts: &[&str]) -> Vec<Vec<f32>> {
    let prompts: Vec<Prompt> = texts.iter().map(|text| Prompt::from(*text)).collect();
    let options = EmbedOptions::new().with_normalize(true);
    let embedder = model.as_embedding_model().unwrap();
    embedder
        .embed(&prompts, &options, &Interrupt::new())
        .unwrap()
}

#[test]
fn encoders_learn_as_with_sentence_transformers() {
    let golden = read(&fixtures().join("training/contrastive.json"));
    let number = |value: &Value| value.as_f64().unwrap() as f32;
    let rank = golden["rank"].as_u64().unwrap() as usize;
    let runs = golden["runs"].as_array().unwrap();
    // transformers does not have JinaBERT, so there are no reference values for it.
    let known = ENCODERS
        .iter()
        .filter(|(name, _)| !name.starts_with("jina"));
    assert_eq!(runs.len(), known.count());
    for run in runs {
        let name = run["name"].as_str().unwrap();
        let targets = run["targets"].as_array().unwrap().iter();
        let lora = LoraConfig::new()
            .with_rank(rank)
            .with_alpha(number(&golden["scale"]) * rank as f32)
            .with_targets(targets.map(|t| t.as_str().unwrap().to_owned()));
        let tuning = plain_sgd(number(&run["rate"]));
        let mut trainer = load(name, &lora, AdapterKind::Lora, tuning);
        // Names in the file do not have prefixes such as `model.`.
        let of = |values: &Value, name: &str| {
            let all = values.as_object().unwrap().iter();
            let mut found = all.filter(|(key, _)| name.ends_with(key.as_str()));
            let (_, values) = found
                .next()
                .unwrap_or_else(|| panic!("{name} is not golden"));
            floats(values)
        };
        let start: Params = trainer
            .params()
            .into_iter()
            .map(|(name, param)| {
                let numbers = of(&run["start"], &name);
                let start = Array::from_slice(&numbers, param.shape()).unwrap();
                (name, start)
            })
            .collect();
        assert_eq!(
            start.len(),
            run["start"].as_object().unwrap().len(),
            "{name}"
        );
        trainer.restore(&start, Params::new(), 0, 0).unwrap();

        let scale = number(&run["similarity_scale"]);
        let losses = floats(&run["losses"]);
        for (batch, expected) in golden["batches"].as_array().unwrap().iter().zip(losses) {
            let text = |line: &Value, field: &str| line[field].as_str().map(str::to_owned);
            let batch: Vec<RelatedTexts> = (batch.as_array().unwrap().iter())
                .map(|line| {
                    let (anchor, positive) = (text(line, "anchor"), text(line, "positive"));
                    let negative = text(line, "negative");
                    let negatives: Vec<&str> = negative.as_deref().into_iter().collect();
                    let (anchor, positive) = (anchor.unwrap(), positive.unwrap());
                    example(trainer.model(), &anchor, &positive, &negatives)
                })
                .collect();
            let report = trainer.step_by_similarity(&batch, scale).unwrap();
            assert!(
                (report.loss - expected).abs() < 1e-4 * expected.max(1.0) && report.updated,
                "{name}: {} {expected}",
                report.loss
            );
        }
        for (part, param) in trainer.params() {
            let got = param.to_f32_vec().unwrap();
            let expected = of(&run["end"], &part);
            let moved = distance(&expected, &start[&part].to_f32_vec().unwrap());
            assert!(moved > 1e-4, "{name}: {part} did not move: {moved}");
            let error = distance(&got, &expected);
            assert!(
                error < 1e-3 * moved.max(0.1),
                "{name}: {part}: {error}, {moved}"
            );
        }
    }
}

/// The gradients of all adapter parameters must equal finite differences, also with gradient
/// checkpointing. In DoRA, the gradients of A and B intentionally omit a term, so only those of the
/// magnitudes are compared.
#[test]
fn gradients_of_encoders_are_slopes() {
    if crate::alone::ran_elsewhere("training_encoders::gradients_of_encoders_are_slopes") {
        return;
    }
    for (name, targets) in ENCODERS {
        let lora = LoraConfig::new()
            .with_rank(2)
            .with_targets(targets.iter().copied());
        for kind in [AdapterKind::Lora, AdapterKind::Dora] {
            let mut trainer = load(name, &lora, kind, at_rate(1e-2));
            disturb(&mut trainer);
            let batch = pairs(trainer.model());
            let (_, gradients) = trainer.similarity_gradients(&batch, 5.0).unwrap();
            let params = trainer.params();
            assert_eq!(gradients.len(), params.len());
            let compared = |part: &str| kind == AdapterKind::Lora || part.ends_with(".m");
            for (part, gradient) in gradients.iter().filter(|(part, _)| compared(part)) {
                let long = length(gradient);
                assert!(long.is_finite() && long > 0.0, "{name} {part}: {long}");
                let along = gradient
                    .multiply(&Array::scalar(1.0 / long).unwrap())
                    .unwrap();
                let mut loss = |step: f32| {
                    let step = along.multiply(&Array::scalar(step).unwrap()).unwrap();
                    let mut all = params.clone();
                    all.insert(part.clone(), params[part].add(&step).unwrap());
                    trainer.restore(&all, Params::new(), 0, 0).unwrap();
                    let evaluation = trainer.evaluate_similarity(&batch, 5.0).unwrap();
                    evaluation.loss / evaluation.items as f64
                };
                // If the loss is flat, short steps are inaccurate because of rounding. If it is
                // steep, long steps are inaccurate because of its curvature. So several step
                // lengths are tried.
                let mut slope = |step: f32| (loss(step) - loss(-step)) / (2.0 * f64::from(step));
                let mut tried: Vec<f64> = Vec::new();
                let agrees = [1e-2f32, 3e-3, 3e-2, 1e-3].into_iter().any(|step| {
                    let slope = slope(step);
                    tried.push(slope);
                    let off = (slope - f64::from(long)).abs();
                    off < 2e-2 * f64::from(long) + 1e-4
                });
                assert!(agrees, "{name} {part}: {long} {tried:?}");
            }
            trainer.restore(&params, Params::new(), 0, 0).unwrap();
            let again = Tuning {
                checkpoint: true,
                ..at_rate(1e-2)
            };
            let mut other = load(name, &lora, kind, again);
            other.restore(&params, Params::new(), 0, 0).unwrap();
            let (_, again) = other.similarity_gradients(&batch, 5.0).unwrap();
            for (part, gradient) in again {
                assert!(
                    gradient.all_close(&gradients[&part], 1e-4, 1e-6).unwrap(),
                    "{name}: {part} is another with checkpoints"
                );
            }
        }
    }
}

/// A trained adapter must give the same vectors after saving, loading and fusing, and must rank the
/// answers of the training data first.
#[test]
fn retrieval_improves_and_adapters_survive_their_files() {
    if crate::alone::ran_elsewhere(
        "training_encoders::retrieval_improves_and_adapters_survive_their_files",
    ) {
        return;
    }
    let questions = PAIRS.map(|(question, _)| question);
    let answers = PAIRS.map(|(_, answer)| answer);
    let right = |model: &dyn TextModel| {
        let (questions, answers) = (vectors(model, &questions), vectors(model, &answers));
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let best = |question: &Vec<f32>| {
            let scores = answers.iter().map(|answer| dot(question, answer));
            let best = scores.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
            best.unwrap().0
        };
        let found = questions.iter().map(best);
        found.enumerate().filter(|(i, best)| i == best).count()
    };
    for (name, targets) in ENCODERS {
        let lora = LoraConfig::new()
            .with_rank(4)
            .with_targets(targets.iter().copied());
        let mut trainer = load(name, &lora, AdapterKind::Lora, at_rate(1e-2));
        let before = right(trainer.model());
        assert!(before < PAIRS.len(), "{name} knows all already");
        let untrained = vectors(trainer.model(), &answers);
        let batch = pairs(trainer.model());
        let losses: Vec<f32> = (0..60)
            .map(|_| trainer.step_by_similarity(&batch, 20.0).unwrap().loss)
            .collect();
        assert!(losses[59] < 0.5 * losses[0], "{name}: {losses:?}");
        assert_eq!(right(trainer.model()), PAIRS.len(), "{name}: {losses:?}");
        let evaluation = trainer.evaluate_similarity(&batch, 20.0).unwrap();
        assert_eq!((evaluation.items, evaluation.correct), (4, 4));

        let trained = vectors(trainer.model(), &answers).concat();
        assert!(distance(&trained, &untrained.concat()) > 1e-2);
        let dirs = tempfile::tempdir().unwrap();
        trainer.save(dirs.path()).unwrap();
        let options = cpu().with_adapter_path(dirs.path());
        let loaded = inference::load_model(encoder(name), &options).unwrap();
        let error = distance(&vectors(loaded.as_ref(), &answers).concat(), &trained);
        assert!(error < 1e-4, "{name}, loaded: {error}");
        let fused = dirs.path().join("fused");
        assert!(train::fuse(&encoder(name), dirs.path(), &fused).unwrap() > 0);
        let fused = inference::load_model(fused, &cpu()).unwrap();
        let error = distance(&vectors(fused.as_ref(), &answers).concat(), &trained);
        assert!(error < 1e-3, "{name}, fused: {error}");

        // The public trait loads and removes the adapter of a running model.
        let model = inference::load_model(encoder(name), &cpu()).unwrap();
        let trainable = model.as_trainable().unwrap();
        trainable.load_adapter(dirs.path()).unwrap();
        let error = distance(&vectors(model.as_ref(), &answers).concat(), &trained);
        assert!(error < 1e-4, "{name}, exchanged: {error}");
        trainable.remove_adapter().unwrap();
        let removed = vectors(model.as_ref(), &answers).concat();
        let error = distance(&removed, &untrained.concat());
        assert!(error < 1e-5, "{name}, removed: {error}");
    }
}

/// Another example may have the same text as its positive. This text must not count as a negative.
#[test]
fn equal_positives_do_not_compete() {
    let lora = LoraConfig::new().with_rank(2).with_targets(["query"]);
    let trainer = load("bert", &lora, AdapterKind::Lora, at_rate(1e-2));
    let model = trainer.model();
    let one = example(model, "water", "Rivers carry water.", &["a fox"]);
    let other = example(model, "rivers", "Rivers carry water.", &["bread"]);
    let loss = |batch: &[RelatedTexts]| trainer.evaluate_similarity(batch, 20.0).unwrap().loss;
    let both = loss(&[one.clone(), other.clone()]);
    let with = |one: &RelatedTexts, other: &RelatedTexts| RelatedTexts {
        negatives: [one.negatives.clone(), other.negatives.clone()].concat(),
        ..one.clone()
    };
    let alone = loss(&[with(&one, &other)]) + loss(&[with(&other, &one)]);
    assert!((both - alone).abs() < 1e-4, "{both} {alone}");
}

#[test]
fn what_encoders_cannot_do_is_refused() {
    let lora = LoraConfig::new().with_rank(2).with_targets(["query"]);
    let mut trainer = load("bert", &lora, AdapterKind::Lora, at_rate(1e-2));
    let one = example(trainer.model(), "water", "rivers", &[]);
    let long = RelatedTexts {
        anchor: vec![5; 100],
        ..one.clone()
    };
    let unknown = RelatedTexts {
        positive: vec![1_000_000],
        ..one.clone()
    };
    for batch in [
        vec![],
        vec![one.clone()],
        vec![one.clone(), long],
        vec![one.clone(), unknown],
    ] {
        let error = trainer.step_by_similarity(&batch, 20.0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
    let two = [one.clone(), example(trainer.model(), "bread", "salt", &[])];
    for scale in [0.0, -1.0, f32::NAN] {
        assert!(trainer.step_by_similarity(&two, scale).is_err());
    }
    let sequence = train::Sequence::new(one.anchor.clone());
    assert!(trainer.step(&[sequence]).is_err());
    let lora = LoraConfig::new().with_rank(2);
    let kind = AdapterKind::Lora;
    let mut decoder = Trainer::load(&tiny("llama"), &cpu(), &lora, kind, at_rate(1e-2)).unwrap();
    let two = two.map(|one| RelatedTexts {
        anchor: vec![5, 6],
        positive: vec![one.positive[0] % 50],
        negatives: Vec::new(),
    });
    let error = decoder.step_by_similarity(&two, 20.0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let targets = LoraConfig::new().with_targets(["q_proj"]);
    let options: LoadOptions = cpu();
    let error = Trainer::load(&encoder("bert"), &options, &targets, kind, at_rate(1e-2)).err();
    assert!(error.unwrap().to_string().contains("query"));
}
