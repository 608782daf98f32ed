//! Many requests at once: one forward pass a step for all of them. Requests come and go at any time
//! (continuous batching, Yu et al. 2022); what each of them gets is what it would get alone.
//!
//! The rows' tokens are packed, so there is no padding: a row of length `L` costs `L` positions. Each
//! row has caches of its own, so rows of any length and age go together. What prompts begin with alike is computed
//! once (`alike.rs`).

use std::collections::VecDeque;
use std::sync::Arc;

use inference::{BatchEvent, BatchSession, Error, GenerateOptions, Prompt, RequestId, Result};
use mlx_rs_core::{Array, async_eval, concatenate, eval, memory};

use super::alike::{self, Standing, Turn};
use super::lane::{Lane, Pending, draw_rows};
use super::{CLEAR_EVERY, Request, read};
use crate::cache::{self, Caches, Row};
use crate::engine::Engine;
use crate::engine::forward::ids;
use crate::error::engine as engine_error;
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::sample::Sampler;

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
    /// `None` once the request is over.
    lane: Option<Lane>,
    /// What went wrong with it alone, to be told after the step.
    error: Option<Error>,
}

impl Batch {
    /// Nobody yet.
    pub fn new(engine: Arc<Engine>) -> Self {
        Self {
            engine,
            rows: Vec::new(),
            next_id: 0,
            steps: 0,
        }
    }

    /// Adds a request for the prompt's ids.
    ///
    /// # Errors
    /// As [`super::Generation::new`].
    pub fn add_ids(&mut self, prompt: Vec<u32>, options: &GenerateOptions) -> Result<RequestId> {
        // Before they are cloned, which recurses over a schema.
        options.validate()?;
        let mut request = Request::new(Arc::clone(&self.engine), prompt, options.clone())?;
        let caches = self.engine.cache_options();
        let lane = self.engine.scope(|| Lane::new(&mut request, caches))?;
        let id = RequestId::new(self.next_id);
        self.next_id += 1;
        self.rows.push(Member {
            id,
            request,
            lane: Some(lane),
            error: None,
        });
        Ok(id)
    }

    /// How each row stands; those that are over hold nothing.
    fn standings(&self) -> Vec<Standing> {
        let of = |m: &Member| match &m.lane {
            Some(lane) if lane.next.is_none() => Standing {
                tokens: m.request.tokens(),
                held: lane.fed,
                waits: true,
                kin: lane.kin(),
            },
            Some(lane) => Standing {
                tokens: m.request.tokens(),
                held: cache::offset(&lane.caches).unsigned_abs() as usize,
                waits: false,
                kin: lane.kin(),
            },
            None => Standing {
                tokens: Vec::new(),
                held: 0,
                waits: false,
                kin: (0, 0),
            },
        };
        self.rows.iter().map(of).collect()
    }

    /// Copies what rows that wait have in common with others, until there is nothing to copy; returns for each row
    /// until which token of its prompt it may compute, `None` for those that do not.
    fn begin_alike(&mut self) -> Result<Vec<Option<usize>>> {
        loop {
            let cuttable = |from: usize, n: usize| {
                surplus(&self.rows[from], n)
                    .is_some_and(|(caches, surplus)| caches.iter().all(|c| c.can_trim(surplus)))
            };
            let turns = alike::turns(&self.standings(), cuttable);
            let mut copied = Vec::new();
            for (i, turn) in turns.iter().enumerate() {
                if let Some(Turn::Copy { from, tokens }) = *turn
                    && let Some((caches, surplus)) = surplus(&self.rows[from], tokens)
                {
                    let mut own = cache::copy(caches).map_err(engine_error("prefill"))?;
                    if cache::trim(&mut own, surplus) {
                        copied.push((i, tokens, own));
                    }
                }
            }
            if copied.is_empty() {
                let until = |(m, turn): (&Member, Option<Turn>)| match turn? {
                    Turn::Compute(until) => Some(until),
                    Turn::Copy { .. } => Some(m.request.so_far().len()),
                    Turn::Wait => None,
                };
                return Ok(self.rows.iter().zip(turns).map(until).collect());
            }
            for (i, tokens, own) in copied {
                let member = &mut self.rows[i];
                if let Some(lane) = &mut member.lane {
                    cache::settle(&own).map_err(engine_error("prefill"))?;
                    let all = member.request.so_far().len();
                    (lane.caches, lane.fed) = (own.for_sequence(all), tokens);
                    lane.begun = true;
                    if all == member.request.prompt().len() {
                        member.request.clock().cached(tokens);
                    }
                }
            }
        }
    }

    /// Runs parts of prompts, as many tokens as one step takes, shortest rest first. The rows whose
    /// prompt is done get their first token.
    fn prefill(&mut self) -> Result<()> {
        let waits = |m: &Member| m.lane.as_ref().is_some_and(|lane| lane.next.is_none());
        if !self.rows.iter().any(waits) {
            return Ok(());
        }
        for member in &mut self.rows {
            if let Some(lane) = &mut member.lane {
                lane.refresh(&mut member.request);
            }
        }
        let until = self.begin_alike()?;
        let mut waiting: Vec<(&mut Member, usize)> = self
            .rows
            .iter_mut()
            .zip(until)
            .filter_map(|(m, until)| {
                let fed = m.lane.as_ref()?.fed;
                Some((m, until?.saturating_sub(fed)))
            })
            .collect();
        waiting.sort_by_key(|(_, left)| *left);
        let budget = waiting
            .iter()
            .map(|(m, _)| m.request.options().prefill_step_size)
            .max()
            .unwrap_or(1);
        let mut tokens = Vec::new();
        let mut chosen: Vec<(&mut Member, usize)> = Vec::new();
        for (member, left) in waiting {
            // As many as still fit, and as the request itself wants at a time.
            let n = left
                .min(member.request.options().prefill_step_size)
                .min(budget - tokens.len().min(budget));
            if n == 0 {
                break;
            }
            let fed = member.lane.as_ref().map_or(0, |lane| lane.fed);
            tokens.extend_from_slice(&member.request.so_far()[fed..fed + n]);
            chosen.push((member, n));
        }
        let mut rows = Vec::with_capacity(chosen.len());
        let mut decoder = None;
        for (member, n) in &mut chosen {
            let Some(lane) = member.lane.as_mut() else {
                continue;
            };
            lane.fed += *n;
            lane.begun = true;
            decoder.get_or_insert_with(|| Arc::clone(&lane.decoder));
            rows.push(Row {
                length: i32::try_from(*n).unwrap_or(i32::MAX),
                caches: &mut lane.caches,
            });
        }
        let Some(decoder) = decoder else {
            return Ok(());
        };
        let step = ids(&tokens).and_then(|ids| {
            decoder.forward(&ids, &mut rows, Positions::Last, &mut Watch::nothing())
        });
        drop(rows);
        let logits = step.map_err(engine_error("prefill"))?;
        let mut ready = Vec::new();
        for (row, (member, _)) in chosen.iter_mut().enumerate() {
            let total = member.request.so_far().len();
            let Some(lane) = member.lane.as_mut() else {
                continue;
            };
            member.request.report(lane.fed);
            if lane.fed == total {
                ready.push((row, &mut **member));
            }
        }
        draw(ready, &logits)?;
        let lanes = chosen.iter().filter_map(|(m, _)| m.lane.as_ref());
        eval(lanes.flat_map(|lane| pending(lane).chain(state(lane))))
            .and_then(|()| memory::clear_cache())
            .map_err(engine_error("prefill"))
    }

    /// Starts the next token of every row that has one, then reads those it has.
    fn decode(&mut self) -> Result<()> {
        let mut running: Vec<(&mut Member, Pending)> = Vec::new();
        for member in &mut self.rows {
            if let Some(pending) = member.lane.as_mut().and_then(|lane| lane.next.take()) {
                running.push((member, pending));
            }
        }
        let fault = engine_error("decode");
        // Rows that have all they asked for with this token need no other.
        let mut decoder = None;
        let (mut fed, mut rows, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (member, pending)) in running.iter_mut().enumerate() {
            if member.request.room() > 1
                && let Some(lane) = member.lane.as_mut().filter(|lane| !lane.must_restart())
            {
                decoder.get_or_insert_with(|| Arc::clone(&lane.decoder));
                fed.push(&pending.token);
                places.push(i);
                rows.push(Row {
                    length: 1,
                    caches: &mut lane.caches,
                });
            }
        }
        if let Some(decoder) = decoder {
            let logits = concatenate(&fed, 0)
                .and_then(|ids| ids.expand_dims(0))
                .and_then(|ids| {
                    decoder.forward(&ids, &mut rows, Positions::Last, &mut Watch::nothing())
                })
                .map_err(&fault)?;
            drop(rows);
            let ready = running
                .iter_mut()
                .enumerate()
                .filter_map(|(i, (member, _))| {
                    let row = places.binary_search(&i).ok()?;
                    Some((row, &mut **member))
                })
                .collect();
            draw(ready, &logits)?;
            let lanes = places.iter().filter_map(|&i| running[i].0.lane.as_ref());
            async_eval(lanes.flat_map(|lane| pending(lane).chain(state(lane)))).map_err(&fault)?;
        }
        for (member, pending) in running {
            let read = read(&pending, &member.request)?;
            member.request.accept(read);
            if let Some(lane) = &mut member.lane
                && lane.next.is_none()
                && lane.must_restart()
                && !member.request.is_over()
            {
                lane.restart(&member.request);
            }
        }
        Ok(())
    }

    fn compute(&mut self) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        engine.scope(|| self.prefill().and_then(|()| self.decode()))?;
        self.steps += 1;
        if self.steps.is_multiple_of(CLEAR_EVERY) {
            memory::clear_cache().map_err(engine_error("decode"))?;
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
                member.lane = None;
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
                // Nothing is computed for a request that asked for no tokens.
                if member.request.finish_reason().is_some() {
                    member.lane = None;
                }
                true
            }
            Err(error) => {
                let row = member.id;
                events.push_back(BatchEvent::Failed { row, error });
                false
            }
        });
        if let Err(error) = self.compute() {
            // What is in the caches now is unknown: no row can go on.
            for mut member in self.rows.drain(..) {
                member.lane = None;
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
                member.lane = None;
                member.request.fail(&error);
                events.push_back(BatchEvent::Failed { row, error });
                return false;
            }
            let Some(reason) = member.request.finish_reason() else {
                return true;
            };
            if let Some(lane) = member.lane.take() {
                lane.keep(&member.request);
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

/// A member's caches, and how many more tokens than `n` they hold, if not fewer.
fn surplus(member: &Member, n: usize) -> Option<(&Caches, i32)> {
    let caches = &member.lane.as_ref()?.caches;
    let surplus = cache::offset(caches).checked_sub(i32::try_from(n).ok()?)?;
    (surplus >= 0).then_some((caches, surplus))
}

/// The token on its way, to be computed.
fn pending(lane: &Lane) -> impl Iterator<Item = &Array> {
    lane.next.iter().flat_map(Pending::arrays)
}

/// Draws the next token of members from their rows of `logits` `[1, rows, vocab]`, not yet computed. A
/// member whose grammar or logits processor fails keeps the error; the others are not affected.
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
        let own = rows_of(&[place(row)]).map_err(&fault)?;
        let Some(lane) = member.lane.as_mut() else {
            continue;
        };
        match draw_rows(&mut [&mut lane.sampler], &own) {
            Ok(mut drawn) => lane.next = drawn.pop(),
            Err(error) => member.error = Some(error),
        }
    }
    let rows: Vec<u32> = together.iter().map(|(row, _)| place(*row)).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let own = rows_of(&rows).map_err(&fault)?;
    let mut lanes: Vec<&mut Lane> = together
        .into_iter()
        .filter_map(|(_, member)| member.lane.as_mut())
        .collect();
    let drawn = {
        let mut samplers: Vec<&mut Sampler> = lanes.iter_mut().map(|l| &mut l.sampler).collect();
        draw_rows(&mut samplers, &own)?
    };
    for (lane, pending) in lanes.into_iter().zip(drawn) {
        lane.next = Some(pending);
    }
    Ok(())
}

/// What must be computed with a step, so that no graph is kept.
fn state(lane: &Lane) -> impl Iterator<Item = &Array> {
    lane.sampler
        .state()
        .chain(lane.caches.iter().flat_map(|c| c.state()))
}
