//! The adapter functions of the public contract, on top of the engine.

use std::path::Path;

use inference::{Adapter, LoraConfig, Result, TokenModel, TrainableModel};

use super::{EncoderModel, MlxModel};
use crate::adapter::AdapterKind;

macro_rules! trainable {
    ($($model:ty),+) => {
        $(impl TrainableModel for $model {
            fn apply_lora(&self, config: &LoraConfig) -> Result<Box<dyn Adapter>> {
                let adapter = self.engine().apply_lora(config, AdapterKind::Lora, 0)?;
                Ok(Box::new(adapter))
            }

            fn load_adapter(&self, path: &Path) -> Result<Box<dyn Adapter>> {
                let adapter = self.engine().load_adapter(path)?;
                Ok(Box::new(adapter))
            }

            fn remove_adapter(&self) -> Result<()> {
                self.engine().remove_adapter()
            }

            fn encode(&self, text: &str) -> Result<Vec<u32>> {
                TokenModel::encode(self, text, true)
            }

            fn decode(&self, ids: &[u32]) -> Result<String> {
                TokenModel::decode(self, ids)
            }

            fn num_layers(&self) -> usize {
                self.engine().info().num_layers
            }
        })+
    };
}

trainable!(MlxModel, EncoderModel);
