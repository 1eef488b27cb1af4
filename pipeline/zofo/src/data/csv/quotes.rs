//! Finds text behind a closing quote, which the CSV reader takes for part of the field: usually a quote inside the text that is not doubled.

/// Where in a field a byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    FieldStart,
    Plain,
    Quoted,
    /// A quote inside quotes: the first of a doubled one, or the closing one.
    Quote,
}

/// Watches the bytes of a file.
#[derive(Debug)]
pub(super) struct Quotes {
    delimiter: u8,
    state: State,
    line: u64,
    offset: u64,
    /// Offset and line of the first offence.
    found: Option<(u64, u64)>,
    /// Line of the last quote that opened a field.
    opened: u64,
}

impl Quotes {
    pub fn new(delimiter: u8) -> Self {
        Self { delimiter, state: State::FieldStart, line: 1, offset: 0, found: None, opened: 0 }
    }

    /// Takes the next bytes.
    pub fn watch(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let ends_field = *byte == self.delimiter || matches!(byte, b'\r' | b'\n');
            if (self.state, byte) == (State::FieldStart, &b'"') {
                self.opened = self.line;
            }
            self.state = match (self.state, byte) {
                (State::FieldStart, b'"') => State::Quoted,
                (State::Quoted, b'"') => State::Quote,
                (State::Quote, b'"') | (State::Quoted, _) => State::Quoted,
                (_, _) if ends_field => State::FieldStart,
                (State::Quote, _) => {
                    self.found.get_or_insert((self.offset, self.line));
                    State::Plain
                }
                (State::FieldStart | State::Plain, _) => State::Plain,
            };
            self.line += u64::from(*byte == b'\n');
            self.offset += 1;
        }
    }

    /// The line of the first offence before `offset`.
    pub fn before(&self, offset: u64) -> Option<u64> {
        self.found.filter(|(at, _)| *at < offset).map(|(_, line)| line)
    }
}

impl Quotes {
    /// At the end of the file: the line of a quote that was opened and never closed.
    pub fn unclosed(&self) -> Option<u64> {
        (self.state == State::Quoted).then_some(self.opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<u64> {
        let mut quotes = Quotes::new(b',');
        // In two parts, as a reader may give them.
        let (a, b) = text.as_bytes().split_at(text.len() / 2);
        quotes.watch(a);
        quotes.watch(b);
        quotes.before(text.len() as u64)
    }

    #[test]
    fn a_quote_that_is_never_closed() {
        for (text, line) in [("a,b\n1,\"c\nd", Some(2)), ("a\n\"b \"\"c\"\"", Some(2)), ("a\n\"b\"", None), ("a\n\"b\"\n", None)] {
            let mut quotes = Quotes::new(b',');
            quotes.watch(text.as_bytes());
            assert_eq!(quotes.unclosed(), line, "{text}");
        }
    }

    #[test]
    fn only_text_behind_a_closing_quote() {
        for (text, line) in [
            ("a,\"b\"\n\"c \"\"d\"\"\",e\r\n\"\",f\n", None),
            ("a \"b\" c,\"d\ne\"\n", None),
            ("a,b\n\"c\nd\" e,f\n", Some(3)),
            ("a,b\n\"he said \"no\"\",f\n", Some(2)),
            ("\"a\" ,b\n", Some(1)),
        ] {
            assert_eq!(found(text), line, "{text}");
        }
    }
}
