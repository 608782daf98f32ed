//! Runs concurrent requests: each step is one forward pass for all of them. Requests start and end
//! at any time (continuous batching, Yu et al. 2022). A request gets the same reply as alone.
//!
//! The rows' tokens are packed without padding: a row of length `L` costs `L` positions. Each row
//! has its own caches, so rows of any length and age run together. A prefix that several prompts
//! share is computed once (`prefix_sharing.rs`). Rows with a drafter compute several tokens a step
//! (`batch/speculation.rs`). Requests that name different adapters share the products with the
//! model's weights (`nn/adapter/pass.rs`).

mod out_of_memory;
mod speculation;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use inference::{BatchEvent, BatchSession, Error, GenerateOptions, Prompt, RequestId, Result};
use mlx_rs_core::{Array, async_eval, concatenate, eval};

use super::draft::{Draft, trimmable};
use super::prefix_sharing::{self, Kin, PrefillAction, RowState};
use super::sequence::{PassGroup, Pending, SequenceState, SharedPass, draw_rows};
use super::{CLEAR_EVERY, Request, read};
use crate::cache::{self, Row};
use crate::engine::Engine;
use crate::engine::forward::{free_unused, ids};
use crate::error::engine as engine_error;
use crate::nn::attention::Positions;
use crate::sample::{Memory, Sampler};
use crate::steer::{Edits, watch};

/// Requests that run together.
pub struct Batch {
    engine: Arc<Engine>,
    rows: Vec<Member>,
    next_id: u64,
    steps: usize,
}

struct Member {
    id: RequestId,
    request: Request,
    /// The computation; `None` when the request has ended.
    sequence: Option<SequenceState>,
    /// The drafter, if the request speculates.
    draft: Option<Draft>,
    /// The request's error, which is reported after the step.
    error: Option<Error>,
    /// The sampler's state before a pass. It is restored if the pass fails.
    before: Option<Memory>,
}

impl Batch {
    /// Creates a batch without requests.
    pub fn new(engine: Arc<Engine>) -> Self {
        Self {
            engine,
            rows: Vec::new(),
            next_id: 0,
            steps: 0,
        }
    }

    /// Adds a request for the token ids of a prompt.
    ///
    /// # Errors
    /// The errors of [`super::Generation::new`].
    pub fn add_ids(&mut self, prompt: Vec<u32>, options: &GenerateOptions) -> Result<RequestId> {
        let mut request = Request::new(Arc::clone(&self.engine), prompt, options)?;
        let engine = &self.engine;
        let (sequence, draft) = engine.scope(|| -> Result<_> {
            let draft = Draft::new(&request)?;
            let caches = match &draft {
                Some(_) => trimmable(engine),
                None => *engine.cache_options(),
            };
            Ok((SequenceState::new(&mut request, &caches)?, draft))
        })?;
        let id = RequestId::new(self.next_id);
        self.next_id += 1;
        self.rows.push(Member {
            id,
            request,
            sequence: Some(sequence),
            draft,
            error: None,
            before: None,
        });
        Ok(id)
    }

    /// Returns the state of each row for prefix sharing. Ended rows share nothing.
    fn row_states(&self) -> Vec<RowState> {
        let salt = |m: &Member| match &m.request.options().steering {
            // The edits depend on the row's own prompt, so no other row may share its caches.
            Some(steering) if steering.depends_on_prompt() => Some(format!("r{}", m.id.number())),
            _ => m.request.salt(),
        };
        let of = |m: &Member| match &m.sequence {
            Some(sequence) if sequence.next.is_none() => RowState {
                tokens: m.request.tokens(),
                cached: sequence.prefilled,
                waits: true,
                kin: sequence.kin(),
                salt: salt(m),
            },
            Some(sequence) => RowState {
                tokens: m.request.tokens(),
                cached: cache::offset(&sequence.caches).unsigned_abs() as usize,
                waits: false,
                kin: sequence.kin(),
                salt: salt(m),
            },
            None => RowState {
                tokens: Vec::new(),
                cached: 0,
                waits: false,
                kin: Kin::default(),
                salt: None,
            },
        };
        self.rows.iter().map(of).collect()
    }

    /// Copies shared prefixes to waiting rows until there is no more to copy. Returns, for each
    /// row, the prompt position up to which it may compute; `None` for rows that compute nothing.
    fn share_prefixes(&mut self) -> Result<Vec<Option<usize>>> {
        if !self.engine.shares_prefixes() {
            let until = |m: &Member| {
                let waits = m.sequence.as_ref()?.next.is_none();
                waits.then(|| m.request.so_far().len())
            };
            return Ok(self.rows.iter().map(until).collect());
        }
        loop {
            let reach = |from: usize, n: usize| {
                let sequence = self.rows[from].sequence.as_ref();
                let cut = sequence.and_then(|s| s.checkpoints.cut(&s.caches, n));
                cut.map_or(0, |cut| cut.tokens)
            };
            let actions = prefix_sharing::actions(&self.row_states(), reach);
            let mut copied = Vec::new();
            for (i, action) in actions.iter().enumerate() {
                if let Some(PrefillAction::Copy { from, tokens }) = *action
                    && let Some(sequence) = &self.rows[from].sequence
                    && let Some(cut) = sequence.checkpoints.cut(&sequence.caches, tokens)
                {
                    let copy = cut.copy(&sequence.caches);
                    if let Some(copy) = copy.map_err(engine_error("prefill"))? {
                        copied.push((i, from, tokens, copy));
                    }
                }
            }
            if copied.is_empty() {
                let until = |(m, action): (&Member, Option<PrefillAction>)| match action? {
                    PrefillAction::Compute(until) => Some(until),
                    PrefillAction::Copy { .. } => Some(m.request.so_far().len()),
                    PrefillAction::Wait => None,
                };
                return Ok(self.rows.iter().zip(actions).map(until).collect());
            }
            let requests = self.rows.len();
            for (i, from, tokens, copy) in copied {
                let Ok([member, other]) = self.rows.get_disjoint_mut([i, from]) else {
                    continue;
                };
                if let (Some(sequence), Some(other)) = (&mut member.sequence, &mut other.sequence) {
                    cache::eval_caches(&copy).map_err(engine_error("prefill"))?;
                    let all = member.request.so_far().len();
                    (sequence.caches, sequence.prefilled) = (copy.for_sequence(all), tokens);
                    let checkpoints = &mut sequence.checkpoints;
                    let caches = &sequence.caches;
                    checkpoints.copy_from(&other.checkpoints, caches, tokens, requests)?;
                    sequence.begun = true;
                    if all == member.request.prompt().len() {
                        member.request.clock().cached(tokens);
                    }
                }
            }
        }
    }

    /// Computes as many prompt tokens as fit in one step. Rows with the fewest remaining tokens
    /// come first. Half of a step is reserved for the row that has waited longest, so that new
    /// short prompts do not starve it. Rows whose prompt is complete sample their first token.
    fn prefill(&mut self) -> Result<()> {
        let waits = |m: &Member| {
            m.sequence
                .as_ref()
                .is_some_and(|sequence| sequence.next.is_none())
        };
        if !self.rows.iter().any(waits) {
            return Ok(());
        }
        for member in &mut self.rows {
            if let Some(sequence) = &mut member.sequence {
                sequence.refresh(&mut member.request);
            }
        }
        let until = self.share_prefixes()?;
        let waiting = self.rows.iter().zip(&until).filter_map(|(m, until)| {
            let sequence = m.sequence.as_ref()?;
            until.map(|_| sequence.group())
        });
        let groups: BTreeSet<PassGroup> = waiting.collect();
        // Groups with edits share one step budget, and groups without edits share another. So the
        // number of groups does not delay running replies.
        for group in &groups {
            let passes = groups.iter().filter(|other| other.is_like(*group)).count();
            self.prefill_group(&until, *group, passes)?;
        }
        Ok(())
    }

    /// Computes prompt tokens as [`Self::prefill`], for the rows of one group, each up to its limit
    /// in `until`. The group gets `1 / passes` of the step's tokens.
    fn prefill_group(
        &mut self,
        until: &[Option<usize>],
        group: PassGroup,
        passes: usize,
    ) -> Result<()> {
        let requests = self.rows.len();
        let mut waiting: Vec<(&mut Member, usize)> = self
            .rows
            .iter_mut()
            .zip(until)
            .filter_map(|(m, until)| {
                let sequence = m.sequence.as_ref()?;
                let in_group = sequence.group() == group;
                let left = (*until)?.saturating_sub(sequence.prefilled);
                in_group.then_some((m, left))
            })
            .collect();
        let step_size = |m: &Member| m.request.options().prefill.prefill_step_size;
        let budget = (waiting.iter().map(|(m, _)| step_size(m))).max();
        let budget = budget.unwrap_or(1).div_ceil(passes.max(1));
        // Rows are in order of arrival, so the first one has waited longest.
        let oldest = waiting.iter().find(|(_, left)| *left > 0);
        let mut reserved = oldest.map_or(0, |(m, left)| {
            (*left).min(step_size(m)).min(budget.div_ceil(2))
        });
        let oldest = oldest.map(|(m, _)| m.id);
        waiting.sort_by_key(|(_, left)| *left);
        let mut total = 0;
        let mut chosen: Vec<(&mut Member, usize)> = Vec::new();
        for (member, left) in waiting {
            if Some(member.id) == oldest {
                reserved = 0;
            }
            // A row computes at most the rest of the step, and at most its own step size.
            let n = left
                .min(step_size(member))
                .min(budget.saturating_sub(total + reserved));
            let Some(sequence) = member.sequence.as_ref().filter(|_| n > 0) else {
                continue;
            };
            let prefilled = sequence.prefilled;
            let n = sequence.checkpoints.end(prefilled, prefilled + n) - prefilled;
            total += n;
            chosen.push((member, n));
        }
        let order = |m: &Member| {
            m.sequence
                .as_ref()
                .and_then(|s| s.order().map(str::to_owned))
        };
        chosen.sort_by_cached_key(|(m, _)| order(m));
        let mut tokens = Vec::with_capacity(total);
        let mut rows = Vec::with_capacity(chosen.len());
        let mut edits = Vec::with_capacity(chosen.len());
        let mut pass = SharedPass::default();
        for (member, n) in &mut chosen {
            let Some(sequence) = member.sequence.as_mut() else {
                continue;
            };
            let prefilled = sequence.prefilled;
            tokens.extend_from_slice(&member.request.so_far()[prefilled..prefilled + *n]);
            sequence.prefilled += *n;
            sequence.begun = true;
            member.before = Some(sequence.sampler.memory());
            let length = i32::try_from(*n).unwrap_or(i32::MAX);
            pass.push(sequence, length);
            edits.push(sequence.edits.clone());
            rows.push(Row {
                length,
                caches: &mut sequence.caches,
            });
        }
        let mut edits = Edits::new(edits);
        let step = pass.run(|decoder| {
            ids(&tokens).and_then(|ids| {
                decoder.forward(&ids, &mut rows, Positions::Last, &mut watch(&mut edits))
            })
        });
        drop(rows);
        let Some(step) = step else {
            return Ok(());
        };
        let logits = step.map_err(engine_error("prefill"))?;
        let mut ready = Vec::new();
        for (row, (member, _)) in chosen.iter_mut().enumerate() {
            let total = member.request.so_far().len();
            let Some(sequence) = member.sequence.as_mut() else {
                continue;
            };
            member.request.report(sequence.prefilled);
            if sequence.prefilled == total {
                ready.push((row, &mut **member));
            }
        }
        draw(ready, &logits)?;
        let sequences = chosen.iter().filter_map(|(m, _)| m.sequence.as_ref());
        eval(sequences.flat_map(|sequence| pending(sequence).chain(state(sequence))))
            .and_then(|()| free_unused())
            .map_err(engine_error("prefill"))?;
        for (member, _) in &mut chosen {
            if let Some(sequence) = &mut member.sequence {
                (sequence.checkpoints).step(&sequence.caches, sequence.prefilled, requests)?;
            }
        }
        chosen.iter_mut().for_each(|(m, _)| m.before = None);
        Ok(())
    }

    /// Queues the next token of every running row, then reads the pending tokens.
    fn decode(&mut self) -> Result<()> {
        let mut running: Vec<(&mut Member, Pending)> = Vec::new();
        let mut speculating: Vec<(&mut Member, Pending)> = Vec::new();
        for member in &mut self.rows {
            if let Some(pending) = member
                .sequence
                .as_mut()
                .and_then(|sequence| sequence.next.take())
            {
                match member.draft {
                    Some(_) => speculating.push((member, pending)),
                    None => running.push((member, pending)),
                }
            }
        }
        let order = |m: &Member| {
            m.sequence
                .as_ref()
                .and_then(|s| s.order().map(str::to_owned))
        };
        running.sort_by_cached_key(|(m, _)| order(m));
        let sequences = running.iter().filter_map(|(m, _)| m.sequence.as_ref());
        let groups: BTreeSet<PassGroup> = sequences.map(SequenceState::group).collect();
        let mut groups = groups.into_iter();
        let started = groups.try_for_each(|group| decode_group(&mut running, group));
        if started.is_ok() {
            speculation::decode(speculating)?;
        } else {
            for (member, pending) in speculating {
                if let Some(sequence) = &mut member.sequence {
                    sequence.next = Some(pending);
                }
            }
        }
        // These tokens were queued by earlier passes, so they are valid even if a pass of this step
        // failed.
        for (member, pending) in running {
            let read = read(&pending, &member.request)?;
            if let Err(error) = read.check() {
                // The error ends only this row.
                member.sequence = None;
                member.error.get_or_insert(error);
                continue;
            }
            member.request.accept(read);
            if let Some(sequence) = &mut member.sequence
                && sequence.next.is_none()
                && sequence.must_restart()
                && !member.request.is_over()
            {
                sequence.restart(&member.request);
            }
        }
        started
    }

    fn compute(&mut self) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        engine.scope(|| self.prefill().and_then(|()| self.decode()))?;
        self.steps += 1;
        if self.steps.is_multiple_of(CLEAR_EVERY) {
            free_unused().map_err(engine_error("decode"))?;
        }
        Ok(())
    }
}

impl BatchSession for Batch {
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId> {
        let ids = self.engine.encode_prompt(prompt)?;
        self.add_ids(ids, options)
    }

    fn remove(&mut self, row: RequestId) -> bool {
        let before = self.rows.len();
        self.rows.retain_mut(|member| {
            let gone = member.id == row;
            if gone {
                member.sequence = None;
                member.request.end(inference::FinishReason::Cancelled);
            }
            !gone
        });
        self.rows.len() < before
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn step(&mut self) -> Result<VecDeque<BatchEvent>> {
        let mut events = VecDeque::new();
        self.rows.retain_mut(|member| match member.request.check() {
            Ok(()) => {
                // A request for zero tokens computes nothing.
                if member.request.finish_reason().is_some() {
                    member.sequence = None;
                }
                true
            }
            Err(error) => {
                let row = member.id;
                events.push_back(BatchEvent::Failed { row, error });
                false
            }
        });
        if let Err(error) = self.compute()
            && !self.make_room(&error)
        {
            // After a failed pass, the contents of the caches are undefined, so no row can
            // continue.
            for mut member in self.rows.drain(..) {
                member.sequence = None;
                member.request.fail(&error);
                events.push_back(BatchEvent::Failed {
                    row: member.id,
                    error: error.clone(),
                });
            }
            return Ok(events);
        }
        self.rows.retain_mut(|member| {
            let row = member.id;
            while let Some(token) = member.request.pop() {
                events.push_back(BatchEvent::Token { row, token });
            }
            if let Some(error) = member.error.take() {
                member.sequence = None;
                member.request.fail(&error);
                events.push_back(BatchEvent::Failed { row, error });
                return false;
            }
            let Some(reason) = member.request.finish_reason() else {
                return true;
            };
            if let Some(sequence) = member.sequence.take() {
                if let Some(draft) = member.draft.take() {
                    draft.keep(&member.request, member.request.tokens());
                }
                sequence.keep(&member.request);
            }
            events.push_back(BatchEvent::Done {
                row,
                reason,
                stop: member.request.stop_cause(),
                metrics: Box::new(member.request.metrics()),
            });
            false
        });
        Ok(events)
    }
}

/// Queues the next token of the running rows of a group.
fn decode_group(running: &mut [(&mut Member, Pending)], group: PassGroup) -> Result<()> {
    let fault = engine_error("decode");
    // Rows whose pending token is their last queue no further token.
    let mut pass = SharedPass::default();
    let (mut inputs, mut rows, mut places) = (Vec::new(), Vec::new(), Vec::new());
    let mut edits = Vec::new();
    for (i, (member, pending)) in running.iter_mut().enumerate() {
        if member.request.remaining() > 1
            && let Some(sequence) = member
                .sequence
                .as_mut()
                .filter(|sequence| !sequence.must_restart())
            && sequence.group() == group
        {
            pass.push(sequence, 1);
            member.before = Some(sequence.sampler.memory());
            inputs.push(&pending.token);
            places.push(i);
            edits.push(sequence.edits.clone());
            rows.push(Row {
                length: 1,
                caches: &mut sequence.caches,
            });
        }
    }
    let mut edits = Edits::new(edits);
    let step = pass.run(|decoder| {
        concatenate(&inputs, 0)
            .and_then(|ids| ids.expand_dims(0))
            .and_then(|ids| {
                decoder.forward(&ids, &mut rows, Positions::Last, &mut watch(&mut edits))
            })
    });
    drop(rows);
    if let Some(logits) = step {
        let logits = logits.map_err(&fault)?;
        let ready = running
            .iter_mut()
            .enumerate()
            .filter_map(|(i, (member, _))| {
                let row = places.binary_search(&i).ok()?;
                Some((row, &mut **member))
            })
            .collect();
        draw(ready, &logits)?;
        let sequences = places
            .iter()
            .filter_map(|&i| running[i].0.sequence.as_ref());
        async_eval(sequences.flat_map(|sequence| pending(sequence).chain(state(sequence))))
            .map_err(&fault)?;
    }
    for i in places {
        running[i].0.before = None;
    }
    Ok(())
}

/// Returns the arrays of the pending token, to be evaluated.
fn pending(sequence: &SequenceState) -> impl Iterator<Item = &Array> {
    sequence.next.iter().flat_map(Pending::arrays)
}

/// Samples the next token of each member from the member's row of `logits` `[1, rows, vocab]`,
/// without evaluation. If a member's grammar or logits processor fails, this member stores the
/// error. Other members are not affected.
fn draw(members: Vec<(usize, &mut Member)>, logits: &Array) -> Result<()> {
    let fault = engine_error("sampling");
    let rows_of = |rows: &[u32]| {
        let all = logits.squeeze_axis(0)?; // [1, rows, V] -> [rows, V]
        match rows {
            rows if rows.len() as i64 == i64::from(all.dim(0)?) => Ok(all),
            [row] => {
                let row = i32::try_from(*row).unwrap_or(i32::MAX);
                all.slice_axis(0, row, row + 1)
            }
            rows => all.take_ids(rows, 0),
        }
    };
    let place = |row: usize| u32::try_from(row).unwrap_or(u32::MAX);
    let (alone, together): (Vec<_>, Vec<_>) = members
        .into_iter()
        .partition(|(_, m)| Sampler::waits(m.request.options()));
    for (row, member) in alone {
        let selected = rows_of(&[place(row)]).map_err(&fault)?;
        let Some(sequence) = member.sequence.as_mut() else {
            continue;
        };
        match draw_rows(&mut [&mut sequence.sampler], &selected) {
            Ok(mut drawn) => sequence.next = drawn.pop(),
            Err(error) => member.error = Some(error),
        }
    }
    let rows: Vec<u32> = together.iter().map(|(row, _)| place(*row)).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let selected = rows_of(&rows).map_err(&fault)?;
    let mut sequences: Vec<&mut SequenceState> = together
        .into_iter()
        .filter_map(|(_, member)| member.sequence.as_mut())
        .collect();
    let drawn = {
        let mut samplers: Vec<&mut Sampler> =
            sequences.iter_mut().map(|l| &mut l.sampler).collect();
        draw_rows(&mut samplers, &selected)?
    };
    for (sequence, pending) in sequences.into_iter().zip(drawn) {
        sequence.next = Some(pending);
    }
    Ok(())
}

/// Returns the arrays that each step must evaluate, so that no graph of earlier steps is retained.
fn state(sequence: &SequenceState) -> impl Iterator<Item = &Array> {
    sequence
        .sampler
        .state()
        .chain(sequence.caches.iter().flat_map(|c| c.arrays()))
}
