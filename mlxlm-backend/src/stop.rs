//! Stop strings in streamed text. Tokens wait here while their text may still change. The bridge
//! decodes ids.

use std::collections::VecDeque;

/// The result of one step of a [`StopText`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released<T> {
    /// Tokens with their final text, which may be empty; the oldest comes first.
    pub ready: Vec<(T, String)>,
    /// Whether a stop string was found. Its text and all later text are left out.
    pub stopped: bool,
}

/// Holds back tokens whose text is incomplete or may become a stop string.
///
/// The released texts together are the text of all tokens, cut before the stop string that is
/// complete first. Of several that end at the same place, the longest counts.
#[derive(Debug)]
pub struct StopText<T> {
    stops: Vec<String>,
    waiting: VecDeque<(T, String)>,
    /// The joined texts of all waiting tokens.
    text: String,
    /// The number of the newest waiting tokens that belong to an incomplete character.
    open: usize,
}

impl<T> StopText<T> {
    /// Ends at any of `stops`, none of which is empty.
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            waiting: VecDeque::new(),
            text: String::new(),
            open: 0,
        }
    }

    /// Takes the next token. `pending` says that a part of its text comes with a later token.
    pub fn push(&mut self, token: T, text: &str, pending: bool) -> Released<T> {
        self.open = if pending { self.open + 1 } else { 0 };
        self.waiting.push_back((token, String::new()));
        self.append(text)
    }

    /// Ends the stream. The last token gets `rest`, and all waiting tokens are released.
    pub fn finish(&mut self, rest: &str) -> Released<T> {
        self.open = 0;
        let mut released = self.append(rest);
        if !released.stopped {
            released.ready.extend(self.waiting.drain(..));
            self.text.clear();
        }
        released
    }

    fn append(&mut self, text: &str) -> Released<T> {
        if let Some((_, last)) = self.waiting.back_mut() {
            last.push_str(text);
        }
        let before = self.text.len();
        self.text.push_str(text);
        let bytes = self.text.as_bytes();
        for end in before + 1..=bytes.len() {
            let ends = |stop: &&String| bytes[..end].ends_with(stop.as_bytes());
            if let Some(stop) = self.stops.iter().filter(ends).max_by_key(|s| s.len()) {
                return self.stop_at(end - stop.len());
            }
        }
        let overlaps = self.stops.iter().map(|s| overlap(bytes, s.as_bytes()));
        let overlaps = overlaps.max().unwrap_or(0);
        let mut ready = Vec::new();
        let mut released = 0;
        while self.waiting.len() > self.open {
            match self.waiting.front() {
                Some((_, text)) if self.text.len() - released - text.len() >= overlaps => {
                    released += text.len();
                }
                _ => break,
            }
            ready.extend(self.waiting.pop_front());
        }
        self.text.drain(..released);
        Released {
            ready,
            stopped: false,
        }
    }

    fn stop_at(&mut self, mut keep: usize) -> Released<T> {
        let mut ready = Vec::with_capacity(self.waiting.len());
        for (token, mut text) in self.waiting.drain(..) {
            text.truncate(keep);
            keep -= text.len();
            ready.push((token, text));
        }
        self.text.clear();
        Released {
            ready,
            stopped: true,
        }
    }
}

/// The length of the longest proper prefix of `stop` that ends `text`.
fn overlap(text: &[u8], stop: &[u8]) -> usize {
    let most = text.len().min(stop.len().saturating_sub(1));
    let length = (1..=most).rev().find(|&n| text.ends_with(&stop[..n]));
    length.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[(&str, bool)], rest: &str) -> (Vec<(usize, String)>, bool) {
        let stops: Vec<String> = stops.iter().map(|&s| s.into()).collect();
        let mut text = StopText::new(&stops);
        let mut out = Vec::new();
        for (n, (piece, pending)) in pieces.iter().enumerate() {
            let released = text.push(n, piece, *pending);
            out.extend(released.ready);
            if released.stopped {
                return (out, true);
            }
        }
        let released = text.finish(rest);
        out.extend(released.ready);
        (out, released.stopped)
    }

    fn joined(out: &[(usize, String)]) -> String {
        out.iter().map(|(_, t)| t.as_str()).collect()
    }

    #[test]
    fn nothing_waits_without_a_reason() {
        let mut text = StopText::new(&[String::from("END")]);
        assert_eq!(text.push(1, "abc", false).ready, [(1, "abc".into())]);
        assert_eq!(text.push(2, "xE", false).ready, []);
        assert_eq!(text.push(3, "N", false).ready, []);
        let out = text.push(4, "x", false).ready;
        assert_eq!(out, [(2, "xE".into()), (3, "N".into()), (4, "x".into())]);
    }

    #[test]
    fn a_stop_string_across_tokens_is_cut_out() {
        let (out, stopped) = run(&["END"], &[("aE", false), ("N", false), ("Db", false)], "");
        assert!(stopped);
        assert_eq!(joined(&out), "a");
        assert_eq!(out.len(), 3);
    }

    #[test]
    fn the_one_complete_first_wins_and_of_two_the_longer() {
        assert_eq!(
            joined(&run(&["bc", "abcd"], &[("xabcd", false)], "").0),
            "xa"
        );
        assert_eq!(joined(&run(&["bc", "abc"], &[("xabc", false)], "").0), "x");
    }

    #[test]
    fn incomplete_characters_wait_and_the_rest_goes_to_the_last_token() {
        let (out, stopped) = run(&[], &[("a", false), ("", true), ("", true)], "\u{fffd}");
        assert!(!stopped);
        let expected = [(0, "a".into()), (1, String::new()), (2, "\u{fffd}".into())];
        assert_eq!(out, expected);
    }

    #[test]
    fn text_is_what_it_was_however_it_is_cut() {
        let text = "aabaabaaé€c";
        for stop in ["aabaac", "€d", "ba€"] {
            let pieces: Vec<String> = text.chars().map(String::from).collect();
            let pieces: Vec<(&str, bool)> = pieces.iter().map(|p| (p.as_str(), false)).collect();
            let (out, stopped) = run(&[stop], &pieces, "");
            assert!(!stopped, "{stop}");
            assert_eq!(joined(&out), text);
        }
        let pieces: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<(&str, bool)> = pieces.iter().map(|p| (p.as_str(), false)).collect();
        assert_eq!(joined(&run(&["aabaa"], &pieces, "").0), "");
        assert_eq!(joined(&run(&["é€"], &pieces, "").0), "aabaabaa");
    }
}
