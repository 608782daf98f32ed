//! The types of options that are neither numbers nor plain text.

use std::ffi::OsStr;

use inference::Result;
use serde::de::Deserializer;
use serde::{Deserialize, Serialize};

use super::bad;
use super::option::{OptionValue, named};
use crate::train::Compile;
use crate::train::loss::LossType;

/// Implements [`OptionValue`] for an enum. The values' names must equal their names in serde.
macro_rules! choice {
    ($type:ident: $($name:literal = $value:ident),+) => {
        impl OptionValue for $type {
            const CHOICES: &'static [&'static str] = &[$($name),+];

            fn parse(text: &OsStr) -> std::result::Result<Self, String> {
                named(text, Self::CHOICES)
            }

            fn text(&self) -> Option<String> {
                let name = match self {
                    $(Self::$value => $name,)+
                };
                Some(name.to_owned())
            }
        }
    };
}

/// The weights to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FineTuneType {
    /// Low-rank adapters (Hu et al. 2021).
    #[default]
    Lora,
    /// Low-rank adapters with magnitude vectors (Liu et al. 2024).
    Dora,
    /// The model's own weights.
    Full,
}

choice!(FineTuneType: "lora" = Lora, "dora" = Dora, "full" = Full);

/// The training objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Cross-entropy on texts and replies (supervised fine-tuning).
    #[default]
    Sft,
    /// Pairs of a better and a worse reply (direct preference optimization, Rafailov et al. 2023).
    Dpo,
    /// Pairs of a better and a worse reply, without a reference model (odds ratio preference
    /// optimization, Hong et al. 2024).
    Orpo,
    /// Single replies that are good or bad (Kahneman-Tversky optimization, Ethayarajh et al. 2024).
    Kto,
    /// Generated replies with rewards (group relative policy optimization, Shao et al. 2024).
    Grpo,
    /// Similarity of texts that belong together, for encoders (van den Oord et al. 2018; Henderson
    /// et al. 2017).
    Contrastive,
}

choice!(Method: "sft" = Sft, "dpo" = Dpo, "orpo" = Orpo, "kto" = Kto, "grpo" = Grpo,
    "contrastive" = Contrastive);

impl Method {
    /// The method's name in options.
    #[must_use]
    pub fn name(self) -> String {
        self.text().unwrap_or_default()
    }
}

choice!(LossType: "grpo" = Grpo, "bnpo" = Bnpo, "dr_grpo" = DrGrpo, "dapo" = Dapo);

/// The divisor of advantages, with TRL's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleRewards {
    /// The standard deviation of the rewards of a prompt.
    #[default]
    Group,
    /// No divisor.
    None,
}

choice!(ScaleRewards: "group" = Group, "none" = None);

/// How examples are grouped into batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BatchOrder {
    /// Examples of similar length share a batch.
    #[default]
    Length,
    /// Adjacent examples in the file share a batch.
    File,
    /// The same batches in the same order as mlx-lm's `train`.
    MlxLm,
    /// Shuffles the examples and makes new batches in each epoch.
    Random,
}

choice!(
    BatchOrder: "length" = Length, "file" = File, "mlx-lm" = MlxLm, "random" = Random
);

/// The optimizer. In files, names are case-insensitive, as in mlx-lm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names are those of the methods")]
pub enum OptimizerName {
    #[default]
    Adam,
    AdamW,
    Muon,
    Sgd,
    Adafactor,
    Lion,
}

choice!(
    OptimizerName: "adam" = Adam, "adamw" = AdamW, "muon" = Muon, "sgd" = Sgd,
    "adafactor" = Adafactor, "lion" = Lion
);

impl<'de> Deserialize<'de> for OptimizerName {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> std::result::Result<Self, D::Error> {
        let name = String::deserialize(reader)?;
        match name.to_ascii_lowercase().as_str() {
            "adam" => Ok(Self::Adam),
            "adamw" => Ok(Self::AdamW),
            "muon" => Ok(Self::Muon),
            "sgd" => Ok(Self::Sgd),
            "adafactor" => Ok(Self::Adafactor),
            "lion" => Ok(Self::Lion),
            _ => Err(serde::de::Error::unknown_variant(&name, Self::CHOICES)),
        }
    }
}

choice!(Compile: "auto" = Auto, "on" = On, "off" = Off);

/// The learning-rate schedule, with mlx-lm's names.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedule {
    /// `cosine_decay`, `exponential_decay`, `linear_schedule`, `step_decay` or `constant`.
    pub name: String,
    /// The arguments of MLX's function with this name, in MLX's order. For `cosine_decay`: first
    /// rate, steps, last rate.
    pub arguments: Vec<f64>,
    /// The number of warmup steps. After the warmup, the rate is the schedule's first rate.
    pub warmup: u64,
    /// The rate at the start of the warmup.
    pub warmup_init: f64,
}

/// A value in [`TrainConfig::optimizer_config`](super::TrainConfig::optimizer_config).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Setting {
    /// On or off.
    Flag(bool),
    /// A number.
    Number(f64),
    /// A list, such as `betas`.
    Numbers(Vec<f64>),
}

impl LrSchedule {
    pub(super) fn validate(&self) -> Result<()> {
        // MLX's schedules, each with the allowed number of arguments.
        let known = [
            ("cosine_decay", 2..=3),
            ("exponential_decay", 2..=2),
            ("linear_schedule", 3..=3),
            ("step_decay", 3..=3),
            ("constant", 1..=1),
        ];
        let name = &self.name;
        let Some((_, count)) = known.iter().find(|(known, _)| known == name) else {
            let names = known.map(|(name, _)| name).join(", ");
            return Err(bad(format!(
                "lr_schedule.name is {name:?}; there are {names}"
            )));
        };
        let have = self.arguments.len();
        if !count.contains(&have) {
            let (from, to) = (count.start(), count.end());
            return Err(bad(format!(
                "lr_schedule.arguments of {name} are {have}; it takes {from} to {to}"
            )));
        }
        if !self.arguments.iter().all(|a| a.is_finite()) || !self.warmup_init.is_finite() {
            return Err(bad("lr_schedule holds a value that is not a number"));
        }
        Ok(())
    }
}
