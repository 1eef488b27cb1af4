//! `tokenizer.json`, run by the `tokenizers` crate, and the special tokens and the chat template that `tokenizer_config.json` declares beside it.

mod check;

use std::{fmt::Display, path::Path};

use serde_json::Value;
use zofo_hal::{Error, Result};

use crate::files::{json::Object, tokenizer::chat};

/// Largest `tokenizer_config.json` read, in bytes; chat templates and lists of added tokens make them long.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Names of the token that begins a sequence, where no file declares one.
pub(super) const KNOWN_BOS: [&str; 3] = ["<s>", "<|begin_of_text|>", "<|startoftext|>"];
/// Names of the token that ends a sequence, where no file declares one.
pub(super) const KNOWN_EOS: [&str; 4] = ["</s>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"];

/// What `tokenizer_config.json` declares.
#[derive(Default)]
pub(super) struct Specials {
    /// `None` where there is no such file; `Some(None)` where it declares that there is no such token.
    pub(super) bos: Option<Option<String>>,
    pub(super) eos: Option<Option<String>>,
    pub(super) add_bos: Option<bool>,
    /// From a file of its own, or from here.
    pub(super) chat_template: Option<String>,
}

impl Specials {
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer_config.json");
        if !path.is_file() {
            return Ok(Self { chat_template: chat::template(folder, None)?, ..Self::default() });
        }
        let json = Object::read(&path, MAX_CONFIG_BYTES)?;
        Ok(Self {
            bos: Some(token(&json, "bos_token")?),
            eos: Some(token(&json, "eos_token")?),
            add_bos: json.flag("add_bos_token")?,
            chat_template: chat::template(folder, Some(&json))?,
        })
    }
}

/// A token given as a string, or as an object with its `content`.
fn token(json: &Object, key: &str) -> Result<Option<String>> {
    match json.get(key) {
        None => Ok(None),
        Some(Value::Object(_)) => match json.object(key)? {
            Some(inner) => Ok(inner.text("content")?.map(str::to_owned)),
            None => Ok(None),
        },
        Some(_) => Ok(json.text(key)?.map(str::to_owned)),
    }
}

pub(super) struct HuggingFace {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    prefix: Option<u32>,
}

impl HuggingFace {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let check::Checked { root, leading } = check::check(bytes)?;
        let invalid = |e: &dyn Display| Error::format(format!("not a valid tokenizer.json ({e}); fetch the file again"));
        let clean = serde_json::to_vec(&root).map_err(|e| invalid(&e))?;
        let inner = tokenizers::Tokenizer::from_bytes(clean).map_err(|e| invalid(&e))?;
        for token in root.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            // The crate gives a token that is already in the vocabulary, or that comes in another order, another id.
            let (Some(text), Some(id)) = (token["content"].as_str(), token["id"].as_u64()) else { continue };
            let given = inner.token_to_id(text);
            if given.map(u64::from) != Some(id) {
                return Err(Error::format(format!(
                    "the added token `{}` should have id {id}, but the file's order gives it {given:?}",
                    text.escape_debug()
                )));
            }
        }
        let prefix = match leading {
            None => None,
            Some(name) => Some(inner.token_to_id(&name).ok_or_else(|| {
                Error::format(format!("the post-processor begins a text with `{}`, which is no token", name.escape_debug()))
            })?),
        };
        Self::assemble(inner, prefix)
    }

    /// Takes a tokenizer whose vocabulary and merges were checked.
    pub(super) fn assemble(inner: tokenizers::Tokenizer, prefix: Option<u32>) -> Result<Self> {
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = match largest {
            Some(id) => id as usize + 1,
            None => return Err(Error::format("the vocabulary is empty")),
        };
        Ok(Self { inner, vocab_size, prefix })
    }

    /// The token that the file's own post-processor puts in front of a text.
    pub(super) fn prefix(&self) -> Option<u32> {
        self.prefix
    }

    /// The declared token, or, where nothing is declared, the first of `known` that the vocabulary has.
    pub(super) fn special(&self, declared: &Option<Option<String>>, known: &[&str]) -> Option<u32> {
        match declared {
            Some(token) => self.token_id(token.as_deref()?),
            None => known.iter().find_map(|t| self.token_id(t)),
        }
    }

    pub(super) fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        ids.extend_from_slice(self.inner.encode_fast(text, false).map_err(failed)?.get_ids());
        Ok(())
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(failed)
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }
}

fn failed(e: tokenizers::Error) -> Error {
    Error::format(format!("the tokenizer failed: {e}"))
}

/// The last tokens of a stream. They are decoded together, because a token's text may depend on the one before it.
#[derive(Default)]
pub(super) struct Window {
    ids: Vec<u32>,
    /// How many of `ids` were given out as text.
    given: usize,
}

impl Window {
    pub(super) fn push(&mut self, model: &HuggingFace, id: u32) -> Result<String> {
        self.ids.push(id);
        let new = self.pending(model)?;
        // A character whose last bytes have not come yet decodes to U+FFFD.
        if new.is_empty() || new.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok(new)
    }

    pub(super) fn finish(self, model: &HuggingFace) -> Result<String> {
        self.pending(model)
    }

    /// The text of what was not given out yet.
    fn pending(&self, model: &HuggingFace) -> Result<String> {
        let (before, after) = self.ids.split_at(self.given);
        let all = model.decode(&self.ids)?;
        match all.strip_prefix(model.decode(before)?.as_str()) {
            Some(new) => Ok(new.to_owned()),
            // Bytes that are no UTF-8 turned text that was given out into U+FFFD after the fact.
            None => model.decode(after),
        }
    }
}
