//! Two concurrent replies in an asynchronous program without an executor.
//!
//! ```text
//! cargo run --release --example async_stream -- [MODEL]
//! ```
//!
//! `AsyncTokens` needs the feature `async` of `inference-api`, or of `rust-mlx`.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use futures_util::{StreamExt, stream};
use rust_mlx::hub;
use rust_mlx::inference::{self, AsyncTokens, GenerateOptions, LoadOptions, Message, TextModel};

/// Runs a future on this thread. Runtimes such as tokio and smol already have this function.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

async fn talk(model: Arc<dyn TextModel>) -> inference::Result<()> {
    let ask = |question: &str| {
        let options = GenerateOptions::new().with_max_tokens(32);
        AsyncTokens::chat(Arc::clone(&model), [Message::user(question)], options)
    };
    let one = ask("What is the capital of France?").map(|token| (1, token));
    let two = ask("Name a river.").map(|token| (2, token));
    // Reads from the reply that has its next token first.
    let mut both = stream::select(one, two);
    while let Some((which, token)) = both.next().await {
        println!("{which}: {:?}", token?.text);
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = hub::resolve(std::env::args().nth(1).as_deref(), &mut hub::Silent)?;
    let model = inference::load_model(&path, &LoadOptions::default())?;
    block_on(talk(Arc::from(model)))?;
    Ok(())
}
