//! The model's data: how often each token followed the two tokens before it. The tokens are the 256
//! bytes and an end-of-text token.

use std::collections::HashMap;

/// The number of tokens.
pub const VOCAB: usize = 257;
/// The end-of-text token. In training, it ends each paragraph.
pub const END: u32 = 256;

/// For each token, the number of times that it followed.
type Followers = HashMap<u32, u32>;

/// The counts of single tokens, and of sequences of two and three tokens.
#[derive(Debug)]
pub struct Counts {
    single: Followers,
    after_one: HashMap<u32, Followers>,
    after_two: HashMap<(u32, u32), Followers>,
}

/// The weights of the mixture of four distributions: uniform, and the counts after zero, one and
/// two tokens.
const MIX: [f32; 4] = [0.02, 0.08, 0.3, 0.6];

impl Counts {
    /// Counts the tokens of a text.
    pub fn from_corpus(corpus: &str) -> Self {
        let mut counts = Self {
            single: HashMap::new(),
            after_one: HashMap::new(),
            after_two: HashMap::new(),
        };
        for paragraph in corpus
            .split("\n\n")
            .map(str::trim)
            .filter(|p| !p.is_empty())
        {
            let ids: Vec<u32> = paragraph.bytes().map(u32::from).chain([END]).collect();
            for (i, &id) in ids.iter().enumerate() {
                *counts.single.entry(id).or_default() += 1;
                if i >= 1 {
                    let followers = counts.after_one.entry(ids[i - 1]).or_default();
                    *followers.entry(id).or_default() += 1;
                }
                if i >= 2 {
                    let followers = counts
                        .after_two
                        .entry((ids[i - 2], ids[i - 1]))
                        .or_default();
                    *followers.entry(id).or_default() += 1;
                }
            }
        }
        counts
    }

    /// The log-probabilities of the next token after `ids`, one per token.
    pub fn logits(&self, ids: &[u32]) -> Vec<f32> {
        let mut p = vec![MIX[0] / VOCAB as f32; VOCAB];
        let one = ids.last().and_then(|a| self.after_one.get(a));
        let two = match ids {
            [.., a, b] => self.after_two.get(&(*a, *b)),
            _ => None,
        };
        for (followers, weight) in [(Some(&self.single), MIX[1]), (one, MIX[2]), (two, MIX[3])] {
            let Some(followers) = followers else { continue };
            let total: u32 = followers.values().sum();
            for (id, n) in followers {
                p[*id as usize] += weight * *n as f32 / total as f32;
            }
        }
        p.into_iter().map(f32::ln).collect()
    }

    /// The number of counts.
    pub fn len(&self) -> usize {
        self.single.len()
            + self.after_one.values().map(HashMap::len).sum::<usize>()
            + self.after_two.values().map(HashMap::len).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_before_is_the_most_probable() {
        let counts = Counts::from_corpus("abc\n\nabd\n\nabd");
        let logits = counts.logits(&[97, 98]);
        let best = (0..VOCAB).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        assert_eq!(best, Some(100));
        assert!(logits.iter().all(|l| l.is_finite()));
        // a, b, c, d, end; ab, bc, bd, c-end, d-end; abc, abd, bc-end, bd-end
        assert_eq!(counts.len(), 14);
    }
}
