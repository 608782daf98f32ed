//! Tests that compiled steps compute the same as steps that are not compiled. On the CPU, graphs
//! are cached and simplified but not fused, so results must be equal bit for bit.

use inference::LoraConfig;
use metal_backend::train::{
    AdapterKind, Compile, OptimizerConfig, Params, Schedule, Sequence, StepReport, Trainer, Tuning,
};

use super::{models, rank};
use crate::training_common::{at_rate, batch, cpu, fixtures, load, tiny};

/// Returns `n` batches with `forms` different shapes in turn. Each batch has different tokens.
fn batches(n: u32, forms: u32) -> Vec<Vec<Sequence>> {
    let batch = |i: u32| {
        let mut batch = batch(2 + (i % forms) as usize);
        for sequence in &mut batch {
            for id in &mut sequence.ids {
                *id = 3 + (*id + i * 13) % 290;
            }
        }
        batch[0].from = 4;
        batch
    };
    (0..n).map(batch).collect()
}

/// Trains on these batches. Returns the reports, the parameters and the state of the optimizer.
fn trained(
    name: &str,
    config: &LoraConfig,
    kind: AdapterKind,
    tuning: Tuning,
    (steps, forms): (u32, u32),
) -> (Vec<StepReport>, Params, Params) {
    let compiled = tuning.compile == Compile::On;
    let mut trainer = load(name, config, kind, tuning);
    assert_eq!(trainer.is_compiled(), compiled);
    let reports = batches(steps, forms)
        .iter()
        .map(|batch| {
            trainer
                .step(batch)
                .unwrap_or_else(|e| panic!("{name}: {e}"))
        })
        .collect();
    let state = trainer.optimizer().state().clone();
    (reports, trainer.params(), state)
}

/// Checks that training with compiled steps gives the same results as without, for batches of
/// several shapes.
fn check(
    (name, what): (&str, &str),
    config: &LoraConfig,
    kind: AdapterKind,
    tuning: &Tuning,
    steps: (u32, u32),
) {
    let by = |compile| {
        let tuning = Tuning {
            compile,
            ..tuning.clone()
        };
        trained(name, config, kind, tuning, steps)
    };
    let (plain, compiled) = (by(Compile::Off), by(Compile::On));
    assert_eq!(plain.0, compiled.0, "{name}, {what}");
    assert!(plain.0.iter().any(|report| report.updated));
    for (expected, actual) in [(&plain.1, &compiled.1), (&plain.2, &compiled.2)] {
        assert!(expected.keys().eq(actual.keys()), "{name}, {what}");
        for (part, value) in expected {
            assert!(
                value.array_equal(&actual[part]).unwrap(),
                "{name}, {what}: {part} is another when compiled"
            );
        }
    }
}

#[test]
fn ten_compiled_steps_are_ten_steps() {
    if crate::alone::ran_elsewhere("training_paths::compiled::ten_compiled_steps_are_ten_steps") {
        return;
    }
    let plain = Tuning {
        schedule: Schedule::constant(1e-2).with_warmup(5, 0.0),
        ..Tuning::default()
    };
    let again = Tuning {
        checkpoint: true,
        ..plain.clone()
    };
    let gathering = Tuning {
        accumulation: 3,
        clip: Some(0.1),
        ..plain.clone()
    };
    let all = Tuning {
        checkpoint: true,
        ..gathering.clone()
    };
    let lora = LoraConfig::new().with_rank(4);
    let dropping = lora.clone().with_dropout(0.3);
    let (ten, kind) = ((10, 2), AdapterKind::Lora);
    // The models cover dense weights (MLX's matrix products) and quantized weights (our kernels).
    for name in ["llama", "llama-q4"] {
        for (what, config, tuning) in [
            ("plain", &lora, &plain),
            ("checkpoints", &lora, &again),
            ("accumulation and clipping", &lora, &gathering),
            ("dropout", &dropping, &plain),
            ("all of it", &dropping, &all),
        ] {
            check((name, what), config, kind, tuning, ten);
        }
    }
    // The models cover windows, and keys that pass between gradient checkpoints.
    for name in ["gemma3-text", "gemma4-small"] {
        check((name, "all of it"), &dropping, kind, &all, (6, 1));
    }
    let dora = AdapterKind::Dora;
    check(("llama", "dora"), &dropping, dora, &all, ten);
    let last = LoraConfig::new().with_num_layers(1);
    let full = AdapterKind::Full;
    check(("llama", "full"), &last, full, &gathering, ten);
}

#[test]
fn every_optimizer_compiles() {
    for optimizer in ["adamw", "adam", "sgd", "lion", "adafactor", "muon"] {
        let tuning = Tuning {
            optimizer: OptimizerConfig::from_name(optimizer).unwrap(),
            ..at_rate(1e-2)
        };
        let config = rank(2);
        check(
            ("llama", optimizer),
            &config,
            AdapterKind::Lora,
            &tuning,
            (4, 1),
        );
    }
    let nesterov = Tuning {
        optimizer: OptimizerConfig::Sgd {
            momentum: 0.9,
            weight_decay: 0.1,
            dampening: 0.0,
            nesterov: true,
        },
        ..at_rate(1e-2)
    };
    let (config, kind) = (rank(2), AdapterKind::Lora);
    check(("llama", "momentum"), &config, kind, &nesterov, (4, 1));
}

#[test]
fn every_architecture_compiles() {
    if crate::alone::ran_elsewhere("training_paths::compiled::every_architecture_compiles") {
        return;
    }
    for (name, targets) in models() {
        let config = rank(2).with_targets(targets);
        let (kind, tuning) = (AdapterKind::Lora, at_rate(1e-2));
        check((&name, "plain"), &config, kind, &tuning, (2, 1));
    }
}

#[test]
fn a_trainer_with_graphs_goes_to_another_thread() {
    let tuning = Tuning {
        compile: Compile::On,
        ..at_rate(1e-2)
    };
    let config = rank(2).with_targets(["q_proj"]);
    let mut trainer = load("llama", &config, AdapterKind::Lora, tuning);
    let first = trainer.step(&batch(2)).unwrap().loss;
    let elsewhere = std::thread::spawn(move || trainer.step(&batch(2)).unwrap().loss);
    assert!(elsewhere.join().unwrap() < first);
}

/// When the model's adapter is replaced, the graphs that contain the previous adapter must not be
/// used again.
#[test]
fn another_adapter_is_another_graph() {
    let by = |compile| {
        let tuning = Tuning {
            compile,
            ..at_rate(1e-3)
        };
        let config = rank(4).with_targets(["q_proj", "v_proj"]);
        let path = tiny("llama");
        let mut trainer = Trainer::load(&path, &cpu(), &config, AdapterKind::Lora, tuning).unwrap();
        let mut losses = vec![trainer.step(&batch(2)).unwrap().loss];
        for other in ["llama-1", "llama-4"] {
            let dir = fixtures().join("training").join(other);
            let trainable = trainer.model().as_trainable().unwrap();
            trainable.load_adapter(&dir).unwrap();
            losses.extend((0..2).map(|_| trainer.step(&batch(2)).unwrap().loss));
        }
        losses
    };
    let plain = by(Compile::Off);
    assert_eq!(plain, by(Compile::On));
    assert!(plain[1] != plain[0] && plain[3] != plain[1], "{plain:?}");
}
