//! Tests that training needs no more memory after 500 steps than after 50 steps, and that
//! recomputing blocks lowers the peak.
//!
//! The memory counters apply to the whole process, so this test runs in a separate process.

use crate::training_common::{batch, cpu, tiny};
use inference::LoraConfig;
use metal_backend::train::{AdapterKind, Compile, Schedule, Sequence, Trainer, Tuning};
use mlx_rs_core::memory;

fn trainer(name: &str, tuning: Tuning) -> Trainer {
    let config = LoraConfig::new().with_dropout(0.1);
    Trainer::load(&tiny(name), &cpu(), &config, AdapterKind::Lora, tuning).unwrap()
}

#[test]
fn training_stays_flat_and_checkpoints_lower_its_peak() {
    crate::alone::alone(
        "training_memory::training_stays_flat_and_checkpoints_lower_its_peak",
        training_stays_flat_and_checkpoints_lower_its_peak_alone,
    );
}

fn training_stays_flat_and_checkpoints_lower_its_peak_alone() {
    // The options cover everything that a step may keep in memory: accumulated gradients, clipping,
    // a changing learning rate, and dropout. Compiled runs also keep a graph for each shape of a
    // batch.
    let empty = memory::live_arrays();
    for (compile, rounds) in [(Compile::Off, 10), (Compile::On, 4)] {
        let tuning = Tuning {
            schedule: Schedule::constant(1e-3).with_warmup(100, 0.0),
            accumulation: 2,
            clip: Some(1.0),
            compile,
            ..Tuning::default()
        };
        let mut run = trainer("llama-q4", tuning);
        let batch = batch(2);
        let mut at = |steps: usize| {
            for _ in 0..steps {
                run.step(&batch).unwrap();
            }
            (memory::live_arrays(), memory::active().unwrap())
        };
        let (handles, bytes) = at(50);
        for round in 1..rounds {
            let (now, used) = at(50);
            assert!(
                (now - handles).abs() <= 8,
                "{compile:?}: {handles} handles grew to {now} after {} steps",
                50 * (round + 1)
            );
            assert!(
                used <= bytes + (64 << 10),
                "{compile:?}: {bytes} bytes grew to {used} after {} steps",
                50 * (round + 1)
            );
        }
        drop(run);
        assert!(memory::live_arrays() <= empty + 8, "{compile:?}");
    }

    // With seven blocks and long sequences, most of the memory contains values for the backward
    // pass.
    let long: Vec<Sequence> = (0..2u32)
        .map(|i| Sequence::new((0..240).map(|j| 3 + (i * 37 + j * j * 11) % 290).collect()))
        .collect();
    let peak = |checkpoint: bool| {
        let tuning = Tuning {
            checkpoint,
            ..Tuning::default()
        };
        let mut trainer = trainer("gemma3-text", tuning);
        trainer.step(&long).unwrap();
        memory::clear_cache().unwrap();
        let before = memory::active().unwrap();
        memory::reset_peak().unwrap();
        trainer.step(&long).unwrap();
        memory::peak().unwrap() - before
    };
    let (without, again) = (peak(false), peak(true));
    println!("peak of a step above what stays: {without} bytes, with checkpoints {again}");
    assert!(
        again * 10 < without * 7,
        "checkpoints leave {again} of {without} bytes; less than 70% is expected"
    );
}
