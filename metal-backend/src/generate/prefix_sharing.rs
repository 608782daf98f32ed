//! Decides which rows of a batch share a prompt prefix, such as one instruction with many inputs.
//! One row computes the prefix, and `batch.rs` copies its caches to the other rows.

use crate::cache::prefix::{common, worth_copying};

/// The minimum number of shared tokens. A copy costs an extra step and one operation per layer, so
/// copying fewer tokens is slower than computing them.
const LEAST: usize = 16;

/// Properties that must be equal if rows share caches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kin {
    /// The adapter epoch.
    pub epoch: u64,
    /// The rotary stretch of the keys.
    pub stretch: usize,
    /// [`crate::cache::CacheOptions::trimmable`], which changes the kinds of caches.
    pub trimmable: Option<i32>,
}

/// A row of the batch.
#[derive(Debug)]
pub struct RowState {
    /// The tokens in the row's caches, or the whole prompt if it is not computed yet.
    pub tokens: Vec<u32>,
    /// The number of tokens in the row's caches.
    pub cached: usize,
    /// Whether part of the row's prompt is not computed yet.
    pub waits: bool,
    /// Rows share caches only if these properties are equal.
    pub kin: Kin,
    /// Rows share caches only if their salts are equal.
    pub salt: Option<String>,
}

/// The next action of a row with an incomplete prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillAction {
    /// Computes the prompt up to this token, where other rows will copy the caches.
    Compute(usize),
    /// Copies the first `tokens` of row `from`'s caches.
    Copy {
        /// The source row's index.
        from: usize,
        /// The number of tokens.
        tokens: usize,
    },
    /// Waits for an older row to compute the common prefix.
    Wait,
}

/// Returns the next action of each row; `None` for rows whose prompt is complete. Rows are ordered
/// from oldest to newest. `reach(row, n)` is the greatest number of tokens, at most `n`, to which a
/// copy of that row's caches can be truncated. The last token of each prompt is never copied,
/// because the pass that computes it returns the first logits.
pub fn actions(
    rows: &[RowState],
    reach: impl Fn(usize, usize) -> usize,
) -> Vec<Option<PrefillAction>> {
    let mut actions: Vec<Option<PrefillAction>> = rows
        .iter()
        .map(|row| {
            row.waits
                .then_some(PrefillAction::Compute(row.tokens.len()))
        })
        .collect();
    // Pairs `(row, n)`: newer rows wait until this older row has computed `n` tokens.
    let mut awaited = Vec::new();
    for (i, row) in rows.iter().enumerate().filter(|(_, row)| row.waits) {
        let most = row.tokens.len().saturating_sub(1);
        let least = row.cached + LEAST;
        let mut best: Option<(usize, usize)> = None;
        let others = rows.iter().enumerate();
        let same = |(j, other): &(usize, &RowState)| {
            *j != i && other.kin == row.kin && other.salt == row.salt
        };
        for (j, other) in others.filter(same) {
            let alike = common(&other.tokens, &row.tokens).min(most);
            let n = if other.waits && j < i {
                // The older row will compute the tokens that its caches lack, so this row can wait
                // for them.
                alike
            } else {
                alike.min(other.cached)
            };
            let there = n <= other.cached;
            let n = if there { reach(j, n) } else { n };
            let may = !there || worth_copying(n, other.cached);
            if n >= least && may && best.is_none_or(|(_, most)| n > most) {
                best = Some((j, n));
            }
        }
        let Some((j, n)) = best else {
            continue;
        };
        actions[i] = Some(if n <= rows[j].cached {
            PrefillAction::Copy { from: j, tokens: n }
        } else {
            awaited.push((j, n));
            PrefillAction::Wait
        });
    }
    for (j, n) in awaited {
        if let Some(PrefillAction::Compute(until)) = &mut actions[j] {
            *until = n.min(*until);
        }
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tokens: impl IntoIterator<Item = u32>, cached: usize, waits: bool) -> RowState {
        RowState {
            tokens: tokens.into_iter().collect(),
            cached,
            waits,
            kin: Kin::default(),
            salt: None,
        }
    }

    fn numbered(alike: u32, last: u32) -> Vec<u32> {
        (0..alike).chain([last]).collect()
    }

    #[test]
    fn the_oldest_computes_what_the_others_copy() {
        let mut rows = vec![
            row(numbered(40, 100), 0, true),
            row(numbered(40, 101), 0, true),
            row(numbered(24, 102), 0, true),
            row([7; 30], 0, true),
        ];
        let first = actions(&rows, |_, n| n);
        let compute = |n| Some(PrefillAction::Compute(n));
        assert_eq!(first[0], compute(24), "as far as the shortest beginning");
        assert_eq!(first[1..3], [Some(PrefillAction::Wait); 2]);
        assert_eq!(first[3], compute(30), "like no other");
        rows[0].cached = 24;
        let second = actions(&rows, |_, n| n);
        assert_eq!(second[0], compute(40));
        assert_eq!(
            second[1],
            Some(PrefillAction::Wait),
            "there is more to come"
        );
        let copied = |from, tokens| Some(PrefillAction::Copy { from, tokens });
        assert_eq!(second[2], copied(0, 24));
        rows[0].cached = 40;
        assert_eq!(actions(&rows, |_, n| n)[1], copied(0, 40));
        // A prefix that was already copied must not be copied again.
        rows[1].cached = 40;
        assert_eq!(actions(&rows, |_, n| n)[1], compute(41));
    }

    #[test]
    fn rows_that_decode_are_copied_from_where_their_caches_can_be_cut() {
        let rows = [
            row(numbered(40, 100), 41, false),
            row(numbered(30, 101), 0, true),
        ];
        let copied = Some(PrefillAction::Copy {
            from: 0,
            tokens: 30,
        });
        assert_eq!(
            actions(&rows, |_, n| if n == 30 { n } else { 0 }),
            [None, copied]
        );
        let alone = Some(PrefillAction::Compute(31));
        assert_eq!(actions(&rows, |_, _| 0), [None, alone]);
        // The caches can only be truncated to a checkpoint, so fewer tokens must be copied.
        let at_checkpoint = Some(PrefillAction::Copy {
            from: 0,
            tokens: 20,
        });
        assert_eq!(actions(&rows, |_, n| n.min(20)), [None, at_checkpoint]);
        assert_eq!(actions(&rows, |_, n| n.min(10)), [None, alone]);
    }

    #[test]
    fn rows_of_another_adapter_or_stretch_are_not_copied() {
        let mut rows = [row(0..40, 40, false), row(0..40, 0, true)];
        let kin = |epoch, stretch, trimmable| Kin {
            epoch,
            stretch,
            trimmable,
        };
        for kin in [kin(1, 0, None), kin(0, 1, None), kin(0, 0, Some(64))] {
            rows[1].kin = kin;
            assert_eq!(
                actions(&rows, |_, n| n)[1],
                Some(PrefillAction::Compute(40))
            );
        }
    }

    #[test]
    fn rows_of_another_salt_are_not_copied() {
        let mut rows = [row(0..40, 40, false), row(0..40, 0, true)];
        rows[0].salt = Some(String::from("a"));
        let alone = Some(PrefillAction::Compute(40));
        for salt in [None, Some("b")] {
            rows[1].salt = salt.map(String::from);
            assert_eq!(actions(&rows, |_, n| n)[1], alone);
        }
        rows[1].salt = Some(String::from("a"));
        assert_ne!(actions(&rows, |_, n| n)[1], alone);
    }

    #[test]
    fn a_token_is_left_and_little_is_not_copied() {
        // Two equal prompts: the second must copy all tokens but the last one.
        let rows = [row(0..20, 20, false), row(0..20, 0, true)];
        let action = actions(&rows, |_, n| n)[1];
        assert_eq!(
            action,
            Some(PrefillAction::Copy {
                from: 0,
                tokens: 19
            })
        );
        let short = [row(0..16, 16, false), row(0..16, 0, true)];
        assert_eq!(
            actions(&short, |_, n| n)[1],
            Some(PrefillAction::Compute(16))
        );
        // A short prefix of long caches must not be copied, because a copy clones the whole
        // capacity.
        let long = [row(0..4000, 4000, false), row(numbered(20, 9), 0, true)];
        assert_eq!(
            actions(&long, |_, n| n)[1],
            Some(PrefillAction::Compute(21))
        );
    }

    #[test]
    fn somebody_always_goes_on() {
        // Every combination of progress of four rows with common prefixes.
        let lengths = [18u32, 33, 33, 60];
        for state in 0..4usize.pow(4) {
            let cached = |i: usize| state / 4usize.pow(i as u32) % 4 * 16;
            let rows: Vec<RowState> = lengths
                .iter()
                .enumerate()
                .map(|(i, n)| {
                    let tokens = numbered(*n, 100 + i as u32);
                    let cached = cached(i).min(tokens.len());
                    let waits = cached < tokens.len();
                    row(tokens, cached, waits)
                })
                .collect();
            for cut in [true, false] {
                let actions = actions(&rows, |j, n| if cut || rows[j].cached == n { n } else { 0 });
                let goes = |action: &Option<PrefillAction>| {
                    matches!(
                        action,
                        Some(PrefillAction::Compute(_) | PrefillAction::Copy { .. })
                    )
                };
                assert!(
                    actions.iter().any(goes) || rows.iter().all(|row| !row.waits),
                    "{rows:?}"
                );
                for (row, action) in rows.iter().zip(&actions) {
                    match action {
                        Some(PrefillAction::Compute(until)) => {
                            assert!(*until > row.cached, "{rows:?}");
                        }
                        Some(PrefillAction::Copy { from, tokens }) => {
                            assert!(*tokens > row.cached && *tokens <= rows[*from].cached);
                            assert_eq!(rows[*from].tokens[..*tokens], row.tokens[..*tokens]);
                        }
                        _ => {}
                    }
                }
            }
        }
    }
}
