//! Where Hugging Face folders keep the template of a conversation.

use std::path::Path;

use serde_json::Value;
use zofo_hal::{Error, Result};

use crate::files::json::{Object, brief, read_limited};

/// Largest template read, in bytes. Those with tools take some ten thousand.
const MAX_BYTES: u64 = 1 << 20;
const FILE: &str = "chat_template.jinja";
const KEY: &str = "chat_template";
const DEFAULT: &str = "default";

/// The template of `folder`: its own file, or else the key in `tokenizer_config.json`, which is one template or a list of them by name.
pub(super) fn template(folder: &Path, config: Option<&Object>) -> Result<Option<String>> {
    let path = folder.join(FILE);
    if path.is_file() {
        let bytes = read_limited(&path, MAX_BYTES)?;
        let text = String::from_utf8(bytes).map_err(|_| Error::format(format!("{}: not UTF-8; fetch the file again", path.display())))?;
        return Ok(Some(text));
    }
    let Some((config, value)) = config.and_then(|c| Some((c, c.get(KEY)?))) else { return Ok(None) };
    let found = match value {
        Value::String(one) => Some(one),
        Value::Array(named) => {
            let mut found = None;
            for entry in named {
                match (&entry["name"], &entry["template"]) {
                    (Value::String(name), Value::String(template)) if name == DEFAULT => found = Some(template),
                    (Value::String(_), Value::String(_)) => {}
                    _ => return Err(config.error(format!("`{KEY}` has the entry {}, which lacks a name or a template", brief(entry)))),
                }
            }
            found
        }
        other => return Err(config.wrong(KEY, "a template or a list of named ones", other)),
    };
    Ok(found.cloned())
}
