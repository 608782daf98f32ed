//! Errors for clients, in the format of each API.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use inference::ErrorKind;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError(Box<Fault>);

impl std::ops::Deref for ApiError {
    type Target = Fault;
    fn deref(&self) -> &Fault {
        &self.0
    }
}

impl std::ops::DerefMut for ApiError {
    fn deref_mut(&mut self) -> &mut Fault {
        &mut self.0
    }
}

/// The content of an error.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fault {
    pub(crate) status: StatusCode,
    /// OpenAI's `type`.
    pub(crate) kind: &'static str,
    /// OpenAI's `code`.
    pub(crate) code: Option<&'static str>,
    pub(crate) message: String,
    /// The request's field that caused the error.
    pub(crate) param: Option<String>,
    /// More fields, such as the counts of tokens.
    pub(crate) extra: Map<String, Value>,
    /// The number of seconds after which the client may try again.
    pub(crate) retry_after: Option<u32>,
}

/// The API that defines the format of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Family {
    /// The API to which a path belongs.
    pub(crate) fn for_path(path: &str) -> Self {
        if path.starts_with("/api/") {
            Family::Ollama
        } else if path == "/v1/messages" || path.starts_with("/v1/messages/") {
            Family::Anthropic
        } else {
            Family::OpenAi
        }
    }
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Fault {
            status,
            kind,
            code: None,
            message: message.into(),
            param: None,
            extra: Map::new(),
            retry_after: None,
        }))
    }

    /// An error for a request that this server cannot serve.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// An error for a field that this server cannot serve.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(message).with_param(param)
    }

    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::field(param, message).with_code("unsupported_parameter")
    }

    pub(crate) fn busy() -> Self {
        let message = "the queue is full; try again soon";
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            .with_code("server_busy");
        error.retry_after = Some(1);
        error
    }

    pub(crate) fn stopping() -> Self {
        let message = "the server is shutting down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
            .with_code("shutting_down")
    }

    /// The error for a fault of the server. The log has the details.
    pub(crate) fn internal() -> Self {
        let message = "the server failed to answer; its log says why";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
            .with_code("internal_error")
    }

    pub(crate) fn context(prompt_tokens: usize, context: usize) -> Self {
        let mut error = Self::invalid(format!(
            "the prompt has {prompt_tokens} tokens, and the context holds {context}, including at least one for the reply; shorten the prompt"
        ))
        .with_code("context_length_exceeded");
        error
            .extra
            .insert("n_prompt_tokens".into(), prompt_tokens.into());
        error.extra.insert("n_ctx".into(), context.into());
        error
    }

    /// The error for a failure of the engine.
    pub(crate) fn of_engine(error: &inference::Error) -> Self {
        let status = |status, kind, code: &'static str| {
            Self::new(status, kind, error.message()).with_code(code)
        };
        match error.kind() {
            ErrorKind::InvalidOption => Self::invalid(error.message()),
            ErrorKind::Unsupported => {
                Self::invalid(error.message()).with_code("unsupported_parameter")
            }
            ErrorKind::DeadlineExceeded => {
                status(StatusCode::GATEWAY_TIMEOUT, "timeout_error", "timeout")
            }
            ErrorKind::Cancelled => Self::stopping(),
            ErrorKind::OutOfMemory => status(
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                "out_of_memory",
            ),
            // Messages of internal errors may contain file names, so clients get only a general
            // message.
            _ => {
                tracing::error!("a request failed: {error:#}");
                Self::internal()
            }
        }
    }

    pub(crate) fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    pub(crate) fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The body of the answer in the shape of `family`.
    pub(crate) fn body(&self, family: Family) -> Value {
        match family {
            Family::OpenAi => {
                let mut error = Map::new();
                error.insert("message".into(), self.message.as_str().into());
                error.insert("type".into(), self.kind.into());
                error.insert("param".into(), self.param.clone().into());
                error.insert("code".into(), self.code.into());
                error.extend(self.extra.clone());
                json!({"error": error})
            }
            Family::Anthropic => {
                let kind = match self.status {
                    StatusCode::UNAUTHORIZED => "authentication_error",
                    StatusCode::FORBIDDEN => "permission_error",
                    StatusCode::NOT_FOUND => "not_found_error",
                    StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
                    StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
                    StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
                    status if status.is_client_error() => "invalid_request_error",
                    _ => "api_error",
                };
                json!({"type": "error", "error": {"type": kind, "message": self.message}})
            }
            Family::Ollama => json!({"error": self.message}),
        }
    }

    /// The answer in the shape of `family`.
    pub(crate) fn response(&self, family: Family) -> Response {
        let mut response = (self.status, axum::Json(self.body(family))).into_response();
        if let Some(seconds) = self.retry_after {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

impl IntoResponse for ApiError {
    /// Creates an answer in OpenAI's format, with the error attached. The outermost middleware
    /// knows the path, and converts the answer if the path belongs to another API.
    fn into_response(self) -> Response {
        let mut response = self.response(Family::OpenAi);
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_shape_of_each_family() {
        let error = ApiError::context(12, 8).with_param("messages");
        let body = error.body(Family::OpenAi);
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert_eq!(body["error"]["param"], "messages");
        assert_eq!(body["error"]["code"], "context_length_exceeded");
        assert_eq!(body["error"]["n_prompt_tokens"], 12);
        assert_eq!(body["error"]["n_ctx"], 8);
        let body = error.body(Family::Anthropic);
        assert_eq!(
            (&body["type"], &body["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error"))
        );
        assert!(error.body(Family::Ollama)["error"].is_string());
        for (path, family) in [
            ("/v1/messages", Family::Anthropic),
            ("/v1/messages/count_tokens", Family::Anthropic),
            ("/api/chat", Family::Ollama),
            ("/v1/messagesx", Family::OpenAi),
        ] {
            assert_eq!(Family::for_path(path), family, "{path}");
        }
    }

    #[test]
    fn faults_of_the_server_do_not_tell_what_they_were() {
        let secret = inference::Error::new(ErrorKind::Engine, "cannot open weights.bin");
        let error = ApiError::of_engine(&secret);
        assert_eq!(error.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(!error.message.contains("weights"));
        let bad = inference::Error::new(ErrorKind::InvalidOption, "top_p is 3");
        assert_eq!(ApiError::of_engine(&bad).message, "top_p is 3");
    }
}
