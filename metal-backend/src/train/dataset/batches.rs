//! Examples to batches, as Python mlx-lm makes them (`iterate_batches`): rows of like length,
//! padded, in an order that a seed decides.
//!
//! The place in the stream follows from the seed and the number of batches. So a resumed run sees
//! what the interrupted one would have seen. The trainer copies batches to arrays.

use inference::{Error, ErrorKind, Result};

use super::Example;
use super::shuffle::Shuffler;

/// Which examples share a batch.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Sorted by number of ids (stable), so that batches need little padding.
    #[default]
    ByLength,
    /// As in the file. It is what mlx-lm's own `train` does with lines of equally many fields: it
    /// sorts its cached data set by the number of fields.
    AsRead,
}

/// How batches are made.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchOptions {
    /// Rows of a batch.
    pub batch_size: usize,
    /// Ids of a row at most; longer examples are cut at their end.
    pub max_seq_length: usize,
    /// Which examples share a batch.
    pub order: Order,
    /// The order of the batches: shuffled anew each epoch from this seed, or as they come.
    pub seed: Option<u32>,
    /// Whether what is left over when examples are dealt out makes a last, smaller batch. mlx-lm
    /// leaves it out.
    pub keep_rest: bool,
    /// The id that fills rows.
    pub pad_id: u32,
    /// Validations that draw from the same generator between the epochs, as mlx-lm's do.
    pub validations: Option<Validations>,
}

/// When mlx-lm's trainer validates. Each time it draws an order of the validation's batches. It
/// draws from the generator of the training batches, whose second epoch depends on it.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validations {
    /// Batches of the validation data.
    pub batches: u32,
    /// It validates before the first batch, before every batch whose number this divides, and
    /// before the last.
    pub every: u64,
    /// Batches of the whole run.
    pub iters: u64,
}

impl Validations {
    /// Validations of a data set with so many whole batches.
    #[must_use]
    pub fn new(batches: u32, every: u64, iters: u64) -> Self {
        Self {
            batches,
            every: every.max(1),
            iters,
        }
    }

    /// How many there are before batch `n` (from 1) is drawn: those before the batches up to `n -
    /// 1`.
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
    /// Ids of each row, L: one more than the next multiple of 32, or the longest row allowed.
    pub width: usize,
    /// Ids, `[B, L]`, row after row; inputs are the first L - 1 of each, targets the last L - 1.
    pub tokens: Vec<u32>,
    /// Offset and length of each row, `[B, 2]`, as mlx-lm's losses take them: target t (from 1)
    /// counts where offset <= t <= length. Only for rows of one part; others need [`Batch::mask`].
    pub spans: Vec<[u32; 2]>,
    /// The parts of each row with their offsets, cut to the row.
    pub parts: Vec<Vec<super::Part>>,
    /// Which examples the rows are.
    pub examples: Vec<usize>,
    /// How many rows were cut.
    pub truncated: usize,
}

impl Batch {
    /// Which targets count, `[B, L - 1]`: element t - 1 of a row is for its id t.
    ///
    /// For rows of one part this is mlx-lm's mask, which lets one id of the padding after a row
    /// count too.
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

    /// How many targets count. A batch with none has no loss: cut rows can lose all that was to be
    /// learned.
    #[must_use]
    pub fn targets(&self) -> usize {
        self.mask().iter().filter(|m| **m).count()
    }

    /// The share of the batch that is padding, from 0 to 1.
    #[must_use]
    pub fn padding(&self) -> f32 {
        let filled: usize = self.spans.iter().map(|s| s[1] as usize).sum();
        1.0 - filled as f32 / (self.rows * self.width).max(1) as f32
    }
}

/// Which examples make each batch: an endless stream of their numbers.
#[derive(Debug, Clone)]
pub struct Rows {
    /// Examples of each batch, before shuffling.
    groups: Vec<Vec<usize>>,
    shuffler: Option<Shuffler>,
    validations: Option<Validations>,
    /// Validations whose draws were passed over.
    validated: u64,
    /// The order of this epoch's batches, and where in it the stream is.
    epoch: Vec<u32>,
    at: usize,
    drawn: u64,
    examples: usize,
}

impl Rows {
    /// A stream over examples that are sorted by `keys`, one for each, unless their order is
    /// [`Order::AsRead`]. Examples with equal keys stay in their order.
    ///
    /// # Errors
    /// `InvalidOption` for no rows, rows of less than two ids, and fewer examples than a batch has
    /// rows.
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
        let groups: Vec<Vec<usize>> = order
            .chunks(size)
            .filter(|c| c.len() == size || options.keep_rest)
            .map(<[usize]>::to_vec)
            .collect();
        let mut stream = Self {
            shuffler: options.seed.map(Shuffler::new),
            validations: options.validations,
            validated: 0,
            groups,
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
                // Only the draws count.
                let _ = shuffler.permutation(validations.batches);
            }
            self.validated = before;
        }
        self.epoch = match &mut self.shuffler {
            Some(shuffler) => shuffler.permutation(n),
            None => (0..n).collect(),
        };
        self.at = 0;
    }

    /// Batches of one epoch.
    #[must_use]
    pub fn per_epoch(&self) -> usize {
        self.groups.len()
    }

    /// Examples that no batch has, epoch after epoch the same: those left over.
    #[must_use]
    pub fn left_over(&self) -> usize {
        self.examples - self.groups.iter().map(Vec::len).sum::<usize>()
    }

    /// How many batches were taken so far.
    #[must_use]
    pub fn drawn(&self) -> u64 {
        self.drawn
    }

    /// Passes over `batches`: a run that resumes after so many steps continues here.
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

    /// The examples of the next batch; after the last of an epoch the first of the next.
    pub fn next_rows(&mut self) -> &[usize] {
        let group = self.next_group();
        &self.groups[group]
    }
}

/// An endless stream of batches over some examples.
#[derive(Debug, Clone)]
pub struct Batches<'a> {
    examples: &'a [Example],
    options: BatchOptions,
    rows: Rows,
}

impl<'a> Batches<'a> {
    /// A stream that begins at its first epoch.
    ///
    /// # Errors
    /// As [`Rows::new`].
    pub fn new(examples: &'a [Example], options: BatchOptions) -> Result<Self> {
        let lengths: Vec<usize> = examples.iter().map(Example::len).collect();
        Self::by_keys(examples, &lengths, options)
    }

    /// The same, with examples sorted by keys of the caller's, one for each.
    ///
    /// # Errors
    /// As [`Rows::new`]; `InvalidOption` where there are more or fewer keys than examples.
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

    /// Batches of one epoch.
    #[must_use]
    pub fn per_epoch(&self) -> usize {
        self.rows.per_epoch()
    }

    /// Examples that no batch has, epoch after epoch the same: those left over.
    #[must_use]
    pub fn left_over(&self) -> usize {
        self.rows.left_over()
    }

    /// How many batches were taken so far.
    #[must_use]
    pub fn drawn(&self) -> u64 {
        self.rows.drawn()
    }

    /// How many examples of the data are longer than a row.
    #[must_use]
    pub fn too_long(&self) -> usize {
        let most = self.options.max_seq_length;
        self.examples.iter().filter(|e| e.len() > most).count()
    }

    /// Passes over `batches` without making them: a run that resumes after so many steps continues
    /// here.
    pub fn skip_batches(&mut self, batches: u64) {
        self.rows.skip_batches(batches);
    }

    /// The next batch; after the last of an epoch the first of the next.
    pub fn next_batch(&mut self) -> Batch {
        let rows = self.rows.next_rows().to_vec();
        self.make(&rows)
    }

    /// One epoch from where the stream is: what validation and tests go through.
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
