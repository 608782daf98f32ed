//! The server's metrics, in Prometheus's text format. Each server has a separate registry, so that
//! servers in one test process do not share counters.

use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use inference::GenerateMetrics;

/// The labels of the answer counter. Routes come from the route table and there are few statuses,
/// so clients cannot create new labels.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Answer {
    pub(crate) route: String,
    pub(crate) status: u16,
}

/// The label of a generated reply.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct End {
    pub(crate) reason: &'static str,
}

pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) answers: Family<Answer, Counter>,
    pub(crate) ends: Family<End, Counter>,
    pub(crate) refused: Counter,
    pub(crate) engine_failures: Counter,
    pub(crate) slow_readers: Counter,
    pub(crate) running: Gauge,
    pub(crate) queued: Gauge,
    pub(crate) kv_reserved: Gauge,
    pub(crate) connections: Gauge<i64, AtomicI64>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    draft_tokens: Counter,
    accepted_draft_tokens: Counter,
    queue_time: Histogram,
    first_token: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    request_time: Histogram,
    busy_time: Counter<f64, AtomicU64>,
}

/// A histogram with buckets from one millisecond to half an hour.
fn seconds() -> Histogram {
    Histogram::new([
        0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
        1800.0,
    ])
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("inference"),
            answers: Family::default(),
            ends: Family::default(),
            refused: Counter::default(),
            engine_failures: Counter::default(),
            slow_readers: Counter::default(),
            running: Gauge::default(),
            queued: Gauge::default(),
            kv_reserved: Gauge::default(),
            connections: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            draft_tokens: Counter::default(),
            accepted_draft_tokens: Counter::default(),
            queue_time: seconds(),
            first_token: seconds(),
            prefill_time: seconds(),
            decode_time: seconds(),
            request_time: seconds(),
            busy_time: Counter::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let r = &mut self.registry;
        r.register(
            "http_answers",
            "Answers by route and status",
            self.answers.clone(),
        );
        r.register("replies", "Replies by what ended them", self.ends.clone());
        r.register(
            "refused",
            "Requests refused for a full queue",
            self.refused.clone(),
        );
        r.register(
            "engine_failures",
            "Steps of the engine that failed or panicked",
            self.engine_failures.clone(),
        );
        r.register(
            "slow_readers",
            "Replies stopped because their reader was too far behind",
            self.slow_readers.clone(),
        );
        r.register(
            "requests_running",
            "Requests that run",
            self.running.clone(),
        );
        r.register("requests_queued", "Requests that wait", self.queued.clone());
        r.register_with_unit(
            "kv_reserved",
            "Bytes of keys and values that running requests may need",
            Unit::Bytes,
            self.kv_reserved.clone(),
        );
        r.register("connections", "Open connections", self.connections.clone());
        r.register(
            "prompt_tokens",
            "Tokens of prompts",
            self.prompt_tokens.clone(),
        );
        r.register(
            "cached_tokens",
            "Tokens of prompts that were not computed again",
            self.cached_tokens.clone(),
        );
        r.register(
            "generated_tokens",
            "Tokens of replies",
            self.generated_tokens.clone(),
        );
        r.register(
            "draft_tokens",
            "Tokens that a drafter proposed",
            self.draft_tokens.clone(),
        );
        r.register(
            "accepted_draft_tokens",
            "Proposed tokens that the model accepted",
            self.accepted_draft_tokens.clone(),
        );
        let mut time = |name: &str, help: &str, histogram: &Histogram| {
            r.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        };
        time(
            "queue_time",
            "From arrival to the first step",
            &self.queue_time,
        );
        time(
            "first_token",
            "From the first step to the first token",
            &self.first_token,
        );
        time(
            "prefill_time",
            "Computation of the prompt",
            &self.prefill_time,
        );
        time(
            "decode_time",
            "From the first token to the last",
            &self.decode_time,
        );
        time(
            "request_time",
            "From arrival to the end",
            &self.request_time,
        );
        r.register_with_unit(
            "engine_busy",
            "Time in the engine's steps",
            Unit::Seconds,
            self.busy_time.clone(),
        );
    }

    /// Counts a reply that ended.
    pub(crate) fn ended(&self, reason: &'static str, took: Duration) {
        self.ends.get_or_create(&End { reason }).inc();
        self.request_time.observe(took.as_secs_f64());
    }

    /// Adds the metrics of a complete reply.
    pub(crate) fn generated(&self, m: &GenerateMetrics) {
        self.prompt_tokens.inc_by(m.prompt_tokens as u64);
        self.cached_tokens.inc_by(m.cached_tokens as u64);
        self.generated_tokens.inc_by(m.generated_tokens as u64);
        self.draft_tokens.inc_by(m.draft_tokens as u64);
        self.accepted_draft_tokens
            .inc_by(m.accepted_draft_tokens as u64);
        self.first_token
            .observe(m.time_to_first_token.as_secs_f64());
        self.prefill_time.observe(m.prefill_time.as_secs_f64());
        self.decode_time.observe(m.decode_time.as_secs_f64());
    }

    /// Adds the time that a request waited in the queue.
    pub(crate) fn waited(&self, time: Duration) {
        self.queue_time.observe(time.as_secs_f64());
    }

    /// Adds time that the engine's thread was busy.
    pub(crate) fn worked(&self, time: Duration) {
        self.busy_time.inc_by(time.as_secs_f64());
    }

    /// All metrics as text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_in_the_text() {
        let metrics = Metrics::new();
        metrics.ended("stop", Duration::from_millis(20));
        metrics.waited(Duration::from_millis(20));
        let text = metrics.text();
        for line in [
            "inference_replies_total{reason=\"stop\"} 1",
            "inference_queue_time_seconds_count 1",
            "inference_requests_running 0",
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
