//! Goldens in `../data` are from Python's sentencepiece and tokenizers: see `make_tokenizer_goldens.py` there.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};
use zofo_hal::ErrorKind;
use zofo_ops::files::{
    Tokenizer,
    tokenizer::sentencepiece::{Options, Piece, PieceKind, SentencePiece},
};

use crate::support::refused;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn golden(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(data(name)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = tokenizer.stream();
    let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    text += &stream.finish().unwrap();
    text
}

/// Compares every text and every sequence of a golden file; `exact_stream` says whether streams are held to them too where bytes are no UTF-8.
#[track_caller]
fn agrees(tokenizer: &Tokenizer, golden: &Value, exact_stream: bool) {
    for pair in golden["encode"].as_array().unwrap() {
        let text = pair[0].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&pair[1]), "{text:?}");
    }
    for pair in golden["decode"].as_array().unwrap() {
        let (ids, text) = (ids(&pair[0]), pair[1].as_str().unwrap());
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{ids:?}");
        if exact_stream || !text.contains('\u{FFFD}') {
            assert_eq!(streamed(tokenizer, &ids), text, "stream of {ids:?}");
        }
    }
}

#[test]
fn sentencepiece_with_bytes_and_kept_spaces() {
    agrees(&Tokenizer::open(&data("spaces_bytes.model")).unwrap(), &golden("spaces_bytes_golden.json"), true);
}

#[test]
fn sentencepiece_with_unknowns_and_tidied_spaces() {
    agrees(&Tokenizer::open(&data("unknown_tidy.model")).unwrap(), &golden("unknown_tidy_golden.json"), true);
}

#[test]
fn sentencepiece_with_merges_of_equal_score() {
    agrees(&Tokenizer::open(&data("ties.model")).unwrap(), &golden("ties_golden.json"), true);
}

#[test]
fn sentencepiece_of_stories260k() {
    let path = zofo_testkit::shared_or_skip!("models/stories260K/tok512.model");
    let tokenizer = Tokenizer::open(&path).unwrap();
    agrees(&tokenizer, &golden("tok512_golden.json"), true);
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos(), tokenizer.eos()), (512, Some(1), Some(2)));
    assert_eq!(tokenizer.token_id("<s>"), Some(1));
    assert_eq!(tokenizer.token_id("\u{2581}the"), Some(265));
    assert_eq!(tokenizer.token_id("none of these"), None);
}

#[test]
fn the_prompt_of_the_adapter_golden_goes_both_ways() {
    let golden = zofo_testkit::shared_or_skip!("models/stories260K/peft_adapter_r4/golden.json");
    let folder = zofo_testkit::shared_or_skip!("models/stories260K/hf");
    let golden: Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let prompt = ids(&golden["prompt_ids"]);
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let text = tokenizer.decode(&prompt).unwrap();
    let story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.";
    assert!(text.len() > 20 && story.starts_with(&text), "{text}");
    assert_eq!(tokenizer.encode(&text, true).unwrap(), prompt);
}

/// `tokenizer.json` in the style of Llama 2, Qwen2 and Llama 3.
#[test]
fn tokenizer_json() {
    for (name, leads, exact) in [("llama2_style", true, false), ("bytelevel_plain", false, false), ("bytelevel_bos", true, false)] {
        let golden = golden(&format!("{name}_golden.json"));
        let tokenizer = Tokenizer::open(&data(&format!("{name}.json"))).unwrap();
        agrees(&tokenizer, &golden, exact);
        for pair in golden["encode_bos"].as_array().unwrap() {
            assert_eq!(tokenizer.encode(pair[0].as_str().unwrap(), true).unwrap(), ids(&pair[1]), "{name}: {pair}");
        }
        let id = |key: &str| golden[key].as_u64().map(|v| v as u32);
        assert_eq!(tokenizer.eos(), id("eos"), "{name}");
        if leads {
            assert_eq!(tokenizer.bos(), id("bos"), "{name}");
        }
    }
}

#[test]
fn tokenizer_config_declares_the_special_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::copy(data("bytelevel_plain.json"), at("tokenizer.json")).unwrap();
    let open = |config: &str| {
        std::fs::write(at("tokenizer_config.json"), config).unwrap();
        Tokenizer::open(folder.path())
    };
    let qwen = open(r#"{"bos_token": null, "eos_token": {"content": "<|endoftext|>"}, "add_bos_token": false}"#).unwrap();
    assert_eq!((qwen.bos(), qwen.eos()), (None, qwen.token_id("<|endoftext|>")));
    assert_eq!(qwen.encode("cat", true).unwrap(), qwen.encode("cat", false).unwrap());
    let adds = open(r#"{"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>", "add_bos_token": true}"#).unwrap();
    assert_eq!(adds.encode("cat", true).unwrap()[0], adds.token_id("<|begin_of_text|>").unwrap());
    refused(open("{\"bos_token\": 3}"), ErrorKind::Format, &["bos_token", "string"]);
}

#[test]
fn a_folder_s_chat_template_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::copy(data("bytelevel_plain.json"), at("tokenizer.json")).unwrap();
    let open = || Tokenizer::open(folder.path());
    let template = || open().unwrap().chat_template().map(str::to_owned);
    assert_eq!(template(), None);
    let config = |value: Value| std::fs::write(at("tokenizer_config.json"), json!({"chat_template": value}).to_string()).unwrap();
    config(json!("one"));
    assert_eq!(template().as_deref(), Some("one"));
    config(json!([{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]));
    assert_eq!(template().as_deref(), Some("three"));
    config(json!([{"name": "tool_use", "template": "two"}]));
    assert_eq!(template(), None);
    config(json!([{"name": "default"}]));
    refused(open(), ErrorKind::Format, &["tokenizer_config.json", "chat_template", "lacks"]);
    config(json!(3));
    refused(open(), ErrorKind::Format, &["tokenizer_config.json", "chat_template"]);
    config(json!("one"));
    std::fs::write(at("chat_template.jinja"), "four").unwrap();
    assert_eq!(template().as_deref(), Some("four"));
    std::fs::write(at("chat_template.jinja"), [0xff]).unwrap();
    refused(open(), ErrorKind::Format, &["chat_template.jinja", "UTF-8"]);
}

#[test]
fn a_folder_is_searched_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    refused(Tokenizer::open(folder.path()), ErrorKind::Io, &["no tokenizer", "tokenizer.json", "tokenizer.model", "*.model"]);
    std::fs::copy(data("unknown_tidy.model"), at("some.model")).unwrap();
    assert_eq!(Tokenizer::open(folder.path()).unwrap().vocab_size(), 120);
    std::fs::copy(data("unknown_tidy.model"), at("other.model")).unwrap();
    refused(Tokenizer::open(folder.path()), ErrorKind::Io, &["other.model", "name the right one tokenizer.model"]);
    std::fs::copy(data("spaces_bytes.model"), at("tokenizer.model")).unwrap();
    assert_eq!(Tokenizer::open(folder.path()).unwrap().vocab_size(), 380);
    std::fs::copy(data("bytelevel_plain.json"), at("tokenizer.json")).unwrap();
    assert_eq!(Tokenizer::open(folder.path()).unwrap().vocab_size(), 330);
    refused(Tokenizer::open(&at("none.model")), ErrorKind::Io, &["none.model"]);
}

#[test]
fn ids_outside_the_vocabulary_give_no_text() {
    for name in ["spaces_bytes.model", "bytelevel_plain.json"] {
        let tokenizer = Tokenizer::open(&data(name)).unwrap();
        let mut ids = tokenizer.encode("the cat", false).unwrap();
        ids.insert(1, u32::MAX);
        assert_eq!(tokenizer.decode(&ids).unwrap(), "the cat", "{name}");
    }
}

#[test]
fn other_kinds_of_model_are_refused_by_name() {
    let bad = |bytes: &[u8], kind, part| refused(Tokenizer::from_sentencepiece(bytes), kind, &[part]);
    // Field 2 (trainer), field 3 (model type): unigram, which is also the default.
    bad(&[0x12, 0x02, 0x18, 0x01], ErrorKind::Unsupported, "unigram");
    bad(&[], ErrorKind::Unsupported, "unigram");
    bad(&[0x12, 0x02, 0x18, 0x02], ErrorKind::Format, "no piece is the unknown piece");
    bad(b"\xff\xff\xff\xff", ErrorKind::Format, "not a SentencePiece model");
    // Field 3 (normalizer), field 2 (character map).
    bad(&[0x12, 0x02, 0x18, 0x02, 0x1a, 0x03, 0x12, 0x01, 0x00], ErrorKind::Unsupported, "normalisation");
    refused(Tokenizer::from_tokenizer_json(b"{}"), ErrorKind::Format, &["not a valid tokenizer.json"]);
}

#[test]
fn exotic_parts_of_a_tokenizer_json_are_refused_by_name() {
    let whole: Value = serde_json::from_slice(&std::fs::read(data("bytelevel_bos.json")).unwrap()).unwrap();
    let with = |at: &str, value: Value| {
        let mut changed = whole.clone();
        *changed.pointer_mut(at).unwrap() = value;
        Tokenizer::from_tokenizer_json(changed.to_string().as_bytes())
    };
    for (at, value, part) in [
        ("/model/type", json!("Unigram"), "Unigram"),
        ("/model/dropout", json!(0.1), "dropout"),
        ("/model/continuing_subword_prefix", json!("##"), "continuing_subword_prefix"),
        ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AA=="}), "Precompiled"),
        ("/pre_tokenizer", json!({"type": "FixedLength", "length": 0}), "FixedLength"),
        ("/pre_tokenizer", json!({"type": "Sequence", "pretokenizers": [{"type": "BertPreTokenizer"}]}), "BertPreTokenizer"),
        ("/post_processor", json!({"type": "RobertaProcessing"}), "RobertaProcessing"),
        ("/decoder", json!({"type": "Strip", "content": " ", "start": 0, "stop": 1}), "strips the end"),
        ("/decoder", json!({"no": "type"}), "decoder"),
    ] {
        refused(with(at, value), ErrorKind::Unsupported, &[part]);
    }
    refused(with("/decoder", json!(5)), ErrorKind::Format, &["decoder", "object"]);
    refused(with("/model/vocab", json!({})), ErrorKind::Format, &["not a valid tokenizer.json"]);
    refused(with("/added_tokens/0/id", json!(77)), ErrorKind::Format, &["should have id 77"]);
}

fn piece(text: &str, kind: PieceKind) -> Piece {
    Piece { text: text.into(), score: 0.0, kind }
}

#[test]
fn inconsistent_vocabularies_are_refused() {
    let options = Options {
        add_dummy_prefix: true,
        remove_extra_whitespaces: false,
        byte_fallback: false,
        unknown_text: String::new(),
        bos: None,
        eos: None,
    };
    let unknown = piece("<unk>", PieceKind::Unknown);
    let make = |extra: Vec<Piece>, options: &Options| {
        let mut all = vec![unknown.clone()];
        all.extend(extra);
        SentencePiece::new(all, options.clone())
    };
    let format = ErrorKind::Format;
    assert!(make(vec![], &options).is_ok());
    refused(make(vec![piece("a", PieceKind::Normal), piece("a", PieceKind::Normal)], &options), format.clone(), &["piece 2 `a`", "twice"]);
    refused(make(vec![piece("<u>", PieceKind::Unknown)], &options), format.clone(), &["second unknown"]);
    refused(make(vec![piece("", PieceKind::Normal)], &options), format.clone(), &["empty"]);
    let nan = Piece { score: f32::NAN, ..piece("a", PieceKind::Normal) };
    refused(make(vec![nan], &options), format.clone(), &["not a number"]);
    refused(make(vec![], &Options { byte_fallback: true, ..options.clone() }), format.clone(), &["byte 0x00"]);
    refused(make(vec![], &Options { eos: Some(1), ..options.clone() }), format, &["outside the vocabulary"]);
}

/// Replaces the value that is the `at`th of a depth-first walk. Long lists and vocabularies are entered at a few places only.
fn replace(node: &mut Value, at: &mut usize, with: &Value) -> bool {
    if *at == 0 {
        *node = with.clone();
        return true;
    }
    *at -= 1;
    match node {
        Value::Array(list) => list.iter_mut().take(4).any(|v| replace(v, at, with)),
        Value::Object(map) => map.values_mut().take(12).any(|v| replace(v, at, with)),
        _ => false,
    }
}

proptest! {
    #[test]
    fn changed_structures_never_panic(at in 1usize..120, with in prop_oneof![
        Just(json!(null)), Just(json!([])), Just(json!({})), Just(json!("")), Just(json!("a")), Just(json!(true)), Just(json!(-1)),
        Just(json!(1.5)), Just(json!(u64::MAX)), Just(json!([["a", "b"]])), Just(json!({"type": "Sequence"})), (0u32..400).prop_map(|v| json!(v)),
        Just(json!({"Regex": "(((a+)+)+)+$"})), Just(json!({"Regex": ""})), Just(json!({"String": ""})),
        Just(json!("MergedWithNext")), Just(json!({"a": 4_000_000_000u32})),
    ]) {
        for name in ["llama2_style.json", "bytelevel_bos.json"] {
            let mut root: Value = serde_json::from_slice(&std::fs::read(data(name)).unwrap()).unwrap();
            replace(&mut root, &mut at.clone(), &with);
            if let Ok(tokenizer) = Tokenizer::from_tokenizer_json(root.to_string().as_bytes()) {
                let ids = tokenizer.encode("the  cat aaaaaaaaaa é🦙 <s>", true);
                let _ = streamed(&tokenizer, &ids.unwrap_or_default());
            }
        }
    }

    #[test]
    fn any_text_survives_a_byte_vocabulary(text in ".{0,60}") {
        let tokenizer = Tokenizer::open(&data("spaces_bytes.model")).unwrap();
        // A literal U+2581 is a space to the format, so it does not come back.
        let text = text.replace('\u{2581}', "_");
        let ids = tokenizer.encode(&text, true).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_str());
        prop_assert_eq!(streamed(&tokenizer, &ids), text.as_str());
        let tokenizer = Tokenizer::open(&data("bytelevel_bos.json")).unwrap();
        let ids = tokenizer.encode(&text, true).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_str());
        prop_assert_eq!(streamed(&tokenizer, &ids), text.as_str());
    }

    #[test]
    fn streams_of_any_ids_do_not_panic(ids in prop::collection::vec(0u32..400, 0..30)) {
        for name in ["spaces_bytes.model", "unknown_tidy.model"] {
            let tokenizer = Tokenizer::open(&data(name)).unwrap();
            prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids).unwrap());
        }
        let _ = streamed(&Tokenizer::open(&data("llama2_style.json")).unwrap(), &ids);
    }

    #[test]
    fn changed_files_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut in any::<prop::sample::Index>()) {
        for name in ["unknown_tidy.model", "spaces_bytes.model", "llama2_style.json", "bytelevel_bos.json"] {
            let whole = std::fs::read(data(name)).unwrap();
            let mut changed = whole.clone();
            for (at, byte) in &changes {
                changed[at.index(whole.len())] = *byte;
            }
            for bytes in [&changed[..], &whole[..cut.index(whole.len())]] {
                let made = if name.ends_with("json") { Tokenizer::from_tokenizer_json(bytes) } else { Tokenizer::from_sentencepiece(bytes) };
                if let Ok(tokenizer) = made {
                    let ids = tokenizer.encode("the  cat é🦙", true);
                    let _ = tokenizer.decode(&ids.unwrap_or_default());
                }
            }
        }
    }
}

/// The crate behind indexes with what a merge says; both cases panicked in it.
#[test]
fn merges_and_ids_that_do_not_fit_are_refused() {
    for (model, part) in [
        (r#"{"type":"BPE","vocab":{"a":1,"O":1},"merges":["a O"]}"#, "no id of its own"),
        (r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}"#, "does not make a token"),
        (r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":["ab"]}"#, "does not make a token"),
        (r#"{"type":"BPE","vocab":{"a":0,"b":-1},"merges":[]}"#, "no id of its own"),
    ] {
        let text = format!(r#"{{"model":{model}}}"#);
        let e = Tokenizer::from_tokenizer_json(text.as_bytes()).err().unwrap();
        assert!(e.message().contains(part), "{text}: {e}");
    }
}
