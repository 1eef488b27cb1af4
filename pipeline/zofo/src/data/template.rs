//! Prompt templates: text with `{column}` in it.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

/// A prompt over columns: `{column}` stands for a column's text, `{{` and `}}` for the braces themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Template {
    pieces: Vec<Piece>,
}

/// Part of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(String),
    Column(String),
}

impl Template {
    /// The column name that stands for the text column, whatever that is called.
    pub const TEXT: &'static str = "text";

    /// Reads a template.
    ///
    /// # Errors
    /// `InvalidArgument` for a brace without its partner or an empty name, with its place, and for a template without a column.
    pub fn parse(text: &str) -> Result<Self> {
        let mut pieces = Vec::new();
        let mut literal = String::new();
        let mut rest = text.char_indices().peekable();
        let bad = |at: usize, what: &str| {
            Err(Error::invalid(format!(
                "template `{text}`: {what} at character {}; write {{{{ or }}}} for a brace",
                text[..at].chars().count() + 1
            )))
        };
        while let Some((at, c)) = rest.next() {
            match (c, rest.peek().map(|(_, c)| *c)) {
                ('{', Some('{')) | ('}', Some('}')) => {
                    rest.next();
                    literal.push(c);
                }
                ('{', _) => {
                    let begin = at + 1;
                    let Some(end) = text[begin..].find(['{', '}']).map(|n| begin + n).filter(|e| text[*e..].starts_with('}')) else {
                        return bad(at, "a `{` is not closed");
                    };
                    let name = text[begin..end].trim();
                    if name.is_empty() {
                        return bad(at, "a column has no name");
                    }
                    if !literal.is_empty() {
                        pieces.push(Piece::Literal(std::mem::take(&mut literal)));
                    }
                    pieces.push(Piece::Column(name.to_owned()));
                    while rest.next_if(|(i, _)| *i <= end).is_some() {}
                }
                ('}', _) => return bad(at, "a `}` has no `{`"),
                _ => literal.push(c),
            }
        }
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal));
        }
        let template = Self { pieces };
        if template.columns().next().is_none() {
            return Err(Error::invalid(format!("template `{text}` has no {{column}}, so every example would be the same")));
        }
        Ok(template)
    }

    /// Names of the columns, in order of use.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.pieces.iter().filter_map(|p| match p {
            Piece::Column(name) => Some(name.as_str()),
            Piece::Literal(_) => None,
        })
    }

    /// The column of the file that `name` means: `{text}` is the text column, where one is named.
    pub(super) fn resolve<'a>(&self, name: &'a str, text_column: Option<&'a str>) -> &'a str {
        text_column.filter(|_| name == Self::TEXT).unwrap_or(name)
    }

    /// The prompt of an example; each field is cut to at most `cap` characters.
    pub fn render(&self, fields: &[String], cap: usize) -> String {
        let mut out = String::new();
        let mut fields = fields.iter();
        for piece in &self.pieces {
            match piece {
                Piece::Literal(text) => out.push_str(text),
                Piece::Column(_) => {
                    let text = fields.next().map_or("", String::as_str);
                    let end = text.char_indices().nth(cap).map_or(text.len(), |(i, _)| i);
                    out.push_str(&text[..end]);
                }
            }
        }
        out
    }

    /// The literal text behind the last column.
    pub fn tail(&self) -> &str {
        match self.pieces.last() {
            Some(Piece::Literal(text)) => text,
            _ => "",
        }
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for piece in &self.pieces {
            match piece {
                Piece::Literal(text) => f.write_str(&text.replace('{', "{{").replace('}', "}}"))?,
                Piece::Column(name) => write!(f, "{{{name}}}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Template {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

impl TryFrom<String> for Template {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        Self::parse(&text)
    }
}

impl From<Template> for String {
    fn from(t: Template) -> Self {
        t.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fields(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn columns_and_escapes() {
        let t = Template::parse("{{{title}}} {description}\nTopic:").unwrap();
        assert_eq!(t.columns().collect::<Vec<_>>(), ["title", "description"]);
        assert_eq!(t.render(&fields(&["a{b", "c"]), usize::MAX), "{a{b} c\nTopic:");
        assert_eq!(t.tail(), "\nTopic:");
        assert_eq!(t.resolve("title", Some("headline")), "title");
        let text = Template::parse("{text}").unwrap();
        assert_eq!((text.resolve("text", Some("body")), text.tail()), ("body", ""));
    }

    #[test]
    fn fields_are_cut_by_characters_and_literals_are_not() {
        let t = Template::parse("[{a}|{b}]").unwrap();
        assert_eq!(t.render(&fields(&["äöü", "x"]), 2), "[äö|x]");
        assert_eq!(t.render(&fields(&["äöü", "x"]), 0), "[|]");
    }

    #[test]
    fn nonsense_is_refused_with_its_place() {
        for (text, part) in
            [("{a", "character 1"), ("é{a} }", "character 6"), ("{ }", "no name"), ("{a{b}}", "not closed"), ("plain", "no {column}")]
        {
            let e = Template::parse(text).unwrap_err();
            assert!(e.message().contains(part), "{text}: {e}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_display_is_its_inverse(text in "[{}a-c é\n]{0,12}") {
            if let Ok(t) = Template::parse(&text) {
                prop_assert_eq!(Template::parse(&t.to_string()).unwrap(), t);
            }
        }
    }
}
