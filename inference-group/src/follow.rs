//! Ranks of a served group other than rank 0. These ranks have no server. They make the calls that
//! rank 0 sends as [`Order`]s.

use std::collections::BTreeMap;

use inference::{BatchSession, Interrupt, Prompt, TextModel};

use crate::error::{Error, Result};
use crate::order::{Order, Seen};

/// A copy of a session of rank 0.
struct Following {
    session: Box<dyn BatchSession>,
    seen: Seen,
}

/// Makes the calls that rank 0 orders, until rank 0 ends. `next` waits for the next order, and
/// returns `None` after the last one.
///
/// # Errors
/// If rank 0 ends without notice, or if the results of this process differ from those of rank 0.
pub fn follow(
    rank: usize,
    models: &[Box<dyn TextModel>],
    mut next: impl FnMut() -> Option<Vec<u8>>,
) -> Result<()> {
    let mut sessions: BTreeMap<u64, Following> = BTreeMap::new();
    while let Some(bytes) = next() {
        let order: Order = serde_json::from_slice(&bytes).map_err(|e| {
            Error::Group(format!("rank {rank}: rank 0 says what has no meaning: {e}"))
        })?;
        // Rank 0 gets the same error and reports it to its client. If it gets no error, the next
        // step detects the difference.
        match order {
            Order::Begin { model, session } => {
                let begun = model_of(rank, models, model)?.batch_session()?;
                let seen = Seen::default();
                sessions.insert(
                    session,
                    Following {
                        session: begun,
                        seen,
                    },
                );
            }
            Order::Add {
                session,
                tokens,
                options,
            } => {
                let one = session_of(rank, &mut sessions, session)?;
                if let Err(e) = one.session.add(&Prompt::Tokens(tokens), &options) {
                    tracing::info!("a request is refused: {e}");
                }
            }
            Order::Remove { session, row } => {
                session_of(rank, &mut sessions, session)?
                    .session
                    .remove(row);
            }
            Order::Step { session, seen } => {
                let one = session_of(rank, &mut sessions, session)?;
                if one.seen.word() != seen {
                    return Err(Error::Group(format!(
                        "rank {rank} computes other tokens than rank 0; are the machines of one \
                         kind, and the files of the model the same?"
                    )));
                }
                match one.session.step() {
                    Ok(events) => one.seen.step(&events),
                    Err(e) => tracing::warn!("a step failed: {e}"),
                }
            }
            Order::End { session } => {
                sessions.remove(&session);
            }
            Order::Embed {
                model,
                prompts,
                options,
            } => {
                let prompts: Vec<Prompt> = prompts.into_iter().map(Prompt::Tokens).collect();
                if let Some(model) = model_of(rank, models, model)?.as_embedding_model()
                    && let Err(e) = model.embed(&prompts, &options, &Interrupt::new())
                {
                    tracing::warn!("a vector failed: {e}");
                }
            }
            Order::Stop => return Ok(()),
        }
    }
    Err(Error::Group(format!(
        "rank {rank}: rank 0 has ended without a word"
    )))
}

fn model_of(rank: usize, models: &[Box<dyn TextModel>], number: usize) -> Result<&dyn TextModel> {
    let model = models.get(number).map(AsRef::as_ref);
    model.ok_or_else(|| {
        Error::Group(format!(
            "rank {rank} has {} models, and rank 0 asks for number {number}",
            models.len()
        ))
    })
}

fn session_of(
    rank: usize,
    sessions: &mut BTreeMap<u64, Following>,
    number: u64,
) -> Result<&mut Following> {
    let unknown = || Error::Group(format!("rank {rank}: there is no session {number}"));
    sessions.get_mut(&number).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use inference::GenerateOptions;
    use inference_conformance::scripted::{Reply, Scripted};

    use super::*;

    /// A model that repeats this letter without end.
    fn repeating(letter: u8) -> Scripted {
        Scripted::computed(move |_| Ok(Reply::ids(std::iter::repeat(u32::from(letter)))))
    }

    /// The hash of the events of a session's first step, as rank 0 computes it.
    fn stepped(model: &Scripted) -> Seen {
        let mut session = model.batch_session().unwrap();
        let options = GenerateOptions::new();
        session.add(&vec![1u32].into(), &options).unwrap();
        let mut seen = Seen::default();
        seen.step(&session.step().unwrap());
        seen
    }

    fn followed(orders: &[Order]) -> std::result::Result<(), String> {
        let mut orders = orders.iter();
        let models: Vec<Box<dyn TextModel>> = vec![Box::new(repeating(b'a'))];
        let next = || {
            orders
                .next()
                .map(|order| serde_json::to_vec(order).unwrap())
        };
        follow(1, &models, next).map_err(|error| error.to_string())
    }

    fn step(seen: Seen) -> Order {
        Order::Step {
            session: 5,
            seen: seen.word(),
        }
    }

    #[test]
    fn orders_are_followed_while_all_compute_the_same() {
        let begin = Order::Begin {
            model: 0,
            session: 5,
        };
        let add = Order::Add {
            session: 5,
            tokens: vec![1],
            options: Box::new(GenerateOptions::new()),
        };
        let steps = |after| {
            let (begin, add) = (begin.clone(), add.clone());
            [begin, add, step(Seen::default()), step(after), Order::Stop]
        };
        let same = stepped(&repeating(b'a'));
        assert_eq!(followed(&steps(same)), Ok(()));
        let error = followed(&steps(stepped(&repeating(b'b')))).unwrap_err();
        assert!(error.contains("rank 1 computes other tokens"), "{error}");
    }

    #[test]
    fn what_cannot_be_followed_is_told() {
        let begin = Order::Begin {
            model: 1,
            session: 0,
        };
        for (orders, told) in [
            (&[][..], "ended without a word"),
            (&[begin], "rank 0 asks for number 1"),
            (&[step(Seen::default())], "no session 5"),
        ] {
            let error = followed(orders).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
        let error = follow(1, &[], || Some(b"{".to_vec())).unwrap_err();
        assert!(error.to_string().contains("no meaning"));
    }
}
