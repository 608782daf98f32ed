//! Rotary embedding, and the table of sines and cosines that all layers of a pass share.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use crate::isa::Isa;

/// Rotary embedding (Su et al. 2021).
#[derive(Debug, Clone)]
pub struct Rotation {
    /// Radians per position for each pair of elements. The first `2 * pairs` elements of a head
    /// rotate.
    pub radians: Arc<[f32]>,
    /// Whether a pair consists of adjacent elements. Otherwise it has an element of each half.
    pub traditional: bool,
    /// Factor on the rotated elements.
    pub amplitude: f32,
}

/// For each position the sines of all pairs, then their cosines.
type RopeTable = Rc<[f32]>;

/// A table of rotations, with the parameters that it was computed from.
struct Table {
    radians: Arc<[f32]>,
    positions: Vec<i32>,
    rope_table: RopeTable,
}

/// The number of cached tables. Local and global layers each need a table for all positions and a
/// table for the last positions.
const TABLES: usize = 4;

thread_local! {
    /// The cache exists because all layers of a pass use the same tables.
    static CACHE: RefCell<VecDeque<Table>> = const { RefCell::new(VecDeque::new()) };
}

/// For each position the sines of all pairs, then their cosines.
pub(crate) fn rope_table(rotation: &Rotation, positions: &[i32]) -> RopeTable {
    CACHE.with_borrow_mut(|known| {
        let same = known
            .iter()
            .find(|t| t.positions == positions && t.radians == rotation.radians);
        if let Some(table) = same {
            return Rc::clone(&table.rope_table);
        }
        let angles = |p: i32| rotation.radians.iter().map(move |r| p as f32 * r);
        let rope_table: RopeTable = positions
            .iter()
            .flat_map(|&p| angles(p).map(f32::sin).chain(angles(p).map(f32::cos)))
            .collect();
        known.truncate(TABLES - 1);
        known.push_front(Table {
            radians: Arc::clone(&rotation.radians),
            positions: positions.to_vec(),
            rope_table: Rc::clone(&rope_table),
        });
        rope_table
    })
}

/// Rotates a head in place. `rope_table` is the table's row for the head's position.
pub(crate) fn apply_rope(isa: Isa, rotation: &Rotation, rope_table: &[f32], head: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx2.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            apply_rope_avx2(rotation, rope_table, head);
        },
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon | Isa::Dot => apply_rope_with(rotation, rope_table, head),
        Isa::Portable => apply_rope_with(rotation, rope_table, head),
    }
}

/// # Safety
/// The processor must have avx2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn apply_rope_avx2(rotation: &Rotation, rope_table: &[f32], head: &mut [f32]) {
    apply_rope_with(rotation, rope_table, head);
}

#[inline(always)]
fn apply_rope_with(rotation: &Rotation, rope_table: &[f32], head: &mut [f32]) {
    let (sines, cosines) = rope_table.split_at(rope_table.len() / 2);
    let pairs = sines.len();
    let amplitude = rotation.amplitude;
    let turn = |a: &mut f32, b: &mut f32, sin: &f32, cos: &f32| {
        let (x, y) = (*a * amplitude, *b * amplitude);
        (*a, *b) = (x * cos - y * sin, x * sin + y * cos);
    };
    let rope_table = sines.iter().zip(cosines);
    if rotation.traditional {
        let (all, _) = head[..2 * pairs].as_chunks_mut::<2>();
        for ([a, b], (sin, cos)) in all.iter_mut().zip(rope_table) {
            turn(a, b, sin, cos);
        }
    } else {
        // The loop has no bounds checks, so that it is vectorized.
        let (first, second) = head[..2 * pairs].split_at_mut(pairs);
        for ((a, b), (sin, cos)) in first.iter_mut().zip(second).zip(rope_table) {
            turn(a, b, sin, cos);
        }
    }
}
