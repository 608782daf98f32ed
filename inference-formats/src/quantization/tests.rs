//! Compares decoding with values of an independent implementation, and packing with decoding.
//! `tools/golden/gguf_blocks.py` also checks that MLX can read the packed layout.

use half::f16;
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    data: String,
    f32: String,
}

/// The types whose elements are blocks.
fn block_types() -> impl Iterator<Item = &'static BlockType> {
    TYPES.iter().filter(|row| row.weights > 1)
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
        .collect()
}

fn golden() -> Vec<(GgmlType, Vec<u8>, Vec<f32>)> {
    let text = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/gguf_blocks.json"
    ));
    let golden: Golden = serde_json::from_str(text).unwrap();
    golden
        .cases
        .iter()
        .map(|case| {
            let kind = TYPES.iter().find(|row| row.name == case.name).unwrap().kind;
            let numbers = unhex(&case.f32);
            let numbers = numbers
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b));
            (kind, unhex(&case.data), numbers.collect())
        })
        .collect()
}

/// The values of a packed matrix by MLX's definition, read bit by bit.
fn unpack(p: &AffinePacked) -> Vec<f32> {
    let bits = p.bits as usize;
    let bit = |i: usize| p.packed[i / 32] >> (i % 32) & 1;
    (0..p.scales.len() * GROUP)
        .map(|i| {
            let q = (0..bits).fold(0, |q, b| q | bit(i * bits + b) << b);
            p.scales[i / GROUP] * q as f32 + p.biases[i / GROUP]
        })
        .collect()
}

#[test]
fn decodes_bit_for_bit_what_the_reference_decodes() {
    let cases = golden();
    // The cases must cover each type with blocks, and both 16-bit float types.
    let mut kinds: Vec<_> = cases.iter().map(|(kind, ..)| *kind).collect();
    kinds.sort();
    let halves = [GgmlType::F16, GgmlType::BF16];
    let mut expected: Vec<_> = block_types().map(|row| row.kind).chain(halves).collect();
    expected.sort();
    assert_eq!(kinds, expected);
    for (kind, data, expected) in cases {
        let got = dequantize(kind, &data).unwrap();
        assert_eq!(got.len(), expected.len());
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            // Compares bits, because -0 and 0 must differ.
            assert_eq!(
                g.to_bits(),
                e.to_bits(),
                "{} element {i}: {g} and {e}",
                kind.name()
            );
        }
    }
}

#[test]
fn packs_what_the_reference_decodes() {
    let mut packed = Vec::new();
    for (kind, data, expected) in golden() {
        let Some(p) = repack(kind, &data) else {
            continue;
        };
        assert_eq!(p.packed.len() * 32, expected.len() * p.bits as usize);
        assert_eq!(
            (p.scales.len(), p.biases.len()),
            (expected.len() / 32, expected.len() / 32)
        );
        assert_eq!(unpack(&p), expected, "{}", kind.name());
        packed.push((kind.name(), p.bits));
    }
    let affine = block_types().filter_map(|row| Some((row.name, row.layout().affine_bits()?)));
    let mut expected: Vec<_> = affine
        .map(|(name, bits)| (name.to_owned(), bits.cast_signed()))
        .collect();
    packed.sort();
    expected.sort();
    assert_eq!(packed, expected);
}

/// The parts of packed blocks.
struct Parts {
    parts: Vec<Part>,
    /// Stored as words, so that the bytes are aligned.
    memory: Vec<Vec<u32>>,
    weights: usize,
}

impl Parts {
    fn read(kind: GgmlType, data: &[u8]) -> Result<Self, Misfit> {
        let weights = count_weights(kind, data).ok_or(Misfit::Size)?;
        let parts = kind.layout().parts();
        let size = |part: &Part| part.bytes(weights);
        let mut memory: Vec<Vec<u32>> = (parts.iter().map(size))
            .map(|bytes| vec![0; bytes.div_ceil(4)])
            .collect();
        let mut out: Vec<&mut [u8]> = (memory.iter_mut().zip(&parts))
            .map(|(memory, part)| &mut bytemuck::cast_slice_mut(memory)[..size(part)])
            .collect();
        pack_into(kind, data, &mut out)?;
        Ok(Self {
            parts,
            memory,
            weights,
        })
    }

    fn part<T: bytemuck::Pod>(&self, i: usize, kind: PartType) -> &[T] {
        assert_eq!(self.parts[i].kind, kind);
        let bytes: &[u8] = bytemuck::cast_slice(&self.memory[i]);
        bytemuck::cast_slice(&bytes[..self.parts[i].bytes(self.weights)])
    }

    fn halves(&self, i: usize) -> Vec<f32> {
        let halves = self.part::<f16>(i, PartType::F16).iter();
        halves.map(|half| half.to_f32()).collect()
    }

    fn bytes(&self) -> usize {
        let parts = self.parts.iter();
        parts.map(|part| part.bytes(self.weights)).sum()
    }

    /// The weights by the definitions of [`Layout`], read bit by bit.
    fn unpack(&self, layout: Layout) -> Vec<f32> {
        let words = self.part::<u32>(0, PartType::U32);
        let bits = words.len() * 32 / self.weights;
        let bit = |i: usize| words[i / 32] >> (i % 32) & 1;
        let code = |i: usize| (0..bits).fold(0, |q, b| q | bit(i * bits + b) << b);
        let int = |i: usize, table: NibbleCodes| {
            let (integers, unit) = table.integers();
            f64::from(unit) * f64::from(integers[code(i) as usize])
        };
        let all = 0..self.weights;
        match layout {
            Layout::Symmetric { bits } => {
                let scales = self.halves(1);
                let zero = if bits == 2 { 1 } else { 1 << (bits - 1) } as f32;
                all.map(|i| scales[i / 32] * (code(i) as f32 - zero))
                    .collect()
            }
            Layout::SuperAffine { group, .. } => {
                let (bytes, supers) = (self.part::<i8>(1, PartType::I8), self.halves(2));
                let factor = |i: usize, n: usize| {
                    supers[2 * (i / (8 * group)) + n] * f32::from(bytes[2 * (i / group) + n])
                };
                all.map(|i| factor(i, 0) * code(i) as f32 - factor(i, 1))
                    .collect()
            }
            Layout::SuperScaled => {
                let (bytes, supers) = (self.part::<i8>(1, PartType::I8), self.halves(2));
                let scale = |i: usize| supers[i / 256] * f32::from(bytes[i / 16]);
                all.map(|i| scale(i) * (code(i) as f32 - 32.0)).collect()
            }
            Layout::Powers => {
                let powers = self.part::<u8>(1, PartType::U8);
                let scale = |i: usize| 2f64.powi(i32::from(powers[i / 32]) - 127);
                all.map(|i| (scale(i) * int(i, NibbleCodes::E2m1)) as f32)
                    .collect()
            }
            Layout::Table { codes } => {
                let scales = self.halves(1);
                all.map(|i| (f64::from(scales[i / 32]) * int(i, codes)) as f32)
                    .collect()
            }
            Layout::TableSuper { codes, group } => {
                let (bytes, supers) = (self.part::<i8>(1, PartType::I8), self.halves(2));
                let scale = |i: usize| f64::from(supers[i / 256]) * f64::from(bytes[i / group]);
                all.map(|i| (scale(i) * int(i, codes)) as f32).collect()
            }
            _ => panic!("{layout:?} has no parts"),
        }
    }
}

#[test]
fn parts_have_what_the_reference_decodes() {
    let mut same_size = Vec::new();
    for (kind, data, expected) in golden() {
        let (layout, name) = (kind.layout(), kind.name());
        let packed = match Parts::read(kind, &data) {
            Err(misfit) => {
                assert_eq!(misfit, Misfit::Layout, "{name}");
                assert!(matches!(layout, Layout::Floats | Layout::Affine { .. }));
                continue;
            }
            Ok(packed) => packed,
        };
        assert_eq!(packed.weights, expected.len());
        let unpacked = packed.unpack(layout);
        match layout {
            // Compares bits, so that -0 and 0 differ.
            Layout::Symmetric { .. } | Layout::SuperScaled => {
                let bits = |all: &[f32]| -> Vec<u32> { all.iter().map(|x| x.to_bits()).collect() };
                assert_eq!(bits(&unpacked), bits(&expected), "{name}");
            }
            _ => assert_eq!(unpacked, expected, "{name}"),
        }
        assert_eq!(packed.bytes() as u64, layout.bytes(expected.len() as u64));
        if packed.bytes() == data.len() {
            same_size.push(name);
        }
    }
    let same = ["Q4_0", "Q5_0", "Q8_0", "Q6_K", "MXFP4", "IQ4_NL"];
    assert_eq!(same_size, same);
}

#[test]
fn layouts_are_those_of_the_kernels() {
    let of = |wanted: fn(Layout) -> bool| -> Vec<&str> {
        let rows = block_types().filter(|row| wanted(row.layout()));
        rows.map(|row| row.name).collect()
    };
    let supers = of(|layout| matches!(layout, Layout::SuperAffine { .. }));
    assert_eq!(supers, ["Q2_K", "Q4_K", "Q5_K"]);
    assert_eq!(of(|layout| layout == Layout::SuperScaled), ["Q6_K"]);
    assert_eq!(of(|layout| layout == Layout::Powers), ["MXFP4"]);
    let affine = of(|layout| matches!(layout, Layout::Affine { .. }));
    assert_eq!(affine, ["Q4_1", "Q5_1"]);
    assert_eq!(of(|layout| layout == Layout::Floats), [""; 0]);
}

#[test]
fn powers_of_two_reach_both_ends() {
    let block = |e: u8| {
        let mut block = [0x77u8; 17];
        block[0] = e;
        dequantize(GgmlType::MXFP4, &block).unwrap()[0]
    };
    // Code 7 is 6.0: the integer 12 times the unit 0.5.
    assert_eq!(block(0), 6.0 * 2f32.powi(-127));
    assert_eq!(block(1), 6.0 * 2f32.powi(-126));
    assert_eq!(block(127), 6.0);
    assert_eq!(block(251), 6.0 * 2f32.powi(124));
    assert_eq!(block(255), f32::INFINITY);
}

#[test]
fn plain_numbers_decode() {
    assert_eq!(
        dequantize(GgmlType::F32, &1.5f32.to_le_bytes()).unwrap(),
        [1.5]
    );
    assert_eq!(
        dequantize(GgmlType::F64, &1.5f64.to_le_bytes()).unwrap(),
        [1.5]
    );
    assert_eq!(dequantize(GgmlType::I8, &[0xff, 1]).unwrap(), [-1.0, 1.0]);
    assert_eq!(
        dequantize(GgmlType::I16, &(-2i16).to_le_bytes()).unwrap(),
        [-2.0]
    );
    assert_eq!(
        dequantize(GgmlType::I32, &7i32.to_le_bytes()).unwrap(),
        [7.0]
    );
    assert_eq!(
        dequantize(GgmlType::I64, &(-9i64).to_le_bytes()).unwrap(),
        [-9.0]
    );
}

#[test]
fn parts_of_blocks_and_other_types_are_refused() {
    for row in block_types() {
        let (kind, bytes) = (row.kind, row.bytes);
        for n in [1, bytes - 1, bytes + 1, 2 * bytes - 1] {
            assert_eq!(dequantize(kind, &vec![0; n]), None);
            assert_eq!(repack(kind, &vec![0; n]), None);
            assert_eq!(Parts::read(kind, &vec![0; n]).err(), Some(Misfit::Size));
        }
        assert_eq!(dequantize(kind, &[]).unwrap(), [0.0; 0]);
        // A part with another length must be refused, and so must another number of parts.
        let parts = kind.layout().parts();
        let data = vec![0; bytes * 256 / row.weights];
        let mut memory: Vec<Vec<u32>> = parts.iter().map(|p| vec![0; p.bytes(256) / 2]).collect();
        let mut out: Vec<&mut [u8]> = (memory.iter_mut().zip(&parts))
            .map(|(memory, part)| &mut bytemuck::cast_slice_mut(memory)[..part.bytes(256)])
            .collect();
        let none = parts.is_empty();
        assert_eq!(pack_into(kind, &data, &mut out).is_err(), none);
        for i in 0..parts.len() {
            let all = std::mem::take(&mut out[i]);
            let (last, short) = all.split_last_mut().unwrap();
            out[i] = short;
            assert_eq!(pack_into(kind, &data, &mut out), Err(Misfit::Size));
            let _ = last;
            out[i] = &mut [];
            assert_eq!(pack_into(kind, &data, &mut out), Err(Misfit::Size));
        }
        out.pop();
        assert!(pack_into(kind, &data, &mut out).is_err());
    }
    assert_eq!(dequantize(GgmlType::Other(40), &[0; 144]), None);
    assert_eq!(repack(GgmlType::Other(40), &[0; 144]), None);
    assert_eq!(repack(GgmlType::F32, &[0; 128]), None);
    assert_eq!(
        pack_into(GgmlType::Other(40), &[], &mut []),
        Err(Misfit::Layout)
    );
}

#[test]
fn the_table_names_each_type_once() {
    let mut numbers: Vec<_> = TYPES.iter().map(|row| row.id).collect();
    assert!(numbers.is_sorted());
    numbers.dedup();
    assert_eq!(numbers.len(), TYPES.len());
    let names = TYPES.iter().flat_map(|row| row.file_types);
    let mut files: Vec<_> = names.map(|(number, _)| *number).collect();
    files.sort_unstable();
    files.dedup();
    // Covers all of llama.cpp's numbers, except those of NVFP4 and of removed types.
    let none = [4, 5, 6, 33, 34, 35, 39];
    let last = files.last().copied().unwrap();
    let expected: Vec<_> = (0..=last).filter(|n| !none.contains(n)).collect();
    assert_eq!(files, expected);
    for row in TYPES {
        assert_eq!(GgmlType::from_id(row.id), row.kind);
        assert_eq!((row.kind.id(), row.kind.name()), (row.id, row.name.into()));
        for (number, name) in row.file_types {
            assert_eq!(file_type_name(*number), Some(*name));
        }
        assert!(row.halves.iter().all(|at| at + 2 <= row.bytes));
    }
    assert_eq!(file_type_name(39), Some("NVFP4"));
    assert_eq!(file_type_name(4), None);
}

#[test]
fn written_types_are_read_again() {
    let numbers: Vec<f32> = (0..64).map(|i| (i as f32 - 20.0) / 4.0).collect();
    let mut written = Vec::new();
    for row in TYPES {
        let Some(bytes) = encode(row.kind, &numbers) else {
            assert!(!row.is_written());
            continue;
        };
        assert_eq!(bytes.len(), numbers.len() / row.weights * row.bytes);
        let read = dequantize(row.kind, &bytes).unwrap();
        let step = if row.weights > 1 { 11.0 / 254.0 } else { 0.0 };
        for (a, b) in numbers.iter().zip(read) {
            assert!((a - b).abs() <= step, "{}: {a} and {b}", row.name);
        }
        written.push(row.name);
    }
    assert_eq!(written, ["F32", "F16", "Q8_0", "BF16"]);
    assert_eq!(encode(GgmlType::Q8_0, &[0.0; 31]), None);
}

#[test]
fn blocks_of_eight_bits_are_ggml_s() {
    let mut numbers = vec![0.0f32; 64];
    (numbers[0], numbers[1], numbers[2]) = (127.0, -127.0, 63.4);
    let bytes = encode(GgmlType::Q8_0, &numbers).unwrap();
    assert_eq!(bytes.len(), 68);
    assert_eq!(bytes[..2], f16::from_f32(1.0).to_le_bytes());
    assert_eq!(bytes[2..5], [127, 0x81, 63]);
    assert!(bytes[34..].iter().all(|b| *b == 0));
    assert!(encode(GgmlType::F16, &[70_000.0]).is_none());
    assert!(encode(GgmlType::F16, &[f32::INFINITY]).is_some());
}

#[test]
fn unpermuting_undoes_the_conversion() {
    // Two heads of four rows with two bytes each. In the file, the rows of a head have the order 0,
    // 2, 1, 3.
    let stored = [0u8, 0, 2, 2, 1, 1, 3, 3, 4, 4, 6, 6, 5, 5, 7, 7];
    let usual = [0u8, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7];
    assert_eq!(unpermute_rows(&stored, 8, 2), usual);
}

proptest! {
    #[test]
    fn packing_keeps_every_number(seed in prop::collection::vec(any::<u8>(), 256 * 3)) {
        for row in block_types() {
            let (kind, size) = (row.kind, row.bytes);
            let mut data = seed[..size * (seed.len() / size)].to_vec();
            for block in data.chunks_exact_mut(size) {
                match kind {
                    GgmlType::MXFP4 => block[0] &= 127,
                    // The upper bits of the last word belong to the scale.
                    GgmlType::IQ1M => block[55] &= 0xbf,
                    _ => {}
                }
                for &at in row.halves {
                    // The values must be finite, because NaN never equals itself.
                    let half = f16::from_le_bytes([block[at], block[at + 1]]);
                    if !half.is_finite() {
                        block[at + 1] &= 0x80;
                    }
                }
            }
            let expected = dequantize(kind, &data).unwrap();
            prop_assert!(expected.iter().all(|x| x.is_finite()));
            let affine = repack(kind, &data);
            prop_assert_eq!(affine.is_some(), kind.layout().affine_bits().is_some());
            if let Some(packed) = affine {
                prop_assert_eq!(unpack(&packed), expected.clone());
            }
            if let Ok(packed) = Parts::read(kind, &data) {
                if let Layout::TableSuper { codes, .. } = kind.layout() {
                    // The kernels sum these products in 32 bits (`MAX_SCALED_CODE`).
                    let greatest = |all: &[i8]| all.iter().map(|v| v.unsigned_abs()).max();
                    let bytes = greatest(packed.part::<i8>(1, PartType::I8)).unwrap();
                    let integers = greatest(&codes.integers().0).unwrap();
                    prop_assert!(u32::from(bytes) * u32::from(integers) <= 4096, "{}", row.name);
                }
                prop_assert_eq!(packed.unpack(kind.layout()), expected);
            }
        }
    }

    #[test]
    fn unpermuting_is_a_permutation_within_heads(heads in 1usize..5, half in 1usize..6, row in 1usize..4) {
        let rows = heads * half * 2;
        let data: Vec<u8> = (0..rows).flat_map(|r| vec![r as u8; row]).collect();
        let out = unpermute_rows(&data, rows, heads);
        prop_assert_eq!(out.len(), data.len());
        for (usual, bytes) in out.chunks_exact(row).enumerate() {
            let (head, within) = (usual / (2 * half), usual % (2 * half));
            // Imitates the converter: [heads, 2, half] -> [heads, half, 2].
            let stored = head * 2 * half + within % half * 2 + within / half;
            prop_assert!(bytes.iter().all(|&b| b as usize == stored));
        }
    }
}
