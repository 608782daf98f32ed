//! One sampling step for all rows of a batch. Each row's sampler first changes the row's logits;
//! then the tokens are drawn.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, Dtype, async_eval, concatenate};

use super::chain::{self, Choice};
use super::{Logprobs, Sampler};
use crate::error::engine;
use crate::exec::sampling;

/// The result of one step.
#[derive(Debug)]
pub struct Drawn {
    /// One token per row, `uint32 [B]`, not yet evaluated.
    pub tokens: Array,
    /// The maximum of each row of the model's logits, float32 `[B]`; NaN if any logit is NaN. See
    /// [`check_greatest`](super::check_greatest).
    pub greatest: Array,
    /// Log-probabilities, if any row requested them.
    pub logprobs: Option<Logprobs>,
}

impl Drawn {
    /// The arrays to evaluate.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        [&self.tokens, &self.greatest]
            .into_iter()
            .chain(self.logprobs.iter().flat_map(Logprobs::arrays))
    }
}

/// Samples a token for each row of `logits` `[B, V]` (any float type) with that row's sampler. The
/// samplers record the tokens. The computation is only queued, with one exception: if a row has a
/// grammar or logits processors, this function waits for the row's previous token.
///
/// # Errors
/// [`ErrorKind::Engine`] if shapes do not match; errors of a grammar or a logits processor. After
/// an error, the samplers must not be used.
pub fn sample(rows: &mut [&mut Sampler], logits: &Array) -> Result<Drawn> {
    let shape = logits.shape();
    let fits = shape.len() == 2 && usize::try_from(shape[0]) == Ok(rows.len()) && !rows.is_empty();
    if !fits {
        return Err(Error::new(
            ErrorKind::Engine,
            format!("logits {shape:?} are not [{}, vocabulary]", rows.len()),
        ));
    }
    let logits = logits.astype(Dtype::Float32).map_err(engine("sampling"))?;
    if rows.iter().any(|r| r.host.is_some()) {
        // Starts computing the logits while the host processes the previous token.
        async_eval([&logits]).map_err(engine("sampling"))?;
        for host in rows.iter_mut().filter_map(|r| r.host.as_mut()) {
            host.catch_up()?;
        }
    }
    let changed = changed(rows, &logits)?;
    let on_cpu = rows.iter().any(|r| r.on_cpu);
    let tokens = if on_cpu {
        let rows = rows.iter_mut().map(|r| r.row()).collect::<Result<_>>()?;
        sampling::sample(&changed, rows)
    } else {
        let choices: Vec<Choice> = rows.iter().map(|r| r.choice()).collect();
        chain::choose(&changed, &choices)
    };
    tokens
        .and_then(|tokens| take(rows, &logits, tokens, on_cpu))
        .map_err(engine("sampling"))
}

/// Records the tokens in the samplers, and computes their log-probabilities.
fn take(
    rows: &mut [&mut Sampler],
    logits: &Array,
    tokens: Array,
    on_cpu: bool,
) -> mlx_rs_core::Result<Drawn> {
    let greatest = logits.max(-1, false)?;
    for (i, row) in (0i32..).zip(rows.iter_mut()) {
        let greatest_of_row = greatest.slice_axis(0, i, i + 1)?;
        row.remember(&tokens.slice_axis(0, i, i + 1)?, greatest_of_row)?;
    }
    let logprobs = match rows.iter().filter_map(|r| r.logprobs).max() {
        Some(n) => Some(Logprobs::new(logits, &tokens, n, on_cpu)?),
        None => None,
    };
    Ok(Drawn {
        tokens,
        greatest,
        logprobs,
    })
}

/// Returns the logits from which the rows select their tokens, after penalties, biases and bans.
fn changed(rows: &mut [&mut Sampler], logits: &Array) -> Result<Array> {
    if !rows.iter().any(|r| r.changes_logits()) {
        return Ok(logits.clone());
    }
    if let [row] = rows {
        return row.changed(logits);
    }
    let mut parts = Vec::with_capacity(rows.len());
    for (i, row) in (0i32..).zip(rows.iter_mut()) {
        let part = logits.slice_axis(0, i, i + 1).map_err(engine("sampling"))?;
        parts.push(if row.changes_logits() {
            row.changed(&part)?
        } else {
            part
        });
    }
    concatenate(&parts.iter().collect::<Vec<_>>(), 0).map_err(engine("sampling"))
}
