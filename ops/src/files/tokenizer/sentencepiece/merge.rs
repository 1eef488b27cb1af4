//! Byte-pair merging: of all neighbours that together are a piece, the best-scored merge goes first; of equals, the leftmost.

use std::{cmp::Ordering, collections::BinaryHeap};

use super::{PieceKind, SentencePiece};

const NONE: u32 = u32::MAX;

/// A stretch of the text in a doubly linked list; empty once it was merged into its left neighbour.
struct Symbol {
    start: u32,
    len: u32,
    previous: u32,
    next: u32,
    /// User-defined pieces are never merged.
    frozen: bool,
}

/// Two neighbours that can merge. Stale once either has changed, which their joint length shows.
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    len: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        // `partial_cmp` would do: scores are numbers. -0 and 0 must be equal, so `total_cmp` would not.
        let by_score = self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal);
        by_score.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

impl SentencePiece {
    /// Splits normalised text, shorter than `u32::MAX` bytes, into symbols; one that is no piece is a single character.
    pub(super) fn merge<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut symbols = self.split(text);
        let mut agenda = BinaryHeap::new();
        for right in 1..symbols.len() as u32 {
            agenda.extend(self.candidate(text, &symbols, right - 1, right));
        }
        while let Some(best) = agenda.pop() {
            let (left, right) = (best.left as usize, best.right as usize);
            let (a, b) = (symbols[left].len, symbols[right].len);
            if a == 0 || b == 0 || a + b != best.len {
                continue;
            }
            symbols[left].len = best.len;
            symbols[right].len = 0;
            let after = symbols[right].next;
            symbols[left].next = after;
            if after != NONE {
                symbols[after as usize].previous = best.left;
            }
            let before = symbols[left].previous;
            agenda.extend(self.candidate(text, &symbols, before, best.left));
            agenda.extend(self.candidate(text, &symbols, best.left, after));
        }
        let kept = symbols.iter().filter(|s| s.len > 0);
        kept.map(|s| &text[s.start as usize..(s.start + s.len) as usize]).collect()
    }

    /// Characters and user-defined pieces, in order.
    fn split(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut start = 0;
        while let Some(first) = text[start..].chars().next() {
            let whole = self.user_defined_prefix(&text[start..]);
            let len = whole.map_or(first.len_utf8(), str::len);
            let index = symbols.len() as u32;
            symbols.push(Symbol {
                start: start as u32,
                len: len as u32,
                previous: index.checked_sub(1).unwrap_or(NONE),
                next: index + 1,
                frozen: whole.is_some(),
            });
            start += len;
        }
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        symbols
    }

    fn candidate(&self, text: &str, symbols: &[Symbol], left: u32, right: u32) -> Option<Candidate> {
        if left == NONE || right == NONE {
            return None;
        }
        let (a, b) = (&symbols[left as usize], &symbols[right as usize]);
        if a.frozen || b.frozen {
            return None;
        }
        let len = a.len + b.len;
        let id = *self.mergeable.get(&text[a.start as usize..(a.start + len) as usize])?;
        let piece = &self.pieces[id as usize];
        debug_assert!(matches!(piece.kind, PieceKind::Normal | PieceKind::UserDefined));
        Some(Candidate { score: piece.score, left, right, len })
    }
}
