//! A connection that limits the total time an answer waits for its client to read. A timeout per
//! write would not suffice: a client that reads byte by byte never exceeds it.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Total time that the current answer has waited for its client, in microseconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waited(Arc<AtomicU64>);

impl Waited {
    /// Begins the next answer, at zero.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }

    fn add(&self, more: Duration) {
        let more = u64::try_from(more.as_micros()).unwrap_or(u64::MAX);
        self.0.fetch_add(more, Ordering::Relaxed);
    }
}

/// A stream that returns an error after its writes have waited longer than `most` within one
/// answer.
#[derive(Debug)]
pub(crate) struct Patience<S> {
    inner: Pin<Box<S>>,
    waited: Waited,
    most: Duration,
    /// Time at which the pending write started to wait.
    since: Option<Instant>,
    end: Pin<Box<Sleep>>,
}

impl<S> Patience<S> {
    pub(crate) fn new(inner: S, waited: Waited, most: Duration) -> Self {
        Self {
            inner: Box::pin(inner),
            waited,
            most,
            since: None,
            end: Box::pin(tokio::time::sleep(Duration::ZERO)),
        }
    }

    /// Measures how long a write waits, and adds this time to the total.
    fn timed<T>(&mut self, written: Poll<Result<T>>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if written.is_ready() {
            if let Some(since) = self.since.take() {
                self.waited.add(since.elapsed());
            }
            return written;
        }
        if self.since.is_none() {
            let now = Instant::now();
            self.since = Some(now);
            let left = self.most.saturating_sub(self.waited.get());
            self.end.as_mut().reset(now + left);
        }
        ready!(self.end.as_mut().poll(cx));
        let message = "the client took too long to read an answer";
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, message)))
    }
}

impl<S: AsyncRead> AsyncRead for Patience<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        self.inner.as_mut().poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite> AsyncWrite for Patience<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = self.inner.as_mut().poll_write(cx, bytes);
        self.timed(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = self.inner.as_mut().poll_write_vectored(cx, parts);
        self.timed(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let flushed = self.inner.as_mut().poll_flush(cx);
        self.timed(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.inner.as_mut().poll_shutdown(cx)
    }
}
