//! Holds back text that may be the beginning of a marker.

/// The text that is held back: always a proper prefix of some marker of the current set.
#[derive(Debug, Default)]
pub(super) struct Hold {
    pending: String,
}

impl Hold {
    /// Reads `c`. Text that is not part of a marker is added to `text`; for a complete marker, its
    /// index is returned. No marker of a set may be a prefix of another.
    ///
    /// The work is limited by the length of the markers, whatever the text.
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

    /// Whether `c` is text immediately: nothing is held back, and no marker begins with it.
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
