//! Drafters: sources of proposed tokens for speculative decoding.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, eval};

use super::Request;
use super::sequence::{empty, prepared};
use crate::arch::Decoder;
use crate::cache::{self, CacheOptions, Caches, Row};
use crate::engine::Engine;
use crate::engine::forward::{forward, free_unused, ids};
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::sample::Sampler;

/// The source of proposed tokens.
pub enum Drafter {
    /// A smaller model with the same vocabulary.
    Model(Arc<dyn Decoder>),
    /// Prompt lookup (Saxena 2023): proposes the tokens that followed an earlier occurrence of the
    /// last n-gram. The number is the maximum length of this n-gram.
    Lookup(usize),
}

/// The drafter of one request, with its state.
pub struct Draft {
    drafter: Drafter,
    /// The caches of the draft model.
    caches: Caches,
}

/// The number of positions that caches must be able to trim: the maximum of `num_draft_tokens`.
const WRONG: i32 = 64;

/// Returns the engine's cache options, for caches that can remove wrong drafts.
pub fn trimmable(engine: &Engine) -> CacheOptions {
    CacheOptions {
        trimmable: Some(WRONG),
        ..*engine.cache_options()
    }
}

/// Returns the cache options for the draft model. Its cache is not quantized, because quantization
/// groups may not divide its small heads.
fn of_draft(options: CacheOptions) -> CacheOptions {
    CacheOptions {
        packing: None,
        ..options
    }
}

/// Returns an error if the decoder's caches cannot remove wrong drafts.
///
/// # Errors
/// [`ErrorKind::Unsupported`], with the reason and an alternative.
pub fn check_rewinds(decoder: &dyn Decoder, what: &str) -> Result<()> {
    if decoder.new_caches(&CacheOptions::default()).rewinds() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "{what} keeps a recurrent state, from which wrong guesses cannot be removed; generate \
             without draft_model and prompt_lookup"
        ),
    ))
}

/// One request's row in a forward pass of the draft model.
struct DraftRow<'a> {
    caches: &'a mut Caches,
    /// The tokens that are not in the caches yet.
    inputs: &'a [u32],
    /// The maximum number of proposed tokens, at least 1.
    most: usize,
}

impl Draft {
    /// Creates the drafter for `request`, with the longest cached prefix. Returns `None` if the
    /// request has no drafter. Also `None` with a grammar or a logits processor, because each token
    /// then restricts the next token.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for models with a recurrent state.
    pub fn new(request: &Request) -> Result<Option<Self>> {
        let (engine, options) = (request.engine(), request.options());
        if options.speculative.num_draft_tokens == 0 || Sampler::waits(options) {
            return Ok(None);
        }
        let drafter = match (engine.draft(), options.speculative.prompt_lookup) {
            (Some(draft), _) => Drafter::Model(draft),
            (None, 0) => return Ok(None),
            (None, n) => Drafter::Lookup(n),
        };
        check_rewinds(engine.decoder()?.as_ref(), "the model")?;
        let caches = match &drafter {
            Drafter::Model(draft) => {
                check_rewinds(draft.as_ref(), "draft_model")?;
                let options = of_draft(trimmable(engine));
                // The draft model has no adapter, so the epoch of its caches never changes.
                let prefixes = engine.draft_prefixes();
                let epoch = prefixes.epoch();
                prepared(draft.as_ref(), &options, prefixes, epoch, request).caches
            }
            Drafter::Lookup(_) => Caches::default(),
        };
        Ok(Some(Self { drafter, caches }))
    }

    /// Stores the caches in the engine, for later prompts with the same prefix. `tokens` are the
    /// tokens of prompt and reply.
    pub fn keep(self, request: &Request, mut tokens: Vec<u32>) {
        if let (Drafter::Model(_), true) = (&self.drafter, request.keeps_prompt()) {
            tokens.truncate(cache::offset(&self.caches).unsigned_abs() as usize);
            let prefixes = request.engine().draft_prefixes();
            let salt = request.salt();
            let of = (prefixes.epoch(), salt.as_deref());
            prefixes.put_salted(of, tokens, self.caches);
        }
    }

    /// If the draft model's caches lack more than one prefill step of `tokens`, computes one step.
    /// Returns whether it computed a step.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn catch_up(&mut self, tokens: &[u32], request: &Request) -> Result<bool> {
        let Drafter::Model(draft) = &self.drafter else {
            return Ok(false);
        };
        let length = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let mut from = cache::offset(&self.caches).unsigned_abs() as usize;
        if self.caches.until_switch() < length(tokens.len().saturating_sub(from)) {
            let options = of_draft(trimmable(request.engine()));
            self.caches = empty(draft.as_ref(), &options, request);
            from = 0;
        }
        let step = request.options().prefill.prefill_step_size.max(1);
        if tokens.len().saturating_sub(from) <= step {
            return Ok(false);
        }
        let rows = (&mut self.caches, None);
        forward(
            draft.as_ref(),
            &tokens[from..from + step],
            rows,
            Positions::Last,
        )
        .and_then(|_| cache::eval_caches(&self.caches))
        .and_then(|()| free_unused())
        .map_err(engine("draft"))?;
        Ok(true)
    }

    /// Removes the draft model's positions after the first `known` tokens. The draft model has
    /// processed its own drafts, except the last one.
    pub fn trim_to(&mut self, known: usize) {
        let surplus = cache::offset(&self.caches) - i32::try_from(known).unwrap_or(i32::MAX);
        if surplus > 0 {
            cache::trim(&mut self.caches, surplus);
        }
    }
}

/// Proposes at most `most` tokens after the tokens of each row. All rows must belong to one engine.
/// For rows with `most` above 0, [`Draft::catch_up`] must have returned `false`.
///
/// # Errors
/// If memory runs out.
pub fn guess(rows: Vec<(&mut Draft, &[u32], usize)>) -> Result<Vec<Vec<u32>>> {
    let mut guesses = vec![Vec::new(); rows.len()];
    let mut model = None;
    let (mut drafting, mut places) = (Vec::new(), Vec::new());
    for (i, (draft, tokens, most)) in rows.into_iter().enumerate() {
        match &draft.drafter {
            _ if most == 0 => {}
            Drafter::Lookup(n) => guesses[i] = look_up(tokens, *n, most),
            Drafter::Model(decoder) => {
                model.get_or_insert_with(|| Arc::clone(decoder));
                let from = cache::offset(&draft.caches).unsigned_abs() as usize;
                let inputs = tokens.get(from..).unwrap_or_default();
                // The first draft adds no position to the caches. Each later draft first adds the
                // position of the previous draft.
                let until = draft.caches.until_switch();
                let storable = usize::try_from(until)
                    .unwrap_or(0)
                    .saturating_sub(inputs.len());
                places.push(i);
                drafting.push(DraftRow {
                    caches: &mut draft.caches,
                    inputs,
                    most: most.min(storable.saturating_add(1)),
                });
            }
        }
    }
    if let Some(model) = model {
        let drafted = draft_rows(model.as_ref(), drafting).map_err(engine("draft"))?;
        for (place, tokens) in places.into_iter().zip(drafted) {
            guesses[place] = tokens;
        }
    }
    Ok(guesses)
}

/// Returns the most probable tokens after each row according to the draft model.
fn draft_rows(
    draft: &dyn Decoder,
    mut rows: Vec<DraftRow<'_>>,
) -> mlx_rs_core::Result<Vec<Vec<u32>>> {
    let all: Vec<u32> = rows.iter().flat_map(|row| row.inputs).copied().collect();
    let most = rows.iter().map(|row| row.most).max().unwrap_or(0);
    let mut inputs = ids(&all)?;
    // For each pass, the indices of its rows and their drafted tokens `[1, rows]`.
    let mut passes: Vec<(Vec<usize>, Array)> = Vec::with_capacity(most);
    for pass in 0..most {
        let live: Vec<usize> = (0..rows.len()).filter(|&i| rows[i].most > pass).collect();
        if let Some((before, tokens)) = passes.last() {
            inputs = match before.len() == live.len() {
                true => tokens.clone(),
                false => {
                    let kept = before.iter().enumerate().filter(|(_, i)| live.contains(i));
                    let kept: Vec<u32> = kept.filter_map(|(at, _)| at.try_into().ok()).collect();
                    tokens.take_ids(&kept, 1)?
                }
            };
        }
        let mut packed: Vec<Row<'_>> = (rows.iter_mut())
            .filter(|row| row.most > pass)
            .map(|row| Row {
                length: match pass {
                    0 => i32::try_from(row.inputs.len()).unwrap_or(i32::MAX),
                    _ => 1,
                },
                caches: &mut *row.caches,
            })
            .collect();
        let watch = &mut Watch::nothing();
        let logits = draft.forward(&inputs, &mut packed, Positions::Last, watch)?;
        passes.push((live, logits.argmax(-1, false)?));
    }
    let state = rows.iter().flat_map(|row| row.caches.iter());
    let tokens = passes.iter().map(|(_, tokens)| tokens);
    eval(tokens.chain(state.flat_map(|layer| layer.arrays())))?;
    let mut guesses = vec![Vec::new(); rows.len()];
    for (live, tokens) in &passes {
        for (i, token) in live.iter().zip(tokens.to_vec::<u32>()?) {
            guesses[*i].push(token);
        }
    }
    Ok(guesses)
}

/// Returns at most `most` tokens that followed the latest earlier occurrence of the last `n`
/// tokens. If these `n` tokens do not occur earlier, tries shorter n-grams, down to one token.
fn look_up(tokens: &[u32], n: usize, most: usize) -> Vec<u32> {
    for n in (1..=n.min(tokens.len().saturating_sub(1))).rev() {
        let end = tokens.len() - n;
        let key = &tokens[end..];
        let position = (0..end).rev().find(|&at| &tokens[at..at + n] == key);
        if let Some(at) = position {
            return tokens[at + n..].iter().copied().take(most).collect();
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::look_up;

    #[test]
    fn the_longest_and_latest_match_is_continued() {
        assert_eq!(look_up(&[1, 2, 3, 9, 2, 3, 4, 2, 3], 3, 2), [4, 2]);
        assert_eq!(
            look_up(&[1, 2, 3, 9, 5, 2, 3, 4, 1, 2, 3], 3, 5),
            [9, 5, 2, 3, 4]
        );
        assert_eq!(look_up(&[7, 7, 7], 2, 4), [7]);
        assert!(look_up(&[1, 2, 3], 3, 4).is_empty());
        assert!(look_up(&[1], 3, 4).is_empty() && look_up(&[], 1, 1).is_empty());
    }
}
