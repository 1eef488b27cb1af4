//! What a `tokenizer.json` may hold before the `tokenizers` crate sees it.
//!
//! The crate panics on some malformed components and on some exotic ones. The families read here need few, so these are listed, and all others are
//! refused by name.

use std::collections::HashSet;

use serde_json::{Map, Value};
use zofo_hal::{Error, ErrorKind, Result};

use crate::files::json::brief;

/// A part of the file, the key under which a sequence of such parts lists its members, and the types that may stand there.
struct Part {
    key: &'static str,
    members: &'static str,
    types: &'static [&'static str],
}

const SEQUENCE: &str = "Sequence";

const PARTS: [Part; 4] = [
    Part { key: "normalizer", members: "normalizers", types: &["NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"] },
    Part { key: "pre_tokenizer", members: "pretokenizers", types: &["ByteLevel", "Digits", "Metaspace", "Split"] },
    Part { key: "post_processor", members: "processors", types: &["ByteLevel", "TemplateProcessing"] },
    Part { key: "decoder", members: "decoders", types: &["ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"] },
];

/// A file that passed, without what is not for the crate: the limits and the padding of the training run that wrote it, which would cut or fill
/// what is encoded, and the post-processor.
pub(super) struct Checked {
    pub(super) root: Map<String, Value>,
    /// The token that the post-processor puts in front of a text.
    pub(super) leading: Option<String>,
}

pub(super) fn check(bytes: &[u8]) -> Result<Checked> {
    let root = serde_json::from_slice(bytes)
        .map_err(|e| Error::format(format!("not a valid tokenizer.json ({e}); it may be cut short, fetch it again")))?;
    let Value::Object(mut root) = root else {
        return Err(Error::format("not a valid tokenizer.json: no JSON object"));
    };
    model(&root)?;
    for part in &PARTS {
        component(part, root.get(part.key).unwrap_or(&Value::Null))?;
    }
    let leading = match root.get("post_processor") {
        Some(processor) => leading_token(processor)?,
        None => None,
    };
    for key in ["truncation", "padding", "post_processor"] {
        root.remove(key);
    }
    Ok(Checked { root, leading })
}

/// What stands before the text in the template for a single one: `"single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": ..}, ..]`.
fn leading_token(processor: &Value) -> Result<Option<String>> {
    if let Value::Array(members) = &processor["processors"] {
        let mut all = Vec::new();
        for member in members {
            all.extend(leading_token(member)?);
        }
        return one(all);
    }
    let Value::Array(template) = &processor["single"] else { return Ok(None) };
    let before = template.iter().take_while(|piece| piece.get("Sequence").is_none());
    let names = before.map(|piece| {
        piece["SpecialToken"]["id"]
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| Error::format(format!("the post-processor's template has {}, which is neither text nor token", brief(piece))))
    });
    one(names.collect::<Result<_>>()?)
}

fn one(mut tokens: Vec<String>) -> Result<Option<String>> {
    if tokens.len() > 1 {
        return Err(Error::unsupported("the tokenizer begins a text with more than one special token, which is not supported"));
    }
    Ok(tokens.pop())
}

fn model(root: &Map<String, Value>) -> Result<()> {
    let Some(Value::Object(model)) = root.get("model") else {
        return Err(Error::format("not a valid tokenizer.json: `model` is missing"));
    };
    match model.get("type") {
        // Files of early versions do not name the type; only a byte-pair model has merges.
        Some(Value::String(t)) if t == "BPE" => {}
        None if model.contains_key("merges") => {}
        other => return Err(unsupported("model", other)),
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        match model.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::String(s)) if s.is_empty() => {}
            Some(value) => return Err(unsupported(key, Some(value))),
        }
    }
    match model.get("dropout") {
        None | Some(Value::Null) => Ok(()),
        Some(value) if value.as_f64() == Some(0.0) => Ok(()),
        Some(_) => Err(Error::unsupported("the tokenizer drops merges at random (`dropout`); set it to null in tokenizer.json")),
    }?;
    merges(model)
}

/// That every token has an id of its own and every merge makes a token from two tokens: the crate that runs the model takes both for granted.
fn merges(model: &Map<String, Value>) -> Result<()> {
    let Some(Value::Object(vocab)) = model.get("vocab") else {
        return Err(Error::format("not a valid tokenizer.json: the byte-pair model has no `vocab`"));
    };
    let mut ids = HashSet::with_capacity(vocab.len());
    for (token, id) in vocab {
        let id = id.as_u64().filter(|id| *id <= u64::from(u32::MAX));
        if !id.is_some_and(|id| ids.insert(id)) {
            return Err(Error::format(format!("not a valid tokenizer.json: the token {token:?} has no id of its own")));
        }
    }
    let Some(Value::Array(merges)) = model.get("merges") else { return Ok(()) };
    for merge in merges {
        let pair = match merge {
            Value::String(s) => s.split_once(' '),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(a), Value::String(b)] => Some((a.as_str(), b.as_str())),
                _ => None,
            },
            _ => None,
        };
        // A header line of the merge list, which some files carry along.
        if matches!(merge, Value::String(s) if s.starts_with("#version")) {
            continue;
        }
        let made = pair.filter(|(a, b)| vocab.contains_key(*a) && vocab.contains_key(*b) && vocab.contains_key(&format!("{a}{b}")));
        if made.is_none() {
            return Err(Error::format(format!(
                "not a valid tokenizer.json: the merge {} does not make a token from two tokens",
                brief(merge)
            )));
        }
    }
    Ok(())
}

fn component(part: &Part, value: &Value) -> Result<()> {
    let Value::Object(map) = value else {
        return match value {
            Value::Null => Ok(()),
            other => Err(Error::format(format!("`{}` must be an object, not {}", part.key, brief(other)))),
        };
    };
    match map.get("type").and_then(Value::as_str) {
        Some(SEQUENCE) => match map.get(part.members) {
            Some(Value::Array(members)) => members.iter().try_for_each(|m| match m {
                // Only a whole part may be null, not a member of a sequence.
                Value::Null => Err(unsupported(part.key, None)),
                _ => component(part, m),
            }),
            _ => Err(Error::format(format!("a sequence under `{}` lacks its list `{}`", part.key, part.members))),
        },
        Some("Strip") if map.get("stop").and_then(Value::as_u64) != Some(0) => {
            Err(Error::unsupported("a decoder that strips the end of the text is not supported"))
        }
        Some(name) if part.types.contains(&name) => Ok(()),
        _ => Err(unsupported(part.key, map.get("type"))),
    }
}

fn unsupported(key: &str, found: Option<&Value>) -> Error {
    let found = found.map_or("of no stated type".into(), brief);
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "the tokenizer's `{key}` is {found}, which is not supported; byte-pair tokenizers of the LLaMA, Mistral and Qwen2 families are"
        ),
    )
}
