//! Tests that batches contain every example exactly once, and that a resumed stream continues with
//! the same batches.

use super::*;
use proptest::prelude::*;

fn examples(lens: &[usize]) -> Vec<Example> {
    lens.iter()
        .zip(1_u32..)
        .map(|(len, id)| Example::new(vec![id; *len], 0))
        .collect()
}

/// The mask computed by mlx-lm's definition.
fn reference_mask(batch: &Batch) -> Vec<bool> {
    let mut mask = Vec::new();
    for [offset, length] in &batch.spans {
        for step in 1..batch.width as u32 {
            mask.push(step >= *offset && step <= *length);
        }
    }
    mask
}

#[test]
fn rows_are_padded_to_one_more_than_a_multiple_of_32() {
    for (len, width) in [(1, 33), (32, 33), (33, 65), (100, 100), (150, 100)] {
        let all = examples(&[len]);
        let options = BatchOptions::new()
            .with_batch_size(1)
            .with_max_seq_length(100);
        let batch = Batches::new(&all, options).unwrap().next_batch();
        assert_eq!(batch.width, width, "{len}");
        assert_eq!(batch.truncated, usize::from(len > 100));
        assert_eq!(batch.spans, [[0, len.min(100) as u32]]);
    }
}

#[test]
fn a_row_cut_before_its_completion_has_no_targets() {
    let all = [Example::new(vec![5; 40], 39)];
    let options = BatchOptions::new()
        .with_batch_size(1)
        .with_max_seq_length(20);
    let batch = Batches::new(&all, options).unwrap().next_batch();
    assert_eq!(batch.targets(), 0);
    assert_eq!(all[0].learned(20), 0);
}

#[test]
fn packed_rows_learn_no_borders_and_no_padding() {
    let all = [Example::new(vec![1; 4], 2), Example::new(vec![2; 3], 0)];
    let packed = super::super::pack(&all, 32);
    let options = BatchOptions::new().with_batch_size(1);
    let batch = Batches::new(&packed, options).unwrap().next_batch();
    let on: Vec<usize> = batch
        .mask()
        .iter()
        .zip(1..)
        .filter(|(m, _)| **m)
        .map(|(_, t)| t)
        .collect();
    // Targets are ids 2 and 3 of the first part, and ids 5 and 6 of the second part, which begins
    // at id 4.
    assert_eq!(on, [2, 3, 5, 6]);
}

#[test]
fn impossible_options_are_errors() {
    let all = examples(&[3, 4]);
    let make = |o: BatchOptions| Batches::new(&all, o).map(drop).unwrap_err().to_string();
    assert!(make(BatchOptions::new()).contains("there are 2 examples and batch_size is 4"));
    assert!(make(BatchOptions::new().with_batch_size(0)).contains("batch_size is 0"));
    let short = BatchOptions::new()
        .with_batch_size(1)
        .with_max_seq_length(1);
    assert!(make(short).contains("max_seq_length is 1"));
    let huge = BatchOptions::new()
        .with_batch_size(2)
        .with_max_seq_length(1 << 31);
    assert!(make(huge).contains("more than a batch can hold"));
    assert!(Batches::new(&[], BatchOptions::new().with_keep_rest(true)).is_err());
}

#[test]
fn shuffled_epochs_have_other_batches() {
    let all = examples(&[4; 12]);
    let groups = |order: Order| {
        let options = BatchOptions::new().with_batch_size(3).with_order(order);
        let mut stream = Batches::new(&all, options).unwrap();
        let mut epoch = || {
            let mut groups: Vec<Vec<usize>> = stream.epoch().map(|b| b.examples).collect();
            groups.iter_mut().for_each(|group| group.sort_unstable());
            groups.sort_unstable();
            groups
        };
        [epoch(), epoch()]
    };
    let [first, second] = groups(Order::Shuffled);
    assert_ne!(first, second);
    let [first, second] = groups(Order::ByLength);
    assert_eq!(first, second);
}

proptest! {
    #[test]
    fn an_epoch_has_every_example_once(
        lens in proptest::collection::vec(1_usize..80, 1..40),
        size in 1_usize..6,
        seed in proptest::option::of(any::<u32>()),
        keep in any::<bool>(),
        shuffled in any::<bool>(),
    ) {
        prop_assume!(keep || lens.len() >= size);
        let all = examples(&lens);
        let order = if shuffled { Order::Shuffled } else { Order::ByLength };
        let options = BatchOptions::new().with_batch_size(size).with_seed(seed).with_keep_rest(keep)
            .with_order(order);
        let mut stream = Batches::new(&all, options).unwrap();
        for _ in 0..2 {
            let batches: Vec<Batch> = stream.epoch().collect();
            let mut seen: Vec<usize> = batches.iter().flat_map(|b| b.examples.clone()).collect();
            seen.sort_unstable();
            let before = seen.len();
            seen.dedup();
            prop_assert_eq!(seen.len(), before);
            prop_assert_eq!(seen.len() + stream.left_over(), all.len());
            prop_assert_eq!(stream.left_over(), if keep { 0 } else { all.len() % size });
            for b in &batches {
                prop_assert_eq!(b.tokens.len(), b.rows * b.width);
                prop_assert_eq!(b.mask(), reference_mask(b));
            }
        }
    }

    #[test]
    fn masks_are_those_of_mlx_lm(len in 1_usize..70, offset in 0_usize..90, most in 2_usize..70) {
        let all = [Example::new(vec![9; len], offset)];
        let options = BatchOptions::new().with_batch_size(1).with_max_seq_length(most);
        let batch = Batches::new(&all, options).unwrap().next_batch();
        prop_assert_eq!(batch.mask(), reference_mask(&batch));
    }

    #[test]
    fn a_resumed_stream_goes_on_the_same(
        seed in any::<u32>(), skip in 0_u64..50, shuffled in any::<bool>(),
    ) {
        let all = examples(&[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]);
        let order = if shuffled { Order::Shuffled } else { Order::ByLength };
        let options = BatchOptions::new().with_batch_size(2).with_seed(seed).with_order(order);
        let mut uninterrupted = Batches::new(&all, options.clone()).unwrap();
        for _ in 0..skip {
            uninterrupted.next_batch();
        }
        let mut resumed = Batches::new(&all, options).unwrap();
        resumed.skip_batches(skip);
        for _ in 0..10 {
            prop_assert_eq!(uninterrupted.next_batch(), resumed.next_batch());
        }
        prop_assert_eq!(uninterrupted.drawn(), resumed.drawn());
    }
}
