//! Streams for asynchronous programs, on an executor of ten lines.

#![cfg(feature = "async")]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_core::stream::FusedStream;
use inference::{
    AsyncTokens, Error, ErrorKind, FinishReason, GenerateMetrics, Result, StopCause, Token,
    TokenSource, TokenStream,
};

struct Thread(std::thread::Thread);

impl Wake for Thread {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Thread(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park_timeout(Duration::from_secs(30)),
        }
    }
}

/// Counts up to `until`, then stops, fails or panics. The test can see which tokens were computed
/// and dropped.
struct Counter {
    next: u32,
    until: u32,
    end: End,
    made: Arc<AtomicUsize>,
    dropped: Arc<AtomicBool>,
}

#[derive(Clone, Copy, PartialEq)]
enum End {
    Stop,
    Fail,
    Panic,
}

impl Iterator for Counter {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.until {
            return match self.end {
                End::Stop => None,
                End::Fail => Some(Err(Error::new(ErrorKind::Engine, "broken"))),
                End::Panic => panic!("a backend's fault"),
            };
        }
        self.next += 1;
        self.made.fetch_add(1, Ordering::SeqCst);
        Some(Ok(Token::new(self.next, format!("{} ", self.next))))
    }
}

impl TokenSource for Counter {
    fn finish_reason(&self) -> Option<FinishReason> {
        (self.next == self.until && self.end == End::Stop).then_some(FinishReason::Stop)
    }

    fn stop_cause(&self) -> Option<StopCause> {
        self.finish_reason().map(|_| StopCause::Eos(2))
    }

    fn metrics(&self) -> GenerateMetrics {
        let mut metrics = GenerateMetrics::default();
        metrics.generated_tokens = self.next as usize;
        metrics
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

struct Seen {
    made: Arc<AtomicUsize>,
    dropped: Arc<AtomicBool>,
}

fn stream(until: u32, end: End) -> (AsyncTokens, Seen) {
    let (made, dropped) = (Arc::default(), Arc::default());
    let counter = Counter {
        next: 0,
        until,
        end,
        made: Arc::clone(&made),
        dropped: Arc::clone(&dropped),
    };
    let tokens = TokenStream::new(counter).into_async();
    (tokens, Seen { made, dropped })
}

async fn all(tokens: &mut AsyncTokens) -> (Vec<u32>, Option<ErrorKind>) {
    let mut ids = Vec::new();
    while let Some(token) = tokens.next_token().await {
        match token {
            Ok(token) => ids.push(token.id),
            Err(error) => {
                assert!(tokens.next_token().await.is_none());
                return (ids, Some(error.kind()));
            }
        }
    }
    (ids, None)
}

#[track_caller]
fn soon(what: impl Fn() -> bool) {
    let late = Instant::now() + Duration::from_secs(30);
    while !what() {
        assert!(Instant::now() < late);
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn every_token_comes_once_and_in_order() {
    let (mut tokens, _) = stream(500, End::Stop);
    assert!(tokens.finish_reason().is_none());
    let (ids, error) = block_on(all(&mut tokens));
    assert_eq!(ids, (1..=500).collect::<Vec<_>>());
    assert_eq!(error, None);
    assert_eq!(tokens.finish_reason(), Some(FinishReason::Stop));
    assert_eq!(tokens.stop_cause(), Some(StopCause::Eos(2)));
    assert_eq!(tokens.metrics().generated_tokens, 500);
    assert!(tokens.is_terminated());
    assert!(block_on(tokens.next_token()).is_none());
}

#[test]
fn errors_and_panics_end_the_stream() {
    for end in [End::Fail, End::Panic] {
        let (mut tokens, _) = stream(3, end);
        let (ids, error) = block_on(all(&mut tokens));
        assert_eq!((ids, error), (vec![1, 2, 3], Some(ErrorKind::Engine)));
        assert_eq!(tokens.finish_reason(), Some(FinishReason::Error));
    }
    let refused = || Err(Error::new(ErrorKind::InvalidOption, "no"));
    let mut tokens = AsyncTokens::start(refused);
    assert_eq!(
        block_on(all(&mut tokens)),
        (vec![], Some(ErrorKind::InvalidOption))
    );
}

#[test]
fn a_slow_reader_is_waited_for() {
    let (mut tokens, seen) = stream(1000, End::Stop);
    let made = || seen.made.load(Ordering::SeqCst);
    soon(|| made() >= 32);
    std::thread::sleep(Duration::from_millis(50));
    assert!(made() <= 33, "{}", made());
    let (ids, _) = block_on(all(&mut tokens));
    assert_eq!(ids.len(), 1000);
}

#[test]
fn dropping_it_cancels_the_request() {
    let (mut tokens, seen) = stream(u32::MAX, End::Stop);
    assert_eq!(block_on(tokens.next_token()).unwrap().unwrap().id, 1);
    drop(tokens);
    soon(|| seen.dropped.load(Ordering::SeqCst));
}
