//! Pieces that text spells out: control and user-defined ones.

use std::cmp::Reverse;

use super::{Piece, PieceKind, SPACE};

#[derive(Clone, Debug)]
pub(super) struct Markers {
    /// As text spells them, by first byte, of each the longest first; none is empty.
    sorted: Vec<(String, u32)>,
}

impl Markers {
    /// No piece may be empty.
    pub(super) fn of(pieces: &[Piece]) -> Self {
        let marks = |p: &Piece| matches!(p.kind, PieceKind::Control | PieceKind::UserDefined);
        let mut sorted: Vec<_> = (0u32..).zip(pieces).filter(|(_, p)| marks(p)).map(|(id, p)| (p.text.replace(SPACE, " "), id)).collect();
        sorted.sort_by_key(|(text, _)| (first(text), Reverse(text.len())));
        Self { sorted }
    }

    /// Length and id of the longest that `text` begins with.
    pub(super) fn prefix(&self, text: &str) -> Option<(usize, u32)> {
        let begin = self.sorted.partition_point(|(t, _)| first(t) < first(text));
        let alike = self.sorted[begin..].iter().take_while(|(t, _)| first(t) == first(text));
        alike.clone().find(|(t, _)| text.starts_with(t.as_str())).map(|(t, id)| (t.len(), *id))
    }
}

fn first(text: &str) -> Option<u8> {
    text.bytes().next()
}
