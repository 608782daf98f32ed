//! Packing: joins several short examples into one row, so that batches have little padding.
//!
//! [`super::Batch::parts`] lists the parts of each row. The trainer splits the row into its parts,
//! so that no example attends to another.

use super::{Example, Part};

/// Concatenates examples, in order, into examples of at most `max_len` ids. A longer example stays
/// alone and is truncated when batched, as without packing. The first id of a part is not a target,
/// because the text before it is unrelated.
#[must_use]
pub fn pack(examples: &[Example], max_len: usize) -> Vec<Example> {
    let mut packed: Vec<Example> = Vec::new();
    for example in examples {
        match packed.last_mut() {
            Some(last) if last.len().saturating_add(example.len()) <= max_len => {
                let start = last.len();
                last.ids.extend_from_slice(&example.ids);
                last.parts.extend(example.parts.iter().map(|p| Part {
                    range: p.range.start + start..p.range.end + start,
                    offset: p.offset,
                }));
            }
            _ => packed.push(example.clone()),
        }
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_is_lost(
            lens in proptest::collection::vec((1_usize..20, 0_usize..20), 0..40),
            max_len in 1_usize..50,
        ) {
            let examples: Vec<Example> = lens
                .iter()
                .zip(0_u32..)
                .map(|((len, offset), id)| Example::new(vec![id; *len], (*offset).min(*len)))
                .collect();
            let packed = pack(&examples, max_len);
            let flat = |all: &[Example]| all.iter().flat_map(|e| e.ids.clone()).collect::<Vec<_>>();
            prop_assert_eq!(flat(&packed), flat(&examples));
            let learned = |all: &[Example]| all.iter().map(|e| e.learned(usize::MAX)).sum::<usize>();
            prop_assert_eq!(learned(&packed), learned(&examples));
            for row in &packed {
                prop_assert!(row.len() <= max_len || row.parts.len() == 1);
                for part in &row.parts {
                    let ids = &row.ids[part.range.clone()];
                    prop_assert!(ids.iter().all(|id| *id == ids[0]));
                }
            }
        }
    }
}
