//! The spans of requests. Attributes have the names of OpenTelemetry's semantic conventions for
//! HTTP and for generative AI. No span contains text of a prompt or a reply.

use std::time::{Instant, SystemTime};

use axum::http::{HeaderMap, HeaderName, Method};
use inference::{FinishReason, GenerateMetrics};
use opentelemetry::propagation::Extractor;
use opentelemetry::trace::{Span, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue, global};

/// The name of the instrumentation.
const SCOPE: &str = "inference_server";

tokio::task_local! {
    /// The span of the request that this task handles.
    static REQUEST: Context;
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The span of a request. It ends with the answer's last byte, because replies hold clones of it.
pub(crate) struct RequestSpan(Context);

impl RequestSpan {
    /// Begins a span, as a child of the span in the header `traceparent`.
    pub(crate) fn begin(method: &Method, route: &str, headers: &HeaderMap) -> Self {
        let caller = global::get_text_map_propagator(|propagator| {
            propagator.extract_with_context(&Context::new(), &Headers(headers))
        });
        let tracer = global::tracer(SCOPE);
        let span = tracer
            .span_builder(format!("{method} {route}"))
            .with_kind(SpanKind::Server)
            .with_attributes([
                KeyValue::new("http.request.method", method.to_string()),
                KeyValue::new("http.route", route.to_owned()),
            ])
            .start_with_context(&tracer, &caller);
        Self(caller.with_span(span))
    }

    /// Runs the handler of the request.
    pub(crate) async fn within<F: Future>(&self, work: F) -> F::Output {
        REQUEST.scope(self.0.clone(), work).await
    }

    /// Records the status of the answer.
    pub(crate) fn answered(&self, status: u16) {
        let span = self.0.span();
        span.set_attribute(KeyValue::new(
            "http.response.status_code",
            i64::from(status),
        ));
        if status >= 500 {
            span.set_status(Status::error(""));
        }
    }
}

/// The spans of one reply: `queue`, `prefill` and `decode`. A span is created when its phase ends.
pub(crate) struct ReplySpans {
    /// The span of the request; `None` if it is not recorded.
    request: Option<Context>,
    model: String,
    arrived: SystemTime,
    started: Option<SystemTime>,
    first_token: Option<SystemTime>,
    is_over: bool,
}

impl ReplySpans {
    /// Creates the spans of a reply to the request of this task, which arrived at this time.
    pub(crate) fn begin(model: &str, arrived: Instant) -> Self {
        let request = REQUEST.try_with(Clone::clone).ok();
        let now = SystemTime::now();
        Self {
            request: request.filter(|context: &Context| context.span().is_recording()),
            model: model.to_owned(),
            arrived: now.checked_sub(arrived.elapsed()).unwrap_or(now),
            started: None,
            first_token: None,
            is_over: false,
        }
    }

    /// Creates the spans of the next round of a reply that called the server's tools.
    pub(crate) fn again(&self) -> Self {
        Self {
            request: self.request.clone(),
            model: self.model.clone(),
            arrived: SystemTime::now(),
            started: None,
            first_token: None,
            is_over: false,
        }
    }

    fn record(
        &self,
        name: &'static str,
        (from, to): (SystemTime, SystemTime),
        mut attributes: Vec<KeyValue>,
        error: Option<&'static str>,
    ) {
        let Some(request) = &self.request else {
            return;
        };
        attributes.push(KeyValue::new("gen_ai.request.model", self.model.clone()));
        let tracer = global::tracer(SCOPE);
        let mut span = tracer
            .span_builder(name)
            .with_kind(SpanKind::Internal)
            .with_start_time(from)
            .with_attributes(attributes)
            .start_with_context(&tracer, request);
        if let Some(error) = error {
            span.set_status(Status::error(error));
        }
        span.end_with_timestamp(to);
    }

    /// Records that the request left the queue.
    pub(crate) fn started(&mut self) {
        let now = SystemTime::now();
        self.started = Some(now);
        self.record("queue", (self.arrived, now), Vec::new(), None);
    }

    /// Records that a token was generated.
    pub(crate) fn token(&mut self) {
        self.first_token.get_or_insert_with(SystemTime::now);
    }

    /// Records the end of the reply.
    pub(crate) fn ended(&mut self, reason: FinishReason, metrics: &GenerateMetrics) {
        let input = vec![
            KeyValue::new("gen_ai.usage.input_tokens", count(metrics.prompt_tokens)),
            KeyValue::new(
                "gen_ai.usage.cache_read.input_tokens",
                count(metrics.cached_tokens),
            ),
        ];
        let output = vec![
            KeyValue::new(
                "gen_ai.usage.output_tokens",
                count(metrics.generated_tokens),
            ),
            KeyValue::new("gen_ai.response.finish_reason", reason.as_str()),
        ];
        self.finish(input, output, None);
    }

    /// Ends the current span with an error: the reply failed, or the client disconnected.
    pub(crate) fn failed(&mut self, why: &'static str) {
        self.finish(Vec::new(), Vec::new(), Some(why));
    }

    fn finish(&mut self, input: Vec<KeyValue>, output: Vec<KeyValue>, error: Option<&'static str>) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        let now = SystemTime::now();
        match (self.started, self.first_token) {
            (None, _) => self.record("queue", (self.arrived, now), input, error),
            (Some(started), None) => self.record("prefill", (started, now), input, error),
            (Some(started), Some(first)) => {
                self.record("prefill", (started, first), input, None);
                self.record("decode", (first, now), output, error);
            }
        }
    }
}

impl Drop for ReplySpans {
    fn drop(&mut self) {
        self.failed("cancelled");
    }
}
