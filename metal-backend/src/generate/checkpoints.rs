//! Chooses the positions of checkpoints during prefill. A checkpoint (`cache/checkpoint.rs`) copies
//! states that cannot be trimmed, so that a later prompt can continue at its position.
//!
//! The next turn of a conversation repeats the last prompt up to the end of its last message. The
//! tokens after that end may differ: templates add the beginning of the reply, and drop reasoning
//! from earlier replies. Other conversations repeat the first message, which is often a system
//! prompt.

use inference::Result;

use super::Request;
use crate::cache::checkpoint::{Cut, can_trim_anywhere};
use crate::cache::{self, Caches, Checkpoints};
use crate::error::engine;

/// The minimum position of a planned checkpoint. Computing fewer tokens again costs less than the
/// extra prefill step.
const LEAST: usize = 64;

/// The distance to the previous checkpoint at which the end of any prefill step becomes a
/// checkpoint.
const SPACING: usize = 512;

/// The maximum distance from the end of the last message to the end of the prompt. With a greater
/// distance, [`BEFORE_END`] applies.
const TAIL: usize = 64;

/// The distance of the last planned checkpoint from the end of the prompt, if the end of the last
/// message is unknown. It should exceed the length of the reply header in chat templates.
const BEFORE_END: usize = 16;

/// The checkpoints of one request.
#[derive(Debug, Default)]
pub struct Recorder {
    kept: Checkpoints,
    /// Positions at which a prefill step must end for a checkpoint, ascending.
    stops: Vec<usize>,
    /// The expected number of positions of the sequence.
    positions: i32,
    /// The maximum memory for checkpoints of all running requests, in bytes. `None` if this request
    /// needs no checkpoints.
    bytes: Option<usize>,
}

impl Recorder {
    /// Creates the recorder of `request`, which starts with the states `caches` and the checkpoints
    /// `inherited`.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(request: &Request, caches: &Caches, inherited: Checkpoints) -> Result<Self> {
        let (engine, prompt) = (request.engine(), request.prompt());
        let positions = prompt.len().saturating_add(request.options().max_tokens);
        let positions = i32::try_from(positions).unwrap_or(i32::MAX);
        let is_needed = request.keeps_prompt() && !can_trim_anywhere(caches, positions);
        let bytes = engine.prefixes().checkpoint_bytes().filter(|_| is_needed);
        if bytes.is_none() {
            return Ok(Self::default());
        }
        let mut recorder = Self {
            kept: inherited,
            stops: stops(prompt, engine.eos_tokens()),
            positions,
            bytes,
        };
        recorder.add(caches, 1)?;
        Ok(recorder)
    }

    /// Returns where a step must end that begins at token `from` and would end at `to`.
    pub fn end(&self, from: usize, to: usize) -> usize {
        let next = self.stops.iter().find(|stop| **stop > from);
        next.map_or(to, |stop| (*stop).min(to))
    }

    /// Whether the prefill must stop between steps for checkpoints.
    pub fn is_needed(&self) -> bool {
        self.bytes.is_some()
    }

    /// Stores a checkpoint of `caches` after a step that ended at token `at`, if one is planned
    /// there or the last checkpoint is far away. The memory is shared by `requests` running
    /// requests.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn step(&mut self, caches: &Caches, at: usize, requests: usize) -> Result<()> {
        let far = at.saturating_sub(self.kept.latest()) >= SPACING;
        match self.stops.contains(&at) || far {
            true => self.add(caches, requests),
            false => Ok(()),
        }
    }

    /// Stores a checkpoint of `caches`, unless they are empty.
    fn add(&mut self, caches: &Caches, requests: usize) -> Result<()> {
        let Some(bytes) = self.bytes.filter(|_| cache::offset(caches) > 0) else {
            return Ok(());
        };
        let bytes = bytes / requests.max(1);
        (self.kept.add(caches, self.positions, bytes)).map_err(engine("prefill"))
    }

    /// Copies another request's checkpoints up to position `n`. `caches` are a copy of its states.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn copy_from(
        &mut self,
        other: &Self,
        caches: &Caches,
        n: usize,
        requests: usize,
    ) -> Result<()> {
        if self.bytes.is_some() {
            self.kept = other.kept.up_to(n).map_err(engine("prefill"))?;
            self.add(caches, requests)?;
        }
        Ok(())
    }

    /// Returns the cut to the greatest length, at most `n`, to which a copy of `caches` can be
    /// truncated.
    pub fn cut(&self, caches: &Caches, n: usize) -> Option<Cut<'_>> {
        self.kept.cut(caches, n)
    }

    /// Drops the checkpoints. Call this before the sequence is computed again from its start.
    pub fn clear(&mut self) {
        self.kept.clear();
    }

    /// Returns the checkpoints, to be stored together with the caches.
    pub fn into_checkpoints(self) -> Checkpoints {
        self.kept
    }
}

/// Returns the positions at which the prefill of `prompt` stops for checkpoints, ascending.
/// Messages end with one of the tokens `eos`.
fn stops(prompt: &[u32], eos: &[u32]) -> Vec<usize> {
    let is_end = |token: &u32| eos.contains(token);
    // The end token belongs to the message, so the stop is after it.
    let first = prompt.iter().position(is_end).map(|at| at + 1);
    let last = prompt.iter().rposition(is_end).map(|at| at + 1);
    let last = last.filter(|at| (1..=TAIL).contains(&(prompt.len() - at)));
    let last = last.unwrap_or(prompt.len().saturating_sub(BEFORE_END));
    let mut stops: Vec<usize> = first.into_iter().chain([last]).collect();
    stops.retain(|at| (LEAST..prompt.len()).contains(at));
    stops.sort_unstable();
    stops.dedup();
    stops
}

#[cfg(test)]
mod tests {
    use super::stops;

    /// A prompt of `n` tokens with the token 2 at these positions.
    fn prompt(n: usize, ends: &[usize]) -> Vec<u32> {
        let mut prompt = vec![5; n];
        ends.iter().for_each(|&at| prompt[at] = 2);
        prompt
    }

    #[test]
    fn the_first_and_the_last_message_end_at_a_checkpoint() {
        assert_eq!(stops(&prompt(500, &[99, 200, 480]), &[2, 3]), [100, 481]);
        assert_eq!(stops(&prompt(500, &[480]), &[2]), [481]);
        // The last message ends too far from the end of the prompt, so `BEFORE_END` must apply.
        assert_eq!(stops(&prompt(500, &[99]), &[2]), [100, 484]);
        assert_eq!(stops(&prompt(500, &[499]), &[2]), [484]);
        // Prompts without message ends, with a short first message, and short prompts.
        assert_eq!(stops(&prompt(500, &[]), &[2]), [484]);
        assert_eq!(stops(&prompt(500, &[20, 460]), &[2]), [461]);
        assert!(stops(&prompt(70, &[20]), &[2]).is_empty());
        assert!(stops(&[], &[2]).is_empty());
    }
}
