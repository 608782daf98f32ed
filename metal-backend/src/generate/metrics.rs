//! Measures one request: times and memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use inference::GenerateMetrics;
use mlx_rs_core::memory;

/// The number of measured requests; MLX counts memory per process, not per request.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// A guard that counts one request in [`RUNNING`].
#[derive(Debug)]
struct Measuring;

impl Measuring {
    /// Resets the measurement of peak memory. It does not reset if another request is being
    /// measured, whose peak would be lost.
    fn start() -> Self {
        if RUNNING.fetch_add(1, Ordering::AcqRel) == 0 {
            let _ = memory::reset_peak();
        }
        Self
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Measures one request.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    first: Option<Duration>,
    last: Duration,
    end: Option<Duration>,
    prompt_tokens: usize,
    cached: usize,
    produced: usize,
    /// The number of drafted and of accepted tokens.
    drafted: (usize, usize),
    peak: u64,
    active: u64,
    measuring: Option<Measuring>,
}

impl Clock {
    /// Starts the clock, and resets peak memory if no other request runs. Concurrent requests share
    /// the peak.
    pub fn start(prompt_tokens: usize) -> Self {
        Self {
            measuring: Some(Measuring::start()),
            start: Instant::now(),
            first: None,
            last: Duration::ZERO,
            end: None,
            prompt_tokens,
            cached: 0,
            produced: 0,
            drafted: (0, 0),
            peak: 0,
            active: 0,
        }
    }

    /// Records a token; the first one ends the prefill.
    pub fn token(&mut self) {
        let now = self.start.elapsed();
        self.first.get_or_insert(now);
        self.last = now;
    }

    /// Records that `n` tokens of the prompt come from a cache.
    pub fn cached(&mut self, n: usize) {
        self.cached = n;
    }

    /// Records that `guessed` tokens were drafted and `right` of them accepted.
    pub fn drafted(&mut self, guessed: usize, right: usize) {
        self.drafted.0 += guessed;
        self.drafted.1 += right;
    }

    /// Records `n` generated tokens.
    pub fn produced(&mut self, n: usize) {
        self.produced = n;
    }

    /// Stops the clock and reads the memory.
    pub fn stop(&mut self) {
        if self.end.is_none() {
            self.end = Some(self.start.elapsed());
            self.active = memory::active().unwrap_or(0) as u64;
            // MLX's reset sets the peak to 0; memory allocated before it counts through `active`.
            self.peak = (memory::peak().unwrap_or(0) as u64).max(self.active);
            self.measuring = None;
        }
    }

    /// The metrics up to now.
    pub fn metrics(&self) -> GenerateMetrics {
        let total = self.end.unwrap_or_else(|| self.start.elapsed());
        let first = self.first.unwrap_or(total);
        let mut m = GenerateMetrics::default();
        m.prompt_tokens = self.prompt_tokens;
        m.cached_tokens = self.cached;
        m.generated_tokens = self.produced;
        (m.draft_tokens, m.accepted_draft_tokens) = self.drafted;
        m.prefill_time = first;
        m.time_to_first_token = first;
        m.decode_time = self.last.saturating_sub(first);
        m.total_time = total;
        m.peak_memory_bytes = self.peak;
        m.active_memory_bytes = self.active;
        m
    }
}
