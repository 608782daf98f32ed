//! Spans of OpenTelemetry for each request, with the feature `otel`: the request, its time in the
//! queue, the prefill and the decoding. The program chooses the exporter, as the global tracer
//! provider. Without the feature, the same functions do nothing.

#[cfg(not(feature = "otel"))]
mod none;
#[cfg(feature = "otel")]
mod spans;

#[cfg(not(feature = "otel"))]
pub(crate) use none::{ReplySpans, RequestSpan};
#[cfg(feature = "otel")]
pub(crate) use spans::{ReplySpans, RequestSpan};
