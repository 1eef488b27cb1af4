//! Text to token ids and back: Hugging Face `tokenizer.json`, SentencePiece `tokenizer.model`, and the tokenizer inside a GGUF file.
//!
//! `tokenizer.json` runs on the `tokenizers` crate, the format's own implementation. SentencePiece models of the LLaMA family are byte-pair models;
//! they run on [`sentencepiece`], which reproduces the original's merge order, also where two merges are equally good. What a GGUF file holds is one
//! or the other.

mod chat;
mod gguf;
mod huggingface;
pub mod sentencepiece;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use zofo_hal::{Error, ErrorKind, Result};

use self::{
    huggingface::{HuggingFace, Specials},
    sentencepiece::{SentencePiece, TextState},
};
use super::json::read_limited;

/// Largest tokenizer file read, in bytes.
const MAX_BYTES: u64 = 256 << 20;
const JSON: &str = "tokenizer.json";
const MODEL: &str = "tokenizer.model";

/// A tokenizer. The same text gives the same ids on every run and machine.
pub struct Tokenizer {
    engine: Engine,
    bos: Option<u32>,
    eos: Option<u32>,
    /// What the model was trained to see first, where anything.
    prefix: Option<u32>,
    turn_ends: Vec<u32>,
    chat_template: Option<String>,
    description: String,
}

/// Spellings of tokens that end a turn or a text, in the families read here.
const KNOWN_TURN_ENDS: [&str; 8] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"];

enum Engine {
    SentencePiece(Box<SentencePiece>),
    HuggingFace(Box<HuggingFace>),
}

impl Tokenizer {
    /// Opens a tokenizer file, or a folder with `tokenizer.json`, `tokenizer.model` or one other `.model` file, looked for in that order.
    ///
    /// # Errors
    /// `Io` where none is there (the message says what was looked for), `Format` where it is malformed, `Unsupported` where it is of a kind that
    /// is not computed here.
    pub fn open(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { find(path)? } else { path.to_owned() };
        let bytes = read_limited(&file, MAX_BYTES)?;
        let specials = file.parent().map(Specials::read).transpose()?.unwrap_or_default();
        let made = if file.extension().is_some_and(|e| e == "json") {
            Self::from_json(&bytes, &specials)
        } else {
            Self::from_model(&bytes, &specials)
        };
        made.map_err(|e| e.context(file.display()))
    }

    /// A tokenizer from the bytes of a SentencePiece model. Errors are those of [`Tokenizer::open`].
    pub fn from_sentencepiece(bytes: &[u8]) -> Result<Self> {
        Self::from_model(bytes, &Specials::default())
    }

    /// A tokenizer from the text of a `tokenizer.json`. Errors are those of [`Tokenizer::open`].
    pub fn from_tokenizer_json(bytes: &[u8]) -> Result<Self> {
        Self::from_json(bytes, &Specials::default())
    }

    fn from_model(bytes: &[u8], specials: &Specials) -> Result<Self> {
        let model = SentencePiece::parse(bytes)?;
        let (bos, eos) = (model.bos(), model.eos());
        let description = format!("SentencePiece, {} pieces", model.len());
        let prefix = if specials.add_bos == Some(false) { None } else { bos };
        Ok(Self::assemble(Engine::SentencePiece(Box::new(model)), (bos, eos, prefix), specials.chat_template.clone(), description))
    }

    fn from_json(bytes: &[u8], specials: &Specials) -> Result<Self> {
        let model = HuggingFace::parse(bytes)?;
        let prefix = model.prefix();
        let bos = model.special(&specials.bos, &huggingface::KNOWN_BOS).or(prefix);
        let eos = model.special(&specials.eos, &huggingface::KNOWN_EOS);
        let description = format!("tokenizer.json, {} tokens", model.vocab_size());
        let prefix = prefix.or(if specials.add_bos == Some(true) { bos } else { None });
        Ok(Self::assemble(Engine::HuggingFace(Box::new(model)), (bos, eos, prefix), specials.chat_template.clone(), description))
    }

    fn assemble(
        engine: Engine,
        (bos, eos, prefix): (Option<u32>, Option<u32>, Option<u32>),
        chat_template: Option<String>,
        description: String,
    ) -> Self {
        let mut made = Self { engine, bos, eos, prefix, turn_ends: Vec::new(), chat_template, description };
        made.turn_ends = eos.into_iter().chain(KNOWN_TURN_ENDS.iter().filter_map(|name| made.token_id(name))).collect();
        made
    }

    /// The ids of `text`. With `add_bos` the sequence begins as the model was trained to see it begin: with the token that begins a sequence, or,
    /// for families that have none (Qwen2), with nothing.
    ///
    /// In a `tokenizer.json`, text that spells a special token becomes that token; in a SentencePiece model it stays text.
    ///
    /// # Errors
    /// `InvalidArgument` where the text is too long for 32-bit positions, `Format` where the tokenizer itself fails on it.
    pub fn encode(&self, text: &str, add_bos: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(1 + text.len() / 2);
        ids.extend(self.prefix.filter(|_| add_bos));
        match &self.engine {
            Engine::SentencePiece(model) => model.encode_into(text, &mut ids)?,
            Engine::HuggingFace(model) => model.encode_into(text, &mut ids)?,
        }
        Ok(ids)
    }

    /// The ids of a conversation that a [template](Tokenizer::chat_template) wrote: control tokens that the text spells become those tokens, also
    /// in a SentencePiece model, and nothing is put in front, because a template writes what a conversation begins with.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 2);
        match &self.engine {
            Engine::SentencePiece(model) => model.encode_marked_into(text, &mut ids)?,
            Engine::HuggingFace(model) => model.encode_into(text, &mut ids)?,
        }
        Ok(ids)
    }

    /// The text of `ids`. Control tokens and ids outside the vocabulary (a model may have more rows than its tokenizer has tokens) give nothing;
    /// bytes that are no UTF-8 give U+FFFD.
    ///
    /// # Errors
    /// `Format` where the decoder of a `tokenizer.json` fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.engine {
            Engine::SentencePiece(model) => Ok(model.decode(ids)),
            Engine::HuggingFace(model) => model.decode(ids),
        }
    }

    /// A decoder that takes one id after the other and gives text as soon as it is certain.
    pub fn stream(&self) -> DecodeStream<'_> {
        let state = match &self.engine {
            Engine::SentencePiece(model) => StreamState::SentencePiece(model, TextState::default()),
            Engine::HuggingFace(model) => StreamState::HuggingFace(model, huggingface::Window::default()),
        };
        DecodeStream { state }
    }

    /// One more than the largest id. A model needs at least that many embedding rows.
    pub fn vocab_size(&self) -> usize {
        match &self.engine {
            Engine::SentencePiece(model) => model.len(),
            Engine::HuggingFace(model) => model.vocab_size(),
        }
    }

    /// The token that begins a sequence, where one is declared.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a sequence, where one is declared.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Tokens that end a turn of a conversation, as far as the vocabulary tells, with the one that ends a text.
    pub fn turn_ends(&self) -> &[u32] {
        &self.turn_ends
    }

    /// The Jinja template that writes a conversation as the model was trained to see it, where the model comes with one. It is as untrusted as the
    /// rest of the model.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// What it is, in a few words for people: its kind, what splits its text, its size.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// How the token is spelled in the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<String> {
        match &self.engine {
            Engine::SentencePiece(model) => model.piece_text(id).map(str::to_owned),
            Engine::HuggingFace(model) => model.token_text(id),
        }
    }

    /// The id of the token that is spelled `text` in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        match &self.engine {
            Engine::SentencePiece(model) => model.piece_id(text),
            Engine::HuggingFace(model) => model.token_id(text),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({})", self.description)
    }
}

/// Decodes a sequence id by id: what [`DecodeStream::push`] and then [`DecodeStream::finish`] give, put together, is what [`Tokenizer::decode`]
/// gives for the whole sequence. (With a `tokenizer.json` whose vocabulary falls back to bytes, byte tokens that are no UTF-8 may give another number
/// of U+FFFD.)
pub struct DecodeStream<'a> {
    state: StreamState<'a>,
}

enum StreamState<'a> {
    SentencePiece(&'a SentencePiece, TextState),
    HuggingFace(&'a HuggingFace, huggingface::Window),
}

impl DecodeStream<'_> {
    /// Takes one id and gives the text that it completes, which may be empty: characters of several tokens appear with their last one.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        match &mut self.state {
            StreamState::SentencePiece(model, state) => {
                let mut out = String::new();
                state.push(model, id, &mut out);
                Ok(out)
            }
            StreamState::HuggingFace(model, window) => window.push(model, id),
        }
    }

    /// Gives what was held back.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String> {
        match self.state {
            StreamState::SentencePiece(_, mut state) => {
                let mut out = String::new();
                state.finish(&mut out);
                Ok(out)
            }
            StreamState::HuggingFace(model, window) => window.finish(model),
        }
    }
}

/// The tokenizer file of a folder.
fn find(folder: &Path) -> Result<PathBuf> {
    for name in [JSON, MODEL] {
        let path = folder.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    let io = |e| Error::io(folder, e);
    let mut models = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|e| e == "model") && path.is_file() {
            models.push(path);
        }
    }
    models.sort();
    match models.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Error::new(
            ErrorKind::Io,
            format!(
                "{}: no tokenizer is here; looked for {JSON}, {MODEL} and *.model, put one of them beside the weights",
                folder.display()
            ),
        )),
        several => Err(Error::new(
            ErrorKind::Io,
            format!("{}: {} and others could be the tokenizer; name the right one {MODEL}", folder.display(), several[0].display()),
        )),
    }
}
