//! Speculative decoding of several rows. One pass checks the proposed tokens of all rows; each row
//! may have another number of proposals. Each row drops its first wrong token and all tokens after
//! it, so its reply equals the reply of plain decoding.

use std::collections::BTreeMap;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::eval;

use super::Member;
use crate::cache::{self, Row};
use crate::engine::forward::ids;
use crate::error::engine as engine_error;
use crate::generate::draft::guess;
use crate::generate::read;
use crate::generate::sequence::{PassGroup, Pending, SequenceState, SharedPass, draw_rows};
use crate::nn::attention::Positions;
use crate::sample::Memory;
use crate::steer::{Edits, watch};

/// Accepts the pending tokens of rows that speculate, then checks proposals for the next tokens.
/// The model's token after the last right proposal becomes the row's next pending token.
///
/// # Errors
/// If memory runs out.
pub(super) fn decode(rows: Vec<(&mut Member, Pending)>) -> Result<()> {
    let mut live = Vec::new();
    for (member, pending) in rows {
        if !accept(member, &pending)? {
            continue;
        }
        let Some(sequence) = &mut member.sequence else {
            continue;
        };
        match sequence.must_restart() {
            true => sequence.restart(&member.request),
            false => live.push(member),
        }
    }
    let mut groups: BTreeMap<PassGroup, Vec<&mut Member>> = BTreeMap::new();
    for member in live {
        if let Some(sequence) = &member.sequence {
            groups.entry(sequence.group()).or_default().push(member);
        }
    }
    for (_, mut members) in groups {
        let order = |m: &Member| {
            m.sequence
                .as_ref()
                .and_then(|s| s.order().map(str::to_owned))
        };
        members.sort_by_cached_key(|m| order(m));
        check(members)?;
    }
    Ok(())
}

/// Adds a token to a row's reply. Returns whether the row continues.
fn accept(member: &mut Member, pending: &Pending) -> Result<bool> {
    let read = read(pending, &member.request)?;
    if let Err(error) = read.check() {
        // The error ends only this row.
        member.sequence = None;
        member.error.get_or_insert(error);
        return Ok(false);
    }
    member.request.accept(read);
    Ok(!member.request.is_over())
}

/// Returns the proposed tokens of each row, which may be none.
fn proposals(members: &mut [&mut Member]) -> Result<Vec<Vec<u32>>> {
    let mut tokens = Vec::with_capacity(members.len());
    let mut limits = Vec::with_capacity(members.len());
    for member in members.iter_mut() {
        let so_far = member.request.tokens();
        let behind = match &mut member.draft {
            Some(draft) => draft.catch_up(&so_far, &member.request)?,
            None => true,
        };
        // A forward pass rotates all its positions as the last one requires. So the pass must end
        // before the position at which the rotation changes.
        let sequence = member.sequence.as_ref();
        let until_switch = sequence.map_or(0, |sequence| sequence.caches.until_switch() - 1);
        let most = (member.request.options().speculative.num_draft_tokens)
            .min(member.request.remaining().saturating_sub(1))
            .min(usize::try_from(until_switch).unwrap_or(0));
        tokens.push(so_far);
        // A draft model that has not yet processed all tokens proposes nothing, so that it does not
        // delay other rows.
        limits.push(if behind { 0 } else { most });
    }
    let mut places = Vec::new();
    let mut rows = Vec::new();
    for (i, member) in members.iter_mut().enumerate() {
        if let Some(draft) = &mut member.draft {
            places.push(i);
            rows.push((draft, tokens[i].as_slice(), limits[i]));
        }
    }
    let mut all = vec![Vec::new(); tokens.len()];
    for (place, proposed) in places.into_iter().zip(guess(rows)?) {
        all[place] = proposed;
    }
    Ok(all)
}

/// Computes the model's tokens after each row's last token and after each of its proposals. Accepts
/// the right proposals.
fn check(mut members: Vec<&mut Member>) -> Result<()> {
    if members.is_empty() {
        return Ok(());
    }
    let fault = engine_error("decode");
    let proposals = proposals(&mut members)?;
    let (mut inputs, mut rows, mut edits) = (Vec::new(), Vec::new(), Vec::new());
    let mut pass = SharedPass::default();
    for (member, proposed) in members.iter_mut().zip(&proposals) {
        let last = member.request.so_far().last().copied();
        let (Some(last), Some(sequence)) = (last, member.sequence.as_mut()) else {
            return Err(Error::new(
                ErrorKind::Engine,
                "a row has no token to go on from",
            ));
        };
        let length = i32::try_from(1 + proposed.len()).unwrap_or(i32::MAX);
        pass.push(sequence, length);
        inputs.push(last);
        inputs.extend(proposed);
        edits.push(sequence.edits.clone());
        rows.push(Row {
            length,
            caches: &mut sequence.caches,
        });
    }
    let mut edits = Edits::new(edits);
    let step = pass.run(|decoder| {
        ids(&inputs)
            .and_then(|ids| {
                decoder.forward(&ids, &mut rows, Positions::All, &mut watch(&mut edits))
            })
            .and_then(|logits| logits.squeeze_axis(0)) // [1, T, V] -> [T, V]
    });
    drop(rows);
    let Some(logits) = step else {
        return Ok(());
    };
    let logits = logits.map_err(&fault)?;
    // Samples at every position as if all earlier drafts were right.
    let mut drawn: Vec<Vec<(Pending, Memory)>> = Vec::with_capacity(members.len());
    let mut at = 0;
    for (member, proposed) in members.iter_mut().zip(&proposals) {
        let Some(sequence) = member.sequence.as_mut() else {
            continue;
        };
        let mut of_row = Vec::with_capacity(1 + proposed.len());
        for _ in 0..=proposed.len() {
            let logits = logits.slice_axis(0, at, at + 1).map_err(&fault)?;
            let pending = draw_rows(&mut [&mut sequence.sampler], &logits)?
                .pop()
                .ok_or_else(|| Error::new(ErrorKind::Engine, "no token was drawn"))?;
            of_row.push((pending, sequence.sampler.memory()));
            at += 1;
        }
        drawn.push(of_row);
    }
    let of_draws = drawn.iter().flatten();
    let arrays = of_draws.flat_map(|(pending, memory)| pending.arrays().chain(memory.arrays()));
    let sequences = members.iter().filter_map(|member| member.sequence.as_ref());
    let caches = sequences.flat_map(|sequence| sequence.caches.iter());
    eval(arrays.chain(caches.flat_map(|layer| layer.arrays()))).map_err(&fault)?;
    for ((member, proposed), drawn) in members.into_iter().zip(&proposals).zip(drawn) {
        keep_right(member, proposed, drawn)?;
    }
    Ok(())
}

/// Accepts the proposals that equal the model's own tokens. The next token becomes pending.
fn keep_right(member: &mut Member, proposed: &[u32], drawn: Vec<(Pending, Memory)>) -> Result<()> {
    let mut right = 0;
    for (i, (pending, memory)) in drawn.into_iter().enumerate() {
        let Some(sequence) = &mut member.sequence else {
            return Ok(());
        };
        // Restores the sampler's state at this token, because later samples may be wrong.
        sequence.sampler.restore(memory);
        let is_right = match proposed.get(i) {
            Some(token) => {
                let id: u32 = pending.token.item().map_err(engine_error("decode"))?;
                id == *token
            }
            None => false,
        };
        if !is_right {
            sequence.next = Some(pending);
            break;
        }
        right += 1;
        if !accept(member, &pending)? {
            break;
        }
    }
    member.request.clock().drafted(proposed.len(), right);
    let known = member.request.so_far().len();
    if let Some(draft) = &mut member.draft {
        draft.trim_to(known);
    }
    match &mut member.sequence {
        Some(sequence) => trim(sequence, proposed.len() - right),
        None => Ok(()),
    }
}

/// Removes wrong proposals from the caches.
fn trim(sequence: &mut SequenceState, wrong: usize) -> Result<()> {
    let wrong = i32::try_from(wrong).unwrap_or(i32::MAX);
    match cache::trim(&mut sequence.caches, wrong) {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::Engine,
            "a cache cannot remove rejected draft tokens",
        )),
    }
}
