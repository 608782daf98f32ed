//! Many requests at once: one forward pass a step for all of them. Requests come and go at any time
//! (continuous batching, Yu et al. 2022); what each of them gets is what it would get alone.
//!
//! The rows' tokens are packed, so there is no padding: a row of length `L` costs `L` positions. Each
//! row has caches of its own, so rows of any length and age go together.

use std::collections::VecDeque;
use std::sync::Arc;

use inference::{BatchEvent, BatchSession, GenerateOptions, Prompt, Result, RowId};
use mlx_rs_core::{Array, async_eval, concatenate, eval, memory};

use super::lane::{Lane, Pending};
use super::prefill::ids;
use super::{CLEAR_EVERY, Request, read};
use crate::arch::Watch;
use crate::cache::Row;
use crate::error::engine as engine_error;
use crate::model::Engine;
use crate::nn::attention::Positions;

/// Requests that run together.
pub struct Batch {
    engine: Arc<Engine>,
    rows: Vec<Member>,
    next_id: u64,
    steps: usize,
}

struct Member {
    id: RowId,
    request: Request,
    /// `None` once the request is over.
    lane: Option<Lane>,
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
    pub fn add_ids(&mut self, prompt: Vec<u32>, options: &GenerateOptions) -> Result<RowId> {
        let mut request = Request::new(Arc::clone(&self.engine), prompt, options.clone())?;
        let lane = self.engine.scope(|| Lane::new(&mut request))?;
        let id = RowId::new(self.next_id);
        self.next_id += 1;
        self.rows.push(Member {
            id,
            request,
            lane: Some(lane),
        });
        Ok(id)
    }

    /// Runs parts of prompts, as many tokens as one step takes, shortest rest first. The rows whose
    /// prompt is done get their first token.
    fn prefill(&mut self) -> Result<()> {
        let mut waiting: Vec<&mut Member> = self
            .rows
            .iter_mut()
            .filter(|m| m.lane.as_ref().is_some_and(|lane| lane.next.is_none()))
            .collect();
        if waiting.is_empty() {
            return Ok(());
        }
        let left = |m: &Member| {
            let fed = m.lane.as_ref().map_or(0, |lane| lane.fed);
            m.request.prompt().len().saturating_sub(fed)
        };
        waiting.sort_by_key(|m| left(m));
        let budget = waiting
            .iter()
            .map(|m| m.request.options().prefill_step_size)
            .max()
            .unwrap_or(1);
        let mut tokens = Vec::new();
        let mut chosen: Vec<(&mut Member, usize)> = Vec::new();
        for member in waiting {
            let n = left(member).min(budget - tokens.len().min(budget));
            if n == 0 {
                break;
            }
            let fed = member.lane.as_ref().map_or(0, |lane| lane.fed);
            tokens.extend_from_slice(&member.request.prompt()[fed..fed + n]);
            chosen.push((member, n));
        }
        let mut rows = Vec::with_capacity(chosen.len());
        let mut decoder = None;
        for (member, n) in &mut chosen {
            let Some(lane) = member.lane.as_mut() else {
                continue;
            };
            lane.fed += *n;
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
        for (row, (member, _)) in chosen.iter_mut().enumerate() {
            let total = member.request.prompt().len();
            let Some(lane) = member.lane.as_mut() else {
                continue;
            };
            if let Some(progress) = &member.request.options().progress {
                progress.report(lane.fed, total);
            }
            if lane.fed == total {
                lane.next = Some(sample(lane, &logits, row).map_err(engine_error("prefill"))?);
            }
        }
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
                && let Some(lane) = member.lane.as_mut()
            {
                decoder.get_or_insert_with(|| Arc::clone(&lane.decoder));
                fed.push(&pending.0);
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
            for (row, &i) in places.iter().enumerate() {
                if let Some(lane) = running[i].0.lane.as_mut() {
                    lane.next = Some(sample(lane, &logits, row).map_err(&fault)?);
                }
            }
            let lanes = places.iter().filter_map(|&i| running[i].0.lane.as_ref());
            async_eval(lanes.flat_map(|lane| pending(lane).chain(state(lane)))).map_err(&fault)?;
        }
        for (member, (token, logits)) in running {
            let (id, logits) = read(&token, &logits, member.request.options())?;
            member.request.accept(id, logits);
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
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RowId> {
        let ids = self.engine.encode_prompt(prompt)?;
        self.add_ids(ids, options)
    }

    fn remove(&mut self, row: RowId) -> bool {
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
            Ok(()) => true,
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
            let Some(reason) = member.request.finish_reason() else {
                return true;
            };
            if let Some(lane) = member.lane.take() {
                lane.keep(&member.request);
            }
            events.push_back(BatchEvent::Done {
                row,
                reason,
                metrics: Box::new(member.request.metrics()),
            });
            false
        });
        Ok(events)
    }
}

/// The token on its way and its logits.
fn pending(lane: &Lane) -> impl Iterator<Item = &Array> {
    lane.next.iter().flat_map(|(token, logits)| [token, logits])
}

/// The next token of a row from logits `[1, rows, vocab]`, not yet computed.
fn sample(lane: &mut Lane, logits: &Array, row: usize) -> mlx_rs_core::Result<Pending> {
    let row = i32::try_from(row).unwrap_or(i32::MAX);
    // [1, rows, V] -> [1, V]
    let logits = logits.slice_axis(1, row, row + 1)?.squeeze_axis(1)?;
    let token = lane.sampler.sample(&logits)?;
    Ok((token, logits))
}

/// What must be computed with a step, so that no graph is kept.
fn state(lane: &Lane) -> impl Iterator<Item = &Array> {
    lane.sampler
        .state()
        .chain(lane.caches.iter().flat_map(|c| c.state()))
}
