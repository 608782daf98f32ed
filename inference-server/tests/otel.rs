//! Spans of OpenTelemetry: their names, times, parents and attributes. The tracer provider is
//! global, so the test has a program of its own.

#![forbid(unsafe_code)]
#![cfg(feature = "otel")]

mod common;

use std::collections::BTreeMap;

use common::{config, eventually, serve};
use opentelemetry::global;
use opentelemetry::trace::Status;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use serde_json::json;

/// The attributes of a span as texts.
fn attributes(span: &SpanData) -> BTreeMap<String, String> {
    let of = |a: &opentelemetry::KeyValue| (a.key.to_string(), a.value.to_string());
    span.attributes.iter().map(of).collect()
}

#[test]
fn a_request_has_spans_for_its_queue_prefill_and_decoding() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(exporter.clone())
        .build();
    global::set_tracer_provider(provider.clone());
    global::set_text_map_propagator(TraceContextPropagator::new());
    let server = serve(&config());
    let spans = |n: usize| {
        eventually("the spans ended", || {
            exporter.get_finished_spans().unwrap().len() >= n
        });
        let spans = exporter.get_finished_spans().unwrap();
        exporter.reset();
        assert_eq!(spans.len(), n, "{spans:#?}");
        spans
    };

    let trace = "0af7651916cd43dd8448eb211c80319c";
    let parent = "b7ad6b7169203331";
    let traceparent = format!("00-{trace}-{parent}-01");
    for stream in [false, true] {
        let body = json!({"prompt": "say:hello", "max_tokens": 100, "stream": stream});
        let client = server.client().with("traceparent", &traceparent);
        let reply = client.post("/v1/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        let spans = spans(4);
        let named = |name: &str| -> &SpanData {
            let mut all = spans.iter().filter(|span| span.name == name);
            let span = all.next().unwrap_or_else(|| panic!("{name} in {spans:#?}"));
            assert!(all.next().is_none(), "two spans {name}");
            span
        };
        let request = named("POST /v1/completions");
        assert_eq!(request.span_context.trace_id().to_string(), trace);
        assert_eq!(request.parent_span_id.to_string(), parent);
        let told = attributes(request);
        assert_eq!(told["http.response.status_code"], "200");
        assert_eq!(told["http.route"], "/v1/completions");
        let [queue, prefill, decode] = ["queue", "prefill", "decode"].map(named);
        for span in [queue, prefill, decode] {
            assert_eq!(span.parent_span_id, request.span_context.span_id());
            assert_eq!(span.span_context.trace_id().to_string(), trace);
            assert!(span.start_time <= span.end_time);
            assert!(span.end_time <= request.end_time, "{stream}");
            assert!(attributes(span).contains_key("gen_ai.request.model"));
        }
        assert_eq!(queue.end_time, prefill.start_time);
        assert_eq!(prefill.end_time, decode.start_time);
        assert_eq!(attributes(prefill)["gen_ai.usage.input_tokens"], "9");
        assert_eq!(
            // The scripted model reports two cached tokens.
            attributes(prefill)["gen_ai.usage.cache_read.input_tokens"],
            "2"
        );
        assert_eq!(attributes(decode)["gen_ai.usage.output_tokens"], "5");
        assert_eq!(attributes(decode)["gen_ai.response.finish_reason"], "stop");
        for span in &spans {
            let text = format!("{:?}", attributes(span));
            assert!(!text.contains("hello"), "a span has text: {text}");
        }
    }

    // A request without a parent starts a new trace. The span of a failed request has an error
    // status.
    let body = json!({"prompt": "!fail say:hello", "max_tokens": 100});
    assert_eq!(server.client().post("/v1/completions", &body).status, 500);
    let failed = spans(4);
    let request = failed.iter().find(|span| span.name.starts_with("POST"));
    let request = request.unwrap();
    assert_ne!(request.span_context.trace_id().to_string(), trace);
    assert!(matches!(request.status, Status::Error { .. }));
    let decode = failed.iter().find(|span| span.name == "decode").unwrap();
    assert!(matches!(&decode.status, Status::Error { description } if description == "engine"));

    // The client disconnects during the reply.
    let body = json!({"prompt": "!long", "max_tokens": 100_000, "stream": true});
    let stream = server.client().open_json("/v1/completions", &body);
    eventually("it runs", || server.state.running() == 1);
    std::thread::sleep(std::time::Duration::from_millis(200));
    drop(stream);
    let cancelled = spans(4);
    let decode = cancelled.iter().find(|span| span.name == "decode").unwrap();
    assert!(matches!(&decode.status, Status::Error { description } if description == "cancelled"));

    // Requests that the caller does not sample have no spans.
    let client = server
        .client()
        .with("traceparent", &format!("00-{trace}-{parent}-00"));
    let body = json!({"prompt": "say:hello"});
    assert_eq!(client.post("/v1/completions", &body).status, 200);
    server.client().get("/health").expect(200);
    assert_eq!(spans(1)[0].name, "GET /health");
    provider.shutdown().unwrap();
}
