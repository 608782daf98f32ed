//! Tests that the tensors of every family with a GGUF layout of its own can be quantized: a file
//! with blocks of Q8_0 computes the same as a file with the values of these blocks in float32.

use std::path::{Path, PathBuf};

use half::f16;
use inference::{Interrupt, Prompt};
use inference_formats::Gguf;
use inference_formats::quantization::dequantize;

use crate::common::{fixture, golden, ids, load, max_difference};

const F32: u32 = 0;
const Q8_0: u32 = 8;
const BLOCK: usize = 32;

/// Weights as blocks of Q8_0: a scale, and 32 multiples of it.
fn blocks(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for block in values.chunks(BLOCK) {
        let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
        let scale = f16::from_f32(largest / 127.0);
        bytes.extend(scale.to_le_bytes());
        let steps = |x: &f32| match scale.to_f32() {
            0.0 => 0,
            scale => (x / scale).round() as i8,
        };
        bytes.extend(block.iter().map(|x| steps(x).cast_unsigned()));
    }
    bytes
}

/// Numbers at an offset of a file.
struct Cursor<'a>(&'a [u8], usize);

impl Cursor<'_> {
    fn number(&mut self, bytes: usize) -> usize {
        let mut wide = [0; 8];
        wide[..bytes].copy_from_slice(&self.0[self.1..self.1 + bytes]);
        self.1 += bytes;
        usize::try_from(u64::from_le_bytes(wide)).unwrap()
    }

    fn skip_value(&mut self, kind: usize) {
        match kind {
            0 | 1 | 7 => self.1 += 1,
            2 | 3 => self.1 += 2,
            4..=6 => self.1 += 4,
            10..=12 => self.1 += 8,
            8 => {
                let length = self.number(8);
                self.1 += length;
            }
            9 => {
                let (kind, count) = (self.number(4), self.number(8));
                (0..count).for_each(|_| self.skip_value(kind));
            }
            other => panic!("no kind of value: {other}"),
        }
    }
}

/// The keys and values of a file, as bytes.
fn metadata(file: &[u8]) -> &[u8] {
    let mut cursor = Cursor(file, 16);
    let count = cursor.number(8);
    for _ in 0..count {
        cursor.skip_value(8);
        let kind = cursor.number(4);
        cursor.skip_value(kind);
    }
    &file[24..cursor.1]
}

/// A tensor of a file: name, type, shape and data.
pub(crate) type Stored = (String, u32, Vec<usize>, Vec<u8>);

/// Writes a copy of a file with other tensors.
pub(crate) fn with_tensors(path: &Path, to: &Path, tensors: impl IntoIterator<Item = Stored>) {
    let file = std::fs::read(path).unwrap();
    let (mut infos, mut data, mut count) = (Vec::new(), Vec::<u8>::new(), 0u64);
    for (name, kind, shape, bytes) in tensors {
        infos.extend((name.len() as u64).to_le_bytes());
        infos.extend(name.as_bytes());
        infos.extend((shape.len() as u32).to_le_bytes());
        for n in shape.iter().rev() {
            infos.extend((*n as u64).to_le_bytes());
        }
        infos.extend(kind.to_le_bytes());
        data.resize(data.len().next_multiple_of(32), 0);
        infos.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        count += 1;
    }
    let mut out = file[..24].to_vec();
    out[8..16].copy_from_slice(&count.to_le_bytes());
    out.extend(metadata(&file));
    out.extend(infos);
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(data);
    std::fs::write(to, out).unwrap();
}

/// Writes a copy of a file in which `quantized` tensors have other types.
fn rewritten(path: &Path, to: &Path, as_floats: bool) -> usize {
    let gguf = Gguf::open(path).unwrap();
    let (mut tensors, mut quantized) = (Vec::new(), 0);
    for (name, tensor) in gguf.tensors() {
        let stored = gguf.read(tensor).unwrap();
        // Converters quantize matrices only. Vectors, routers and convolutions stay in float32.
        let is_matrix = name.ends_with(".weight")
            && !name.contains("ffn_gate_inp")
            && !name.contains("lerp")
            && !name.contains("conv1d")
            && tensor.shape.len() > 1
            && tensor.shape.last().is_some_and(|n| n.is_multiple_of(BLOCK));
        let (kind, bytes) = match is_matrix {
            false => (tensor.kind.id(), stored),
            true => {
                quantized += 1;
                let packed = blocks(&dequantize(tensor.kind, &stored).unwrap());
                match as_floats {
                    false => (Q8_0, packed),
                    true => {
                        let values =
                            dequantize(inference_formats::gguf::GgmlType::Q8_0, &packed).unwrap();
                        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                        (F32, bytes)
                    }
                }
            }
        };
        tensors.push((name.clone(), kind, tensor.shape.clone(), bytes));
    }
    with_tensors(path, to, tensors);
    quantized
}

pub(crate) fn file(name: &str) -> PathBuf {
    let usual = fixture("gguf").join(format!("{name}.gguf"));
    match usual.is_file() {
        true => usual,
        false => fixture("gguf_other").join(format!("{name}.gguf")),
    }
}

#[test]
fn blocks_compute_as_their_values_do() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "cohere2-moe",
        "dbrx",
        "deepseek-v2-lite",
        "deepseek-v32",
        "glm-moe-dsa",
        "jamba",
        "kimi-linear",
        "laguna",
        "mimo-v2-flash",
        "mistral4",
        "rwkv7",
        "step3p5",
    ] {
        let [packed, plain] = ["packed", "plain"].map(|kind| {
            let to = dir.path().join(format!("{name}-{kind}.gguf"));
            let quantized = rewritten(&file(name), &to, kind == "plain");
            assert!(quantized >= 10, "{name}: {quantized}");
            load(&to)
        });
        let golden = golden(&fixture("tiny").join(name));
        for case in golden["prompts"].as_array().unwrap() {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let [ours, floats] = [&packed, &plain].map(|model| {
                let tokens = model.as_token_model().unwrap();
                let all = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
                all.logits
            });
            let difference = max_difference(&ours, &floats);
            assert!(difference < 1e-3, "{name}: {difference}");
        }
    }
}
