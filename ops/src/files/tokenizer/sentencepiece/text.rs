//! Ids to text, one after the other.

use super::{PieceKind, SPACE, SentencePiece};

/// How far a sequence is decoded.
#[derive(Clone, Debug, Default)]
pub struct TextState {
    /// Whether text or the dummy prefix has been seen: from then on, a leading space of a piece is text.
    begun: bool,
    /// Byte pieces that may still become a character.
    bytes: Vec<u8>,
}

impl TextState {
    /// Takes one id and appends the text that it completes to `out`. An id outside the vocabulary counts as a control piece.
    pub fn push(&mut self, model: &SentencePiece, id: u32, out: &mut String) {
        let piece = model.pieces.get(id as usize);
        if let Some(PieceKind::Byte(byte)) = piece.map(|p| p.kind) {
            self.bytes.push(byte);
            self.drain(out, false);
            return;
        }
        self.drain(out, true);
        let Some(piece) = piece else { return };
        match piece.kind {
            PieceKind::Control | PieceKind::Unused | PieceKind::Byte(_) => {}
            PieceKind::Unknown => self.append(&model.options.unknown_text, out),
            PieceKind::Normal | PieceKind::UserDefined => {
                let mut text = piece.text.as_str();
                let options = &model.options;
                if !self.begun
                    && (options.add_dummy_prefix || options.remove_extra_whitespaces)
                    && let Some(rest) = text.strip_prefix(SPACE)
                {
                    text = rest;
                    // With tidied spaces none can lead, so the next piece is stripped too as long as there is no text.
                    self.begun = !options.remove_extra_whitespaces;
                }
                self.append(&text.replace(SPACE, " "), out);
            }
        }
    }

    /// Appends what was held back to `out`.
    pub fn finish(&mut self, out: &mut String) {
        self.drain(out, true);
    }

    fn append(&mut self, text: &str, out: &mut String) {
        self.begun |= !text.is_empty();
        out.push_str(text);
    }

    /// Moves complete characters to `out`, and U+FFFD for every byte that can no longer be part of one; at the `end` that is every byte left.
    fn drain(&mut self, out: &mut String, end: bool) {
        if self.bytes.is_empty() {
            return;
        }
        let bytes = std::mem::take(&mut self.bytes);
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.append(chunk.valid(), out);
            let broken = chunk.invalid();
            let cut_short = chunks.peek().is_none() && std::str::from_utf8(broken).is_err_and(|e| e.error_len().is_none());
            if cut_short && !end {
                self.bytes = broken.to_vec();
                return;
            }
            for _ in broken {
                self.append("\u{FFFD}", out);
            }
        }
    }
}
