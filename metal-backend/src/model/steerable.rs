//! The activation edits of the public contract, on top of `steer.rs`.

use std::collections::BTreeSet;

use inference::{
    AttentionWeights, FeedForwardActivations, Hook, HookStates, Interrupt, LogitsOutput, Prompt,
    ResidualTrace, Result, SteerableModel, Steering, SteeringShape,
};

use super::MlxModel;
use crate::error::engine as engine_error;
use crate::{inspect, steer};

impl SteerableModel for MlxModel {
    fn steering_shape(&self) -> Result<SteeringShape> {
        steer::shape(&self.engine, self.engine.decoder()?.as_ref())
    }

    fn steered_logits(
        &self,
        prompt: &Prompt,
        all: bool,
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput> {
        self.edited_logits(prompt, all, Some(steering), interrupt)
    }

    fn steered_logprobs(
        &self,
        prompt: &Prompt,
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<Vec<f32>> {
        let ids = self.engine.encode_prompt(prompt)?;
        self.engine.check_prompt(&ids)?;
        inspect::token_logprobs(&self.engine, &ids, Some(steering), interrupt)
    }

    fn steered_residuals(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<ResidualTrace> {
        inspect::residuals(&self.engine, (prompt, Some(steering)), positions, interrupt)
    }

    fn steered_attention_weights(
        &self,
        prompt: &Prompt,
        layers: Option<&[usize]>,
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<AttentionWeights> {
        inspect::attention_weights(&self.engine, (prompt, Some(steering)), layers, interrupt)
    }

    fn steered_activations(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        steering: &Steering,
        interrupt: &Interrupt,
    ) -> Result<FeedForwardActivations> {
        let of = (prompt, Some(steering));
        inspect::feed_forward_activations(&self.engine, of, positions, interrupt)
    }

    fn hook_states(
        &self,
        prompt: &Prompt,
        places: &[(usize, Hook)],
        interrupt: &Interrupt,
    ) -> Result<Vec<HookStates>> {
        let engine = &self.engine;
        let tokens = engine.encode_prompt(prompt)?;
        engine.check_prompt(&tokens)?;
        let decoder = engine.decoder()?;
        let shape = steer::shape(engine, decoder.as_ref())?;
        for (layer, hook) in places {
            shape.width(*layer, *hook)?;
        }
        engine.scope(|| {
            let sites: BTreeSet<_> = places.iter().copied().collect();
            let of = (&**engine, decoder.as_ref());
            let captured = steer::capture(of, &tokens, sites, interrupt)?;
            let states = places.iter().filter_map(|place| {
                let states = captured.get(place)?;
                let values = states.to_f32_vec().map_err(engine_error("steering"));
                Some(values.map(|values| HookStates::new(*place, tokens.clone(), values)))
            });
            states.collect()
        })
    }
}
