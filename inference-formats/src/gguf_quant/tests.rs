//! Compares decoding with the numbers of an independent implementation, and packing with decoding.
//! `tools/golden/gguf_blocks.py` also checks that MLX reads the packed layout.

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

const QUANTIZED: [(GgmlType, &[usize]); 22] = [
    (GgmlType::Q4_0, &[0]),
    (GgmlType::Q4_1, &[0, 2]),
    (GgmlType::Q5_0, &[0]),
    (GgmlType::Q5_1, &[0, 2]),
    (GgmlType::Q8_0, &[0]),
    (GgmlType::Q2K, &[80, 82]),
    (GgmlType::Q3K, &[108]),
    (GgmlType::Q4K, &[0, 2]),
    (GgmlType::Q5K, &[0, 2]),
    (GgmlType::Q6K, &[208]),
    (GgmlType::MXFP4, &[]),
    (GgmlType::IQ4NL, &[0]),
    (GgmlType::IQ4XS, &[0]),
    (GgmlType::TQ1_0, &[52]),
    (GgmlType::TQ2_0, &[64]),
    (GgmlType::IQ2XXS, &[0]),
    (GgmlType::IQ2XS, &[0]),
    (GgmlType::IQ2S, &[0]),
    (GgmlType::IQ3XXS, &[0]),
    (GgmlType::IQ3S, &[0]),
    (GgmlType::IQ1S, &[0]),
    (GgmlType::IQ1M, &[]),
];

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
    let kinds = QUANTIZED
        .map(|q| q.0)
        .into_iter()
        .chain([GgmlType::F16, GgmlType::BF16]);
    let kinds: Vec<_> = kinds.collect();
    golden
        .cases
        .iter()
        .map(|case| {
            let kind = *kinds.iter().find(|k| k.name() == case.name).unwrap();
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

/// The values that MLX computes from a packed matrix, read bit by bit.
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
    assert_eq!(cases.len(), 24);
    for (kind, data, expected) in cases {
        let got = dequantize(kind, &data).unwrap();
        assert_eq!(got.len(), expected.len());
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            // Compares bits, so that -0 and 0 differ.
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
    let want = [
        ("Q4_0", 4),
        ("Q4_1", 4),
        ("Q5_0", 5),
        ("Q5_1", 5),
        ("Q8_0", 8),
        ("Q4_K", 4),
        ("Q5_K", 5),
        ("TQ1_0", 2),
        ("TQ2_0", 2),
    ];
    assert_eq!(packed, want.map(|(name, bits)| (name.to_owned(), bits)));
}

/// The weights of a matrix with super-scales, read bit by bit.
fn unpack_super(p: &SuperPacked) -> Vec<f32> {
    let bit = |i: usize| p.packed[i / 32] >> (i % 32) & 1;
    (0..p.scales.len() * 16)
        .map(|i| {
            let q = (0..6).fold(0, |q, b| q | bit(i * 6 + b) << b);
            let scale = p.supers[i / 256].to_f32() * f32::from(p.scales[i / 16]);
            scale * (q as f32 - 32.0)
        })
        .collect()
}

#[test]
fn super_scales_pack_what_the_reference_decodes() {
    let mut packed = Vec::new();
    for (kind, data, expected) in golden() {
        let Some(p) = repack_super_scaled(kind, &data) else {
            continue;
        };
        assert_eq!(p.packed.len() * 32, expected.len() * 6);
        assert_eq!(
            (p.scales.len(), p.supers.len()),
            (expected.len() / 16, expected.len() / 256)
        );
        // As many bytes as in the file.
        assert_eq!(
            p.packed.len() * 4 + p.scales.len() + p.supers.len() * 2,
            data.len()
        );
        let bits = |all: &[f32]| -> Vec<u32> { all.iter().map(|x| x.to_bits()).collect() };
        assert_eq!(bits(&unpack_super(&p)), bits(&expected), "{}", kind.name());
        packed.push(kind);
    }
    assert_eq!(packed, [GgmlType::Q6K]);
}

#[test]
fn super_scales_and_minima_pack_what_the_reference_decodes() {
    let mut kinds = Vec::new();
    for (kind, data, expected) in golden() {
        let Some(bits) = super_affine_bits(kind) else {
            continue;
        };
        let (groups, bits) = (expected.len() / 32, bits as usize);
        let mut words = vec![0u32; groups * bits];
        let mut bytes = vec![0i8; 2 * groups];
        let mut supers = vec![half::f16::ZERO; groups / 4];
        let packed = repack_super_affine_into(kind, &data, &mut words, &mut bytes, &mut supers);
        assert_eq!(packed, Some(()));
        let bit = |i: usize| words[i / 32] >> (i % 32) & 1;
        let weights = (0..expected.len()).map(|i| {
            let q = (0..bits).fold(0, |q, b| q | bit(i * bits + b) << b);
            let [scale, min] = [0, 1].map(|part| {
                let byte = bytes[2 * (i / 32) + part];
                supers[2 * (i / 256) + part].to_f32() * f32::from(byte)
            });
            scale * q as f32 - min
        });
        assert_eq!(weights.collect::<Vec<_>>(), expected, "{}", kind.name());
        // Slices of other lengths.
        let short = repack_super_affine_into(kind, &data, &mut words, &mut bytes, &mut supers[1..]);
        assert_eq!(short, None);
        kinds.push(kind);
    }
    assert_eq!(kinds, [GgmlType::Q4K, GgmlType::Q5K]);
}

/// The weights of codes that index a table, by the definition of the packed form.
fn unpack_nibbles(kind: GgmlType, p: &NibblePacked) -> Vec<f32> {
    let (integers, unit) = NibbleCodes::of(kind).unwrap().integers();
    let codes = (0..p.packed.len() * 8).map(|i| (p.packed[i / 8] >> (i % 8 * 4) & 15) as usize);
    let weight = |(i, q): (usize, usize)| {
        let scale = match (&p.scales, NibbleFormat::of(kind).unwrap()) {
            (NibbleScales::Powers(all), NibbleFormat::Powers) => {
                2f64.powi(i32::from(all[i / 32]) - 127)
            }
            (NibbleScales::Halves(all), NibbleFormat::Halves) => all[i / 32].to_f64(),
            (NibbleScales::Super { scales, supers }, NibbleFormat::Super { group }) => {
                supers[i / 256].to_f64() * f64::from(scales[i / group])
            }
            _ => panic!("{} has other scales", kind.name()),
        };
        (scale * f64::from(unit) * f64::from(integers[q])) as f32
    };
    codes.enumerate().map(weight).collect()
}

#[test]
fn codes_that_are_looked_up_pack_what_the_reference_decodes() {
    let mut packed = Vec::new();
    for (kind, data, expected) in golden() {
        let Some(p) = repack_nibbles(kind, &data) else {
            continue;
        };
        assert_eq!(p.packed.len() * 8, expected.len());
        assert_eq!(unpack_nibbles(kind, &p), expected, "{}", kind.name());
        let scales = match &p.scales {
            NibbleScales::Powers(all) => all.len(),
            NibbleScales::Halves(all) => 2 * all.len(),
            NibbleScales::Super { scales, supers } => scales.len() + 2 * supers.len(),
        };
        let format = NibbleFormat::of(kind).unwrap();
        let bytes = p.packed.len() * 4 + scales;
        assert_eq!(bytes, expected.len() * format.bytes_of_256() as usize / 256);
        if matches!(kind, GgmlType::MXFP4 | GgmlType::IQ4NL) {
            assert_eq!(bytes, data.len());
        }
        packed.push(kind);
    }
    // All types except the affine ones, Q2_K and Q6_K.
    assert_eq!(packed.len(), 11);
}

#[test]
fn powers_of_two_reach_both_ends() {
    let block = |e: u8| {
        let mut block = [0x77u8; 17];
        block[0] = e;
        dequantize(GgmlType::MXFP4, &block).unwrap()[0]
    };
    // Twelve halves.
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
    for (kind, _) in QUANTIZED {
        let (_, bytes) = kind.block().unwrap();
        for n in [1, bytes - 1, bytes + 1, 2 * bytes - 1] {
            assert_eq!(dequantize(kind, &vec![0; n]), None);
            assert_eq!(repack(kind, &vec![0; n]), None);
            assert_eq!(repack_super_scaled(kind, &vec![0; n]), None);
            assert_eq!(repack_nibbles(kind, &vec![0; n]), None);
        }
        assert_eq!(dequantize(kind, &[]).unwrap(), [0.0; 0]);
    }
    assert_eq!(dequantize(GgmlType::Other(40), &[0; 144]), None);
    assert_eq!(repack(GgmlType::Other(40), &[0; 144]), None);
    assert_eq!(repack(GgmlType::F32, &[0; 128]), None);
}

#[test]
fn unpermuting_undoes_the_conversion() {
    // Two heads of four rows of two bytes. The order within a head in the file is 0, 2, 1, 3.
    let stored = [0u8, 0, 2, 2, 1, 1, 3, 3, 4, 4, 6, 6, 5, 5, 7, 7];
    let usual = [0u8, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7];
    assert_eq!(unpermute_rows(&stored, 8, 2), usual);
}

proptest! {
    #[test]
    fn packing_keeps_every_number(seed in prop::collection::vec(any::<u8>(), 256 * 3)) {
        for (kind, halves) in QUANTIZED {
            let (_, size) = kind.block().unwrap();
            let mut data = seed[..size * (seed.len() / size)].to_vec();
            for block in data.chunks_exact_mut(size) {
                match kind {
                    GgmlType::MXFP4 => block[0] &= 127,
                    // The upper bits of the last word belong to the scale.
                    GgmlType::IQ1M => block[55] &= 0xbf,
                    _ => {}
                }
                for &at in halves {
                    // Finite, of either sign; a NaN is never equal to itself.
                    let half = f16::from_le_bytes([block[at], block[at + 1]]);
                    if !half.is_finite() {
                        block[at + 1] &= 0x80;
                    }
                }
            }
            let expected = dequantize(kind, &data).unwrap();
            prop_assert!(expected.iter().all(|x| x.is_finite()));
            if let Some(packed) = repack(kind, &data) {
                prop_assert_eq!(unpack(&packed), expected);
            } else if let Some(packed) = repack_super_scaled(kind, &data) {
                prop_assert_eq!(unpack_super(&packed), expected);
            } else if let Some(packed) = repack_nibbles(kind, &data) {
                prop_assert_eq!(unpack_nibbles(kind, &packed), expected);
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
            // The converter: [heads, 2, half] -> [heads, half, 2].
            let stored = head * 2 * half + within % half * 2 + within / half;
            prop_assert!(bytes.iter().all(|&b| b as usize == stored));
        }
    }
}
