//! Measures the time of each part of a decode step. Evaluates each part before the next part
//! begins.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use inference::{
    Error, ErrorKind, GenerateOptions, Interrupt, PartTime, Prompt, Result, StepPart, StepProfile,
};
use mlx_rs_core::{Array, eval};

use crate::arch::Decoder;
use crate::cache::{self, Caches, Row};
use crate::engine::Engine;
use crate::engine::forward::{forward_prompt, ids};
use crate::error::engine as engine_error;
use crate::generate::{Pending, draw_rows};
use crate::nn::attention::Positions;
use crate::nn::hooks::{Stopwatch, Watch};
use crate::sample::{Sampler, check_greatest};

/// Times by layer and part. Parts outside the layers have the layer `None`.
type Times = BTreeMap<(Option<usize>, StepPart), Duration>;

/// A stopwatch that evaluates the arrays of a part and adds the elapsed time to the part's time.
struct Laps {
    last: Instant,
    times: Times,
}

impl Laps {
    fn book(&mut self, layer: Option<usize>, part: StepPart) {
        let now = Instant::now();
        *self.times.entry((layer, part)).or_default() += now - self.last;
        self.last = now;
    }
}

impl Stopwatch for Laps {
    fn lap(
        &mut self,
        layer: Option<usize>,
        part: StepPart,
        arrays: &[&Array],
    ) -> mlx_rs_core::Result<()> {
        eval(arrays.iter().copied())?;
        self.book(layer, part);
        Ok(())
    }
}

/// A request in which each step is evaluated before the next step begins.
struct Steps<'a> {
    decoder: &'a dyn Decoder,
    caches: Caches,
    sampler: Sampler,
    /// All tokens sampled so far.
    tokens: Vec<u32>,
}

impl Steps<'_> {
    /// Computes the token after the last token, in a step that `watch` observes.
    fn forward(&mut self, watch: &mut Watch<'_>) -> Result<Pending> {
        if self.caches.until_switch() < 1 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the rotation changes at this length, and all of the prompt must be computed \
                 again; take a shorter or a longer prompt",
            ));
        }
        let logits = ids(self
            .tokens
            .last_chunk::<1>()
            .map_or(&[], <[u32; 1]>::as_slice))
        .and_then(|ids| {
            let mut rows = [Row {
                length: 1,
                caches: &mut self.caches,
            }];
            self.decoder
                .forward(&ids, &mut rows, Positions::Last, watch)
        })
        .map_err(engine_error("profile"))?;
        self.draw(&logits)
    }

    /// Samples a token from logits `[1, 1, vocab]`, without evaluation.
    fn draw(&mut self, logits: &Array) -> Result<Pending> {
        let logits = logits.squeeze_axis(1).map_err(engine_error("profile"))?;
        draw_rows(&mut [&mut self.sampler], &logits)?
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::Engine, "no token was drawn"))
    }

    /// Waits for the token, and appends it.
    fn finish(&mut self, pending: &Pending) -> Result<()> {
        let fault = engine_error("profile");
        eval(pending.arrays().chain(self.sampler.state())).map_err(&fault)?;
        check_greatest(
            pending.greatest.item::<f32>().map_err(&fault)?,
            pending.step,
        )?;
        self.tokens
            .push(pending.token.item::<u32>().map_err(&fault)?);
        Ok(())
    }

    /// Runs a step without measurement.
    fn plain(&mut self) -> Result<()> {
        let pending = self.forward(&mut Watch::nothing())?;
        self.finish(&pending)?;
        cache::eval_caches(&self.caches).map_err(engine_error("profile"))
    }

    /// Runs a step, and adds the times of its parts to `times`.
    fn measured(&mut self, times: Times) -> Result<Times> {
        let last = Instant::now();
        let mut laps = Laps { last, times };
        let pending = self.forward(&mut Watch::measured(&mut laps))?;
        self.finish(&pending)?;
        laps.book(None, StepPart::Sampling);
        cache::eval_caches(&self.caches).map_err(engine_error("profile"))?;
        laps.book(None, StepPart::Rest);
        Ok(laps.times)
    }
}

/// The times of the parts in the steps that follow `prompt`.
///
/// # Errors
/// If the options are unsuitable, memory runs out, the model is closed, or the caller interrupts.
pub fn profile_steps(
    engine: &Engine,
    prompt: &Prompt,
    options: &GenerateOptions,
    interrupt: &Interrupt,
) -> Result<StepProfile> {
    options.validate()?;
    let is_plain = options.steering.is_none() && options.adapter.is_none();
    if !is_plain || options.speculative.prompt_lookup > 0 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "steps are measured one by one, and as the model computes them: leave out steering, \
             adapter and prompt_lookup",
        ));
    }
    let steps = options.max_tokens;
    if steps == 0 {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "max_tokens is 0; measure at least one step",
        ));
    }
    let prompt = engine.encode_prompt(prompt)?;
    engine.check_prompt(&prompt)?;
    let decoder = engine.decoder()?;
    let check = || engine.check_open().and_then(|()| interrupt.check());
    check()?;
    engine.scope(|| {
        let caches = decoder.new_caches(engine.cache_options());
        // Two warm-up steps, then one plain and one measured step per requested step.
        let all = steps.saturating_add(1).saturating_mul(2);
        let mut caches = caches.for_sequence(prompt.len());
        let total = i32::try_from(prompt.len().saturating_add(all)).unwrap_or(i32::MAX);
        caches.iter_mut().for_each(|cache| cache.expect(total));
        let mut run = Steps {
            decoder: decoder.as_ref(),
            caches,
            sampler: engine.sampler(options, &prompt)?,
            tokens: Vec::new(),
        };
        let step = options.prefill.prefill_step_size;
        let parts = (&mut run.caches, None);
        let logits = forward_prompt(run.decoder, &prompt, parts, step, &mut |_| check())?;
        let first = run.draw(&logits)?;
        run.finish(&first)?;
        cache::eval_caches(&run.caches).map_err(engine_error("profile"))?;
        // One step of each kind fills caches and prepares kernels.
        run.plain()?;
        run.measured(Times::new())?;
        let (mut plain, mut measured) = (Duration::ZERO, Duration::ZERO);
        let mut times = Times::new();
        let context = cache::offset(&run.caches).unsigned_abs() as usize;
        for _ in 0..steps {
            check()?;
            let began = Instant::now();
            run.plain()?;
            plain += began.elapsed();
            let began = Instant::now();
            times = run.measured(times)?;
            measured += began.elapsed();
        }
        let mean = |time: Duration| time.as_secs_f64() / steps as f64;
        let mut profile = StepProfile::default();
        profile.steps = steps;
        profile.context = context;
        profile.step_seconds = mean(measured);
        profile.plain_step_seconds = mean(plain);
        profile.tokens = run.tokens;
        profile.parts = (times.into_iter())
            .map(|((layer, part), time)| PartTime::new(layer, part, mean(time)))
            .collect();
        Ok(profile)
    })
}
