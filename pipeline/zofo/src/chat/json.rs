//! The filter `tojson` as transformers has it: JSON as Python writes it, with nothing escaped for HTML.

use minijinja::{Error, Value, value::Kwargs};

/// What minijinja escapes for HTML, without the backslash.
const ESCAPED: [(&str, char); 4] = [("u003c", '<'), ("u003e", '>'), ("u0026", '&'), ("u0027", '\'')];

pub(super) fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let text = minijinja::filters::tojson(value, indent, options)?;
    Ok(Value::from(unescaped(text.as_str().unwrap_or_default())))
}

fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let escape = &rest[at + 1..];
        match ESCAPED.iter().find(|(code, _)| escape.starts_with(code)) {
            Some((code, sign)) => {
                out.push(*sign);
                rest = &escape[code.len()..];
            }
            None => {
                // The backslash and what it escapes, which may be another backslash.
                let length = 1 + escape.chars().next().map_or(0, char::len_utf8);
                out.push_str(&rest[at..at + length]);
                rest = &rest[at + length..];
            }
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_html_escapes_are_undone() {
        assert_eq!(unescaped(r#"\u003cb\u003e \u0026 \u0027 \n \\u003c \" \\"#), r#"<b> & ' \n \\u003c \" \\"#);
    }
}
