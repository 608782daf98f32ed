//! Measures the times and memory of one request.

use std::sync::atomic::{AtomicUsize, Ordering};

use inference::{GenerateMetrics, kit};
use mlx_rs_core::memory;

/// The number of requests being measured. MLX counts memory per process, not per request.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// A guard that counts one request in [`RUNNING`].
#[derive(Debug)]
struct Measuring;

impl Measuring {
    /// Resets MLX's peak memory, unless another request is being measured, because the reset would
    /// lose that request's peak.
    fn start() -> Self {
        if RUNNING.fetch_add(1, Ordering::AcqRel) == 0 {
            let _ = memory::reset_peak();
        }
        Self
    }

    /// Returns the peak so far, and resets MLX's peak memory. `None` while another request is being
    /// measured, because the reset would lose that request's peak.
    fn restart(&self) -> Option<u64> {
        if RUNNING.load(Ordering::Acquire) != 1 {
            return None;
        }
        let peak = memory::peak().ok()?;
        memory::reset_peak().ok()?;
        Some(peak as u64)
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Measures one request: its times and counts, and the memory of the process.
#[derive(Debug)]
pub struct Clock {
    clock: kit::Clock,
    measuring: Option<Measuring>,
    decoding: bool,
    /// Peak memory of the prefill; `None` if the peak was not reset at the first token.
    prefill_peak: Option<u64>,
}

impl Clock {
    /// Starts the clock. Resets peak memory if no other request runs; otherwise the requests share
    /// a peak.
    pub fn start(prompt_tokens: usize) -> Self {
        Self {
            measuring: Some(Measuring::start()),
            decoding: false,
            prefill_peak: None,
            clock: kit::Clock::start(prompt_tokens),
        }
    }

    /// Records a token. The first token ends the prefill.
    pub fn token(&mut self) {
        self.clock.token();
        if !std::mem::replace(&mut self.decoding, true) {
            self.prefill_peak = self.measuring.as_ref().and_then(Measuring::restart);
        }
    }

    /// Records that `n` tokens of the prompt came from a cache.
    pub fn cached(&mut self, n: usize) {
        self.clock.counts().cached_tokens = n;
    }

    /// Records that `guessed` tokens were drafted, and that the model accepted `right` of them.
    pub fn drafted(&mut self, guessed: usize, right: usize) {
        let counts = self.clock.counts();
        counts.draft_tokens += guessed;
        counts.accepted_draft_tokens += right;
    }

    /// Records `n` generated tokens.
    pub fn produced(&mut self, n: usize) {
        self.clock.counts().generated_tokens = n;
    }

    /// Stops the clock and reads the memory.
    pub fn stop(&mut self) {
        if self.clock.stop() {
            let active = memory::active().unwrap_or(0) as u64;
            let counts = self.clock.counts();
            counts.active_memory_bytes = active;
            // MLX's reset sets the peak to 0 although memory is allocated, so the peak may be less
            // than `active`.
            let peak = (memory::peak().unwrap_or(0) as u64).max(active);
            counts.peak_memory_bytes = peak.max(self.prefill_peak.unwrap_or(0));
            counts.decode_peak_memory_bytes = if self.prefill_peak.is_some() { peak } else { 0 };
            self.measuring = None;
        }
    }

    /// The metrics up to now.
    pub fn metrics(&self) -> GenerateMetrics {
        self.clock.metrics()
    }
}
