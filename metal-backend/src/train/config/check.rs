//! Validation of a whole config.

use inference::Result;

use super::{BatchOrder, LrSchedule, Method, TrainConfig, bad};

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
            // Packing already keeps the order of the file, so the second option would have no
            // effect.
            return Err(bad(
                "pack keeps the order of lines already; leave keep_order out",
            ));
        }
        if self.keep_order && self.batch_order == BatchOrder::MlxLm {
            return Err(bad(
                "keep_order and batch_order mlx-lm are two orders; leave one out",
            ));
        }
        if self.pack && self.batch_order != BatchOrder::Length {
            return Err(bad("pack has an order of its own; leave batch_order out"));
        }
        match self.method {
            Method::Sft => {}
            Method::Dpo if self.pack => {
                return Err(bad("pairs of replies are not packed; leave pack out"));
            }
            Method::Dpo if self.batch_order == BatchOrder::MlxLm => {
                return Err(bad(
                    "mlx-lm has no dpo, so there is no order of its batches; leave batch_order out",
                ));
            }
            Method::Dpo => {
                let (beta, smoothing) = (self.beta, self.label_smoothing);
                if !(beta.is_finite() && beta > 0.0) {
                    return Err(bad(format!("beta is {beta}; it must be a number above 0")));
                }
                if !(0.0..0.5).contains(&smoothing) {
                    return Err(bad(format!(
                        "label_smoothing is {smoothing}; it must lie in 0 to below 0.5"
                    )));
                }
            }
        }
        self.lr_schedule
            .as_ref()
            .map_or(Ok(()), LrSchedule::validate)
    }
}
