//! A very small model with a byte-level tokenizer, data for it, and the program.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use safetensors::{Dtype, serialize, tensor::TensorView};
use serde_json::{Value, json};

/// A folder that is gone when the test ends.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// An empty folder.
    pub fn empty() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// A folder with `model` and `data.csv`.
    pub fn new() -> Self {
        let place = Self::empty();
        write_model(&place.path("model"));
        place.write("data.csv", news(60));
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), contents).unwrap();
    }

    /// The program, run in the folder.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zofo"));
        command.args(args).current_dir(self.dir.path());
        command
    }

    pub fn run(&self, args: &[&str]) -> Outcome {
        Outcome::from(self.command(args).output().unwrap())
    }

    /// `zofo train` on the model and data of the folder; arguments that come later win.
    pub fn train(&self, args: &[&str]) -> Outcome {
        self.run(&[&TRAIN, args].concat())
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }
}

pub const TRAIN: [&str; 19] = [
    "train",
    "--model",
    "model",
    "--data",
    "data.csv",
    "--template",
    r"{text}\nTopic:",
    "--label-column",
    "label",
    "--classes",
    "World,Sports",
    "--micro-batches",
    "2",
    "--batch",
    "4",
    "--directions",
    "2",
    "--threads",
    "1",
];

pub struct Outcome {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Outcome {
    /// Asserts that the program succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self
    }

    /// Asserts that the program ended with `code` and one message with all of `parts`, and no panic.
    #[track_caller]
    pub fn refused(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(self.err.contains("error: ") && !self.err.contains("panicked"), "{}", self.err);
        for part in parts {
            assert!(self.err.contains(part), "`{}` does not mention `{part}`", self.err);
        }
    }
}

/// Labels 1 and 2 over text that tells them apart.
pub fn news(rows: usize) -> String {
    let words = [["war in the east", "vote of the senate"], ["the cup final", "a late goal"]];
    let row = |i: usize| format!("{},\"{}, number {i}\"\n", i % 2 + 1, words[i % 2][i / 2 % 2]);
    std::iter::once("label,text\n".to_owned()).chain((0..rows).map(row)).collect()
}

pub fn config() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 96,
        "tie_word_embeddings": true, "bos_token_id": 256, "eos_token_id": 257,
    })
}

pub fn write_model(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config().to_string()).unwrap();
    std::fs::write(folder.join("model.safetensors"), weights()).unwrap();
    std::fs::write(folder.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    let specials = json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true});
    std::fs::write(folder.join("tokenizer_config.json"), specials.to_string()).unwrap();
}

/// Random weights: matrices uniform with the variance 1 / in, gains 1.
fn weights() -> Vec<u8> {
    let (d, inner, kv) = (16, 24, 8);
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![258, d]), ("model.norm.weight".to_owned(), vec![d])];
    for layer in 0..4 {
        for (name, shape) in [
            ("input_layernorm", vec![d]),
            ("post_attention_layernorm", vec![d]),
            ("self_attn.q_proj", vec![d, d]),
            ("self_attn.k_proj", vec![kv, d]),
            ("self_attn.v_proj", vec![kv, d]),
            ("self_attn.o_proj", vec![d, d]),
            ("mlp.gate_proj", vec![inner, d]),
            ("mlp.up_proj", vec![inner, d]),
            ("mlp.down_proj", vec![d, inner]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut uniform = || {
        // Xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    let data: Vec<_> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let width = (3.0 / *shape.last().unwrap() as f32).sqrt();
            let value = |matrix: bool, u: f32| if matrix { width * u } else { 1.0 };
            let count: usize = shape.iter().product();
            let bytes: Vec<u8> = (0..count).flat_map(|_| value(shape.len() == 2, uniform()).to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    serialize(data.iter().map(|(n, s, b)| (n.as_str(), TensorView::new(Dtype::F32, s.clone(), b).unwrap())), None).unwrap()
}

/// A `tokenizer.json` whose tokens are the 256 bytes, as GPT-2 writes them, and two special ones.
fn tokenizer() -> Value {
    let plain = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut other = 256;
    let mut vocab = BTreeMap::new();
    for byte in 0..256 {
        let shown = if plain(byte) {
            byte
        } else {
            other += 1;
            other - 1
        };
        vocab.insert(char::from_u32(shown).unwrap().to_string(), byte);
    }
    vocab.insert("<s>".into(), 256);
    vocab.insert("</s>".into(), 257);
    let special = |id: u32, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special(256, "<s>"), special(257, "</s>")], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [],
        },
    })
}
