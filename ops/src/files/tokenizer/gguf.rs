//! The tokenizer inside a GGUF file: the keys `tokenizer.ggml.*` (ggml `docs/gguf.md`; meanings and defaults are those of llama.cpp's
//! `llama-vocab.cpp`).
//!
//! | `tokenizer.ggml.model` | what it is | what runs it |
//! |---|---|---|
//! | `llama` | SentencePiece byte-pair pieces with scores | [`super::sentencepiece`] |
//! | `gpt2` | byte-level byte-pair merges behind a pre-tokenizer named by `tokenizer.ggml.pre` | the `tokenizers` crate, as for `tokenizer.json` |

mod byte_pair;
mod pieces;
mod pre;

use std::collections::HashMap;

use zofo_hal::{Error, Result};

use super::{Engine, Tokenizer};
use crate::files::gguf::Metadata;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
const TIDY_SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
const CHAT: &str = "tokenizer.chat_template";
/// Tokens that end a turn or a message, beside the one that ends a text.
const TURN_ENDS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    /// Fills the vocabulary up.
    Unused,
    Byte,
}

impl Kind {
    fn of(number: i64) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            // 0 is what converters leave where they know nothing of a token.
            0 | 5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// Tokens, no two spelled alike, with their kinds, where the file lists kinds; a token's position is its id.
struct Vocabulary<'a> {
    tokens: &'a [String],
    ids: HashMap<&'a str, u32>,
    kinds: Option<Vec<Kind>>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self> {
        let tokens = metadata.texts(TOKENS)?.ok_or_else(|| Error::format(format!("`{TOKENS}` is missing")))?;
        if tokens.is_empty() {
            return Err(Error::format(format!("`{TOKENS}` is empty")));
        }
        if u32::try_from(tokens.len()).is_err() {
            return Err(Error::format(format!("`{TOKENS}` has {} tokens, more than 32-bit ids can name", tokens.len())));
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in (0u32..).zip(tokens) {
            if token.is_empty() {
                return Err(Error::format(format!("`{TOKENS}`: token {id} is empty")));
            }
            if let Some(first) = ids.insert(token.as_str(), id) {
                return Err(Error::format(format!("`{TOKENS}`: token {id} `{}` is spelled like token {first}", brief(token))));
            }
        }
        let kinds = match metadata.integers(TYPES)? {
            None => None,
            Some(numbers) => {
                same_length(TYPES, numbers.len(), tokens.len())?;
                let kinds = numbers.iter().enumerate().map(|(at, number)| {
                    Kind::of(*number)
                        .ok_or_else(|| Error::format(format!("`{TYPES}`: token {at} is of type {number}, which is none of GGUF")))
                });
                Some(kinds.collect::<Result<_>>()?)
            }
        };
        Ok(Self { tokens, ids, kinds })
    }

    fn kind(&self, id: usize) -> Kind {
        self.kinds.as_ref().map_or(Kind::Normal, |k| k[id])
    }

    /// The token that `key` names.
    fn id(&self, metadata: &Metadata, key: &str) -> Result<Option<u32>> {
        let Some(id) = metadata.count(key)? else { return Ok(None) };
        let known = u32::try_from(id).ok().filter(|id| (*id as usize) < self.tokens.len());
        known.map(Some).ok_or_else(|| Error::format(format!("`{key}` is {id}, but there are {} tokens", self.tokens.len())))
    }
}

/// An engine, what it begins and ends texts with, and what to tell people about it.
struct Made {
    engine: Engine,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Whether a text begins with `bos` where the file says nothing.
    adds_bos: bool,
    description: String,
}

impl Tokenizer {
    /// The tokenizer inside a GGUF file.
    ///
    /// # Errors
    /// `Unsupported` for kinds of tokenizer and pre-tokenizer that are not computed here, with those that are; `Format`, naming the key and the
    /// token's position, where lists differ in length, tokens repeat, merges make no token, or an id lies outside the vocabulary.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self> {
        let kind = metadata.text(MODEL)?.ok_or_else(|| Error::format(format!("`{MODEL}` is missing; the file has no tokenizer")))?;
        let make = match kind {
            "llama" => pieces::make,
            "gpt2" => byte_pair::make,
            other => {
                return Err(Error::unsupported(format!(
                    "`{MODEL}` is `{}`, which is not supported; llama (SentencePiece byte-pair) and gpt2 (byte-level byte-pair) are",
                    brief(other)
                )));
            }
        };
        let vocabulary = Vocabulary::read(metadata)?;
        let made = make(metadata, &vocabulary)?;
        let asked = metadata.flag(ADD_BOS)?;
        let prefix = match (asked, made.bos) {
            (Some(true), None) => return Err(Error::format(format!("`{ADD_BOS}` is true, but there is no `{BOS}`"))),
            (asked, bos) => bos.filter(|_| asked.unwrap_or(made.adds_bos)),
        };
        let template = metadata.text(CHAT)?.map(str::to_owned);
        let mut tokenizer = Self::assemble(made.engine, (made.bos, made.eos, prefix), template, made.description);
        for key in TURN_ENDS {
            tokenizer.turn_ends.extend(vocabulary.id(metadata, key)?);
        }
        Ok(tokenizer)
    }
}

/// A text as shown in an error: hostile ones may be long.
fn brief(text: &str) -> String {
    text.chars().take(60).collect::<String>().escape_debug().to_string()
}

fn same_length(key: &str, found: usize, tokens: usize) -> Result<()> {
    if found == tokens {
        return Ok(());
    }
    Err(Error::format(format!("`{key}` has {found} entries for {tokens} tokens")))
}
