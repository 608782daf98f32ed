//! A token for each row of logits, in one operation: what changes logits (penalties, biases, bans), what
//! filters them, and the draw. Not the passes over rows that it is made of (`weigh`, `select`, `nucleus`).
//!
//! As separate operations each of these stages reads and writes the whole vocabulary, in some sixty nodes a
//! token; here a row is copied at most once, tokens that are penalized are touched alone, and what a filter
//! leaves is a short list.

use std::sync::Arc;

use crate::isa::Isa;
use crate::partition::{Output, share};
use crate::sampling::softmax_pass::{BLOCK, Scale, depth, peak};
use crate::sampling::top_k::{Room, ascending, gather, most, pass, pick, select, weigh};
use crate::sampling::top_p::nucleus;
use crate::work::{Input, Work};

/// How a token is chosen from one row of logits.
#[derive(Debug, Clone)]
pub enum Pick {
    /// This one, whatever the logits.
    Token(u32),
    /// The greatest; of equals the first.
    Greatest,
    /// A draw.
    Draw(Filters),
}

/// What a draw chooses from, and how. The stages come in this order: top-p, min-p, XTC, top-k, temperature.
/// With a top-k and no XTC those before it see the `k` greatest alone, with probabilities under the whole row.
#[derive(Debug, Clone)]
pub struct Filters {
    /// Keeps the smallest set of the most probable whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keeps what is at least this many times as probable as the most probable; 0 keeps all.
    pub min_p: f32,
    /// Leaves out all that is more probable than a threshold but the least probable of these, and the
    /// tokens named.
    pub xtc: Option<(f32, Arc<[u32]>)>,
    /// Keeps so many; 0 keeps all.
    pub top_k: usize,
    /// Logits are multiplied with this: 1 over the temperature, finite.
    pub scale: f32,
    /// The number in `[0, 1)` that the running sum of probabilities must pass.
    pub uniform: f64,
}

/// Lowers tokens that were seen: positive logits are divided, negative ones multiplied.
#[derive(Debug, Clone, Copy)]
pub struct Repeat {
    /// How many of the last tokens seen count.
    pub last: usize,
    /// What logits are divided by.
    pub penalty: f32,
}

/// Takes `presence` off the logits of tokens that were seen, and `frequency` for each time.
#[derive(Debug, Clone, Copy)]
pub struct Count {
    /// How many of the last tokens seen count.
    pub last: usize,
    /// Taken off once.
    pub presence: f32,
    /// Taken off each time.
    pub frequency: f32,
}

/// The operations on one row of logits, in the order of the fields. Tokens beyond the row are ignored.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The repetition penalty.
    pub repeat: Option<Repeat>,
    /// Presence and frequency penalties.
    pub count: Option<Count>,
    /// Added to the logits of tokens.
    pub bias: Arc<[(u32, f32)]>,
    /// Tokens that are impossible.
    pub never: Arc<[u32]>,
    /// The tokens that are possible: token `i` is bit `i % 32` of word `i / 32`; missing words count as
    /// zero.
    pub only: Option<Vec<u32>>,
    /// The choice.
    pub pick: Pick,
}

/// More candidates than this are filtered as all others are.
pub const MOST_CANDIDATES: usize = 1024;

/// A token for each row. Its inputs are the logits, float32 `[rows, n]`, and arrays of uint32 with tokens
/// seen; its output is `[rows]`.
pub struct Choose {
    /// Elements of a row.
    pub n: usize,
    /// For each row its operations, and which input has the tokens seen.
    pub rows: Vec<(Choice, Option<usize>)>,
}

impl Work for Choose {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `choose` passes logits of float32 first.
        let logits: &[f32] = unsafe { inputs[0].as_slice() };
        let seen = |input: Option<usize>| match input.and_then(|i| inputs.get(i)) {
            // SAFETY: `choose` checked that all others are uint32.
            Some(input) => unsafe { input.as_slice::<u32>() },
            None => &[],
        };
        let rows: Vec<(&[f32], &[u32], &Choice)> = logits
            .chunks_exact(self.n)
            .zip(&self.rows)
            .map(|(x, (row, input))| (x, seen(*input), row))
            .collect();
        let isa = Isa::detect();
        let out = Output::new(output);
        // Each element costs about as much as four multiplications.
        share(rows.len(), 4 * logits.len(), &|from, to| {
            Room::with(|room| {
                room.crowded = rows.len() > 1;
                for (i, (x, seen, row)) in rows.iter().enumerate().take(to).skip(from) {
                    // SAFETY: each row has an element of its own.
                    let token = unsafe { out.part(i, 1) };
                    token[0] = row.token(isa, x, seen, room) as f32; // below `LONGEST`
                }
                room.crowded = false;
            });
        });
    }

    fn outputs(&self) -> usize {
        self.rows.len()
    }
}

/// The last `n` of them.
pub fn tail(tokens: &[u32], n: usize) -> &[u32] {
    &tokens[tokens.len().saturating_sub(n)..]
}

impl Choice {
    fn token(&self, isa: Isa, logits: &[f32], seen: &[u32], room: &mut Room) -> u32 {
        if let Pick::Token(id) = self.pick {
            return id;
        }
        let changes = !(seen.is_empty()
            && self.bias.is_empty()
            && self.never.is_empty()
            && self.only.is_none());
        // The row leaves its room while the rest of that is in use.
        let mut own = std::mem::take(&mut room.row);
        if changes {
            own.clear();
            own.extend_from_slice(logits);
            self.change(logits, seen, &mut own, &mut room.counts);
        }
        let token = match &self.pick {
            Pick::Token(id) => *id,
            Pick::Greatest => {
                let x = if changes { &own } else { logits };
                room.find_peaks(isa, x);
                first_greatest(x, &room.peaks)
            }
            Pick::Draw(filters) => {
                if !changes && filters.xtc.is_some() {
                    own.clear();
                    own.extend_from_slice(logits);
                }
                let all = if changes || filters.xtc.is_some() {
                    All::Own(&mut own)
                } else {
                    All::Read(logits)
                };
                filters.token(isa, all, room)
            }
        };
        room.row = own;
        token
    }

    /// Penalties, biases and bans; `x` begins as `logits`.
    fn change(&self, logits: &[f32], seen: &[u32], x: &mut [f32], counts: &mut Vec<u32>) {
        if let Some(Repeat { last, penalty }) = self.repeat {
            for &id in tail(seen, last) {
                // From what it was, so that a token counts once however often it stands.
                if let (Some(&was), Some(x)) = (logits.get(id as usize), x.get_mut(id as usize)) {
                    *x = if was < 0.0 {
                        was * penalty
                    } else {
                        was / penalty
                    };
                }
            }
        }
        if let Some(Count {
            last,
            presence,
            frequency,
        }) = self.count
        {
            let seen = tail(seen, last);
            if counts.len() < x.len() {
                counts.resize(x.len(), 0);
            }
            for &id in seen {
                if let Some(count) = counts[..x.len()].get_mut(id as usize) {
                    *count += 1;
                }
            }
            for &id in seen {
                let Some(x) = x.get_mut(id as usize) else {
                    continue;
                };
                let count = std::mem::take(&mut counts[id as usize]);
                if count > 0 {
                    *x -= count as f32 * frequency;
                    *x -= presence;
                }
            }
        }
        for &(id, bias) in &*self.bias {
            if let Some(x) = x.get_mut(id as usize) {
                *x += bias;
            }
        }
        for &id in &*self.never {
            if let Some(x) = x.get_mut(id as usize) {
                *x = f32::NEG_INFINITY;
            }
        }
        if let Some(words) = &self.only {
            let mut words = words.iter().copied();
            for part in x.chunks_mut(32) {
                match words.next().unwrap_or(0) {
                    0 => part.fill(f32::NEG_INFINITY),
                    u32::MAX => {}
                    word => {
                        for (i, x) in part.iter_mut().enumerate() {
                            if word >> i & 1 == 0 {
                                *x = f32::NEG_INFINITY;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The place of the greatest; of equals the first, and 0 where there is no number.
fn first_greatest(x: &[f32], peaks: &[f32]) -> u32 {
    let max = peak(peaks);
    let start = peaks.iter().position(|&p| p == max).unwrap_or(0) * BLOCK;
    let block = x.get(start..).unwrap_or_default();
    (start + block.iter().position(|&x| x == max).unwrap_or(0)) as u32
}

/// A row that is only read, or one that may be changed.
enum All<'a> {
    Read(&'a [f32]),
    Own(&'a mut [f32]),
}

impl All<'_> {
    fn row(&self) -> &[f32] {
        match self {
            All::Read(row) => row,
            All::Own(row) => row,
        }
    }
}

impl Filters {
    fn token(&self, isa: Isa, all: All<'_>, room: &mut Room) -> u32 {
        room.find_peaks(isa, all.row());
        let max = peak(&room.peaks);
        if max == f32::NEG_INFINITY {
            return 0;
        }
        let k = self.top_k;
        if k > 0 && k < all.row().len() && k <= MOST_CANDIDATES && self.xtc.is_none() {
            self.among_candidates(isa, all.row(), max, room)
        } else {
            self.among_all(isa, all, max, room)
        }
    }

    /// With a top-k: its candidates, from the least to the most probable.
    fn among_candidates(&self, isa: Isa, row: &[f32], max: f32, room: &mut Room) -> u32 {
        let one = Scale { max, by: 1.0 };
        let whole = (self.top_p < 1.0).then(|| room.find_sums(isa, row, one));
        select(row, self.top_k, room);
        room.found.sort_unstable_by(ascending);
        let mut first = 0;
        if let Some(total) = whole {
            weigh(isa, &room.found, one, &mut room.values, &mut room.weights);
            // Those stay before which (of the more probable ones) there is less than p.
            let reach = f64::from(self.top_p) * total;
            let mut before = 0.0;
            first = room.found.len();
            while first > 0 && before < reach {
                first -= 1;
                before += f64::from(room.weights[first]);
            }
        }
        if self.min_p > 0.0 {
            let least = self.min_p.ln();
            let kept = |f: &(f32, u32)| depth(f.0, max) >= least;
            first += room.found[first..].iter().position(kept).unwrap_or(0);
        }
        let found = &room.found[first..];
        let scale = Scale {
            max,
            by: self.scale,
        };
        let total = weigh(isa, found, scale, &mut room.values, &mut room.weights);
        found_at(room, first, self.uniform * total)
    }

    fn among_all(&self, isa: Isa, mut all: All<'_>, max: f32, room: &mut Room) -> u32 {
        // What is left: everything, or what was found, in order of place.
        let mut found = false;
        // What min-p leaves, minus infinity without.
        let least = max + self.min_p.ln();
        if self.top_p < 1.0 {
            nucleus(isa, all.row(), (max, least), self.top_p, room);
            found = true;
        }
        if self.min_p > 0.0 {
            if found {
                room.found.retain(|f| f.0 >= least);
            } else {
                gather(all.row(), &room.peaks, least, &mut room.found);
                found = true;
            }
        }
        if let Some((threshold, spared)) = &self.xtc {
            match (&mut all, found) {
                (All::Own(row), false) => exclude(isa, row, max, *threshold, spared, room),
                _ => exclude_found(isa, max, *threshold, spared, room),
            }
        }
        if self.top_k > 0 && self.top_k < all.row().len() {
            if found {
                most(&mut room.found, self.top_k);
            } else {
                select(all.row(), self.top_k, room);
                found = true;
            }
            room.found.sort_unstable_by_key(|f| f.1);
        }
        if !found {
            // The greatest may have been left out.
            let scale = Scale {
                max: peak(&room.peaks),
                by: self.scale,
            };
            return pick(isa, all.row(), scale, self.uniform, room) as u32;
        }
        let scale = Scale {
            max: room
                .found
                .iter()
                .map(|f| f.0)
                .fold(f32::NEG_INFINITY, f32::max),
            by: self.scale,
        };
        let total = weigh(isa, &room.found, scale, &mut room.values, &mut room.weights);
        found_at(room, 0, self.uniform * total)
    }
}

/// The token at which the running sum of the weights passes `target`, among those found from number
/// `first` on.
fn found_at(room: &Room, first: usize, target: f64) -> u32 {
    let weights = room.weights.iter().map(|&w| f64::from(w));
    let (place, _) = pass(weights, 0.0, target);
    room.found.get(first + place).map_or(0, |f| f.1)
}

/// The least probable of those more probable than `threshold`, by its probability; infinity where there is none.
fn least_above(weights: &[f32], total: f64, threshold: f32) -> f32 {
    weights
        .iter()
        .map(|&w| (f64::from(w) / total) as f32)
        .filter(|&p| p > threshold)
        .fold(f32::INFINITY, f32::min)
}

/// XTC among what was found.
fn exclude_found(isa: Isa, max: f32, threshold: f32, spared: &[u32], room: &mut Room) {
    let one = Scale { max, by: 1.0 };
    let total = weigh(isa, &room.found, one, &mut room.values, &mut room.weights);
    let least = least_above(&room.weights, total, threshold);
    let mut weights = room.weights.iter();
    room.found.retain(|(_, id)| {
        let w = weights.next().copied().unwrap_or(0.0);
        (f64::from(w) / total) as f32 <= least || spared.contains(id)
    });
}

/// XTC among all.
fn exclude(isa: Isa, row: &mut [f32], max: f32, threshold: f32, spared: &[u32], room: &mut Room) {
    let one = Scale { max, by: 1.0 };
    let total = room.find_sums(isa, row, one);
    // Everything above the threshold is among those, with something to spare for rounding.
    let from = (f64::from(threshold) * total).ln() - 1e-3;
    let least = if from.is_finite() {
        (f64::from(max) + from) as f32
    } else {
        f32::NEG_INFINITY
    };
    gather(row, &room.peaks, least, &mut room.found);
    weigh(isa, &room.found, one, &mut room.values, &mut room.weights);
    let least = least_above(&room.weights, total, threshold);
    for (&(_, id), &w) in room.found.iter().zip(&room.weights) {
        if (f64::from(w) / total) as f32 > least && !spared.contains(&id) {
            row[id as usize] = f32::NEG_INFINITY;
            let block = id as usize / BLOCK;
            let end = row.len().min((block + 1) * BLOCK);
            room.peaks[block] = peak(&row[block * BLOCK..end]);
        }
    }
}
