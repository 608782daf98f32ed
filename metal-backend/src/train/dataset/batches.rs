//! Groups examples into batches like `iterate_batches` of Python mlx-lm: padded rows of similar
//! length, in an order that a seed determines.
//!
//! The position in the stream depends only on the seed and the number of batches. So a resumed run
//! receives the same batches as an uninterrupted run. The trainer copies batches to arrays.

use inference::{Error, ErrorKind, Result};

use super::Example;
use super::shuffle::Shuffler;

/// How examples are grouped into batches.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Sorted by the number of ids (stable sort), so that batches need little padding.
    #[default]
    ByLength,
    /// The order of the file. mlx-lm's own `train` has this order if all lines have an equal number
    /// of fields, because it sorts by that number.
    AsRead,
    /// A new random order in each epoch, so that the groups differ between epochs. Without a seed,
    /// the same as [`Order::AsRead`].
    Shuffled,
}

/// Options of batches.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchOptions {
    /// Rows per batch.
    pub batch_size: usize,
    /// The maximum ids per row; longer examples are truncated at the end.
    pub max_seq_length: usize,
    /// How examples are grouped into batches.
    pub order: Order,
    /// The seed that shuffles batches in each epoch; `None` means no shuffling.
    pub seed: Option<u32>,
    /// Whether leftover examples form a smaller last batch. mlx-lm drops them.
    pub keep_rest: bool,
    /// The id used for padding.
    pub pad_id: u32,
    /// Validations that advance the random generator of training batches between epochs, as in
    /// mlx-lm.
    pub validations: Option<Validations>,
}

/// The schedule of validations in mlx-lm's trainer. Each validation shuffles its batches with the
/// generator of the training batches, so the order of later epochs depends on the validations.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validations {
    /// Batches per validation.
    pub batches: u32,
    /// A validation runs before the first batch, before every batch whose number is divisible by
    /// this number, and before the last batch.
    pub every: u64,
    /// The number of batches in the whole run.
    pub iters: u64,
}

impl Validations {
    /// Describes validations on a data set with `batches` full batches.
    #[must_use]
    pub fn new(batches: u32, every: u64, iters: u64) -> Self {
        Self {
            batches,
            every: every.max(1),
            iters,
        }
    }

    /// Returns the number of validations before batches `1..=n - 1`, which all run before batch `n`
    /// (the first is 1) is taken.
    fn before(&self, n: u64) -> u64 {
        let drawn = n.saturating_sub(1).min(self.iters);
        let multiples = drawn / self.every;
        let first = drawn >= 1 && self.every != 1;
        let last = drawn == self.iters && drawn > 1 && !drawn.is_multiple_of(self.every);
        multiples + u64::from(first) + u64::from(last)
    }
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self {
            batch_size: 4,
            max_seq_length: 2048,
            order: Order::ByLength,
            seed: Some(0),
            keep_rest: false,
            pad_id: 0,
            validations: None,
        }
    }
}

impl BatchOptions {
    /// mlx-lm's defaults: 4 rows of at most 2048 ids, by length, shuffled from seed 0, padded with
    /// id 0.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`BatchOptions::batch_size`].
    #[must_use]
    pub fn with_batch_size(mut self, rows: usize) -> Self {
        self.batch_size = rows;
        self
    }

    /// Sets [`BatchOptions::max_seq_length`].
    #[must_use]
    pub fn with_max_seq_length(mut self, ids: usize) -> Self {
        self.max_seq_length = ids;
        self
    }

    /// Sets [`BatchOptions::order`].
    #[must_use]
    pub fn with_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Sets [`BatchOptions::seed`].
    #[must_use]
    pub fn with_seed(mut self, seed: impl Into<Option<u32>>) -> Self {
        self.seed = seed.into();
        self
    }

    /// Sets [`BatchOptions::keep_rest`].
    #[must_use]
    pub fn with_keep_rest(mut self, yes: bool) -> Self {
        self.keep_rest = yes;
        self
    }

    /// Sets [`BatchOptions::pad_id`].
    #[must_use]
    pub fn with_pad_id(mut self, id: u32) -> Self {
        self.pad_id = id;
        self
    }

    /// Sets [`BatchOptions::validations`].
    #[must_use]
    pub fn with_validations(mut self, validations: impl Into<Option<Validations>>) -> Self {
        self.validations = validations.into();
        self
    }
}

/// One batch in host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of rows, B.
    pub rows: usize,
    /// Ids per row, L: one more than a multiple of 32, or the maximum row length.
    pub width: usize,
    /// Ids, `[B, L]`, row-major. In each row, the first L - 1 ids are inputs, the last L - 1
    /// targets.
    pub tokens: Vec<u32>,
    /// Offset and length of each row, `[B, 2]`, as mlx-lm's losses use them: target `t` (the first
    /// is 1) counts if `offset <= t <= length`. Valid only for rows of one part. For rows of
    /// several parts, use [`Batch::mask`].
    pub spans: Vec<[u32; 2]>,
    /// The parts of each row with their offsets. Parts are truncated with the row.
    pub parts: Vec<Vec<super::Part>>,
    /// The example index of each row.
    pub examples: Vec<usize>,
    /// The number of truncated rows.
    pub truncated: usize,
}

impl Batch {
    /// Returns which targets count, `[B, L - 1]`: element `t - 1` of a row says whether its id `t`
    /// counts.
    ///
    /// For rows of one part, this mask equals mlx-lm's mask, which includes one padding id after a
    /// row.
    #[must_use]
    pub fn mask(&self) -> Vec<bool> {
        let targets = self.width.saturating_sub(1);
        let mut mask = vec![false; self.rows * targets];
        for (row, parts) in self.parts.iter().enumerate() {
            let row = &mut mask[row * targets..(row + 1) * targets];
            for part in parts {
                let end = match parts.len() {
                    1 => (part.range.end + 1).min(self.width),
                    _ => part.range.end,
                };
                let start = (part.range.start + part.offset.max(1)).min(end);
                row[start.max(1) - 1..end.max(1) - 1].fill(true);
            }
        }
        mask
    }

    /// Returns the number of counted targets. It is zero if truncation removed all targets; such a
    /// batch has no loss.
    #[must_use]
    pub fn targets(&self) -> usize {
        self.mask().iter().filter(|m| **m).count()
    }

    /// The fraction of padding in the batch, from 0 to 1.
    #[must_use]
    pub fn padding(&self) -> f32 {
        let filled: usize = self.spans.iter().map(|s| s[1] as usize).sum();
        1.0 - filled as f32 / (self.rows * self.width).max(1) as f32
    }
}

/// An endless stream of batches, each a list of example indices.
#[derive(Debug, Clone)]
pub struct Rows {
    /// Example indices per batch, before shuffling.
    groups: Vec<Vec<usize>>,
    /// Rows per batch, and whether a smaller last batch is kept. `Some` if each epoch has new
    /// groups.
    regrouped: Option<(usize, bool)>,
    shuffler: Option<Shuffler>,
    validations: Option<Validations>,
    /// The number of validations for which the generator was already advanced.
    validated: u64,
    /// The order of batches in the current epoch, and the position in it.
    epoch: Vec<u32>,
    at: usize,
    drawn: u64,
    examples: usize,
}

impl Rows {
    /// Creates a stream over examples, sorted by `keys` unless the order is [`Order::AsRead`].
    /// There is one key per example, and the sort is stable.
    ///
    /// # Errors
    /// `InvalidOption` for zero rows, for rows of less than two ids, and for fewer examples than
    /// rows in a batch.
    pub fn new(keys: &[usize], options: &BatchOptions) -> Result<Self> {
        let bad = |what: String| Err(Error::new(ErrorKind::InvalidOption, what));
        let size = options.batch_size;
        if size == 0 {
            return bad(String::from("batch_size is 0; it must be at least 1"));
        }
        if options.max_seq_length < 2 {
            let most = options.max_seq_length;
            return bad(format!(
                "max_seq_length is {most}; it must be at least 2: one id to read and one to predict"
            ));
        }
        if i32::try_from(options.max_seq_length.saturating_mul(size)).is_err() {
            let most = options.max_seq_length;
            return bad(format!(
                "batch_size {size} times max_seq_length {most} is more than a batch can hold"
            ));
        }
        if keys.is_empty() || (keys.len() < size && !options.keep_rest) {
            let have = keys.len();
            return bad(format!(
                "there are {have} examples and batch_size is {size}; give more data or a smaller batch_size"
            ));
        }
        if u32::try_from(keys.len()).is_err() {
            return bad(format!(
                "there are {} examples; at most {} make batches",
                keys.len(),
                u32::MAX
            ));
        }
        let mut order: Vec<usize> = (0..keys.len()).collect();
        if options.order == Order::ByLength {
            order.sort_by_key(|i| keys[*i]);
        }
        let groups = groups(&order, size, options.keep_rest);
        let regrouped = options.order == Order::Shuffled && options.seed.is_some();
        let mut stream = Self {
            shuffler: options.seed.map(Shuffler::new),
            validations: options.validations,
            validated: 0,
            groups,
            regrouped: regrouped.then_some((size, options.keep_rest)),
            epoch: Vec::new(),
            at: 0,
            drawn: 0,
            examples: keys.len(),
        };
        stream.next_epoch();
        Ok(stream)
    }

    fn next_epoch(&mut self) {
        let n = self.groups.len() as u32;
        if let (Some(shuffler), Some(validations)) = (&mut self.shuffler, self.validations) {
            let before = validations.before(self.drawn + 1);
            for _ in self.validated..before {
                // Only the state of the generator must advance, so the permutation is not used.
                let _ = shuffler.permutation(validations.batches);
            }
            self.validated = before;
        }
        self.epoch = match &mut self.shuffler {
            Some(shuffler) if self.regrouped.is_some() => {
                let order = shuffler.permutation(u32::try_from(self.examples).unwrap_or(u32::MAX));
                let order: Vec<usize> = order.into_iter().map(|i| i as usize).collect();
                let (size, keep_rest) = self.regrouped.unwrap_or_default();
                self.groups = groups(&order, size, keep_rest);
                (0..n).collect()
            }
            Some(shuffler) => shuffler.permutation(n),
            None => (0..n).collect(),
        };
        self.at = 0;
    }

    /// The number of batches in one epoch.
    #[must_use]
    pub fn per_epoch(&self) -> usize {
        self.groups.len()
    }

    /// Returns the number of examples that are in no batch. It is the same in each epoch.
    #[must_use]
    pub fn left_over(&self) -> usize {
        self.examples - self.groups.iter().map(Vec::len).sum::<usize>()
    }

    /// The number of batches taken so far.
    #[must_use]
    pub fn drawn(&self) -> u64 {
        self.drawn
    }

    /// Skips `batches` batches, to resume a run after this number of batches.
    pub fn skip_batches(&mut self, batches: u64) {
        for _ in 0..batches {
            self.next_group();
        }
    }

    fn next_group(&mut self) -> usize {
        if self.at == self.epoch.len() {
            self.next_epoch();
        }
        let group = self.epoch[self.at] as usize;
        self.at += 1;
        self.drawn += 1;
        group
    }

    /// Returns the example indices of the next batch. After the last batch, a new epoch begins.
    pub fn next_rows(&mut self) -> &[usize] {
        let group = self.next_group();
        &self.groups[group]
    }
}

/// Splits examples into groups of `size`. Keeps a smaller last group if `keep_rest`.
fn groups(order: &[usize], size: usize, keep_rest: bool) -> Vec<Vec<usize>> {
    order
        .chunks(size)
        .filter(|chunk| chunk.len() == size || keep_rest)
        .map(<[usize]>::to_vec)
        .collect()
}

/// An endless stream of batches of examples.
#[derive(Debug, Clone)]
pub struct Batches<'a> {
    examples: &'a [Example],
    options: BatchOptions,
    rows: Rows,
}

impl<'a> Batches<'a> {
    /// Creates a stream at the start of its first epoch.
    ///
    /// # Errors
    /// The errors of [`Rows::new`].
    pub fn new(examples: &'a [Example], options: BatchOptions) -> Result<Self> {
        let lengths: Vec<usize> = examples.iter().map(Example::len).collect();
        Self::by_keys(examples, &lengths, options)
    }

    /// Creates a stream as [`Self::new`], with examples sorted by `keys`, one per example.
    ///
    /// # Errors
    /// The errors of [`Rows::new`]; `InvalidOption` if the numbers of keys and examples differ.
    pub fn by_keys(examples: &'a [Example], keys: &[usize], options: BatchOptions) -> Result<Self> {
        if keys.len() != examples.len() {
            let (have, wanted) = (keys.len(), examples.len());
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!("there are {have} keys for {wanted} examples"),
            ));
        }
        let rows = Rows::new(keys, &options)?;
        Ok(Self {
            examples,
            options,
            rows,
        })
    }

    /// The number of batches in one epoch.
    #[must_use]
    pub fn per_epoch(&self) -> usize {
        self.rows.per_epoch()
    }

    /// Returns the number of examples that are in no batch. It is the same in each epoch.
    #[must_use]
    pub fn left_over(&self) -> usize {
        self.rows.left_over()
    }

    /// The number of batches taken so far.
    #[must_use]
    pub fn drawn(&self) -> u64 {
        self.rows.drawn()
    }

    /// Returns the number of examples that are longer than a row.
    #[must_use]
    pub fn too_long(&self) -> usize {
        let most = self.options.max_seq_length;
        self.examples.iter().filter(|e| e.len() > most).count()
    }

    /// Skips `batches` batches without building them, to resume a run after this number of batches.
    pub fn skip_batches(&mut self, batches: u64) {
        self.rows.skip_batches(batches);
    }

    /// Returns the next batch. After the last batch, a new epoch begins.
    pub fn next_batch(&mut self) -> Batch {
        let rows = self.rows.next_rows().to_vec();
        self.make(&rows)
    }

    /// Returns the next [`Self::per_epoch`] batches, for validation and tests.
    pub fn epoch(&mut self) -> impl Iterator<Item = Batch> + use<'_, 'a> {
        (0..self.per_epoch()).map(|_| self.next_batch())
    }

    fn make(&self, group: &[usize]) -> Batch {
        const PAD_TO: usize = 32;
        let most = self.options.max_seq_length;
        let rows: Vec<&Example> = group.iter().map(|i| &self.examples[*i]).collect();
        let longest = rows.iter().map(|e| e.len()).max().unwrap_or_default();
        let width = (1 + PAD_TO * longest.div_ceil(PAD_TO)).min(most);
        let mut tokens = vec![self.options.pad_id; rows.len() * width];
        let mut batch = Batch {
            rows: rows.len(),
            width,
            tokens: Vec::new(),
            spans: Vec::new(),
            parts: Vec::new(),
            examples: group.to_vec(),
            truncated: rows.iter().filter(|e| e.len() > most).count(),
        };
        for (example, row) in rows.iter().zip(tokens.chunks_mut(width)) {
            let len = example.len().min(width);
            row[..len].copy_from_slice(&example.ids[..len]);
            let offset = example.parts.first().map_or(0, |p| p.offset);
            batch.spans.push([offset as u32, len as u32]);
            let parts = example.parts.iter().filter(|p| p.range.start < len);
            batch.parts.push(
                parts
                    .map(|p| super::Part {
                        range: p.range.start..p.range.end.min(len),
                        offset: p.offset,
                    })
                    .collect(),
            );
        }
        batch.tokens = tokens;
        batch
    }
}

#[cfg(test)]
#[path = "batches_tests.rs"]
mod tests;
