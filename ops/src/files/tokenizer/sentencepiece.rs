//! SentencePiece byte-pair models, encoded and decoded as the original does (google/sentencepiece: `bpe_model.cc`, `normalizer.cc`,
//! `sentencepiece_processor.cc`).

mod markers;
mod merge;
mod proto;
mod text;

use std::collections::HashMap;

use zofo_hal::{Error, Result};

pub(super) use proto::byte as byte_of;
pub use text::TextState;

use self::markers::Markers;

/// What stands for a space inside pieces.
const SPACE: char = '\u{2581}';
/// The same as a text.
pub(super) const SPACE_TEXT: &str = "\u{2581}";
/// What the unknown piece decodes to where a model says nothing.
pub(super) const DEFAULT_UNKNOWN_TEXT: &str = " \u{2047} ";

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    /// Made by merging.
    Normal,
    /// Stands for text outside the vocabulary.
    Unknown,
    /// Stands for no text: begin, end, padding.
    Control,
    /// Found in the text before anything is merged.
    UserDefined,
    /// One byte of text outside the vocabulary.
    Byte(u8),
    /// Fills the vocabulary up: no text becomes it, and it becomes no text.
    Unused,
}

/// One entry of the vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// As spelled, with U+2581 for a space.
    pub text: String,
    /// The merge with the highest score goes first.
    pub score: f32,
    /// What it is.
    pub kind: PieceKind,
}

/// Settings of a model beside its pieces.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Puts a space in front of the text, so that its first word looks like any other.
    pub add_dummy_prefix: bool,
    /// Drops leading and trailing spaces and joins runs of them.
    pub remove_extra_whitespaces: bool,
    /// Spells characters outside the vocabulary as bytes.
    pub byte_fallback: bool,
    /// What the unknown piece decodes to.
    pub unknown_text: String,
    /// Id of the piece that begins a sequence.
    pub bos: Option<u32>,
    /// Id of the piece that ends a sequence.
    pub eos: Option<u32>,
}

/// A byte-pair vocabulary with its settings.
#[derive(Clone, Debug)]
pub struct SentencePiece {
    pieces: Vec<Piece>,
    options: Options,
    /// Pieces that text can become: normal and user-defined ones.
    mergeable: HashMap<String, u32>,
    /// All others, found by name only.
    reserved: HashMap<String, u32>,
    /// Longest first.
    user_defined: Vec<String>,
    markers: Markers,
    unknown: u32,
    bytes: Option<Box<[u32; 256]>>,
}

impl SentencePiece {
    /// Parses a `.model` file.
    ///
    /// # Errors
    /// `Format` where it is malformed, `Unsupported` where it is no byte-pair model or normalises its text.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let (pieces, options) = proto::parse(bytes)?;
        Self::new(pieces, options)
    }

    /// Puts a vocabulary together; a piece's position is its id.
    ///
    /// # Errors
    /// `Format` where two pieces are spelled alike, none is the unknown piece, a score is not a number, an id is out of range, or bytes are missing
    /// where `byte_fallback` needs them.
    pub fn new(pieces: Vec<Piece>, options: Options) -> Result<Self> {
        if u32::try_from(pieces.len()).is_err() {
            return Err(Error::format(format!("{} pieces are more than 32-bit ids can name", pieces.len())));
        }
        let (mut mergeable, mut reserved) = (HashMap::new(), HashMap::new());
        let mut bytes = [None; 256];
        let mut unknown = None;
        for (id, piece) in (0u32..).zip(&pieces) {
            let shown = piece.text.escape_debug();
            if piece.text.is_empty() {
                return Err(Error::format(format!("piece {id} is empty")));
            }
            if piece.score.is_nan() {
                return Err(Error::format(format!("the score of piece {id} `{shown}` is not a number")));
            }
            let map = match piece.kind {
                PieceKind::Normal | PieceKind::UserDefined => &mut mergeable,
                _ => &mut reserved,
            };
            if map.insert(piece.text.clone(), id).is_some() {
                return Err(Error::format(format!("piece {id} `{shown}` is there twice")));
            }
            match piece.kind {
                PieceKind::Byte(b) => bytes[b as usize] = Some(id),
                PieceKind::Unknown if unknown.replace(id).is_some() => {
                    return Err(Error::format(format!("piece {id} `{shown}` is a second unknown piece")));
                }
                _ => {}
            }
        }
        let unknown = unknown.ok_or_else(|| Error::format("no piece is the unknown piece"))?;
        let bytes = match options.byte_fallback {
            false => None,
            true => {
                let mut all = Box::new([0; 256]);
                for (value, (slot, id)) in all.iter_mut().zip(bytes).enumerate() {
                    *slot = id.ok_or_else(|| Error::format(format!("byte fallback is on, but there is no piece for byte {value:#04x}")))?;
                }
                Some(all)
            }
        };
        for id in [options.bos, options.eos].into_iter().flatten() {
            if id as usize >= pieces.len() {
                return Err(Error::format(format!("special piece {id} lies outside the vocabulary of {}", pieces.len())));
            }
        }
        let mut user_defined: Vec<_> = pieces.iter().filter(|p| p.kind == PieceKind::UserDefined).map(|p| p.text.clone()).collect();
        user_defined.sort_by_key(|t| std::cmp::Reverse(t.len()));
        let markers = Markers::of(&pieces);
        Ok(Self { pieces, options, mergeable, reserved, user_defined, markers, unknown, bytes })
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there are none, which a vocabulary that was made never is.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The piece that begins a sequence.
    pub fn bos(&self) -> Option<u32> {
        self.options.bos
    }

    /// The piece that ends a sequence.
    pub fn eos(&self) -> Option<u32> {
        self.options.eos
    }

    /// The piece spelled `text`.
    pub fn piece_id(&self, text: &str) -> Option<u32> {
        self.reserved.get(text).or_else(|| self.mergeable.get(text)).copied()
    }

    /// The spelling of a piece.
    pub fn piece_text(&self, id: u32) -> Option<&str> {
        self.pieces.get(id as usize).map(|p| p.text.as_str())
    }

    /// Appends the ids of `text`.
    ///
    /// # Errors
    /// `InvalidArgument` where the text is too long for 32-bit positions.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let text = self.normalise(text);
        if u32::try_from(text.len()).is_err() {
            return Err(Error::invalid("the text is longer than 4 GiB; split it"));
        }
        let mut previous_unknown = false;
        for symbol in self.merge(&text) {
            let known = self.mergeable.get(symbol);
            match (known, &self.bytes) {
                (Some(id), _) => ids.push(*id),
                (None, Some(bytes)) => ids.extend(symbol.bytes().map(|b| bytes[b as usize])),
                // A run of unknown characters is one unknown piece.
                (None, None) if previous_unknown => {}
                (None, None) => ids.push(self.unknown),
            }
            previous_unknown = known.is_none();
        }
        Ok(())
    }

    /// Appends the ids of `text`, where control and user-defined pieces that the text spells become those pieces. What lies between two of them
    /// is a text of its own, with the space in front that [`Options::add_dummy_prefix`] asks for.
    ///
    /// # Errors
    /// Those of [`SentencePiece::encode_into`].
    pub fn encode_marked_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let (mut begin, mut at) = (0, 0);
        while let Some(first) = text[at..].chars().next() {
            match self.markers.prefix(&text[at..]) {
                Some((length, id)) => {
                    self.encode_into(&text[begin..at], ids)?;
                    ids.push(id);
                    at += length;
                    begin = at;
                }
                None => at += first.len_utf8(),
            }
        }
        self.encode_into(&text[begin..], ids)
    }

    /// The text of `ids`.
    pub fn decode(&self, ids: &[u32]) -> String {
        let (mut state, mut out) = (TextState::default(), String::new());
        for id in ids {
            state.push(self, *id, &mut out);
        }
        state.finish(&mut out);
        out
    }

    /// The longest user-defined piece that `text` begins with.
    fn user_defined_prefix(&self, text: &str) -> Option<&str> {
        self.user_defined.iter().map(String::as_str).find(|p| text.starts_with(p))
    }

    /// Spaces as the model wants them, then written as U+2581.
    fn normalise(&self, text: &str) -> String {
        let tidy = self.options.remove_extra_whitespaces;
        let mut rest = if tidy { text.trim_start_matches(' ') } else { text };
        let mut out = String::with_capacity(text.len() + text.len() / 2 + SPACE.len_utf8());
        if rest.is_empty() {
            return out;
        }
        if self.options.add_dummy_prefix {
            out.push(SPACE);
        }
        let mut after_space = tidy;
        while let Some(first) = rest.chars().next() {
            let length = self.user_defined_prefix(rest).map_or(first.len_utf8(), str::len);
            let (mut unit, tail) = rest.split_at(length);
            rest = tail;
            if after_space {
                unit = unit.trim_start_matches(' ');
            }
            if let Some(last) = unit.chars().next_back() {
                out.extend(unit.chars().map(|c| if c == ' ' { SPACE } else { c }));
                after_space = tidy && last == ' ';
            }
        }
        if tidy {
            out.truncate(out.trim_end_matches(SPACE).len());
        }
        out
    }
}
