//! A batch session of the mock. Each request is a stream of the wrapped model.

use std::collections::VecDeque;
use std::sync::Arc;

use inference::{
    BatchEvent, BatchSession, Error, ErrorKind, GenerateOptions, Prompt, RequestId, Result,
    TextModel, TokenStream,
};

use super::Fault;
use super::model::{Adapters, without_adapter};

pub struct Session {
    model: Arc<dyn TextModel>,
    adapters: Adapters,
    fault: Fault,
    rows: Vec<(RequestId, TokenStream)>,
    next: u64,
}

impl Session {
    pub fn new(model: Arc<dyn TextModel>, adapters: Adapters, fault: Fault) -> Self {
        Self {
            model,
            adapters,
            fault,
            rows: Vec::new(),
            next: 0,
        }
    }
}

impl BatchSession for Session {
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId> {
        let mut options = without_adapter(options, &self.adapters, self.fault)?;
        if self.fault == Fault::SessionNotCancelled && options.interrupt.cancel.take().is_some() {
            options.max_tokens = options.max_tokens.min(64); // so that the reply ends
        }
        let prompt = match (self.fault, prompt) {
            (Fault::SessionMixesRows, Prompt::Text(_)) if self.rows.len() > 1 => {
                &Prompt::from("Water is")
            }
            _ => prompt,
        };
        let stream = self.model.generate(prompt, &options)?;
        let row = RequestId::new(self.next);
        self.next += 1;
        self.rows.push((row, stream));
        Ok(row)
    }

    fn remove(&mut self, row: RequestId) -> bool {
        let before = self.rows.len();
        if self.fault == Fault::SessionRemovesNothing {
            return self.rows.iter().any(|(id, _)| *id == row);
        }
        self.rows.retain(|(id, _)| *id != row);
        self.rows.len() < before
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn step(&mut self) -> Result<VecDeque<BatchEvent>> {
        let mut events = VecDeque::new();
        self.rows.retain_mut(|(row, stream)| {
            let row = *row;
            let event = match stream.next() {
                Some(Ok(mut token)) => {
                    // This fault changes each reply of the model.
                    if self.fault == Fault::OtherText {
                        token.text = token.text.to_uppercase();
                    }
                    BatchEvent::Token { row, token }
                }
                Some(Err(error)) => BatchEvent::Failed { row, error },
                None => BatchEvent::Done {
                    row,
                    reason: stream.finish_reason().unwrap(),
                    stop: stream.stop_cause(),
                    metrics: Box::new(stream.metrics()),
                },
            };
            let stays = matches!(event, BatchEvent::Token { .. });
            events.push_back(event);
            stays
        });
        let engine = |e: &BatchEvent| matches!(e, BatchEvent::Failed { error, .. } if error.kind() == ErrorKind::Engine);
        if self.fault == Fault::SessionFailsWhole && events.iter().any(engine) {
            for (row, _) in self.rows.drain(..) {
                let error = Error::new(ErrorKind::Engine, "a neighbor failed");
                events.push_back(BatchEvent::Failed { row, error });
            }
        }
        Ok(events)
    }
}
