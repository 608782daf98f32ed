//! Stores of long contexts: a few residual vectors for each window of tokens, in `BNDX` and `CTXT`
//! files.
//!
//! | bytes of `BNDX` | of `CTXT` | what (all little-endian) |
//! |---|---|---|
//! | 0, 4 | 0, 4 | magic, version `u32`: 1 |
//! | 8 | 8 | elements of a vector, `u32` |
//! | | 12 | blocks of the model, `u32` |
//! | 12 | 16 | greatest number of tokens in a window, `u32` |
//! | | 20, 21 | tier and number of layers, `u8` each |
//! | | 24 to 32 | layers, `u8` each |
//! | 16, 20 | 32, 36 | windows, tokens, `u32` each |
//! | 32 to 64 | 96 to 128 | SHA-256 of the file with zeros here |
//! | 64 | 128 | for each window its first token, its tokens, where its vectors begin |
//!
//! An entry of `BNDX` is four `u32`; the last is 0. An entry of `CTXT` is two `u32` and two `u64`;
//! the last is 0. The vectors are float32, window by window: the residual, then from tier 2 each
//! layer's feed-forward contribution, then at tier 3 each mixer's contribution. The fields are
//! those of larql. larql's files have zeros as hash, which is then not checked.
//!
//! In numpy, `np.fromfile(path, "<u4", 4 * windows, offset=64).reshape(windows, 4)` has the entries
//! of a `BNDX` file, and `np.fromfile(path, "<f4", offset=64 + 16 * windows).reshape(windows,
//! width)` has its vectors.

use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Result};
use crate::files::{self, HASH, read_numbers, write_whole};

const VERSION: u32 = 1;
/// The maximum number of layers whose parts a context store can have.
pub const MAX_LAYERS: usize = 8;

/// Which vectors a context store (a `CTXT` file) has for each window of tokens. A tier includes the
/// vectors of the tiers before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// The residual vector of each window.
    Residual = 1,
    /// Adds the contributions of the feed-forward parts of the chosen layers.
    FeedForward = 2,
    /// Adds the contributions of the mixers of the chosen layers.
    Full = 3,
}

/// The additional fields of a context store.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Context {
    blocks: usize,
    tier: Tier,
    layers: Vec<usize>,
}

/// One window of a store.
#[derive(Debug, Clone, PartialEq)]
pub struct Window<'a> {
    /// The positions of its tokens.
    pub tokens: Range<usize>,
    /// The residual vector.
    pub residual: &'a [f32],
    /// From tier 2, the contribution of each layer's feed-forward part.
    pub feed_forward: Vec<&'a [f32]>,
    /// At tier 3, the contribution of each layer's mixer.
    pub mixer: Vec<&'a [f32]>,
}

/// Residual vectors of windows of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct WindowStore {
    width: usize,
    window: usize,
    context: Option<Context>,
    /// The end of each window.
    ends: Vec<usize>,
    /// `[windows, vectors, width]`.
    values: Vec<f32>,
}

impl WindowStore {
    /// An empty boundary store (`BNDX`): one vector of `width` elements for a window of at most
    /// `window` tokens.
    ///
    /// # Errors
    /// [`Error::Data`] if a number is 0.
    pub fn boundaries(width: usize, window: usize) -> Result<Self> {
        Self::new(width, window, None).map_err(Error::data)
    }

    /// An empty context store (`CTXT`) of a model with `blocks` blocks. `tier` determines which
    /// contributions of `layers` it contains.
    ///
    /// # Errors
    /// [`Error::Data`] for a number that is 0, and for layers that are not ascending, do not exist
    /// in the model, exceed 255, or are more than [`MAX_LAYERS`].
    pub fn context(
        width: usize,
        window: usize,
        blocks: usize,
        tier: Tier,
        layers: &[usize],
    ) -> Result<Self> {
        let context = Context {
            blocks,
            tier,
            layers: layers.to_vec(),
        };
        Self::new(width, window, Some(context)).map_err(Error::data)
    }

    fn new(
        width: usize,
        window: usize,
        context: Option<Context>,
    ) -> std::result::Result<Self, String> {
        if width == 0 || window == 0 {
            return Err(format!(
                "windows of {window} tokens and vectors of {width} elements cannot be stored"
            ));
        }
        if let Some(Context { blocks, layers, .. }) = &context {
            let bad = layers.iter().find(|l| **l >= *blocks || **l > 255);
            if let Some(layer) = bad {
                return Err(format!(
                    "layer {layer} is not one of {blocks}, or above 255"
                ));
            }
            if layers.len() > MAX_LAYERS || !layers.is_sorted_by(|a, b| a < b) {
                return Err(format!(
                    "layers {layers:?} are not ascending, or more than {MAX_LAYERS}"
                ));
            }
        }
        Ok(Self {
            width,
            window,
            context,
            ends: Vec::new(),
            values: Vec::new(),
        })
    }

    /// The numbers of feed-forward and of mixer vectors per window.
    fn parts(&self) -> (usize, usize) {
        self.context.as_ref().map_or((0, 0), |c| {
            let of = |tier| if c.tier >= tier { c.layers.len() } else { 0 };
            (of(Tier::FeedForward), of(Tier::Full))
        })
    }

    /// Adds a window of `tokens` tokens after the existing ones.
    ///
    /// # Errors
    /// [`Error::Data`] for a window without tokens or with too many, and for a wrong number of
    /// vectors or elements. After an error, the store is unchanged.
    pub fn push(
        &mut self,
        tokens: usize,
        residual: &[f32],
        feed_forward: &[&[f32]],
        mixer: &[&[f32]],
    ) -> Result<()> {
        if tokens == 0 || tokens > self.window {
            return Err(Error::data(format!(
                "a window of {tokens} tokens where 1 to {} are allowed",
                self.window
            )));
        }
        if (feed_forward.len(), mixer.len()) != self.parts() {
            return Err(Error::data(format!(
                "{} feed-forward and {} mixer vectors where the store has {:?}",
                feed_forward.len(),
                mixer.len(),
                self.parts()
            )));
        }
        let vectors = || {
            let parts = feed_forward.iter().chain(mixer).copied();
            std::iter::once(residual).chain(parts)
        };
        if let Some(v) = vectors().find(|v| v.len() != self.width) {
            return Err(Error::data(format!(
                "a vector has {} elements; the store has {}",
                v.len(),
                self.width
            )));
        }
        self.ends.push(self.tokens() + tokens);
        vectors().for_each(|v| self.values.extend_from_slice(v));
        Ok(())
    }

    /// The number of windows in the store.
    #[must_use]
    pub fn windows(&self) -> usize {
        self.ends.len()
    }

    /// The number of tokens in all windows.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The number of elements of a vector.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The tier of a context store.
    #[must_use]
    pub fn tier(&self) -> Option<Tier> {
        self.context.as_ref().map(|c| c.tier)
    }

    /// The layers whose parts a context store has.
    #[must_use]
    pub fn layers(&self) -> &[usize] {
        self.context.as_ref().map_or(&[], |c| &c.layers)
    }

    /// The index of the window that contains a token.
    #[must_use]
    pub fn window_of(&self, token: usize) -> Option<usize> {
        let window = self.ends.partition_point(|end| *end <= token);
        (window < self.windows()).then_some(window)
    }

    /// The window at this index, or `None` past the last one.
    #[must_use]
    pub fn window(&self, index: usize) -> Option<Window<'_>> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        let (feed_forward, mixer) = self.parts();
        let size = (1 + feed_forward + mixer) * self.width;
        let values = self.values.get(index * size..(index + 1) * size)?;
        let mut vectors = values.chunks_exact(self.width);
        Some(Window {
            tokens: start..end,
            residual: vectors.next()?,
            feed_forward: vectors.by_ref().take(feed_forward).collect(),
            mixer: vectors.collect(),
        })
    }

    /// The residual stream after the last of the layers: the stored stream before the first layer,
    /// plus all contributions. `None` if there is no such window, below tier 3, or if the layers
    /// have gaps.
    #[must_use]
    pub fn reconstruct(&self, index: usize) -> Option<Vec<f32>> {
        let contiguous = self.layers().windows(2).all(|l| l[0] + 1 == l[1]);
        if self.tier() != Some(Tier::Full) || self.layers().is_empty() || !contiguous {
            return None;
        }
        let window = self.window(index)?;
        let mut sum = window.residual.to_vec();
        // The order is that of the forward pass, so that rounding is almost equal.
        for (mixer, feed_forward) in window.mixer.iter().zip(&window.feed_forward) {
            for part in [mixer, feed_forward] {
                sum.iter_mut().zip(*part).for_each(|(s, p)| *s += p);
            }
        }
        Some(sum)
    }

    /// The sizes of the header and of an entry, in bytes.
    fn sizes(context: bool) -> (usize, usize) {
        if context { (128, 24) } else { (64, 16) }
    }

    /// Writes the file. It appears completely or not at all.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] when a number does not fit its field.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_whole(path, &self.bytes().map_err(Error::data)?)
    }

    fn bytes(&self) -> std::result::Result<Vec<u8>, String> {
        let word = |n: usize| {
            u32::try_from(n)
                .map(u32::to_le_bytes)
                .map_err(|_| format!("{n} does not fit a field of a store"))
        };
        let (header, entry) = Self::sizes(self.context.is_some());
        let mut bytes = Vec::new();
        bytes.extend(if self.context.is_some() {
            b"CTXT"
        } else {
            b"BNDX"
        });
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(word(self.width)?);
        match &self.context {
            None => bytes.extend(word(self.window)?),
            Some(context) => {
                bytes.extend(word(context.blocks)?);
                bytes.extend(word(self.window)?);
                // `new` limits both numbers.
                bytes.extend([context.tier as u8, context.layers.len() as u8, 0, 0]);
                let mut layers = [0; MAX_LAYERS];
                for (to, from) in layers.iter_mut().zip(&context.layers) {
                    *to = *from as u8;
                }
                bytes.extend(layers);
            }
        }
        bytes.extend(word(self.windows())?);
        bytes.extend(word(self.tokens())?);
        bytes.resize(header, 0);
        let (feed_forward, mixer) = self.parts();
        let size = 4 * (1 + feed_forward + mixer) * self.width;
        let data = header + entry * self.windows();
        let mut start = 0;
        for (i, end) in self.ends.iter().enumerate() {
            bytes.extend(word(start)?);
            bytes.extend(word(end - start)?);
            let offset = data + i * size;
            if self.context.is_some() {
                bytes.extend((offset as u64).to_le_bytes());
                bytes.extend([0; 8]);
            } else {
                bytes.extend(word(offset)?);
                bytes.extend([0; 4]);
            }
            start = *end;
        }
        bytes.extend(self.values.iter().flat_map(|v| v.to_le_bytes()));
        files::put_hash(&mut bytes, header);
        Ok(bytes)
    }

    /// Reads a file of either format.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::File`] for a file that is not a store, of another version, of a
    /// size that does not match its header, or with changed bytes.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = read_numbers(path)?;
        Self::parse(&bytes).map_err(|why| Error::file(path, why))
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let context = match bytes.first_chunk::<4>() {
            Some(b"BNDX") => false,
            Some(b"CTXT") => true,
            _ => {
                return Err(String::from(
                    "this is no store of windows: it begins with neither BNDX nor CTXT",
                ));
            }
        };
        let (header, entry) = Self::sizes(context);
        let (head, rest) = bytes
            .split_at_checked(header)
            .ok_or_else(|| format!("{} bytes are less than a header of {header}", bytes.len()))?;
        let word = |at: usize| u32_at(head, at).unwrap_or(0);
        if word(4) != VERSION as usize {
            return Err(format!(
                "version {} of stores is not known, only {VERSION}",
                word(4)
            ));
        }
        files::check_hash(bytes, header)?;
        let (about, window, counts, hash_free) = if context {
            (Some(parse_context(head, word(12))?), 16, 32, 40)
        } else {
            (None, 12, 16, 24)
        };
        if head[hash_free..header - HASH].iter().any(|b| *b != 0) {
            return Err(String::from("reserved bytes of the header are not 0"));
        }
        let mut store = Self::new(word(8), word(window), about)?;
        let (windows, tokens) = (word(counts), word(counts + 4));

        let (feed_forward, mixer) = store.parts();
        let size = store
            .width
            .checked_mul(4 * (1 + feed_forward + mixer))
            .filter(|size| size.checked_mul(windows).is_some_and(|n| n <= rest.len()))
            .ok_or_else(|| format!("{windows} windows do not fit {} bytes", rest.len()))?;
        // The vectors are at the end of the file. larql's files have unused entries before them.
        let data = bytes.len() - windows * size;
        let index = bytes
            .get(header..data)
            .filter(|index| index.len() / entry >= windows)
            .ok_or_else(|| format!("{windows} entries do not fit the file"))?;
        let (used, unused) = index.split_at(windows * entry);
        if unused.iter().any(|b| *b != 0) || (windows == 0 && unused.len() % entry != 0) {
            return Err(String::from(
                "bytes between the entries and the vectors are not 0",
            ));
        }
        for (i, entry) in used.chunks_exact(entry).enumerate() {
            let field = |at: usize| u32_at(entry, at).unwrap_or(0);
            let offset = if context && field(12) != 0 {
                usize::MAX
            } else {
                field(8)
            };
            let reserved = entry.get(if context { 16 } else { 12 }..).unwrap_or(&[]);
            let (start, length) = (field(0), field(4));
            let consistent = start == store.tokens()
                && (1..=store.window).contains(&length)
                && offset == data + i * size
                && reserved.iter().all(|b| *b == 0);
            if !consistent {
                return Err(format!(
                    "entry {i} is damaged: {length} tokens from {start}, vectors at {offset}"
                ));
            }
            store.ends.push(start + length);
        }
        if store.tokens() != tokens {
            return Err(format!(
                "the windows have {} tokens where the header says {tokens}",
                store.tokens()
            ));
        }
        let (values, _) = bytes[data..].as_chunks::<4>();
        store.values = values.iter().map(|v| f32::from_le_bytes(*v)).collect();
        Ok(store)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    let four = bytes.get(at..)?.first_chunk::<4>()?;
    usize::try_from(u32::from_le_bytes(*four)).ok()
}

fn parse_context(head: &[u8], blocks: usize) -> std::result::Result<Context, String> {
    let [tier, count, pad @ ..] = [head[20], head[21], head[22], head[23]];
    let tier = match tier {
        1 => Tier::Residual,
        2 => Tier::FeedForward,
        3 => Tier::Full,
        other => return Err(format!("tier {other} is not 1, 2 or 3")),
    };
    let layers = &head[24..24 + MAX_LAYERS];
    let (used, unused) = layers
        .split_at_checked(usize::from(count))
        .ok_or_else(|| format!("{count} layers are more than {MAX_LAYERS}"))?;
    if pad != [0, 0] || unused.iter().any(|l| *l != 0) {
        return Err(String::from("reserved bytes of the header are not 0"));
    }
    Ok(Context {
        blocks,
        tier,
        layers: used.iter().map(|l| usize::from(*l)).collect(),
    })
}
