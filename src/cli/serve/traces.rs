//! Sends traces of requests by OpenTelemetry, with the feature `otel`. The standard variables
//! configure the exporter. `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`
//! sets the endpoint. Other variables set headers, timeout, service name and resource attributes.
//! Without an endpoint, no traces are sent.

use std::future::{Future, ready};
use std::pin::Pin;
use std::time::Duration;

use opentelemetry::global;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;

use crate::cli::terminal::failure::Failure;

/// Each of these variables turns traces on.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
];

/// The client of the exporter. The exporter has a thread of its own, so the client may block.
#[derive(Debug)]
struct Client(ureq::Agent);

impl Client {
    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts, body.to_vec());
        let (parts, mut body) = self.0.run(request)?.into_parts();
        let body = body.read_to_vec()?;
        Ok(Response::from_parts(parts, Bytes::from(body)))
    }
}

impl HttpClient for Client {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(ready(self.send(request)))
    }
}

/// Sends traces while this value lives. On drop, it sends the pending ones.
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Starts to send traces, if a variable names an endpoint.
    pub fn start() -> Result<Option<Self>, Failure> {
        let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let Some(variable) = ENDPOINTS.iter().find(|name| is_set(name)) else {
            return Ok(None);
        };
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(10)))
            .build();
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client(agent.into()))
            .build()
            .map_err(|e| Failure::usage(format!("{variable}: {e}")))?;
        let mut resource = Resource::builder();
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("mlx");
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        global::set_tracer_provider(provider.clone());
        global::set_text_map_propagator(TraceContextPropagator::new());
        Ok(Some(Self(provider)))
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        if let Err(e) = self.0.shutdown() {
            tracing::warn!("traces are lost: {e}");
        }
    }
}
