//! Tokenizers inside GGUF files. Goldens: llama.cpp's own cases for a SentencePiece vocabulary, transformers' ids for SmolLM2, and splits derived by
//! hand from each family's pattern.

use std::{collections::BTreeSet, path::Path};

use proptest::prelude::*;
use serde_json::Value as Json;
use zofo_hal::{ErrorKind, Result};
use zofo_ops::files::{Tokenizer, gguf::Gguf};

use crate::{
    gguf_keys::{
        Keys,
        Value::{Count, Flag, Floats, Integers, Text, Texts},
    },
    support::refused,
};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";

fn open(path: &Path) -> Tokenizer {
    Tokenizer::from_gguf(Gguf::open(path).unwrap().metadata()).unwrap()
}

fn made(keys: &Keys) -> Result<Tokenizer> {
    Tokenizer::from_gguf(keys.gguf().metadata())
}

fn texts(all: &[&str]) -> Vec<String> {
    all.iter().map(|t| (*t).to_owned()).collect()
}

/// How byte-level vocabularies spell a byte: printable ones as themselves, all others from U+0100 on.
fn spelled(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    match byte {
        b if printable(b) => char::from(b),
        b => char::from_u32(256 + (0..b).filter(|b| !printable(*b)).count() as u32).unwrap(),
    }
}

fn spell(text: &str) -> String {
    text.bytes().map(spelled).collect()
}

/// A vocabulary that merges any two neighbours within `text`, so that every word it is split into becomes one token.
fn merging_all(pre: &str, text: &str) -> Keys {
    let signs: Vec<char> = spell(text).chars().collect();
    let part = |a: usize, b: usize| signs[a..b].iter().collect::<String>();
    let mut tokens: BTreeSet<String> = (0..=255).map(|b| spelled(b).to_string()).collect();
    let mut merges = BTreeSet::new();
    for begin in 0..signs.len() {
        for end in begin + 2..=signs.len() {
            tokens.insert(part(begin, end));
            merges.extend((begin + 1..end).map(|middle| format!("{} {}", part(begin, middle), part(middle, end))));
        }
    }
    Keys::default()
        .with(MODEL, Text("gpt2".into()))
        .with(PRE, Text(pre.into()))
        .with(TOKENS, Texts(tokens.into_iter().collect()))
        .with(MERGES, Texts(merges.into_iter().collect()))
}

#[track_caller]
fn splits(pre: &str, text: &str, words: &[&str]) {
    let tokenizer = made(&merging_all(pre, text)).unwrap();
    let ids = tokenizer.encode(text, false).unwrap();
    let found: Vec<_> = ids.iter().map(|id| tokenizer.decode(&[*id]).unwrap()).collect();
    assert_eq!(found, words, "{pre}");
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
}

#[test]
fn each_family_splits_text_its_own_way() {
    let text = "I'LL pay 1234 euros,\n\n  don't  you?";
    let llama3 = ["I", "'LL", " pay", " ", "123", "4", " euros", ",\n\n", " ", " don", "'t", " ", " you", "?"];
    for name in ["llama-bpe", "llama3", "llama-v3"] {
        splits(name, text, &llama3);
    }
    splits("qwen2", text, &["I", "'LL", " pay", " ", "1", "2", "3", "4", " euros", ",\n\n", " ", " don", "'t", " ", " you", "?"]);
    splits("gpt-2", text, &["I", "'", "LL", " pay", " 1234", " euros", ",", "\n\n ", " don", "'t", " ", " you", "?"]);
    splits("smollm", text, &["I", "'", "LL", " pay", " ", "1", "2", "3", "4", " euros", ",", "\n\n ", " don", "'t", " ", " you", "?"]);
    splits("default", text, &["I", "'", "LL", " pay", " ", "123", "4", " euros", ",", "\n\n ", " don", "'", "t", " ", " you", "?"]);
    let text = " x_1  été\r\n\t日本語 3½";
    splits("llama-bpe", text, &[" x", "_", "1", " ", " été", "\r\n", "\t日本語", " ", "3½"]);
    splits("qwen2", text, &[" x", "_", "1", " ", " été", "\r\n", "\t日本語", " ", "3", "½"]);
    splits("gpt-2", text, &[" x", "_", "1", " ", " été", "\r\n", "\t", "日本語", " 3½"]);
    splits("smollm", text, &[" x", "_", "1", " ", " été", "\r\n", "\t", "日本語", " ", "3", "½"]);
    splits("default", text, &[" x", "_", "1", " ", " été", "\r\n", "\t", "日本語", " ", "3½"]);
    let text = "a  \n b==c $5 \t";
    for pre in ["llama-bpe", "qwen2", "gpt-2", "smollm"] {
        splits(pre, text, &["a", "  \n", " b", "==", "c", " $", "5", " \t"]);
    }
    splits("default", text, &["a", "  \n", " b", "==", "c", " ", "$", "5", " \t"]);
}

#[test]
fn a_file_without_pre_tokenizer_is_split_as_llama_cpp_does_and_says_so() {
    let keys = merging_all("default", "don't 1234").without(PRE);
    let tokenizer = made(&keys).unwrap();
    assert!(tokenizer.describe().contains("pre-tokenizer default (the file names none)"), "{}", tokenizer.describe());
    let ids = tokenizer.encode("don't 1234", false).unwrap();
    let words: Vec<_> = ids.iter().map(|id| tokenizer.decode(&[*id]).unwrap()).collect();
    assert_eq!(words, ["don", "'", "t", " ", "123", "4"]);
}

#[test]
fn qwen2_composes_characters() {
    let (composed, decomposed) = ("\u{e9}t\u{e9}", "e\u{301}te\u{301}");
    let ids = |pre: &str, text: &str| made(&merging_all(pre, &format!("{composed}{decomposed}"))).unwrap().encode(text, false).unwrap();
    assert_eq!(ids("qwen2", decomposed), ids("qwen2", composed));
    assert_ne!(ids("gpt-2", decomposed), ids("gpt-2", composed));
}

/// Words that are tokens stay whole in Llama 3, even where no merge makes them.
#[test]
fn llama3_takes_whole_words_before_merging() {
    let base = merging_all("llama-bpe", "abc").with(MERGES, Texts(texts(&["a b"])));
    let count = |pre: &str| made(&base.clone().with(PRE, Text(pre.into()))).unwrap().encode("abc", false).unwrap().len();
    assert_eq!((count("llama-bpe"), count("gpt-2")), (1, 2));
}

/// A byte-pair vocabulary whose first tokens are `<|end|>` (control), `<|bos|>` (control) and `<tool>` (user-defined), and whose last fills it up.
fn byte_pair() -> Keys {
    let mut tokens = texts(&["<|end|>", "<|bos|>", "<tool>"]);
    tokens.extend((0..=255).map(|b| spelled(b).to_string()));
    tokens.extend(texts(&["th", "the", "[PAD]"]));
    let mut kinds = vec![1; tokens.len()];
    kinds[..3].copy_from_slice(&[3, 3, 4]);
    *kinds.last_mut().unwrap() = 5;
    Keys::default()
        .with(MODEL, Text("gpt2".into()))
        .with(PRE, Text("gpt-2".into()))
        .with(TOKENS, Texts(tokens))
        .with(TYPES, Integers(kinds))
        .with(MERGES, Texts(texts(&["t h", "th e"])))
        .with(BOS, Count(1))
        .with(EOS, Count(0))
}

#[test]
fn special_tokens_of_a_byte_pair_vocabulary() {
    let keys = byte_pair().with("tokenizer.chat_template", Text("{{ messages }}".into()));
    let t = made(&keys).unwrap();
    assert_eq!((t.vocab_size(), t.bos(), t.eos()), (262, Some(1), Some(0)));
    assert_eq!(t.chat_template(), Some("{{ messages }}"));
    assert_eq!((t.token_text(2).as_deref(), t.token_id("the"), t.token_text(262)), (Some("<tool>"), Some(260), None));
    assert!(t.turn_ends().contains(&0));
    let the = t.token_id("the").unwrap();
    let text = "<|bos|>the<tool><|end|>";
    assert_eq!(t.encode_chat(text).unwrap(), [1, the, 2, 0]);
    assert_eq!(t.encode(text, true).unwrap(), [1, the, 2, 0], "nothing is put in front unless the file says so");
    assert_eq!(t.decode(&[1, the, 2, 0]).unwrap(), "the<tool>");
    let adds = made(&byte_pair().with(ADD_BOS, Flag(true))).unwrap();
    assert_eq!((adds.encode("the", true).unwrap(), adds.encode("the", false).unwrap()), (vec![1, the], vec![the]));
    assert_eq!(adds.encode_chat("the").unwrap(), [the]);
    // Llama 3 begins with it where the file says nothing.
    let llama = byte_pair().with(PRE, Text("llama-bpe".into()));
    assert_eq!(made(&llama).unwrap().encode("the", true).unwrap(), [1, the]);
    assert_eq!(made(&llama.with(ADD_BOS, Flag(false))).unwrap().encode("the", true).unwrap(), [the]);
    let turn = made(&byte_pair().with("tokenizer.ggml.eot_token_id", Count(2))).unwrap();
    assert!(turn.turn_ends().contains(&0) && turn.turn_ends().contains(&2));
}

/// SentencePiece pieces: unknown, begin, end, a control token, a user-defined piece, then text.
fn sentence_pieces() -> Keys {
    let pieces = ["<unk>", "<s>", "</s>", "[INST]", "<tool>", "\u{2581}", "a", "b", "\u{2581}a", "ab", "\u{2581}ab"];
    Keys::default()
        .with(MODEL, Text("llama".into()))
        .with(TOKENS, Texts(texts(&pieces)))
        .with(SCORES, Floats(vec![0., 0., 0., 0., 0., -5., -6., -7., -2., -3., -1.]))
        .with(TYPES, Integers(vec![2, 3, 3, 3, 4, 1, 1, 1, 1, 1, 1]))
}

#[test]
fn special_pieces_of_a_sentencepiece_vocabulary() {
    let t = made(&sentence_pieces()).unwrap();
    // Ids 1 and 2 and the token in front are llama.cpp's defaults.
    assert_eq!((t.bos(), t.eos(), t.vocab_size()), (Some(1), Some(2), 11));
    assert_eq!(t.encode("ab", true).unwrap(), [1, 10]);
    // Control tokens are text, but in a conversation.
    assert!(!t.encode("[INST]ab</s>", true).unwrap().contains(&3));
    assert_eq!(t.encode_chat("<s>[INST]ab a</s><tool>b").unwrap(), [1, 3, 10, 8, 2, 4, 5, 7]);
    assert_eq!(t.encode_chat("ab").unwrap(), [10]);
    assert_eq!(t.encode_chat("").unwrap(), [0u32; 0]);
    assert_eq!(t.token_text(3).as_deref(), Some("[INST]"));
    let bare = made(&sentence_pieces().with("tokenizer.ggml.add_space_prefix", Flag(false)).with(ADD_BOS, Flag(false))).unwrap();
    assert_eq!(bare.encode("ab", true).unwrap(), [9]);
    // Converters mark the unknown piece as control where a Hugging Face configuration lists it.
    let control = sentence_pieces().with(TYPES, Integers(vec![3, 3, 3, 3, 4, 1, 1, 1, 1, 1, 5]));
    let control = made(&control).unwrap();
    assert_eq!(control.encode("z", false).unwrap(), [5, 0]);
    assert_eq!(control.encode("ab", false).unwrap(), [8, 7], "the last piece fills up");
}

#[test]
fn other_kinds_are_refused_by_name() {
    let unsupported = ErrorKind::Unsupported;
    for kind in ["bert", "t5", "rwkv"] {
        refused(made(&byte_pair().with(MODEL, Text(kind.into()))), unsupported.clone(), &[MODEL, kind, "llama", "gpt2"]);
    }
    let other = byte_pair().with(PRE, Text("deepseek-llm".into()));
    refused(made(&other), unsupported, &[PRE, "deepseek-llm", "llama-bpe", "smollm", "qwen2", "gpt-2"]);
    refused(made(&byte_pair().without(MODEL)), ErrorKind::Format, &[MODEL, "missing"]);
}

#[test]
fn inconsistent_vocabularies_are_refused_with_key_and_position() {
    let tokens = |keys: &Keys, at: usize, text: &str| {
        let mut keys = keys.clone();
        let Some((_, Texts(list))) = keys.0.iter_mut().find(|(k, _)| k == TOKENS) else { unreachable!() };
        list[at] = text.into();
        keys
    };
    let (pairs, pieces) = (byte_pair(), sentence_pieces());
    let cases = [
        (pairs.clone().without(TOKENS), vec![TOKENS, "missing"]),
        (pairs.clone().with(TOKENS, Texts(vec![])), vec![TOKENS, "empty"]),
        (pairs.clone().with(TOKENS, Count(3)), vec![TOKENS, "list of texts"]),
        (pairs.clone().with(TYPES, Integers(vec![1; 5])), vec![TYPES, "5 entries", "262 tokens"]),
        (pairs.clone().with(TYPES, Integers(vec![9; 262])), vec![TYPES, "token 0", "type 9"]),
        (pairs.clone().without(MERGES), vec![MERGES, "missing"]),
        (pairs.clone().with(MERGES, Texts(texts(&["t h", "th x"]))), vec![MERGES, "merge 1", "`th x`"]),
        (pairs.clone().with(MERGES, Texts(texts(&["th"]))), vec![MERGES, "merge 0"]),
        (pairs.clone().with(MERGES, Texts(texts(&["x y"]))), vec![MERGES, "merge 0"]),
        (pairs.clone().with(BOS, Count(262)), vec![BOS, "262"]),
        (pairs.clone().with(EOS, Count(u32::MAX)), vec![EOS, "262 tokens"]),
        (pairs.clone().with("tokenizer.ggml.eot_token_id", Count(999)), vec!["eot_token_id", "999"]),
        (pairs.clone().without(BOS).with(ADD_BOS, Flag(true)), vec![ADD_BOS, BOS]),
        (tokens(&pairs, 5, "th"), vec![TOKENS, "token 259", "token 5"]),
        (tokens(&pairs, 5, ""), vec![TOKENS, "token 5", "empty"]),
        (tokens(&pieces, 7, "<s>"), vec![TOKENS, "token 7", "token 1"]),
        (pieces.clone().without(SCORES), vec![SCORES, "missing"]),
        (pieces.clone().with(SCORES, Floats(vec![0.; 3])), vec![SCORES, "3 entries", "11 tokens"]),
        (pieces.clone().with(SCORES, Floats(vec![f32::NAN; 11])), vec![SCORES, "token 0", "not a number"]),
        (pieces.clone().with(TYPES, Integers(vec![6; 11])), vec![TYPES, "token 0", "byte"]),
        (tokens(&pieces, 6, "<0x41>").with(TYPES, Integers(vec![2, 3, 3, 3, 4, 1, 6, 1, 1, 1, 1])), vec![TOKENS, "byte 0x00"]),
        (pieces.clone().with("tokenizer.ggml.unknown_token_id", Count(11)), vec!["unknown_token_id", "11"]),
    ];
    for (keys, parts) in cases {
        refused(made(&keys), ErrorKind::Format, &parts);
    }
}

#[test]
fn llama_cpp_cases_of_a_sentencepiece_vocabulary() {
    const NAME: &str = "models/ggml-vocab-llama-spm.gguf";
    let path = zofo_testkit::shared_or_skip!(NAME);
    let read = |ending: &str| std::fs::read_to_string(path.with_extension(ending)).unwrap();
    let (inputs, outputs) = (read("gguf.inp"), read("gguf.out"));
    let tokenizer = open(&path);
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos(), tokenizer.eos()), (32000, Some(1), Some(2)));
    let inputs: Vec<_> = inputs.split("\n__ggml_vocab_test__\n").collect();
    let outputs: Vec<_> = outputs.lines().collect();
    // Behind the last separator nothing follows.
    let (last, inputs) = inputs.split_last().unwrap();
    assert_eq!((*last, inputs.len()), ("", outputs.len()));
    assert!(inputs.len() > 40);
    for (text, expected) in inputs.iter().zip(outputs) {
        let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected).unwrap(), *text);
    }
}

#[test]
fn stories260k_in_gguf_has_the_ids_of_its_tokenizer_model() {
    let folder = zofo_testkit::shared_or_skip!("models/stories260K/gguf");
    let model = zofo_testkit::shared_or_skip!("models/stories260K/hf/tokenizer.model");
    let original = Tokenizer::open(&model).unwrap();
    // Of single spaces only: the original joins runs of them, which a GGUF file of this kind cannot say.
    let texts = ["Once upon a time, there was a little girl named Lily.", "", "a", "Zürich\n\t日本 🦙", "<s>[INST]</s>"];
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let tokenizer = open(&entry.unwrap().path());
        files += 1;
        assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (original.bos(), original.eos(), 512));
        for text in texts {
            let ids = original.encode(text, true).unwrap();
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), original.decode(&ids).unwrap());
        }
    }
    assert!(files >= 7);
}

#[test]
fn smollm2_gives_the_ids_of_transformers() {
    let golden = zofo_testkit::shared_or_skip!("goldens/smollm2_reference.json");
    let path = zofo_testkit::smollm2_or_skip!();
    let golden: Json = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let tokenizer = open(&path);
    assert_eq!(tokenizer.describe(), "byte-pair, pre-tokenizer smollm, 49152 tokens, 48900 merges");
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (Some(1), Some(2), 49152));
    for name in ["text", "prompt", "chat"] {
        let ids: Vec<u32> = golden[name]["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let text = golden[name]["string"].as_str().unwrap();
        assert_eq!(tokenizer.encode_chat(text).unwrap(), ids, "{name}");
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{name}: nothing is put in front");
        if name != "chat" {
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{name}");
        }
    }
    assert!(tokenizer.turn_ends().contains(&2));
}

proptest! {
    /// Keys of other types, other lengths and other values: refused or read, without a panic.
    #[test]
    fn changed_keys_never_panic(
        pairs in any::<bool>(), at in any::<prop::sample::Index>(),
        value in prop_oneof![
            any::<u32>().prop_map(Count), any::<bool>().prop_map(Flag), "[a-z <>|]{0,8}".prop_map(Text),
            prop::collection::vec("[a-c \u{2581}]{0,3}", 0..12).prop_map(Texts),
            prop::collection::vec(any::<f32>(), 0..12).prop_map(Floats), prop::collection::vec(-1i32..8, 0..12).prop_map(Integers),
            prop::collection::vec(-1i32..8, 11).prop_map(Integers), prop::collection::vec(0i32..7, 262).prop_map(Integers),
        ],
    ) {
        let keys = if pairs { byte_pair() } else { sentence_pieces() };
        let key = keys.0[at.index(keys.0.len())].0.clone();
        if let Ok(tokenizer) = made(&keys.with(&key, value)) {
            for ids in [tokenizer.encode("the ab <tool> é", true), tokenizer.encode_chat("<s>ab<|end|> <tool>")] {
                let _ = tokenizer.decode(&ids.unwrap());
            }
        }
    }

    #[test]
    fn any_text_survives_a_byte_vocabulary(text in ".{0,60}") {
        for pre in ["llama-bpe", "smollm", "gpt-2", "default"] {
            let tokenizer = made(&byte_pair().with(PRE, Text(pre.into()))).unwrap();
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_str());
        }
    }
}
