//! The parts of `sentencepiece_model.proto` that a byte-pair model needs.

use prost::Message;
use zofo_hal::{Error, ErrorKind, Result};

use super::{DEFAULT_UNKNOWN_TEXT, Options, Piece, PieceKind};

#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<PieceProto>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<NormalizerSpec>,
    #[prost(message, optional, tag = "5")]
    denormalizer: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
struct PieceProto {
    #[prost(string, optional, tag = "1")]
    piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct TrainerSpec {
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    treat_whitespace_as_suffix: Option<bool>,
    #[prost(bool, optional, tag = "35")]
    byte_fallback: Option<bool>,
    #[prost(int32, optional, tag = "41")]
    bos_id: Option<i32>,
    #[prost(int32, optional, tag = "42")]
    eos_id: Option<i32>,
    #[prost(string, optional, tag = "44")]
    unk_surface: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct NormalizerSpec {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    escape_whitespaces: Option<bool>,
}

const MODEL_TYPES: [&str; 5] = ["?", "unigram", "byte-pair", "word", "char"];
const BYTE_PAIR: i32 = 2;

/// Defaults of the format where a field is absent.
const DEFAULT_MODEL_TYPE: i32 = 1;
const DEFAULT_BOS: i32 = 1;
const DEFAULT_EOS: i32 = 2;

pub(super) fn parse(bytes: &[u8]) -> Result<(Vec<Piece>, Options)> {
    let model = ModelProto::decode(bytes).map_err(|e| Error::format(format!("not a SentencePiece model ({e}); fetch the file again")))?;
    let trainer = model.trainer.unwrap_or_default();
    let normalizer = model.normalizer.unwrap_or_default();
    let unsupported = |what: String| {
        Err(Error::new(ErrorKind::Unsupported, format!("SentencePiece model {what}; convert the tokenizer to tokenizer.json")))
    };
    let model_type = trainer.model_type.unwrap_or(DEFAULT_MODEL_TYPE);
    if model_type != BYTE_PAIR {
        let name = usize::try_from(model_type).ok().and_then(|t| MODEL_TYPES.get(t)).unwrap_or(&"?");
        return unsupported(format!("of type {name}, only byte-pair is supported"));
    }
    if trainer.treat_whitespace_as_suffix == Some(true) {
        return unsupported("with spaces as suffixes is not supported".into());
    }
    if normalizer.escape_whitespaces == Some(false) {
        return unsupported("that keeps plain spaces is not supported".into());
    }
    let maps = |n: &NormalizerSpec| n.precompiled_charsmap.as_ref().is_some_and(|m| !m.is_empty());
    if maps(&normalizer) || model.denormalizer.as_ref().is_some_and(maps) {
        let name = normalizer.name.unwrap_or_default();
        return unsupported(format!("with text normalisation `{}` is not supported", name.escape_debug()));
    }
    let pieces = (0..).zip(model.pieces).map(|(id, piece)| self::piece(id, piece)).collect::<Result<_>>()?;
    let id = |value: Option<i32>, default| u32::try_from(value.unwrap_or(default)).ok();
    let options = Options {
        add_dummy_prefix: normalizer.add_dummy_prefix.unwrap_or(true),
        remove_extra_whitespaces: normalizer.remove_extra_whitespaces.unwrap_or(true),
        byte_fallback: trainer.byte_fallback.unwrap_or(false),
        unknown_text: trainer.unk_surface.unwrap_or_else(|| DEFAULT_UNKNOWN_TEXT.into()),
        bos: id(trainer.bos_id, DEFAULT_BOS),
        eos: id(trainer.eos_id, DEFAULT_EOS),
    };
    Ok((pieces, options))
}

fn piece(id: usize, proto: PieceProto) -> Result<Piece> {
    let text = proto.piece.unwrap_or_default();
    let kind = match proto.kind.unwrap_or(1) {
        1 => PieceKind::Normal,
        2 => PieceKind::Unknown,
        3 => PieceKind::Control,
        4 => PieceKind::UserDefined,
        6 => PieceKind::Byte(byte(&text).ok_or_else(|| {
            Error::format(format!("piece {id} `{}` is to stand for a byte, but is not spelled <0x..>", text.escape_debug()))
        })?),
        other => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("piece {id} `{}` is of type {other}, which is not supported", text.escape_debug()),
            ));
        }
    };
    Ok(Piece { text, score: proto.score.unwrap_or(0.0), kind })
}

/// The value of a piece spelled `<0xAB>`.
pub(in crate::files::tokenizer) fn byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}
