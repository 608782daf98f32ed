//! Divides rows into training and test rows: stratified and grouped cross-validation.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A division of the rows. Both lists are sorted, and no row is in both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fold {
    /// The rows for training.
    pub train: Vec<usize>,
    /// The rows for testing.
    pub test: Vec<usize>,
}

/// A random generator that depends only on the seed, and not on the machine.
pub(crate) fn generator(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// `labels` in a random order.
pub(crate) fn shuffled<T: Clone>(labels: &[T], seed: u64) -> Vec<T> {
    let mut labels = labels.to_vec();
    labels.shuffle(&mut generator(seed));
    labels
}

/// The distinct names in sorted order, and for each row the index of its name.
pub fn encode_labels<S: AsRef<str>>(names: &[S]) -> (Vec<String>, Vec<usize>) {
    let mut numbers: BTreeMap<&str, usize> = names.iter().map(|n| (n.as_ref(), 0)).collect();
    for (i, number) in numbers.values_mut().enumerate() {
        *number = i;
    }
    let labels = names.iter().map(|n| numbers[n.as_ref()]).collect();
    let names = numbers.keys().map(ToString::to_string).collect();
    (names, labels)
}

fn rows_by<K: Ord + Copy>(keys: &[K]) -> BTreeMap<K, Vec<usize>> {
    let mut rows: BTreeMap<K, Vec<usize>> = BTreeMap::new();
    for (row, key) in keys.iter().enumerate() {
        rows.entry(*key).or_default().push(row);
    }
    rows
}

fn from_tests(n: usize, tests: Vec<Vec<usize>>) -> Vec<Fold> {
    tests
        .into_iter()
        .map(|mut test| {
            test.sort_unstable();
            let train = (0..n).filter(|r| test.binary_search(r).is_err()).collect();
            Fold { train, test }
        })
        .collect()
}

fn check_count(n: usize, folds: usize) -> Result<()> {
    if folds < 2 || folds > n {
        return Err(Error::data(format!(
            "{folds} folds of {n} rows: at least 2, and at most one a row"
        )));
    }
    Ok(())
}

/// Folds in which each label is about as frequent as in all rows.
///
/// # Errors
/// [`Error::Data`] for fewer than two folds, and for a label with fewer rows than folds.
pub fn stratified(labels: &[usize], folds: usize, seed: u64) -> Result<Vec<Fold>> {
    check_count(labels.len(), folds)?;
    let mut random = generator(seed);
    let mut tests = vec![Vec::new(); folds];
    let mut next = 0;
    for (label, mut rows) in rows_by(labels) {
        if rows.len() < folds {
            return Err(Error::data(format!(
                "label number {label} has {} rows, and {folds} folds need one each: \
                 use fewer folds or more stimuli",
                rows.len()
            )));
        }
        rows.shuffle(&mut random);
        for row in rows {
            tests[next % folds].push(row);
            next += 1;
        }
    }
    Ok(from_tests(labels.len(), tests))
}

/// Folds in which no group is in both training and test rows. So a classifier is tested on groups
/// on which it was not trained.
///
/// # Errors
/// [`Error::Data`] if there are fewer groups than folds, or if a label would occur in a test but
/// not in its training rows.
pub fn grouped(labels: &[usize], groups: &[usize], folds: usize, seed: u64) -> Result<Vec<Fold>> {
    check_count(labels.len(), folds)?;
    if labels.len() != groups.len() {
        return Err(Error::data(format!(
            "there are {} labels but {} groups; give one group for each label",
            labels.len(),
            groups.len()
        )));
    }
    let mut by_group: Vec<Vec<usize>> = rows_by(groups).into_values().collect();
    if by_group.len() < folds {
        return Err(Error::data(format!(
            "{} groups for {folds} folds: each fold holds out at least one group",
            by_group.len()
        )));
    }
    by_group.shuffle(&mut generator(seed));
    // Groups are assigned from the largest to the smallest. Each goes into the fold with the fewest
    // rows.
    by_group.sort_by_key(|rows| std::cmp::Reverse(rows.len()));
    let mut tests: Vec<Vec<usize>> = vec![Vec::new(); folds];
    for rows in by_group {
        if let Some(smallest) = tests.iter_mut().min_by_key(|test| test.len()) {
            smallest.extend(rows);
        }
    }
    let folds = from_tests(labels.len(), tests);
    for fold in &folds {
        let known: Vec<usize> = {
            let mut known: Vec<usize> = fold.train.iter().map(|r| labels[*r]).collect();
            known.sort_unstable();
            known.dedup();
            known
        };
        let unknown = fold
            .test
            .iter()
            .find(|r| known.binary_search(&labels[**r]).is_err());
        if let Some(row) = unknown {
            return Err(Error::data(format!(
                "label number {} (row {row}) would be tested without having been in training: \
                 it needs rows in groups of several folds",
                labels[*row]
            )));
        }
    }
    Ok(folds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stratified_folds_part_the_rows(
            labels in proptest::collection::vec(0usize..3, 12..60),
            folds in 2usize..5,
            seed in 0u64..9,
        ) {
            match stratified(&labels, folds, seed) {
                Ok(parts) => {
                    let mut seen: Vec<usize> = parts.iter().flat_map(|f| f.test.clone()).collect();
                    seen.sort_unstable();
                    prop_assert_eq!(seen, (0..labels.len()).collect::<Vec<_>>());
                    for fold in &parts {
                        prop_assert_eq!(fold.train.len() + fold.test.len(), labels.len());
                        for label in 0..3 {
                            let all = labels.iter().filter(|l| **l == label).count();
                            let here = fold.test.iter().filter(|r| labels[**r] == label).count();
                            prop_assert!(here >= all / folds && here <= all.div_ceil(folds));
                        }
                    }
                }
                Err(_) => prop_assert!(
                    (0..3).any(|l| (1..folds).contains(&labels.iter().filter(|x| **x == l).count()))
                ),
            }
        }
    }

    #[test]
    fn groups_stay_together() {
        let labels = [0, 1, 0, 1, 0, 1, 0, 1];
        let groups = [0, 0, 1, 1, 2, 2, 3, 3];
        let folds = grouped(&labels, &groups, 4, 1).unwrap();
        for fold in &folds {
            for row in &fold.test {
                assert!(fold.train.iter().all(|r| groups[*r] != groups[*row]));
            }
        }
        // A label that occurs in only one group cannot be tested on other groups.
        let e = grouped(&[0, 0, 1, 1], &[0, 0, 1, 1], 2, 0).unwrap_err();
        assert!(e.to_string().contains("without having been in training"));
    }

    #[test]
    fn names_become_numbers_in_sorted_order() {
        let (names, labels) = encode_labels(&["b", "a", "b"]);
        assert_eq!(
            (names, labels),
            (vec!["a".into(), "b".into()], vec![1, 0, 1])
        );
    }
}
