//! Validates a complete configuration.

use inference::Result;

use super::{BatchOrder, LrSchedule, Method, TrainConfig, bad};
use crate::train::Compile;
use crate::train::loss::LossType;

impl TrainConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// `InvalidOption`, with the field, its value and the allowed values.
    pub fn validate(&self) -> Result<()> {
        let at_least_one = [
            ("batch_size", self.batch_size as u64),
            ("iters", self.iters),
            ("steps_per_report", self.steps_per_report),
            ("steps_per_eval", self.steps_per_eval),
            ("save_every", self.save_every),
            (
                "grad_accumulation_steps",
                self.grad_accumulation_steps as u64,
            ),
            ("lora_parameters.rank", self.lora_parameters.rank as u64),
        ];
        if let Some((name, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(bad(format!("{name} is 0; it must be at least 1")));
        }
        let counts = [
            ("num_layers", self.num_layers),
            ("val_batches", self.val_batches),
            ("test_batches", self.test_batches),
        ];
        if let Some((name, value)) = counts.iter().find(|(_, value)| *value < -1) {
            return Err(bad(format!(
                "{name} is {value}; it must be a positive number, or -1 for all"
            )));
        }
        if self.max_seq_length < 2 {
            let have = self.max_seq_length;
            return Err(bad(format!(
                "max_seq_length is {have}; it must be at least 2"
            )));
        }
        let rates = [
            Some(("learning_rate", self.learning_rate)),
            self.max_grad_norm.map(|n| ("max_grad_norm", n)),
        ];
        for (name, value) in rates.into_iter().flatten() {
            if !(value.is_finite() && value > 0.0) {
                return Err(bad(format!(
                    "{name} is {value}; it must be a number above 0"
                )));
            }
        }
        let lora = &self.lora_parameters;
        if !(0.0..1.0).contains(&lora.dropout) {
            let have = lora.dropout;
            return Err(bad(format!(
                "lora_parameters.dropout is {have}; it must lie in 0 to below 1"
            )));
        }
        if !lora.scale.is_finite() {
            let have = lora.scale;
            return Err(bad(format!(
                "lora_parameters.scale is {have}; it must be a number"
            )));
        }
        if lora
            .keys
            .as_ref()
            .is_some_and(|k| k.is_empty() || k.iter().any(String::is_empty))
        {
            return Err(bad(
                "lora_parameters.keys must name at least one projection, none empty; leave it out for all",
            ));
        }
        if self.pack && self.keep_order {
            // Packing always keeps the order of the file, so `keep_order` would have no effect.
            return Err(bad(
                "pack keeps the order of lines already; leave keep_order out",
            ));
        }
        if self.keep_order && self.batch_order == BatchOrder::MlxLm {
            return Err(bad(
                "keep_order and batch_order mlx-lm are two orders; leave one out",
            ));
        }
        if self.keep_order && self.batch_order == BatchOrder::Random {
            return Err(bad(
                "keep_order and batch_order random are two orders; leave one out",
            ));
        }
        if self.pack && self.batch_order != BatchOrder::Length {
            return Err(bad("pack has an order of its own; leave batch_order out"));
        }
        self.check_method()?;
        if self.early_stopping_patience == Some(0) {
            return Err(bad("early_stopping_patience is 0; it must be at least 1"));
        }
        let threshold = self.early_stopping_threshold;
        if !(threshold.is_finite() && threshold >= 0.0) {
            return Err(bad(format!(
                "early_stopping_threshold is {threshold}; it must be a number from 0"
            )));
        }
        if threshold > 0.0 && self.early_stopping_patience.is_none() {
            return Err(bad(
                "early_stopping_threshold means nothing without early_stopping_patience",
            ));
        }
        if self.early_stopping_patience.is_some() && self.val_batches == 0 {
            return Err(bad(
                "early_stopping_patience needs validations, and val_batches is 0",
            ));
        }
        self.lr_schedule
            .as_ref()
            .map_or(Ok(()), LrSchedule::validate)
    }
    /// Checks the options of the training method.
    fn check_method(&self) -> Result<()> {
        let method = self.method.name();
        if self.method == Method::Sft {
            return Ok(());
        }
        self.check_unused()?;
        if self.pack {
            return Err(bad(format!(
                "the examples of {method} are not packed; leave pack out"
            )));
        }
        if self.compile == Compile::On {
            return Err(bad(format!(
                "steps of {method} are not compiled; leave compile out"
            )));
        }
        if self.batch_order == BatchOrder::MlxLm {
            return Err(bad(format!(
                "mlx-lm has no {method}, so there is no order of its batches; leave batch_order out"
            )));
        }
        // ORPO also computes the cross-entropy of the better replies, with or without their
        // prompts, so `mask_prompt` has an effect.
        if self.mask_prompt && self.method != Method::Orpo {
            return Err(bad(match self.method {
                Method::Contrastive => {
                    String::from("contrastive compares whole texts; leave mask_prompt out")
                }
                _ => format!("{method} never learns prompts; leave mask_prompt out"),
            }));
        }
        let above_0 = match self.method {
            Method::Contrastive => ("similarity_scale", self.similarity_scale),
            _ => ("beta", self.beta()),
        };
        let may_be_0 = self.method == Method::Grpo && above_0.1 == 0.0;
        if !(above_0.1.is_finite() && (above_0.1 > 0.0 || may_be_0)) {
            return Err(bad(format!(
                "{} is {}; it must be a number above 0",
                above_0.0, above_0.1
            )));
        }
        if self.method == Method::Kto && self.batch_size < 2 {
            return Err(bad(
                "kto needs a batch_size of at least 2, because each prompt is also paired with \
                 another reply",
            ));
        }
        if self.method == Method::Grpo {
            self.check_grpo()?;
        }
        let weights = [
            ("desirable_weight", self.desirable_weight),
            ("undesirable_weight", self.undesirable_weight),
        ];
        if let Some((name, weight)) = weights.iter().find(|(_, w)| !(w.is_finite() && *w >= 0.0)) {
            return Err(bad(format!(
                "{name} is {weight}; it must be a number from 0"
            )));
        }
        let smoothing = self.label_smoothing;
        if !(0.0..0.5).contains(&smoothing) {
            return Err(bad(format!(
                "label_smoothing is {smoothing}; it must lie in 0 to below 0.5"
            )));
        }
        Ok(())
    }

    fn check_grpo(&self) -> Result<()> {
        if self.num_generations < 2 {
            return Err(bad(format!(
                "num_generations is {}; it must be at least 2, because replies are compared",
                self.num_generations
            )));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(bad(format!(
                "top_p is {}; it must be above 0 and at most 1",
                self.top_p
            )));
        }
        if self.num_iterations == 0 {
            return Err(bad("num_iterations is 0; it must be at least 1"));
        }
        self.grpo().check().map_err(bad)?;
        let bounds = self.epsilon != Self::default().epsilon || self.epsilon_high.is_some();
        if bounds && self.num_iterations == 1 {
            return Err(bad(
                "epsilon and epsilon_high bound the ratio of probabilities, which is 1 with \
                 num_iterations 1; leave them out, or use num_iterations of at least 2",
            ));
        }
        if self.loss_type == LossType::Dapo && self.grad_accumulation_steps > 1 {
            return Err(bad(
                "loss_type dapo divides by the tokens of all batches of an update, so \
                 grad_accumulation_steps must be 1; use loss_type bnpo",
            ));
        }
        if self.test {
            return Err(bad("grpo has no test; leave test out"));
        }
        if self.early_stopping_patience.is_some() {
            return Err(bad(
                "grpo has no validations; leave early_stopping_patience out",
            ));
        }
        Ok(())
    }

    /// Returns an error for changed options that [`TrainConfig::method`] does not use.
    pub(in crate::train) fn check_unused(&self) -> Result<()> {
        use Method::{Contrastive, Dpo, Grpo, Kto, Orpo};
        let default = Self::default();
        let changed: [(&str, bool, &[Method]); 17] = [
            ("beta", self.beta.is_some(), &[Dpo, Orpo, Kto, Grpo]),
            ("reward_command", self.reward_command.is_some(), &[Grpo]),
            (
                "num_generations",
                self.num_generations != default.num_generations,
                &[Grpo],
            ),
            (
                "max_completion_length",
                self.max_completion_length != default.max_completion_length,
                &[Grpo],
            ),
            (
                "temperature",
                self.temperature != default.temperature,
                &[Grpo],
            ),
            ("top_p", self.top_p != default.top_p, &[Grpo]),
            (
                "scale_rewards",
                self.scale_rewards != default.scale_rewards,
                &[Grpo],
            ),
            ("loss_type", self.loss_type != default.loss_type, &[Grpo]),
            (
                "num_iterations",
                self.num_iterations != default.num_iterations,
                &[Grpo],
            ),
            ("epsilon", self.epsilon != default.epsilon, &[Grpo]),
            ("epsilon_high", self.epsilon_high.is_some(), &[Grpo]),
            (
                "label_smoothing",
                self.label_smoothing != default.label_smoothing,
                &[Dpo],
            ),
            (
                "desirable_weight",
                self.desirable_weight != default.desirable_weight,
                &[Kto],
            ),
            (
                "undesirable_weight",
                self.undesirable_weight != default.undesirable_weight,
                &[Kto],
            ),
            (
                "similarity_scale",
                self.similarity_scale != default.similarity_scale,
                &[Contrastive],
            ),
            (
                "anchor_prompt_name",
                self.anchor_prompt_name.is_some(),
                &[Contrastive],
            ),
            (
                "positive_prompt_name",
                self.positive_prompt_name.is_some(),
                &[Contrastive],
            ),
        ];
        let unused = changed
            .iter()
            .find(|(_, given, methods)| *given && !methods.contains(&self.method));
        match unused {
            None => Ok(()),
            Some((name, _, methods)) => {
                let names: Vec<String> = methods.iter().map(|m| m.name()).collect();
                Err(bad(format!(
                    "{name} is about method {}, and the method is {}; leave it out",
                    names.join(", "),
                    self.method.name()
                )))
            }
        }
    }
}
