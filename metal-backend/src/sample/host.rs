//! The state of requests that need each token on the host before the next draw: logits processors
//! and a grammar. The sampler applies their results to the logits on the device.

use inference::{Error, ErrorKind, LogitsProcessor, Result};
use mlx_rs_core::Array;

use super::finite::check_greatest;
use super::grammar::Matcher;
use crate::error::engine;

/// State of a request that needs each token on the host before the next token is drawn.
pub(super) struct Host {
    pub(super) processors: Vec<Box<dyn LogitsProcessor>>,
    pub(super) grammar: Option<Matcher>,
    pub(super) prompt: Vec<u32>,
    pub(super) reply: Vec<u32>,
    /// The last token and the greatest logit of its row, not read yet.
    pub(super) pending: Option<(Array, Array)>,
}

impl Host {
    /// Reads the last token. Waits if the token is still being computed.
    ///
    /// # Errors
    /// The errors of [`check_greatest`]; also if the grammar rejects the token.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let Some((token, greatest)) = self.pending.take() else {
            return Ok(());
        };
        let id: u32 = token.item().map_err(engine("sampling"))?;
        let greatest: f32 = greatest.item().map_err(engine("sampling"))?;
        check_greatest(greatest, self.reply.len() as u64 + 1)?;
        self.reply.push(id);
        match &mut self.grammar {
            Some(grammar) => grammar.accept(id),
            None => Ok(()),
        }
    }

    pub(super) fn process(&mut self, logits: &Array) -> Result<Array> {
        let mut values = logits.to_vec::<f32>().map_err(engine("sampling"))?;
        // The model's logits are checked before the processors run, so that an error is not
        // attributed to a processor.
        let greatest = values.iter().copied().fold(f32::NEG_INFINITY, |a, b| {
            if a.is_nan() || b <= a { a } else { b }
        });
        check_greatest(greatest, self.reply.len() as u64 + 1)?;
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

    /// Returns the tokens that the grammar allows, without the tokens `banned`. Also removes the
    /// tokens `too_early`, unless no token would remain. Returns `None` without a grammar.
    pub(super) fn allowed(
        &mut self,
        banned: &[u32],
        too_early: &[u32],
    ) -> Result<Option<Vec<u32>>> {
        let Some(mut words) = self.words()? else {
            return Ok(None);
        };
        clear(&mut words, banned);
        // The grammar takes precedence over the minimum length: if it requires the end of the
        // reply, the end is allowed.
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
