//! `tokenizer.ggml.model` = `llama`: SentencePiece pieces.

use zofo_hal::{Error, Result};

use super::{
    ADD_SPACE, BOS, EOS, Engine, Kind, Made, Metadata, SCORES, TIDY_SPACES, TOKENS, TYPES, UNKNOWN, Vocabulary, brief, same_length,
};
use crate::files::tokenizer::sentencepiece::{self, DEFAULT_UNKNOWN_TEXT, Options, Piece, PieceKind, SentencePiece};

/// Ids where the file names none.
const DEFAULT_UNKNOWN: u32 = 0;
const DEFAULT_BOS: u32 = 1;
const DEFAULT_EOS: u32 = 2;

pub(super) fn make(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Made> {
    let tokens = vocabulary.tokens;
    let scores =
        metadata.numbers(SCORES)?.ok_or_else(|| Error::format(format!("`{SCORES}` is missing; pieces are merged by their scores")))?;
    same_length(SCORES, scores.len(), tokens.len())?;
    if let Some(at) = scores.iter().position(|s| s.is_nan()) {
        return Err(Error::format(format!("`{SCORES}`: the score of token {at} is not a number")));
    }
    let kinds = (0..tokens.len()).map(|id| kind(vocabulary, id)).collect::<Result<Vec<_>>>()?;
    let mut pieces: Vec<_> = tokens
        .iter()
        .zip(&scores)
        .zip(kinds)
        .map(|((text, score), kind)| {
            // Converters write the spaces of user-defined pieces as spaces.
            let text = if kind == PieceKind::UserDefined { text.replace(' ', sentencepiece::SPACE_TEXT) } else { text.clone() };
            Piece { text, score: *score as f32, kind }
        })
        .collect();
    // Converters mark the unknown piece as a control piece where a tokenizer_config.json lists it.
    let unknown = vocabulary.id(metadata, UNKNOWN)?.unwrap_or(DEFAULT_UNKNOWN) as usize;
    if pieces.iter().all(|p| p.kind != PieceKind::Unknown) {
        pieces[unknown].kind = PieceKind::Unknown;
    }
    let within = |id: u32| Some(id).filter(|id| (*id as usize) < tokens.len());
    let (bos, eos) = (vocabulary.id(metadata, BOS)?.or(within(DEFAULT_BOS)), vocabulary.id(metadata, EOS)?.or(within(DEFAULT_EOS)));
    let options = Options {
        add_dummy_prefix: metadata.flag(ADD_SPACE)?.unwrap_or(true),
        remove_extra_whitespaces: metadata.flag(TIDY_SPACES)?.unwrap_or(false),
        byte_fallback: pieces.iter().any(|p| matches!(p.kind, PieceKind::Byte(_))),
        unknown_text: DEFAULT_UNKNOWN_TEXT.into(),
        bos,
        eos,
    };
    let description = format!("SentencePiece, {} pieces", pieces.len());
    let model = SentencePiece::new(pieces, options).map_err(|e| e.context(format_args!("`{TOKENS}`")))?;
    Ok(Made { engine: Engine::SentencePiece(Box::new(model)), bos, eos, adds_bos: true, description })
}

fn kind(vocabulary: &Vocabulary<'_>, id: usize) -> Result<PieceKind> {
    let text = &vocabulary.tokens[id];
    let byte = sentencepiece::byte_of(text).map(PieceKind::Byte);
    if vocabulary.kinds.is_none() {
        // Without kinds, the spelling alone tells bytes apart.
        return Ok(byte.unwrap_or(PieceKind::Normal));
    }
    Ok(match vocabulary.kind(id) {
        Kind::Normal => PieceKind::Normal,
        Kind::Unknown => PieceKind::Unknown,
        Kind::Control => PieceKind::Control,
        Kind::UserDefined => PieceKind::UserDefined,
        Kind::Unused => PieceKind::Unused,
        Kind::Byte => byte.ok_or_else(|| {
            Error::format(format!("`{TYPES}`: token {id} `{}` is to stand for a byte, but is not spelled <0x..>", brief(text)))
        })?,
    })
}
