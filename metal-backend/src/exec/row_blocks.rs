//! GGUF blocks that kernels pack directly into our kernels' layout.

use inference_formats::quantization::GgmlType;
use mlx_rs_core::cpu::{self, BlockKind, PackedBlockMut};

use super::INTERLEAVED_ROWS;

/// A type of GGUF blocks that kernels can pack.
#[derive(Debug, Clone, Copy)]
pub struct RowBlocks(BlockKind);

impl RowBlocks {
    /// Returns the kernels for blocks of `kind`; `None` if there are none.
    pub fn of(kind: GgmlType) -> Option<Self> {
        let kind = match kind {
            GgmlType::Q4_0 => BlockKind::Q4_0,
            GgmlType::Q5_0 => BlockKind::Q5_0,
            GgmlType::Q8_0 => BlockKind::Q8_0,
            GgmlType::Q4K => BlockKind::Q4K,
            GgmlType::Q5K => BlockKind::Q5K,
            GgmlType::Q6K => BlockKind::Q6K,
            GgmlType::IQ4NL => BlockKind::Iq4Nl,
            GgmlType::IQ4XS => BlockKind::Iq4Xs,
            _ => return None,
        };
        cpu::packs_row_blocks().then_some(Self(kind))
    }

    /// Packs rows of `row_bytes` bytes into the interleaved parts of their layout. Row `i` of the
    /// result is row `stored(i)` of `bytes`. Returns `false`, perhaps after some writes, if the
    /// rows are not complete row blocks or a part has the wrong size.
    pub fn pack(
        self,
        bytes: &[u8],
        row_bytes: usize,
        stored: impl Fn(usize) -> usize,
        out: &mut [&mut [u8]],
    ) -> bool {
        let rows = bytes.len() / row_bytes.max(1);
        let blocks = rows / INTERLEAVED_ROWS;
        let whole = blocks > 0 && bytes.len() == blocks * INTERLEAVED_ROWS * row_bytes;
        let ([words, scales, rest @ ..], true) = (out, whole) else {
            return false;
        };
        // An empty slice may be unaligned, and casting it would fail.
        let supers: Result<&mut [u16], _> = match rest {
            [] => Ok(&mut []),
            [supers, ..] => bytemuck::try_cast_slice_mut(supers),
        };
        let (Ok(words), Ok(supers)) = (bytemuck::try_cast_slice_mut::<u8, u32>(words), supers)
        else {
            return false;
        };
        let BlockSizes {
            words: per_words,
            scales: per_scales,
            supers: per_supers,
        } = match self.sizes(row_bytes) {
            Some(sizes)
                if words.len() == blocks * sizes.words
                    && scales.len() == blocks * sizes.scales
                    && supers.len() == blocks * sizes.supers =>
            {
                sizes
            }
            _ => return false,
        };
        let parts = words.chunks_exact_mut(per_words);
        let parts = parts.zip(scales.chunks_exact_mut(per_scales));
        for (block, (words, scales)) in parts.enumerate() {
            let row = |r: usize| {
                let at = stored(block * INTERLEAVED_ROWS + r) * row_bytes;
                bytes.get(at..at + row_bytes).unwrap_or_default()
            };
            let mut out = PackedBlockMut {
                words,
                scales,
                supers: &mut supers[block * per_supers..(block + 1) * per_supers],
            };
            if !cpu::pack_row_block(self.0, std::array::from_fn(row), &mut out) {
                return false;
            }
        }
        true
    }

    /// Returns the sizes of a row block; `None` if a row does not consist of complete blocks.
    fn sizes(self, row_bytes: usize) -> Option<BlockSizes> {
        let kind = self.0;
        let count = row_bytes / kind.bytes();
        let weights = count * kind.weights();
        (count > 0 && row_bytes.is_multiple_of(kind.bytes())).then(|| BlockSizes {
            words: weights / 32 * kind.bits() * INTERLEAVED_ROWS,
            scales: weights / 32 * kind.scale_bytes() * INTERLEAVED_ROWS,
            supers: count * kind.supers() * INTERLEAVED_ROWS,
        })
    }
}

/// The number of elements of a row block in each part.
struct BlockSizes {
    words: usize,
    scales: usize,
    supers: usize,
}

#[cfg(test)]
mod tests {
    use inference_formats::quantization::{pack_into, permuted_row};

    use super::*;

    /// Returns pseudo-random bytes.
    fn noise(n: usize) -> Vec<u8> {
        let mut state = 12_345u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(|_| next()).collect()
    }

    /// Computes the interleaved parts by definition: packs each row separately, and writes its
    /// elements `INTERLEAVED_ROWS` elements apart.
    fn by_definition(kind: GgmlType, rows: &[&[u8]], weights: usize) -> Vec<Vec<u8>> {
        let parts = kind.layout().parts();
        let mut all: Vec<Vec<u8>> = (parts.iter())
            .map(|part| vec![0; part.bytes(weights) * rows.len()])
            .collect();
        for (r, row) in rows.iter().enumerate() {
            let mut words = [const { Vec::<u32>::new() }; 3];
            let mut one: Vec<&mut [u8]> = (parts.iter().zip(&mut words))
                .map(|(part, words)| {
                    words.resize(part.bytes(weights).div_ceil(4), 0);
                    &mut bytemuck::cast_slice_mut(words)[..part.bytes(weights)]
                })
                .collect();
            pack_into(kind, row, &mut one).unwrap();
            let (block, lane) = (r / INTERLEAVED_ROWS, r % INTERLEAVED_ROWS);
            for ((one, all), part) in one.iter().zip(&mut all).zip(&parts) {
                let size = part.kind.size();
                let first = block * INTERLEAVED_ROWS * part.elements(weights);
                for (i, element) in one.chunks(size).enumerate() {
                    let at = (first + i * INTERLEAVED_ROWS + lane) * size;
                    all[at..at + size].copy_from_slice(element);
                }
            }
        }
        all
    }

    #[test]
    fn kernels_pack_what_the_definition_packs() {
        let kinds = [
            GgmlType::Q4_0,
            GgmlType::Q5_0,
            GgmlType::Q8_0,
            GgmlType::Q4K,
            GgmlType::Q5K,
            GgmlType::Q6K,
            GgmlType::IQ4NL,
            GgmlType::IQ4XS,
        ];
        for kind in kinds {
            let Some(blocks) = RowBlocks::of(kind) else {
                assert!(!cpu::packs_row_blocks());
                continue;
            };
            let (weights, bytes) = kind.block().unwrap();
            for count in [1, 2, 3, 7, 8, 9, 17] {
                let (row_bytes, weights) = (count * bytes, count * weights);
                let stored = noise(32 * row_bytes);
                let order = |row: usize| permuted_row(row, 16);
                let rows: Vec<&[u8]> = (0..32)
                    .map(|row| &stored[order(row) * row_bytes..][..row_bytes])
                    .collect();
                let wanted = by_definition(kind, &rows, weights);
                // Memory of `u32` aligns the parts.
                let mut memory: Vec<Vec<u32>> = wanted
                    .iter()
                    .map(|part| vec![0xaaaa_aaaa; part.len().div_ceil(4)])
                    .collect();
                let mut out: Vec<&mut [u8]> = (memory.iter_mut().zip(&wanted))
                    .map(|(words, part)| &mut bytemuck::cast_slice_mut(words)[..part.len()])
                    .collect();
                assert!(blocks.pack(&stored, row_bytes, order, &mut out));
                let what = format!("{}, {count} blocks", kind.name());
                assert!(
                    out.iter().zip(&wanted).all(|(out, part)| *out == part),
                    "{what}"
                );
                // Parts and rows of wrong sizes must not be packed.
                assert!(!blocks.pack(&stored[..9 * row_bytes], row_bytes, order, &mut out));
                assert!(!blocks.pack(&stored, row_bytes - 1, order, &mut out));
                assert!(!blocks.pack(&stored[..8 * row_bytes], row_bytes, order, &mut out));
                assert!(!blocks.pack(&stored, row_bytes, order, &mut out[..1]));
            }
        }
    }
}
