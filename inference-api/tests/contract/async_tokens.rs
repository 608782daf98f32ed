//! Tests of asynchronous token streams, with a minimal executor.

#![cfg(feature = "async")]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_core::stream::FusedStream;
use inference::{
    AsyncTokens, Error, ErrorKind, FinishReason, GenerateOptions, StopCause, TextModel, Token,
};
use inference_conformance::scripted::{Control, END, Reply, Scripted, Step};

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

#[derive(Clone, Copy, PartialEq)]
enum End {
    Stop,
    Fail,
    Panic,
}

struct Seen {
    made: Arc<AtomicUsize>,
    control: Arc<Control>,
}

/// A stream that counts from 1 to `until`, then stops, fails or panics. The test can observe which
/// tokens were computed, and whether the request ended.
fn stream(until: u32, end: End) -> (AsyncTokens, Seen) {
    let made = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&made);
    let model = Scripted::computed(move |_| {
        let counted = Arc::clone(&counted);
        Ok(Reply::new((1..=until).map(move |n| {
            counted.fetch_add(1, Ordering::SeqCst);
            Step::Token(Token::new(n, format!("{n} ")))
        })))
    });
    let model = match end {
        End::Stop => model,
        End::Fail => model.after(until as usize, Step::fail(ErrorKind::Engine)),
        End::Panic => model.after(until as usize, Step::Panic("a backend's fault".into())),
    };
    let options = GenerateOptions::new().with_max_tokens(usize::MAX);
    let tokens = model.generate(&"count".into(), &options).unwrap();
    let control = Arc::clone(model.control());
    (tokens.into_async(), Seen { made, control })
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
    assert_eq!(tokens.stop_cause(), Some(StopCause::Eos(END)));
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
    soon(|| seen.control.running() == 0);
}
