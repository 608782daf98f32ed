//! Products for x86-64 with AMX: tile registers that multiply sixteen rows of inputs with sixteen
//! rows of a matrix, pairs of bfloat16 at a time, and sum in float32. Inputs are the sum of two bfloat16, which is sixteen
//! bits of theirs (`inputs.rs`); what is too small to be a normal number counts as zero. Of quantized matrices, packed numbers are
//! multiplied (`numbers.rs`), which are exact in bfloat16, and scales meet the sums of a group (`eight.rs` with `steps.rs`, and
//! `chunks.rs` with `tall.rs`). Matrices of bfloat16 are multiplied as they are (`brain.rs`).
//! What goes in and comes out is in `squares.rs` and `bricks.rs`.
//!
//! The instructions are written as assembly, since the standard library does not have them yet. The compiler itself never
//! uses tile registers, so that they keep what they hold from one piece of assembly to the next.

#[macro_use]
mod asm_macros;
mod activations;
mod bf16;
mod encoding;
mod epilogue;
mod large_m;
mod large_m_asm;
mod scales;
mod small_m;
mod small_m_asm;

use std::arch::asm;
use std::marker::PhantomData;

use crate::layout::packed::{BAND, Bands, Factors};

pub(crate) use activations::{Filling, Squares};
pub(crate) use bf16::{Panel, TOGETHER, products as dense_products};
pub(crate) use epilogue::{Then, put};

/// The most rows of a tile, and the outputs of one.
pub(crate) const SIDE: usize = 16;

/// Inputs that a tile has of each row.
const DEEP: usize = 32;

/// The most tiles of inputs that are multiplied with a group's numbers before the next group: they and their totals are to stay
/// in the first cache.
const CHUNK: usize = 6;

/// A row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u16; DEEP]);

/// Outputs of a row of inputs.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Outputs(pub [f32; SIDE]);

/// Bytes from a row of a tile to the next, wherever one is in memory.
const LINE: usize = size_of::<Line>();

/// Two tiles' outputs: sixteen rows of a matrix each, or eight where the matrix ends, or the same twice.
#[derive(Clone, Copy)]
pub(crate) struct Two<'a>(pub [Bands<'a>; 2]);

/// What a thread needs for [`products`].
#[derive(Default)]
pub(crate) struct Scratch {
    /// Products of two tiles' outputs.
    sums: Vec<Outputs>,
    /// For few rows, and for tiles of them.
    bench: Box<small_m_asm::Bench>,
    hall: Box<large_m_asm::Hall>,
    /// Scales and biases for these.
    factors: Vec<Line>,
}

/// Tile registers, set up for this thread.
pub(crate) struct Registers {
    /// They are this thread's.
    own: PhantomData<*const ()>,
}

impl Registers {
    /// For whole tiles.
    ///
    /// # Safety
    /// The system must let the process use AMX, as for `Isa::Amx`.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::with([SIDE; 8]) }
    }

    /// With so many rows each, at most [`SIDE`], of the longest lines.
    ///
    /// # Safety
    /// As of [`Self::new`].
    unsafe fn with(rows: [usize; 8]) -> Self {
        #[repr(C, align(64))]
        struct Setting([u8; 64]);
        let mut setting = Setting([0; 64]);
        // The only palette; bytes of a row, two each, from 16 on; rows from 48 on.
        setting.0[0] = 1;
        for (register, rows) in rows.into_iter().enumerate() {
            setting.0[16 + 2 * register] = LINE as u8;
            setting.0[48 + register] = rows as u8;
        }
        // SAFETY: it reads 64 bytes; that the registers are there is the caller's promise.
        unsafe { asm!("ldtilecfg [{}]", in(reg) setting.0.as_ptr(), options(nostack)) };
        Self { own: PhantomData }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: who made this has the registers.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// The products of all inputs with two tiles' outputs for each of `places`, which `source` names: `done` has them,
/// `[2, padded rows]`.
///
/// # Panics
/// If the outputs do not fit the inputs.
///
/// # Safety
/// The processor must have avx512f, avx512bw and f16c.
pub(crate) unsafe fn products<'a>(
    places: &mut dyn Iterator<Item = usize>,
    source: &dyn Fn(usize) -> Two<'a>,
    x: &Squares,
    registers: &Registers,
    room: &mut Scratch,
    done: &mut dyn FnMut(usize, &[Outputs]),
) {
    let (groups, bits) = x.packing();
    let fits = |b: Bands<'a>| {
        let numbers = b.count() * BAND * x.inputs();
        (1..=2).contains(&b.count())
            && b.words.len() * b.per_word() == numbers
            && b.scales.len() == b.count() * b.groups * BAND
            && b.biases.len() == b.scales.len()
            && (b.groups, b.bits) == (groups, bits)
    };
    let source = |place: usize| {
        let two = source(place);
        assert!(two.0.into_iter().all(fits));
        two
    };
    // SAFETY: the lengths are as asserted; features are the caller's promise, the registers are here.
    unsafe {
        if x.stacked() {
            let bench = (&mut *room.bench, &mut room.factors);
            return match bits {
                4 => small_m::run::<4>(places, &source, x, registers, bench, done),
                _ => small_m::run::<8>(places, &source, x, registers, bench, done),
            };
        }
        let mut sums = std::mem::take(&mut room.sums);
        sums.resize(2 * x.padded(), Outputs::default());
        for place in places {
            let (two, out) = (source(place), &mut sums[..]);
            match bits {
                4 => large_m::run::<4>(two, x, registers, room, out),
                _ => large_m::run::<8>(two, x, registers, room, out),
            }
            done(place, &sums);
        }
        room.sums = sums;
    }
}

/// Where rows of two tiles are: of each the two bands, or the same twice, and how far on what the next call reads is
/// likely to be: neighbors of one matrix, or of two.
#[derive(Clone, Copy)]
struct Sources<'a> {
    words: [[*const u32; 2]; 2],
    scales: [Factors<'a>; 2],
    biases: [Factors<'a>; 2],
    /// From the first band's scales and biases to those of the second.
    second: [usize; 2],
    ahead: [usize; 2],
}

impl<'a> Sources<'a> {
    fn of(Two([one, other]): Two<'a>) -> Self {
        let words = |b: Bands<'a>| {
            let at = b.words.as_ptr();
            [at, at.wrapping_add((b.count() - 1) * b.words.len() / 2)]
        };
        let second = |b: Bands<'a>| (b.count() - 1) * b.groups * BAND;
        let (lengths, ends) = (
            (one.words.len(), other.words.len()),
            one.words.as_ptr_range(),
        );
        let ahead = if ends.end == other.words.as_ptr() {
            [lengths.0 + lengths.1; 2]
        } else {
            [lengths.0, lengths.1]
        };
        Self {
            words: [words(one), words(other)],
            scales: [one.scales, other.scales],
            biases: [one.biases, other.biases],
            second: [second(one), second(other)],
            ahead,
        }
    }
}
