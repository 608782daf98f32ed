//! The options and data that determine a run's results. A resumed run must have the same values.

use inference::Result;
use inference_formats::hex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::config::TrainConfig;
use super::dataset::Example;
use super::examples::Examples;
use super::objective::Objective;
use super::step::Trainer;

/// Returns all options that determine a run's results, except the run's length.
pub(super) fn settings(
    trainer: &Trainer,
    config: &TrainConfig,
    examples: &Examples,
) -> Result<Value> {
    let mut hash = Sha256::new();
    let mut add = |example: &Example| {
        hash.update((example.len() as u64).to_le_bytes());
        hash.update(bytemuck::cast_slice::<u32, u8>(&example.ids));
        for part in &example.parts {
            for n in [part.range.start, part.range.end, part.offset] {
                hash.update((n as u64).to_le_bytes());
            }
        }
    };
    match examples {
        Examples::Texts(examples) => examples.iter().for_each(add),
        Examples::Pairs(pairs) => {
            for pair in pairs {
                add(&pair.chosen);
                add(&pair.rejected);
            }
        }
        Examples::Verdicts(verdicts) => {
            for verdict in verdicts {
                add(&verdict.example);
                // The label is part of the data, so it enters the hash.
                add(&Example::new(vec![u32::from(verdict.desirable)], 0));
            }
        }
        Examples::Prompts(prompts) => {
            for prompt in prompts {
                add(&Example::new(prompt.ids.clone(), 0));
            }
        }
        Examples::Related(examples) => {
            for example in examples {
                hash.update((example.negatives.len() as u64).to_le_bytes());
                for text in example.texts() {
                    hash.update((text.len() as u64).to_le_bytes());
                    hash.update(bytemuck::cast_slice::<u32, u8>(text));
                }
            }
        }
    }
    let digest = hex(&hash.finalize());
    let info = trainer.model().info();
    let tuning = trainer.tuning();
    let mut settings = json!({
        "architecture": info.architecture,
        "parameters": info.parameters,
        "data": digest,
        "fine_tune_type": config.fine_tune_type,
        "lora_parameters": config.lora_parameters,
        "num_layers": config.num_layers,
        "resume_adapter_file": config.resume_adapter_file,
        "optimizer": tuning.optimizer,
        "learning rate": tuning.schedule,
        "grad_accumulation_steps": tuning.accumulation,
        "max_grad_norm": tuning.clip,
        "seed": config.seed,
        "batch_size": config.batch_size,
        "max_seq_length": config.max_seq_length,
        "keep_order": config.keep_order,
    });
    // Default settings are omitted, so that older files still match.
    match config.objective() {
        Objective::Sft => {}
        Objective::Dpo {
            beta,
            label_smoothing,
        } => settings["dpo"] = json!({"beta": beta, "label_smoothing": label_smoothing}),
        Objective::Orpo { beta, learn_prompt } => {
            settings["orpo"] = json!({"beta": beta, "mask_prompt": !learn_prompt});
        }
        Objective::Kto(kto) => {
            settings["kto"] = json!({
                "beta": kto.beta,
                "desirable_weight": kto.desirable_weight,
                "undesirable_weight": kto.undesirable_weight,
            });
        }
        Objective::Grpo(grpo, sampling) => {
            settings["grpo"] = json!({
                "beta": grpo.beta,
                "temperature": grpo.temperature,
                "loss_type": grpo.loss_type,
                "max_completion_length": grpo.max_completion_length,
                "num_generations": sampling.num_generations,
                "top_p": sampling.top_p,
                "scale_rewards": sampling.scale_rewards,
                "reward_command": config.reward_command,
            });
            if sampling.num_iterations > 1 {
                settings["num_iterations"] = json!(sampling.num_iterations);
                settings["epsilon"] = json!([grpo.epsilon, grpo.epsilon_high]);
            }
        }
        Objective::Contrastive { scale } => {
            settings["contrastive"] = json!({"similarity_scale": scale});
        }
    }
    if config.batch_order != Default::default() {
        settings["batch_order"] = json!(config.batch_order);
    }
    // Fused operations may round differently. The field is omitted if steps are not compiled, so
    // that older files still match.
    if trainer.is_compiled() {
        settings["compiled"] = json!(true);
    }
    Ok(settings)
}
