//! Whole GGUF models of made-up weights: what is read, where rows go, and that hostile files are refused without a panic.

use std::path::Path;

use proptest::prelude::*;
use zofo_hal::{DType, ErrorKind, Result, perturb::Projection};
use zofo_ops::{
    config::{Family, RopeScaling},
    files::{Gguf, GgufModel, MappedBytes},
    llama::{ParamName, WeightSource},
};

use crate::{
    gguf_keys::{
        Keys,
        Value::{Count, Text},
    },
    support::refused,
};

const ALIGNMENT: usize = 32;
const F32: u32 = 0;
const Q4_0: u32 = 2;
const HIDDEN: usize = 32;

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    /// Innermost first.
    dims: Vec<u64>,
    type_number: u32,
    data: Vec<u8>,
    /// Where the header says it begins; `None` is where it does.
    offset: Option<u64>,
}

/// `f32` elements that tell where they are: row and column of tensor number `n`.
fn tensor(n: usize, name: &str, rows: usize, cols: usize) -> Tensor {
    let value = |r: usize, c: usize| (n * 10_000 + r * 100 + c) as f32;
    let data = (0..rows).flat_map(|r| (0..cols).flat_map(move |c| value(r, c).to_le_bytes())).collect();
    let dims = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
    Tensor { name: name.into(), dims, type_number: F32, data, offset: None }
}

/// Metadata of a model of one layer: 2 query heads and 1 key head of width 4, 8 tokens.
fn keys(arch: &str) -> Keys {
    let key = |name: &str| format!("{arch}.{name}");
    Keys::default()
        .with("general.architecture", Text(arch.into()))
        .with(&key("block_count"), Count(1))
        .with(&key("context_length"), Count(64))
        .with(&key("embedding_length"), Count(HIDDEN as u32))
        .with(&key("feed_forward_length"), Count(32))
        .with(&key("attention.head_count"), Count(2))
        .with(&key("attention.head_count_kv"), Count(1))
        .with(&key("attention.key_length"), Count(4))
}

fn tensors() -> Vec<Tensor> {
    [
        ("token_embd.weight", 8, HIDDEN),
        ("output_norm.weight", 1, HIDDEN),
        ("blk.0.attn_norm.weight", 1, HIDDEN),
        ("blk.0.ffn_norm.weight", 1, HIDDEN),
        ("blk.0.attn_q.weight", 8, HIDDEN),
        ("blk.0.attn_k.weight", 4, HIDDEN),
        ("blk.0.attn_v.weight", 4, HIDDEN),
        ("blk.0.attn_output.weight", HIDDEN, 8),
        ("blk.0.ffn_gate.weight", 32, HIDDEN),
        ("blk.0.ffn_up.weight", 32, HIDDEN),
        ("blk.0.ffn_down.weight", HIDDEN, 32),
    ]
    .iter()
    .enumerate()
    .map(|(n, (name, rows, cols))| tensor(n, name, *rows, *cols))
    .collect()
}

/// Puts a file together. `eps` is added to the metadata, because `Keys` has no float of its own.
fn file(arch: &str, keys: &Keys, tensors: &[Tensor]) -> Vec<u8> {
    let mut out = keys.bytes();
    let eps = format!("{arch}.attention.layer_norm_rms_epsilon");
    out.extend((eps.len() as u64).to_le_bytes());
    out.extend(eps.bytes());
    out.extend(6u32.to_le_bytes());
    out.extend(1e-5f32.to_le_bytes());
    out[8..16].copy_from_slice(&(tensors.len() as u64).to_le_bytes());
    out[16..24].copy_from_slice(&(keys.0.len() as u64 + 1).to_le_bytes());
    let mut at = 0;
    for t in tensors {
        out.extend((t.name.len() as u64).to_le_bytes());
        out.extend(t.name.bytes());
        out.extend((t.dims.len() as u32).to_le_bytes());
        t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(t.type_number.to_le_bytes());
        out.extend(t.offset.unwrap_or(at as u64).to_le_bytes());
        at = (at + t.data.len()).next_multiple_of(ALIGNMENT);
    }
    for t in tensors {
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(&t.data);
    }
    out
}

fn open(bytes: Vec<u8>) -> Result<GgufModel> {
    GgufModel::new(Gguf::parse(Path::new("m.gguf"), MappedBytes::from(bytes))?)
}

fn model(keys: &Keys, tensors: &[Tensor]) -> Result<GgufModel> {
    open(file("llama", keys, tensors))
}

/// First element of each row.
fn first_column(model: &GgufModel, name: ParamName) -> Vec<f32> {
    let t = model.require(name).unwrap();
    t.to_f32().unwrap().chunks(t.cols).map(|row| row[0]).collect()
}

#[test]
fn rows_of_q_and_k_go_back_into_the_checkpoints_order() {
    let model = model(&keys("llama"), &tensors()).unwrap();
    // Stored row 2 i + j of a head is row j n/2 + i of the checkpoint.
    let q: Vec<f32> = [0, 2, 1, 3, 4, 6, 5, 7].iter().map(|r| (4 * 10_000 + r * 100) as f32).collect();
    assert_eq!(first_column(&model, ParamName::Weight(0, Projection::Q)), q);
    let k: Vec<f32> = [0, 2, 1, 3].iter().map(|r| (5 * 10_000 + r * 100) as f32).collect();
    assert_eq!(first_column(&model, ParamName::Weight(0, Projection::K)), k);
    let v: Vec<f32> = (0..4).map(|r| (6 * 10_000 + r * 100) as f32).collect();
    assert_eq!(first_column(&model, ParamName::Weight(0, Projection::V)), v);
}

#[test]
fn qwen2_keeps_its_rows_and_brings_biases() {
    let mut all = tensors();
    for (n, (name, width)) in [("q", 8), ("k", 4), ("v", 4)].into_iter().enumerate() {
        all.push(tensor(20 + n, &format!("blk.0.attn_{name}.bias"), 1, width));
    }
    let model = open(file("qwen2", &keys("qwen2"), &all)).unwrap();
    assert_eq!(model.config().family, Family::Qwen2);
    assert!(model.config().qkv_bias && model.config().tie_word_embeddings);
    let q: Vec<f32> = (0..8).map(|r| (4 * 10_000 + r * 100) as f32).collect();
    assert_eq!(first_column(&model, ParamName::Weight(0, Projection::Q)), q);
    assert_eq!(model.require(ParamName::Bias(0, Projection::K)).unwrap().to_f32().unwrap(), [210_000., 210_001., 210_002., 210_003.]);
}

#[test]
fn a_bias_of_the_llama_architecture_moves_with_its_rows() {
    let mut all = tensors();
    for (n, (name, width)) in [("q", 8), ("k", 4), ("v", 4)].into_iter().enumerate() {
        all.push(tensor(20 + n, &format!("blk.0.attn_{name}.bias"), 1, width));
    }
    let model = model(&keys("llama"), &all).unwrap();
    assert_eq!(model.require(ParamName::Bias(0, Projection::K)).unwrap().to_f32().unwrap(), [210_000., 210_002., 210_001., 210_003.]);
}

#[test]
fn quantised_rows_keep_their_blocks() {
    let mut all = tensors();
    let block = |row: u8| [&[0x00, 0x3C][..], &[row; 16]].concat();
    all[4] = Tensor { type_number: Q4_0, data: (0..8).flat_map(block).collect(), ..all[4].clone() };
    let model = model(&keys("llama"), &all).unwrap();
    let q = model.require(ParamName::Weight(0, Projection::Q)).unwrap();
    assert_eq!(q.dtype, DType::Q4_0);
    // Scale 1, low nibble minus 8.
    let rows: Vec<f32> = q.to_f32().unwrap().chunks(HIDDEN).map(|r| r[0]).collect();
    assert_eq!(rows, [0., 2., 1., 3., 4., 6., 5., 7.].map(|r| r - 8.0));
}

#[test]
fn frequency_factors_of_llama3_are_recognised_and_others_refused() {
    let theta = 500_000f64;
    let wide = keys("llama").with("llama.attention.key_length", Count(4)).with("llama.rope.freq_base", Count(theta as u32));
    // By hand, from the formula: wavelength 2 pi of frequency 1 is kept, 2 pi sqrt(theta) = 4443 lies on the ramp between 2048 and 8192.
    let wavelength = 2.0 * std::f64::consts::PI * theta.sqrt();
    let smooth = (8192.0 / wavelength - 1.0) / 3.0;
    let on_ramp = 1.0 / ((1.0 - smooth) / 8.0 + smooth);
    // The largest factor of so narrow a head is not the stretch itself, so neither is taken for Llama 3's.
    for factors in [[1.0f32, on_ramp as f32], [1.0, 3.0]] {
        let mut all = tensors();
        let data = factors.iter().flat_map(|f| f.to_le_bytes()).collect();
        all.push(Tensor { name: "rope_freqs.weight".into(), dims: vec![2], type_number: F32, data, offset: None });
        refused(model(&wide, &all), ErrorKind::Unsupported, &["rope_freqs.weight"]);
    }
    // Heads of width 128 as published, factor 8.
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 };
    let factors: Vec<u8> = (0..64)
        .flat_map(|i| {
            let wavelength = 2.0 * std::f64::consts::PI * theta.powf(2.0 * i as f64 / 128.0);
            let smooth = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
            ((1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32).to_le_bytes()
        })
        .collect();
    let mut all = tensors();
    all[4] = tensor(4, "blk.0.attn_q.weight", 256, HIDDEN);
    all[5] = tensor(5, "blk.0.attn_k.weight", 128, HIDDEN);
    all[6] = tensor(6, "blk.0.attn_v.weight", 128, HIDDEN);
    all[7] = tensor(7, "blk.0.attn_output.weight", HIDDEN, 256);
    all.push(Tensor { name: "rope_freqs.weight".into(), dims: vec![64], type_number: F32, data: factors, offset: None });
    let wide = wide.with("llama.attention.key_length", Count(128));
    assert_eq!(model(&wide, &all).unwrap().config().rope_scaling, llama3);
}

#[test]
fn what_is_missing_or_left_over_is_named() {
    for gone in ["token_embd.weight", "blk.0.ffn_up.weight"] {
        let all: Vec<_> = tensors().into_iter().filter(|t| t.name != gone).collect();
        assert!(model(&keys("llama"), &all).is_err());
    }
    let mut all = tensors();
    all.push(tensor(9, "blk.0.ffn_gate_exps.weight", 2, 32));
    refused(model(&keys("llama"), &all), ErrorKind::Unsupported, &["blk.0.ffn_gate_exps.weight"]);
    refused(model(&keys("llama").without("llama.block_count"), &tensors()), ErrorKind::Format, &["llama.block_count"]);
    refused(open(file("mamba", &keys("mamba"), &tensors())), ErrorKind::Unsupported, &["mamba", "qwen2"]);
    refused(model(&keys("llama").with("llama.vocab_size", Count(9)), &tensors()), ErrorKind::Format, &["vocab_size", "8 rows"]);
    refused(model(&keys("llama").with("llama.expert_count", Count(8)), &tensors()), ErrorKind::Unsupported, &["8 experts"]);
    refused(model(&keys("llama").with("llama.rope.scaling.type", Text("yarn".into())), &tensors()), ErrorKind::Unsupported, &["yarn"]);
    refused(model(&keys("llama").with("split.count", Count(3)), &tensors()), ErrorKind::Unsupported, &["3 parts"]);
    refused(
        model(&keys("llama").with("llama.block_count", Text("1".into())), &tensors()),
        ErrorKind::Format,
        &["llama.block_count", "a text"],
    );
    let mut all = tensors();
    all[8] = tensor(8, "blk.0.ffn_gate.weight", 16, HIDDEN);
    refused(model(&keys("llama"), &all), ErrorKind::Format, &["gate_proj", "16", "32"]);
}

#[test]
fn hostile_headers_are_refused() {
    type Change = fn(&mut Vec<Tensor>);
    let cases: [(Change, ErrorKind, &[&str]); 8] = [
        (|t| t[3].offset = Some(0), ErrorKind::Format, &["overlap"]),
        (|t| t[3].offset = Some(33), ErrorKind::Format, &["aligned", "33"]),
        (|t| t[3].offset = Some(1 << 40), ErrorKind::Format, &["past the end"]),
        (|t| t[3].offset = Some(u64::MAX - 31), ErrorKind::Format, &["past the end"]),
        (|t| t[4].dims = vec![u64::MAX, u64::MAX, u64::MAX], ErrorKind::Format, &["more elements"]),
        (|t| t[4].dims = vec![1 << 62, 1], ErrorKind::Format, &["past the end"]),
        (|t| t[4].dims = vec![], ErrorKind::Format, &["0 dimensions"]),
        (|t| t[5].name = t[4].name.clone(), ErrorKind::Format, &["two tensors"]),
    ];
    for (change, kind, parts) in cases {
        let mut all = tensors();
        change(&mut all);
        refused(model(&keys("llama"), &all), kind, parts);
    }
    let mut all = tensors();
    all[4].type_number = 16;
    refused(model(&keys("llama"), &all), ErrorKind::Unsupported, &["IQ2_XXS", "Q4_K"]);
    all[4].type_number = 4711;
    refused(model(&keys("llama"), &all), ErrorKind::Unsupported, &["number 4711"]);
    all[4] = Tensor { type_number: Q4_0, dims: vec![33, 8], ..tensors()[4].clone() };
    refused(model(&keys("llama"), &all), ErrorKind::Format, &["33", "blocks of 32"]);
}

#[test]
fn wrong_beginnings_and_absurd_counts_are_refused() {
    let good = file("llama", &keys("llama"), &tensors());
    let patched = |at: usize, bytes: &[u8]| {
        let mut all = good.clone();
        all[at..at + bytes.len()].copy_from_slice(bytes);
        open(all)
    };
    refused(patched(0, b"GGML"), ErrorKind::Format, &["GGUF"]);
    refused(patched(4, &1u32.to_le_bytes()), ErrorKind::Unsupported, &["version 1"]);
    refused(patched(4, &3u32.to_be_bytes()), ErrorKind::Unsupported, &["big-endian"]);
    refused(patched(8, &u64::MAX.to_le_bytes()), ErrorKind::Format, &["tensors", "room"]);
    refused(patched(16, &u64::MAX.to_le_bytes()), ErrorKind::Format, &["metadata keys"]);
    refused(patched(24, &u64::MAX.to_le_bytes()), ErrorKind::Format, &["metadata key"]);
    refused(open(Vec::new()), ErrorKind::Format, &["GGUF"]);
    for alignment in [0, 1, 3, 48, 1 << 20] {
        refused(model(&keys("llama").with("general.alignment", Count(alignment)), &tensors()), ErrorKind::Format, &["general.alignment"]);
    }
}

/// Reads all that an accepted file offers.
fn touch(bytes: Vec<u8>) {
    let Ok(model) = open(bytes) else { return };
    for name in ParamName::all(model.config()) {
        let t = model.require(name).unwrap();
        let (rows, cols) = name.shape(model.config());
        assert_eq!(t.to_f32().unwrap().len(), rows * cols);
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let good = file("llama", &keys("llama"), &tensors());
    touch(good.clone());
    for n in 0..good.len() {
        assert!(open(good[..n].to_vec()).is_err(), "{n} of {} bytes", good.len());
    }
}

proptest! {
    #[test]
    fn damaged_headers_never_panic(places in prop::collection::vec((0usize..1400, any::<u8>()), 1..6)) {
        let mut bytes = file("llama", &keys("llama"), &tensors());
        for (at, byte) in places {
            bytes[at] = byte;
        }
        touch(bytes);
    }
}
