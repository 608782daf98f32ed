//! Checks of concurrent requests, and of requests that move between threads.

use std::sync::Arc;

use inference::{Prompt, TextModel};

use crate::context::{Context, Stop, Verdict, ensure, fail};
use crate::probe::{N, Reply, greedy, read, reply, same, start};

const CALLERS: usize = 4;
const ROUNDS: usize = 3;

fn solo(context: &Context, n: usize) -> Result<Vec<(Prompt, Reply)>, Stop> {
    let model = context.model()?;
    let pair = |prompt: Prompt| {
        let alone = reply(model.as_ref(), &prompt, &greedy(n))?;
        Ok((prompt, alone))
    };
    context.all_prompts().into_iter().map(pair).collect()
}

pub(crate) fn concurrent(context: &Context) -> Verdict {
    let model = context.model()?;
    let expected = Arc::new(solo(context, N)?);
    let mut callers = Vec::new();
    for caller in 0..CALLERS {
        let (model, expected) = (Arc::clone(&model), Arc::clone(&expected));
        callers.push(std::thread::spawn(move || {
            for round in 0..ROUNDS {
                let (prompt, alone) = &expected[(caller + round) % expected.len()];
                let got = reply(model.as_ref(), prompt, &greedy(N))?;
                same(
                    &format!("the reply to {prompt:?} beside others"),
                    &got,
                    alone,
                )?;
            }
            Ok(())
        }));
    }
    for caller in callers {
        match caller.join() {
            Ok(verdict) => verdict?,
            Err(_) => return fail("the backend panicked in a caller's thread"),
        }
    }
    Ok(())
}

pub(crate) fn crossing(context: &Context) -> Verdict {
    let model = context.model()?;
    let expected = reply(model.as_ref(), &context.prompt(), &greedy(N))?;
    let mut stream = start(model.as_ref(), &context.prompt(), &greedy(N))?;
    let mut head = Reply {
        ids: Vec::new(),
        texts: Vec::new(),
        finish: None,
    };
    if let Some(Ok(token)) = stream.next() {
        head.ids.push(token.id);
        head.texts.push(token.text);
    }
    match std::thread::spawn(move || read(stream)).join() {
        Ok(rest) => {
            let (rest, _) = rest?;
            head.ids.extend(rest.ids);
            head.texts.extend(rest.texts);
            head.finish = rest.finish;
            same("a reply read in two threads", &head, &expected)
        }
        Err(_) => fail("the backend panicked in the other thread"),
    }
}

pub(crate) fn interleaved(context: &Context) -> Verdict {
    let model: Arc<dyn TextModel> = context.model()?;
    let expected = solo(context, N)?;
    let mut streams = Vec::new();
    for (prompt, _) in &expected {
        streams.push((start(model.as_ref(), prompt, &greedy(N))?, Vec::new()));
    }
    for _ in 0..=N {
        for (stream, ids) in &mut streams {
            match stream.next() {
                Some(Ok(token)) => ids.push(token.id),
                Some(Err(e)) => return fail(format!("a reply failed beside others: {e}")),
                None => {}
            }
        }
    }
    for ((_, ids), (prompt, alone)) in streams.iter().zip(&expected) {
        ensure!(
            *ids == alone.ids,
            "the reply to {prompt:?} is {ids:?} in turn with others, {:?} alone",
            alone.ids
        );
    }
    Ok(())
}
