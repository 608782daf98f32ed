//! The part of a request that knows each token on the host before the next is drawn. It holds
//! logits processors and a grammar. The sampler applies them to logits on the device.

use inference::{Error, ErrorKind, LogitsProcessor, Result};
use mlx_rs_core::Array;

use super::grammar::Matcher;
use crate::error::engine;

/// The part of a request that must know each token on the host before the next is drawn.
pub(super) struct Host {
    pub(super) processors: Vec<Box<dyn LogitsProcessor>>,
    pub(super) grammar: Option<Matcher>,
    pub(super) prompt: Vec<u32>,
    pub(super) reply: Vec<u32>,
    /// The last token, not read yet.
    pub(super) pending: Option<Array>,
}

impl Host {
    /// Reads the last token, waiting for it where it is still being computed.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let Some(token) = self.pending.take() else {
            return Ok(());
        };
        let id: u32 = token.item().map_err(engine("sampling"))?;
        self.reply.push(id);
        match &mut self.grammar {
            Some(grammar) => grammar.accept(id),
            None => Ok(()),
        }
    }

    pub(super) fn process(&mut self, logits: &Array) -> Result<Array> {
        let mut values = logits.to_vec::<f32>().map_err(engine("sampling"))?;
        for processor in &mut self.processors {
            processor
                .process(&self.prompt, &self.reply, &mut values)
                .map_err(|e| e.context("logits processor"))?;
        }
        if values.iter().all(|&v| v == f32::NEG_INFINITY || v.is_nan()) {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "the logits processors leave no token to draw; leave at least one above minus infinity",
            ));
        }
        Array::from_slice(&values, logits.shape()).map_err(engine("sampling"))
    }

    fn words(&mut self) -> Result<Option<Vec<u32>>> {
        match &mut self.grammar {
            Some(grammar) => grammar.allowed(),
            None => Ok(None),
        }
    }

    /// The tokens that the grammar allows now, without `banned`, and without `too_early` if that
    /// leaves any. `None` without a grammar.
    pub(super) fn allowed(
        &mut self,
        banned: &[u32],
        too_early: &[u32],
    ) -> Result<Option<Vec<u32>>> {
        let Some(mut words) = self.words()? else {
            return Ok(None);
        };
        clear(&mut words, banned);
        // The grammar goes before: where it wants the end, the end comes.
        let mut longer = words.clone();
        clear(&mut longer, too_early);
        if longer.iter().any(|&w| w != 0) {
            words = longer;
        }
        if words.iter().all(|&w| w == 0) {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "the grammar needs a token that banned_tokens forbids; ban fewer tokens",
            ));
        }
        Ok(Some(words))
    }
}

fn clear(words: &mut [u32], tokens: &[u32]) {
    for &id in tokens {
        if let Some(word) = words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }
}
