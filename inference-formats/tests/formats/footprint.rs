//! Compares computed sizes in memory with the definitions of the formats.

use std::path::Path;

use inference_formats::footprint::{Footprint, Part, WeightStorage};
use inference_formats::gguf::testing::Writer;
use inference_formats::safetensors::SafetensorsCheckpoint;
use inference_formats::{Gguf, ModelConfig};
use serde_json::{Map, Value, json};

/// An engine that computes in float32 and keeps 16-bit and packed matrices in their stored form.
const KERNELS: WeightStorage = WeightStorage {
    compute_bytes: 4,
    keeps_halves: true,
    keeps_half_factors: |mode, bits, group| {
        mode == "affine" && matches!((bits, group), (4 | 8, 32 | 64))
    },
    keeps_gguf_bits: true,
};

fn config(model_type: &str, more: Value) -> ModelConfig {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 64, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 128,
    });
    let Value::Object(more) = more else {
        panic!("not an object");
    };
    config.as_object_mut().unwrap().extend(more);
    ModelConfig::from_json(config.to_string().as_bytes()).unwrap()
}

/// Writes a file whose tensors contain zeros, and opens its directory.
fn checkpoint(dir: &Path, tensors: &[(&str, &str, &[usize])]) -> SafetensorsCheckpoint {
    let mut header = Map::new();
    let mut at = 0;
    for (name, dtype, shape) in tensors {
        let width = match *dtype {
            "F32" | "U32" => 4,
            "F16" | "BF16" => 2,
            "U8" => 1,
            other => panic!("{other}"),
        };
        let end = at + width * shape.iter().product::<usize>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]});
        header.insert((*name).to_owned(), entry);
        at = end;
    }
    let header = serde_json::to_string(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + at, 0);
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    SafetensorsCheckpoint::open(dir).unwrap()
}

/// The size of the tensor `name` in memory in bytes, and its number of weights.
fn of(footprint: &Footprint, name: &str) -> (u64, u64) {
    let tensor = footprint.tensors().iter().find(|t| t.name == name);
    let tensor = tensor.unwrap_or_else(|| panic!("{name}"));
    (tensor.loaded_bytes, tensor.parameters)
}

#[test]
fn dense_matrices_stay_halves_only_where_the_engine_keeps_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors: Vec<(&str, &str, &[usize])> = Vec::new();
    for (dtype, q, norm, bias) in [
        (
            "F32",
            "a.self_attn.q_proj.weight",
            "a.norm.weight",
            "a.self_attn.q_proj.bias",
        ),
        (
            "F16",
            "b.self_attn.q_proj.weight",
            "b.norm.weight",
            "b.self_attn.q_proj.bias",
        ),
        (
            "BF16",
            "c.self_attn.q_proj.weight",
            "c.norm.weight",
            "c.self_attn.q_proj.bias",
        ),
    ] {
        tensors.extend([
            (q, dtype, &[64, 32][..]),
            (norm, dtype, &[64][..]),
            (bias, dtype, &[64][..]),
        ]);
    }
    let files = checkpoint(dir.path(), &tensors);
    let llama = config("llama", json!({}));
    let measured = |storage: &WeightStorage| {
        let footprint = Footprint::of_safetensors(&files, &llama, storage);
        ["a", "b", "c"].map(|at| {
            let of = |name: &str| of(&footprint, &format!("{at}.{name}"));
            assert_eq!(of("self_attn.q_proj.weight").1, 2048);
            assert_eq!(of("norm.weight"), of("self_attn.q_proj.bias"));
            (of("self_attn.q_proj.weight").0, of("norm.weight").0)
        })
    };
    // Sizes of the matrix, which has 64 * 32 weights, and of the norm, which has 64.
    assert_eq!(measured(&KERNELS), [(8192, 256), (4096, 256), (4096, 256)]);
    let float32 = WeightStorage::converted(4);
    assert_eq!(measured(&float32), [(8192, 256), (8192, 256), (8192, 256)]);
    let halves = WeightStorage::converted(2);
    assert_eq!(measured(&halves), [(4096, 128), (4096, 128), (4096, 128)]);
}

#[test]
fn packed_matrices_keep_their_words_and_convert_their_factors() {
    let dir = tempfile::tempdir().unwrap();
    let files = checkpoint(
        dir.path(),
        &[
            ("m.q_proj.weight", "U32", &[64, 8]), // 64 weights of 4 bits in 8 words a row
            ("m.q_proj.scales", "F16", &[64, 1]),
            ("m.q_proj.biases", "F16", &[64, 1]),
            ("m.k_proj.weight", "U32", &[64, 16]), // 8 bits, by an exception
            ("m.k_proj.scales", "BF16", &[64, 2]),
            ("m.k_proj.biases", "BF16", &[64, 2]),
            ("m.mlp.experts.0.up_proj.weight", "U32", &[64, 8]),
            ("m.mlp.experts.0.up_proj.scales", "F16", &[64, 1]),
            ("m.mlp.experts.0.up_proj.biases", "F16", &[64, 1]),
        ],
    );
    let quantization = json!({"quantization": {
        "group_size": 64, "bits": 4, "m.k_proj": {"group_size": 32, "bits": 8},
    }});
    let config = config("llama", quantization);
    let sum = |storage: &WeightStorage, layer: &str| {
        let footprint = Footprint::of_safetensors(&files, &config, storage);
        let parts = ["weight", "scales", "biases"].map(|p| of(&footprint, &format!("{layer}.{p}")));
        let parameters: u64 = parts.iter().map(|p| p.1).sum();
        assert_eq!(parameters, 64 * 64, "{layer}");
        parts.iter().map(|p| p.0).sum::<u64>()
    };
    let (words4, words8) = (64 * 64 / 2, 64 * 64);
    // Each of the 64 or 128 groups has a scale and a bias.
    assert_eq!(sum(&KERNELS, "m.q_proj"), words4 + 2 * 64 * 2);
    // float16 may be unable to represent a bfloat16 value, so the scales stay float32.
    assert_eq!(sum(&KERNELS, "m.k_proj"), words8 + 2 * 128 * 4);
    let experts = "m.mlp.experts.0.up_proj";
    assert_eq!(sum(&KERNELS, experts), words4 + 2 * 64 * 2);
    for layer in ["m.q_proj", experts] {
        assert_eq!(
            sum(&WeightStorage::converted(4), layer),
            words4 + 2 * 64 * 4
        );
        assert_eq!(
            sum(&WeightStorage::converted(2), layer),
            words4 + 2 * 64 * 2
        );
    }
    let footprint = Footprint::of_safetensors(&files, &config, &KERNELS);
    // Equal shares of the file are sorted by name.
    let formats: Vec<_> = footprint.formats().into_iter().map(|f| f.name).collect();
    assert_eq!(
        formats,
        ["affine 4 bits, groups of 64", "affine 8 bits, groups of 32"]
    );
    assert_eq!(footprint.parameters(), 3 * 64 * 64);
    let parts: u64 = footprint.parts().iter().map(|p| p.loaded_bytes).sum();
    assert_eq!(parts, footprint.loaded_bytes());
    let stored: u64 = files
        .names()
        .map(|n| files.info(n).unwrap().nbytes as u64)
        .sum();
    assert_eq!(footprint.stored_bytes(), stored);
}

#[test]
fn what_is_not_loaded_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let tensors: [(&str, &str, &[usize]); 4] = [
        (
            "language_model.model.embed_tokens.weight",
            "F32",
            &[128, 64],
        ),
        ("language_model.lm_head.weight", "F32", &[128, 64]),
        ("vision_tower.x.weight", "F32", &[32, 32]),
        (
            "language_model.model.layers.0.per_layer_input_gate.weight",
            "F32",
            &[8, 8],
        ),
    ];
    let files = checkpoint(dir.path(), &tensors);
    let loaded = |tied: bool| {
        let config = config("gemma3", json!({"tie_word_embeddings": tied}));
        Footprint::of_safetensors(&files, &config, &KERNELS).loaded_bytes()
    };
    let table = 128 * 64 * 4;
    assert_eq!(loaded(false), 2 * table + 8 * 8 * 4);
    assert_eq!(loaded(true), table + 8 * 8 * 4);
    let config = config("gemma3", json!({}));
    let footprint = Footprint::of_safetensors(&files, &config, &KERNELS);
    assert_eq!(of(&footprint, "lm_head.weight").1, 128 * 64);
    let parts: Vec<_> = footprint.tensors().iter().map(|t| t.part).collect();
    assert!(parts.contains(&Part::Embedding) && parts.contains(&Part::Output));
}

#[test]
fn weights_packed_by_openai_stay_packed() {
    let dir = tempfile::tempdir().unwrap();
    let files = checkpoint(
        dir.path(),
        &[
            ("m.mlp.experts.down_proj_blocks", "U8", &[2, 64, 2, 16]),
            ("m.mlp.experts.down_proj_scales", "U8", &[2, 64, 2]),
            ("m.mlp.experts.down_proj_bias", "BF16", &[2, 64]),
        ],
    );
    let config = config(
        "gpt_oss",
        json!({"quantization_config": {"quant_method": "mxfp4"}}),
    );
    let footprint = Footprint::of_safetensors(&files, &config, &KERNELS);
    let name = |part: &str| format!("m.mlp.experts.down_proj_{part}");
    assert_eq!(of(&footprint, &name("blocks")), (4096, 8192));
    assert_eq!(of(&footprint, &name("scales")), (256, 0));
    assert_eq!(of(&footprint, &name("bias")), (512, 128));
}

/// Loader and report must use one estimate. Earlier, one of them counted 4 bytes per value of an
/// F16 or BF16 matrix, and the other counted 2.
#[test]
fn gguf_blocks_are_counted_as_they_are_loaded() {
    let (weights, groups) = (32 * 256u64, 256u64);
    // Type number, bytes of a block, weights of a block; loaded with kernels, as float32, as
    // halves.
    for (kind, block, of_block, kernels, float32, halves) in [
        (0, 4, 1, 4 * weights, 4 * weights, 2 * weights),
        (1, 2, 1, 2 * weights, 4 * weights, 2 * weights),
        (30, 2, 1, 2 * weights, 4 * weights, 2 * weights),
        // 4 bits a weight, and for each group of 32 two factors, or one for the kernels.
        (
            2,
            18,
            32,
            4096 + groups * 2,
            4096 + groups * 8,
            4096 + groups * 4,
        ),
        (
            3,
            20,
            32,
            4096 + groups * 4,
            4096 + groups * 8,
            4096 + groups * 4,
        ),
        // 5 bits, for an engine whose kernels lack them.
        (
            6,
            22,
            32,
            5120 + groups * 2,
            5120 + groups * 8,
            5120 + groups * 4,
        ),
        (
            7,
            24,
            32,
            5120 + groups * 8,
            5120 + groups * 8,
            5120 + groups * 4,
        ),
        (
            8,
            34,
            32,
            8192 + groups * 2,
            8192 + groups * 8,
            8192 + groups * 4,
        ),
        // The kernels store two bytes per group, and two float16 values per block.
        (
            12,
            144,
            256,
            4096 + groups * 2 + 32 * 4,
            4096 + groups * 8,
            4096 + groups * 4,
        ),
        (
            13,
            176,
            256,
            5120 + groups * 2 + 32 * 4,
            5120 + groups * 8,
            5120 + groups * 4,
        ),
        // MLX has no layout with groups of 16. The kernels support Q3_K with codes of 4 bits, and
        // Q6_K in its own bits.
        (10, 84, 256, 4 * weights, 4 * weights, 2 * weights),
        (11, 110, 256, (128 + 18) * 32, 4 * weights, 2 * weights),
        (14, 210, 256, 210 * 32, 4 * weights, 2 * weights),
    ] {
        let bytes = vec![0; weights as usize / of_block * block];
        let (_dir, path) = Writer::default()
            .tensor("blk.0.ffn_up.weight", &[256, 32], kind, &bytes)
            .file();
        let file = Gguf::open(&path).unwrap();
        let llama = config("llama", json!({}));
        let storages = [
            KERNELS,
            WeightStorage::converted(4),
            WeightStorage::converted(2),
        ];
        for (storage, expected) in storages.iter().zip([kernels, float32, halves]) {
            let footprint = Footprint::of_gguf(&file, &llama, storage);
            let name = "model.layers.0.mlp.up_proj.weight";
            assert_eq!(of(&footprint, name), (expected, weights), "type {kind}");
            assert_eq!(footprint.stored_bytes(), bytes.len() as u64);
        }
    }
}

#[test]
fn gguf_experts_vectors_and_factors_of_the_rotation() {
    let (_dir, path) = Writer::default()
        .tensor("blk.0.ffn_up_exps.weight", &[32, 4, 2], 8, &[0; 272])
        .tensor("blk.0.ffn_gate_exps.weight", &[32, 4, 2], 1, &[0; 512])
        .tensor("blk.1.ffn_up_exps.weight", &[32, 8, 2], 8, &[0; 544])
        .tensor("blk.1.ffn_gate_exps.weight", &[32, 8, 2], 1, &[0; 1024])
        .tensor("blk.1.ffn_down_exps.weight", &[256, 8, 2], 14, &[0; 3360])
        .tensor("blk.0.attn_norm.weight", &[32], 1, &[0; 64])
        .tensor("rope_factors_long.weight", &[16], 0, &[0; 64])
        .file();
    let file = Gguf::open(&path).unwrap();
    let mixtral = config("mixtral", json!({}));
    let footprint = Footprint::of_gguf(&file, &mixtral, &KERNELS);
    let experts = "model.layers.0.block_sparse_moe.switch_mlp";
    assert_eq!(
        of(&footprint, &format!("{experts}.up_proj.weight")).0,
        256 + 8 * 8,
        "four rows are no block of the kernels"
    );
    assert_eq!(
        of(&footprint, &format!("{experts}.gate_proj.weight")).0,
        4 * 256
    );
    let experts = "model.layers.1.block_sparse_moe.switch_mlp";
    let expert_bytes = |name: &str| of(&footprint, &format!("{experts}.{name}_proj.weight")).0;
    assert_eq!(expert_bytes("up"), 512 + 16 * 2);
    assert_eq!(expert_bytes("gate"), 2 * 512);
    assert_eq!(expert_bytes("down"), 2 * 8 * 210);
    assert_eq!(
        of(&footprint, "model.layers.0.input_layernorm.weight").0,
        4 * 32
    );
    assert_eq!(of(&footprint, "rope_factors_long.weight").0, 0);
}

/// Converters write GPT-2's output matrix a second time, but no code reads it, so it must count as
/// 0.
#[test]
fn the_head_of_gpt2_is_its_embedding() {
    let (_dir, path) = Writer::default()
        .tensor("token_embd.weight", &[32, 8], 0, &[0; 1024])
        .tensor("output.weight", &[32, 8], 0, &[0; 1024])
        .file();
    let file = Gguf::open(&path).unwrap();
    let loaded = |model_type: &str| {
        let config = config(model_type, json!({}));
        Footprint::of_gguf(&file, &config, &KERNELS).loaded_bytes()
    };
    assert_eq!((loaded("gpt2"), loaded("llama")), (1024, 2048));
}

#[test]
fn packed_matrices_of_gguf_are_kept_or_named() {
    // GGUF type, bytes per block, weights per block, bits per weight in the kernels' memory.
    let kinds: [(u32, usize, usize, f64); 5] = [
        (10, 84, 256, 32.0),                // Q2_K
        (16, 66, 256, 4.0 + 80.0 / 256.0),  // IQ2_XXS
        (22, 82, 256, 4.0 + 144.0 / 256.0), // IQ2_S
        (20, 18, 32, 4.5),                  // IQ4_NL
        (39, 17, 32, 4.25),                 // MXFP4
    ];
    let mut writer = Writer::default();
    for (i, (kind, bytes, weights, _)) in kinds.iter().enumerate() {
        let data = vec![0; 16 * 512 / weights * bytes];
        let name = format!("blk.{i}.ffn_up.weight");
        writer = writer.tensor(&name, &[512, 16], *kind, &data);
    }
    let (_dir, path) = writer.file();
    let file = Gguf::open(&path).unwrap();
    let footprint = |storage| Footprint::of_gguf(&file, &config("llama", json!({})), storage);
    let with_kernels = footprint(&KERNELS);
    for (i, (_, _, _, bits)) in kinds.iter().enumerate() {
        let name = format!("model.layers.{i}.mlp.up_proj.weight");
        assert_eq!(
            of(&with_kernels, &name),
            ((512.0 * 16.0 / 8.0 * bits) as u64, 8192)
        );
    }
    let named = |footprint: &Footprint| -> Vec<String> {
        let all = footprint.expansions().into_iter();
        all.map(|one| format!("{one}")).collect()
    };
    assert_eq!(
        named(&with_kernels),
        ["Q2_K: model.layers.0.mlp.up_proj.weight, in 12.2 times the bytes"]
    );
    // Without kernels, only the MXFP4 matrix stays packed, because MLX supports no other of these
    // types.
    let halves = footprint(&WeightStorage::converted(2));
    assert_eq!(named(&halves).len(), 4);
    let name = "model.layers.4.mlp.up_proj.weight";
    assert_eq!(of(&halves, name).0, 512 * 16 * 17 / 32);
}

/// The matrices that expand the compressed vectors of latent attention become plain floats.
#[test]
fn expansions_of_latent_attention_are_plain() {
    let dir = tempfile::tempdir().unwrap();
    let at = |part: &str| format!("model.layers.0.self_attn.{part}");
    let [weight, scales, biases] =
        ["weight", "scales", "biases"].map(|p| at(&format!("kv_b_proj.{p}")));
    let other = at("o_proj.weight");
    let tensors: [(&str, &str, &[usize]); 4] = [
        (&weight, "U32", &[64, 8]),
        (&scales, "F16", &[64, 1]),
        (&biases, "F16", &[64, 1]),
        (&other, "BF16", &[64, 64]),
    ];
    let files = checkpoint(dir.path(), &tensors);
    let packed = json!({"quantization": {"group_size": 64, "bits": 4}});
    let loaded = |model_type: &str| {
        let config = config(model_type, packed.clone());
        let footprint = Footprint::of_safetensors(&files, &config, &KERNELS);
        (footprint.loaded_bytes(), footprint.expansions().len())
    };
    let other = 64 * 64 * 2;
    assert_eq!(loaded("deepseek_v3"), (64 * 64 * 4 + other, 1));
    assert_eq!(loaded("llama"), (64 * 64 / 2 + 2 * 64 * 2 + other, 0));
}
