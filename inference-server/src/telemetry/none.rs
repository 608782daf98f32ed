//! No spans, for builds without the feature `otel`.

use std::time::Instant;

use axum::http::{HeaderMap, Method};
use inference::{FinishReason, GenerateMetrics};

pub(crate) struct RequestSpan;

impl RequestSpan {
    pub(crate) fn begin(_method: &Method, _route: &str, _headers: &HeaderMap) -> Self {
        Self
    }

    pub(crate) async fn within<F: Future>(&self, work: F) -> F::Output {
        work.await
    }

    pub(crate) fn answered(&self, _status: u16) {}
}

pub(crate) struct ReplySpans;

impl ReplySpans {
    pub(crate) fn begin(_model: &str, _arrived: Instant) -> Self {
        Self
    }

    pub(crate) fn again(&self) -> Self {
        Self
    }

    pub(crate) fn started(&mut self) {}

    pub(crate) fn token(&mut self) {}

    pub(crate) fn ended(&mut self, _reason: FinishReason, _metrics: &GenerateMetrics) {}

    pub(crate) fn failed(&mut self, _why: &'static str) {}
}
