//! Computes a matrix memory in chunks of positions: attention within the chunk, reads of the
//! earlier memory, and one update of the memory, in register tiles. Panels of sixteen columns of
//! the memory are processed one after another, in the L1 cache.

use std::ops::Range;

use crate::isa::Isa;
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::{LANES, ScaledRow, TileA, TileB, TileC};
use crate::partition::OutputBlock;
use crate::recurrence::gates::{ChunkGates, capped, denominator, log_sigmoid};
use crate::recurrence::matrix_memory::{Buffers, MatrixMemory, MemoryRule, Part, Positions};
use crate::recurrence::step::{Step, advance, missing};
use crate::simd::microkernel::{MAX_TILE_ROWS, gemm_tiles};
use crate::simd::transpose::pack_rows;
use crate::simd::vmath::dot;

/// The number of rows of the triangular system that are solved at once.
const SOLVED_ROWS: usize = 4;

/// The buffers of a thread, for chunks of `T` positions. `S` is `T` rounded up to a multiple of
/// `LANES`. `K` is the key width plus a cache line, so that rows do not map to the same cache set.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Queries, scaled, `[T, K]`.
    q: AlignedVec,
    /// Keys, `[T, K]`.
    k: AlignedVec,
    /// Sixteen adjacent keys, `[key_dim, LANES]`.
    packed: AlignedVec,
    /// Products of queries and keys, `[T, S]`.
    scores: AlignedVec,
    /// Products of keys and keys, `[T, S]`.
    overlaps: AlignedVec,
    /// Scores with decay applied, `[T, S]`.
    weighted: AlignedVec,
    /// Overlaps with decay applied, `[T, S]`.
    system: AlignedVec,
    /// Sixteen columns of the memory, `[key_dim, LANES]`.
    panel: AlignedVec,
    /// Sixteen columns of values, of outputs and of written values, `[T, LANES]` each.
    values: AlignedVec,
    partial: AlignedVec,
    written: AlignedVec,
    /// Write strengths of the chunk.
    strengths: Vec<f32>,
    /// Factors of written values in the memory after the chunk.
    take: Vec<f32>,
    /// Inverse denominators of the chunk.
    shares: Vec<f32>,
    /// The current normalizer and stabilizer.
    n: Vec<f32>,
    m: f32,
    gates: ChunkGates,
    /// The buffers for a single position: the written value, its key and query with their factors,
    /// and outputs.
    row: AlignedVec,
    key: Vec<f32>,
    query: Vec<f32>,
    out: AlignedVec,
}

/// The columns of a head that a part computes.
struct Columns {
    head: usize,
    columns: Range<usize>,
}

/// Computes all positions of a part.
pub(crate) fn run_head(
    isa: Isa,
    memory: &MatrixMemory,
    buffers: &Buffers<'_>,
    part: &Part,
    scratch: &mut Scratch,
) {
    let chunk = memory.chunk_len();
    let (row, dk) = (part.row, memory.key_dim);
    let heads = || columns_of(memory, part);
    if memory.rule.is_normalized() {
        // With a normalized rule, a part has one head.
        let at = row * memory.heads + part.key_head;
        scratch.n.clear();
        scratch.n.extend_from_slice(&buffers.n[at * dk..][..dk]);
        scratch.m = buffers.m[at];
    }
    for from in (0..memory.length).step_by(chunk) {
        let positions = from..memory.length.min(from + chunk);
        if positions.len() == 1 {
            for columns in heads() {
                one(isa, memory, buffers, (row, from, &columns), scratch);
            }
            continue;
        }
        load(
            isa,
            memory,
            buffers,
            (row, part.key_head, &positions),
            scratch,
        );
        for columns in heads() {
            several(isa, memory, buffers, (row, &positions, &columns), scratch);
        }
    }
    if memory.rule.is_normalized() && part.panels.start == 0 {
        let at = row * memory.heads + part.key_head;
        // SAFETY: these elements belong to the part that has the head's first panel.
        unsafe {
            let n = buffers.new_n.slice_mut(at * dk, dk);
            n.copy_from_slice(&scratch.n);
            buffers.new_m.slice_mut(at, 1)[0] = scratch.m;
        }
    }
}

/// The heads of a part, each with its columns.
fn columns_of(memory: &MatrixMemory, part: &Part) -> impl Iterator<Item = Columns> {
    let (panels, dv) = (memory.panels(), memory.value_dim);
    let (range, first) = (part.panels.clone(), part.key_head * memory.repeats());
    let heads = range.start / panels..range.end.div_ceil(panels);
    heads.map(move |head| {
        let begin = range.start.max(head * panels) - head * panels;
        let end = range.end.min((head + 1) * panels) - head * panels;
        Columns {
            head: first + head,
            columns: begin * LANES..(end * LANES).min(dv),
        }
    })
}

/// The columns of a head's current memory. The part writes them.
fn block<'a>(
    memory: &MatrixMemory,
    buffers: &'a Buffers<'_>,
    row: usize,
    part: &Columns,
) -> OutputBlock<'a> {
    let (dk, dv) = (memory.key_dim, memory.value_dim);
    let first = (row * memory.heads + part.head) * dk * dv + part.columns.start;
    // SAFETY: no other part of the job uses these columns. This part creates one block at a time.
    unsafe { buffers.new_c.block(first, dv, (dk, part.columns.len())) }
}

/// Returns the memory before the first position, from the first of these columns on, and its row
/// stride.
fn before<'a>(
    memory: &MatrixMemory,
    buffers: &Buffers<'a>,
    row: usize,
    part: &Columns,
) -> (&'a [f32], usize) {
    let (dk, dv) = (memory.key_dim, memory.value_dim);
    let first = (row * memory.heads + part.head) * dk * dv;
    (&buffers.c[first..first + dk * dv][part.columns.start..], dv)
}

/// The logarithms of a position's forget and input gates.
fn logs(
    memory: &MatrixMemory,
    buffers: &Buffers<'_>,
    (row, position, head): (usize, usize, usize),
) -> (f32, f32) {
    let gate = |of: &Positions<'_>| of.at(row, position, head, 1)[0];
    let f = gate(&buffers.f);
    match (memory.rule, &buffers.second) {
        (MemoryRule::Exponential { gate_cap, .. }, Some(i)) => {
            (log_sigmoid(capped(f, gate_cap)), capped(gate(i), gate_cap))
        }
        _ => (f, 0.0),
    }
}

/// Computes one position of one head.
fn one(
    isa: Isa,
    memory: &MatrixMemory,
    buffers: &Buffers<'_>,
    (row, position, part): (usize, usize, &Columns),
    scratch: &mut Scratch,
) {
    let (dk, dv) = (memory.key_dim, memory.value_dim);
    let key_head = part.head / memory.repeats();
    let (f, i) = logs(memory, buffers, (row, position, part.head));
    let k = buffers.k.at(row, position, key_head * dk, dk);
    let q = buffers.q.at(row, position, key_head * dk, dk);
    let first = part.head * dv + part.columns.start;
    let width = part.columns.len();
    let value = buffers.v.at(row, position, first, width);
    scratch.query.clear();
    scratch.query.extend(q.iter().map(|q| q * memory.scale));
    scratch.key.clear();
    scratch.row.resize(width);
    scratch.out.resize(width);
    let mut c = block(memory, buffers, row, part);
    let initial = (position == 0).then(|| before(memory, buffers, row, part));
    let (keep, share) = match memory.rule {
        MemoryRule::Exponential { eps, .. } => {
            let decayed = f + scratch.m;
            // `max` would lose a NaN.
            let m = if decayed < i { i } else { decayed };
            let (keep, take) = ((decayed - m).exp(), (i - m).exp());
            scratch.m = m;
            scratch.key.extend(k.iter().map(|k| k * take));
            for (n, k) in scratch.n.iter_mut().zip(&scratch.key) {
                *n = keep * *n + k;
            }
            let dot = dot(isa, &scratch.query, &scratch.n);
            (keep, 1.0 / denominator(dot, m, eps))
        }
        MemoryRule::Decay | MemoryRule::Delta => {
            scratch.key.extend_from_slice(k);
            (f.exp(), 1.0)
        }
    };
    let step = Step {
        q: &scratch.query,
        k: &scratch.key,
        keep,
    };
    match (memory.rule, &buffers.second) {
        (MemoryRule::Delta, Some(strength)) => {
            let strength = strength.at(row, position, part.head, 1)[0];
            let new = &mut scratch.row;
            missing(isa, &step, (value, strength), initial, &mut c, new);
            advance(isa, &step, initial, new, &mut c, &mut scratch.out);
        }
        _ => advance(isa, &step, initial, value, &mut c, &mut scratch.out),
    }
    let at = (row * memory.length + position) * memory.heads * dv + first;
    // SAFETY: no other part of the job uses these columns of this head.
    let y = unsafe { buffers.y.slice_mut(at, width) };
    for (y, out) in y.iter_mut().zip(scratch.out.iter()) {
        *y = out * share;
    }
}

/// The row width of queries or keys in the scratch memory.
fn key_stride(dk: usize) -> usize {
    dk.next_multiple_of(LANES) + LANES
}

/// Loads queries and keys of a chunk, and computes their dot products.
fn load(
    isa: Isa,
    memory: &MatrixMemory,
    buffers: &Buffers<'_>,
    (row, key_head, positions): (usize, usize, &Range<usize>),
    scratch: &mut Scratch,
) {
    let (len, dk) = (positions.len(), memory.key_dim);
    let (wide, stride) = (key_stride(dk), len.next_multiple_of(LANES));
    scratch.q.resize(len * wide);
    scratch.k.resize(len * wide);
    for (t, position) in positions.clone().enumerate() {
        let q = buffers.q.at(row, position, key_head * dk, dk);
        for (to, q) in scratch.q[t * wide..].iter_mut().zip(q) {
            *to = q * memory.scale;
        }
        let k = buffers.k.at(row, position, key_head * dk, dk);
        scratch.k[t * wide..][..dk].copy_from_slice(k);
    }
    scratch.packed.resize(dk * LANES);
    scratch.scores.resize(len * stride);
    let is_delta = memory.rule == MemoryRule::Delta;
    if is_delta {
        scratch.overlaps.resize(len * stride);
    }
    for first in (0..len).step_by(LANES) {
        let count = LANES.min(len - first);
        let mut rows: [ScaledRow<'_>; LANES] = [(&[], 1.0); LANES];
        for (lane, key) in rows.iter_mut().take(count).enumerate() {
            key.0 = &scratch.k[(first + lane) * wide..][..dk];
        }
        pack_rows(isa, &rows[..count], None, &mut scratch.packed);
        let right = TileB {
            data: scratch.packed.as_ptr(),
            stride: LANES,
        };
        // Computes products only for the positions from the first of these keys on, because earlier
        // positions do not attend to these keys.
        let product = |left: &[f32], out: &mut [f32]| {
            let out = &mut out[first * stride + first..];
            let left = &left[first * wide..];
            let rows = len - first;
            assert!(left.len() >= (rows - 1) * wide + dk);
            assert!(out.len() >= (rows - 1) * stride + LANES);
            let left = TileA {
                data: left.as_ptr(),
                row_stride: wide,
                stride: 1,
            };
            let product = TileC {
                data: out.as_mut_ptr(),
                row_stride: stride,
                accumulate: false,
            };
            // SAFETY: by the assertions, `left` has `rows` rows of `dk` elements, the packed keys
            // have `dk` times `LANES`, and each row of `out` has `LANES`.
            unsafe { gemm_tiles(isa, rows, dk, left, right, product) };
        };
        product(&scratch.q, &mut scratch.scores);
        if is_delta {
            product(&scratch.k, &mut scratch.overlaps);
        }
    }
}

/// Computes a chunk of one head.
fn several(
    isa: Isa,
    memory: &MatrixMemory,
    buffers: &Buffers<'_>,
    (row, positions, part): (usize, &Range<usize>, &Columns),
    scratch: &mut Scratch,
) {
    let (len, dk, dv) = (positions.len(), memory.key_dim, memory.value_dim);
    let stride = len.next_multiple_of(LANES);
    let normalized = memory.rule.is_normalized();
    let m = normalized.then_some(scratch.m);
    let each = (positions.clone()).map(|at| logs(memory, buffers, (row, at, part.head)));
    scratch.gates.fill(m, each);
    scratch.gates.take(&mut scratch.take);
    scratch.weighted.resize(len * stride);
    let both = (&*scratch.scores, &mut *scratch.weighted);
    scratch.gates.weigh(isa, both, stride, None);
    if let (MemoryRule::Delta, Some(strength)) = (memory.rule, &buffers.second) {
        let each = (positions.clone()).map(|at| strength.at(row, at, part.head, 1)[0]);
        scratch.strengths.clear();
        scratch.strengths.extend(each);
        scratch.system.resize(len * stride);
        let both = (&*scratch.overlaps, &mut *scratch.system);
        let strengths = Some(scratch.strengths.as_slice());
        scratch.gates.weigh(isa, both, stride, strengths);
    }
    scratch.shares.clear();
    match memory.rule {
        MemoryRule::Exponential { eps, .. } => normalize(isa, (len, dk, stride), eps, scratch),
        MemoryRule::Decay | MemoryRule::Delta => scratch.shares.resize(len, 1.0),
    }
    scratch.panel.resize(dk * LANES);
    scratch.values.resize(len * LANES);
    scratch.partial.resize(len * LANES);
    scratch.written.resize(len * LANES);
    let (old, old_stride) = before(memory, buffers, row, part);
    let mut c = block(memory, buffers, row, part);
    for from in (0..part.columns.len()).step_by(LANES) {
        let width = LANES.min(part.columns.len() - from);
        let lanes = scratch.panel.as_chunks_mut::<LANES>().0;
        for (a, lanes) in lanes.iter_mut().enumerate() {
            let state: &[f32] = match positions.start {
                0 => &old[a * old_stride..],
                _ => c.row_mut(a),
            };
            lanes[..width].copy_from_slice(&state[from..from + width]);
            lanes[width..].fill(0.0);
        }
        let first = part.head * dv + part.columns.start + from;
        let lanes = scratch.values.as_chunks_mut::<LANES>().0;
        for (lanes, at) in lanes.iter_mut().zip(positions.clone()) {
            lanes[..width].copy_from_slice(buffers.v.at(row, at, first, width));
            lanes[width..].fill(0.0);
        }
        columns(isa, memory.rule, (len, dk), scratch);
        for (t, at) in positions.clone().enumerate() {
            let place = (row * memory.length + at) * memory.heads * dv + first;
            // SAFETY: no other part of the job uses these columns of this head.
            let y = unsafe { buffers.y.slice_mut(place, width) };
            let partial = &scratch.partial[t * LANES..];
            for (y, partial) in y.iter_mut().zip(partial) {
                *y = partial * scratch.shares[t];
            }
        }
        let lanes = scratch.panel.as_chunks::<LANES>().0;
        for (a, lanes) in lanes.iter().enumerate() {
            c.row_mut(a)[from..from + width].copy_from_slice(&lanes[..width]);
        }
    }
}

/// Computes the inverse denominators of a normalized rule. It updates the normalizer and the
/// stabilizer to those after the chunk.
fn normalize(isa: Isa, (len, dk, stride): (usize, usize, usize), eps: f32, scratch: &mut Scratch) {
    let wide = key_stride(dk);
    for t in 0..len {
        let within: f32 = scratch.weighted[t * stride..][..=t].iter().sum();
        let from_state = dot(isa, &scratch.q[t * wide..][..dk], &scratch.n);
        let dot = scratch.gates.keep[t] * from_state + within;
        let share = 1.0 / denominator(dot, scratch.gates.m[t], eps);
        scratch.shares.push(share);
    }
    let keep = scratch.gates.keep[len - 1];
    scratch.n.iter_mut().for_each(|n| *n *= keep);
    for (t, take) in scratch.take.iter().enumerate() {
        for (n, k) in scratch.n.iter_mut().zip(&scratch.k[t * wide..]) {
            *n += take * k;
        }
    }
    scratch.m = scratch.gates.m[len - 1];
}

/// Computes sixteen columns of a chunk. It reads `values` and `panel`, writes outputs to
/// `partial`, and updates `panel`.
fn columns(isa: Isa, rule: MemoryRule, (len, dk): (usize, usize), scratch: &mut Scratch) {
    let wide = key_stride(dk);
    let stride = len.next_multiple_of(LANES);
    assert!(scratch.q.len() >= len * wide && scratch.k.len() >= len * wide);
    assert!(scratch.panel.len() >= dk * LANES && scratch.weighted.len() >= len * stride);
    assert!(scratch.values.len() >= len * LANES && scratch.partial.len() >= len * LANES);
    assert!(scratch.written.len() >= len * LANES);
    let rows = |data: &[f32]| TileA {
        data: data.as_ptr(),
        row_stride: wide,
        stride: 1,
    };
    let lanes = |data: &[f32]| TileB {
        data: data.as_ptr(),
        stride: LANES,
    };
    let into = |data: &mut [f32], accumulate: bool| TileC {
        data: data.as_mut_ptr(),
        row_stride: LANES,
        accumulate,
    };
    let keep = &scratch.gates.keep;
    if rule == MemoryRule::Delta {
        let predicted = into(&mut scratch.written, false);
        // SAFETY: by the assertions, there are `len` rows of `dk` keys, `dk` rows of the panel and
        // `len` rows of the product.
        unsafe {
            gemm_tiles(
                isa,
                len,
                dk,
                rows(&scratch.k),
                lanes(&scratch.panel),
                predicted,
            );
        };
        let each = (scratch.written.as_chunks_mut::<LANES>().0.iter_mut())
            .zip(scratch.values.as_chunks_mut::<LANES>().0);
        for (t, (predicted, value)) in each.enumerate() {
            for (predicted, value) in predicted.iter_mut().zip(value) {
                *value = scratch.strengths[t] * (*value - keep[t] * *predicted);
            }
        }
        solve(isa, len, &scratch.system, &mut scratch.values);
    }
    let partial = into(&mut scratch.partial, false);
    // SAFETY: the lengths are those of the call above, with `len` rows of queries.
    unsafe {
        gemm_tiles(
            isa,
            len,
            dk,
            rows(&scratch.q),
            lanes(&scratch.panel),
            partial,
        );
    };
    let each = scratch.partial.as_chunks_mut::<LANES>().0.iter_mut();
    for (partial, keep) in each.zip(keep) {
        partial.iter_mut().for_each(|x| *x *= keep);
    }
    // A position sees itself and earlier positions. Its scores for later positions are zero, so
    // they are skipped.
    for t in (0..len).step_by(MAX_TILE_ROWS) {
        let count = MAX_TILE_ROWS.min(len - t);
        let left = TileA {
            data: scratch.weighted[t * stride..].as_ptr(),
            row_stride: stride,
            stride: 1,
        };
        let partial = into(&mut scratch.partial[t * LANES..], true);
        // SAFETY: scores and outputs have `count` rows from `t` on, and `values` has `t + count`
        // rows.
        unsafe { gemm_tiles(isa, count, t + count, left, lanes(&scratch.values), partial) };
    }
    let last = keep[len - 1];
    scratch.panel.iter_mut().for_each(|c| *c *= last);
    let each = (scratch.written.as_chunks_mut::<LANES>().0.iter_mut())
        .zip(scratch.values.as_chunks::<LANES>().0);
    for ((written, value), take) in each.zip(&scratch.take) {
        for (written, value) in written.iter_mut().zip(value) {
            *written = take * value;
        }
    }
    let left = TileA {
        data: scratch.k.as_ptr(),
        row_stride: 1,
        stride: wide,
    };
    let panel = into(&mut scratch.panel, true);
    // SAFETY: there are `len` keys of `dk` elements, `len` rows of written values, and `dk` rows of
    // the panel.
    unsafe { gemm_tiles(isa, dk, len, left, lanes(&scratch.written), panel) };
}

/// Solves `(I + A) d = values` in place, where `A` is strictly lower triangular, `[len, S]`.
fn solve(isa: Isa, len: usize, system: &[f32], values: &mut [f32]) {
    let stride = len.next_multiple_of(LANES);
    assert!(system.len() >= len * stride && values.len() >= len * LANES);
    let mut known = [0.0f32; SOLVED_ROWS * LANES];
    for first in (0..len).step_by(SOLVED_ROWS) {
        let count = SOLVED_ROWS.min(len - first);
        let left = TileA {
            data: system[first * stride..].as_ptr(),
            row_stride: stride,
            stride: 1,
        };
        let right = TileB {
            data: values.as_ptr(),
            stride: LANES,
        };
        let product = TileC {
            data: known.as_mut_ptr(),
            row_stride: LANES,
            accumulate: false,
        };
        // SAFETY: the system has `count` rows from `first` on, and `values` has `first` rows before
        // them. The product has at most `SOLVED_ROWS` rows and is separate memory.
        unsafe { gemm_tiles(isa, count, first, left, right, product) };
        for t in first..first + count {
            let (solved, rest) = values.split_at_mut(t * LANES);
            let current = &mut rest[..LANES];
            let known = &known[(t - first) * LANES..];
            for (current, known) in current.iter_mut().zip(known) {
                *current -= known;
            }
            for s in first..t {
                let factor = system[t * stride + s];
                for (current, solved) in current.iter_mut().zip(&solved[s * LANES..]) {
                    *current -= factor * solved;
                }
            }
        }
    }
}
