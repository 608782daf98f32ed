//! Withholds text that may be the start of a marker.

/// The withheld text. It is always a proper prefix of a marker in the current set.
#[derive(Debug, Default)]
pub(super) struct Hold {
    pending: String,
}

impl Hold {
    /// Reads `c`. Appends text that is not part of a marker to `text`. Returns the index of a
    /// complete marker. No marker of a set may be a prefix of another.
    ///
    /// The cost per character is bounded by the length of the markers.
    pub(super) fn push(
        &mut self,
        c: char,
        markers: &[&str],
        text: &mut dyn FnMut(char),
    ) -> Option<usize> {
        if self.passes(c, markers) {
            text(c);
            return None;
        }
        self.pending.push(c);
        while !self.pending.is_empty() {
            if let Some(index) = markers.iter().position(|marker| *marker == self.pending) {
                self.pending.clear();
                return Some(index);
            }
            if markers
                .iter()
                .any(|marker| marker.starts_with(self.pending.as_str()))
            {
                return None;
            }
            text(self.pending.remove(0));
        }
        None
    }

    /// Whether `c` is text without delay: no text is withheld, and no marker starts with `c`.
    pub(super) fn passes(&self, c: char, markers: &[&str]) -> bool {
        self.pending.is_empty() && !markers.iter().any(|marker| marker.starts_with(c))
    }

    /// Returns the text that was held back.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }

    /// Whether no text is held back.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str, markers: &[&str]) -> (String, Vec<usize>, String) {
        let (mut hold, mut plain, mut markers_seen) = (Hold::default(), String::new(), Vec::new());
        for c in text.chars() {
            markers_seen.extend(hold.push(c, markers, &mut |c| plain.push(c)));
        }
        (plain, markers_seen, hold.take())
    }

    #[test]
    fn overlapping_beginnings_are_found() {
        assert_eq!(
            run("<<think>", &["<think>"]),
            ("<".into(), vec![0], String::new())
        );
        assert_eq!(
            run("aabaab", &["aab"]),
            (String::new(), vec![0, 0], String::new())
        );
        assert_eq!(run("aaab", &["aab"]), ("a".into(), vec![0], String::new()));
        assert_eq!(
            run("ab</thi", &["</think>"]),
            ("ab".into(), vec![], "</thi".into())
        );
    }
}
