//! Repositories of the Hugging Face hub.

use std::io::Read;

use serde::Deserialize;
use zofo_hal::{Error, ErrorKind, Result};

use super::{
    Context, Settings,
    download::Download,
    http::{Client, Failure},
    store::Store,
};
use crate::catalogue::{Kind, ReceiptFile};

/// Largest description of a repository read.
const LARGEST_LISTING: u64 = 16 << 20;
/// Most files taken of one repository.
const MOST_FILES: usize = 1000;

pub(super) struct Repo<'a> {
    settings: &'a Settings,
    kind: Kind,
    repo: &'a str,
    revision: &'a str,
}

/// What the hub says of a repository.
#[derive(Deserialize)]
struct Listing {
    sha: Option<String>,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// The name of a repository for people.
pub(super) fn describe(settings: &Settings, repo: &str) -> String {
    format!("Hugging Face hub, {repo} ({})", settings.endpoint)
}

impl<'a> Repo<'a> {
    pub fn new(settings: &'a Settings, kind: Kind, repo: &'a str, revision: &'a str) -> Self {
        Self { settings, kind, repo, revision }
    }

    pub fn describe(&self) -> String {
        describe(self.settings, self.repo)
    }

    /// A file of the repository.
    pub fn fetch(
        &self,
        client: &Client,
        name: &str,
        sha256: Option<&str>,
        store: &Store,
        context: &mut Context<'_>,
    ) -> Result<ReceiptFile> {
        let url =
            format!("{}/{}{}/resolve/{}/{}", self.settings.endpoint, self.prefix(), self.repo, encoded(self.revision), encoded_path(name));
        Download::new(name, url).sha256(sha256).advice(self.advice()).run(client, store, context)
    }

    /// The files called `names`, or those that training needs, all of one commit.
    pub fn fetch_all(&self, client: &Client, names: &[String], store: &Store, context: &mut Context<'_>) -> Result<Vec<ReceiptFile>> {
        let listing = self.listing(client, context)?;
        let all: Vec<&str> = listing.siblings.iter().map(|s| s.rfilename.as_str()).collect();
        let chosen = if names.is_empty() { select(self.kind, &all)? } else { names.iter().map(String::as_str).collect() };
        if let Some(missing) = chosen.iter().find(|c| !all.contains(c)) {
            return Err(Error::invalid(format!("there is no file `{missing}`; there are {}", some(&all))));
        }
        chosen.iter().try_for_each(|name| Store::check_name(name))?;
        let revision = listing.sha.as_deref().unwrap_or(self.revision);
        let at = Repo { revision, ..*self };
        chosen.iter().map(|name| at.fetch(client, name, None, store, context)).collect()
    }

    fn listing(&self, client: &Client, context: &mut Context<'_>) -> Result<Listing> {
        let kind = if self.kind == Kind::Model { "models" } else { "datasets" };
        let url = format!("{}/api/{kind}/{}/revision/{}", self.settings.endpoint, self.repo, encoded(self.revision));
        let mut left = self.settings.retries;
        let mut wait = self.settings.retry_wait;
        let answer = loop {
            match client.get(&url, 0) {
                Ok(answer) if left > 0 && (answer.status().is_server_error() || answer.status().as_u16() == 429) => {}
                Ok(answer) => break answer,
                Err(Failure::Lost(_)) if left > 0 => {}
                Err(Failure::Lost(e) | Failure::Unreachable(e)) => return Err(e),
            }
            context.wait(wait)?;
            (left, wait) = (left - 1, wait * 2);
        };
        match answer.status().as_u16() {
            200 => {}
            status @ (401 | 403 | 404) => {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!(
                        "the hub has no such repository or revision `{}`, or does not show it ({status}); {}",
                        self.revision,
                        self.advice()
                    ),
                ));
            }
            status => return Err(Error::new(ErrorKind::Io, format!("the hub answers {status}"))),
        }
        let mut text = Vec::new();
        let mut body = answer.response.into_body().into_with_config().limit(LARGEST_LISTING).reader();
        body.read_to_end(&mut text)
            .map_err(|e| Error::new(ErrorKind::Io, format!("what the hub says of the repository cannot be read: {e}")))?;
        serde_json::from_slice(&text).map_err(|e| Error::format(format!("what the hub says of the repository is not understood: {e}")))
    }

    fn prefix(&self) -> &'static str {
        if self.kind == Kind::Model { "" } else { "datasets/" }
    }

    fn advice(&self) -> String {
        let page = format!("{}/{}{}", self.settings.endpoint, self.prefix(), self.repo);
        match self.settings.token {
            None => format!("if it is private or wants its terms accepted, do that at {page} and put your token into HF_TOKEN"),
            Some(_) => format!("if it wants its terms accepted, do that at {page}; your token was sent and may lack the right to read it"),
        }
    }
}

/// The files that training needs.
fn select<'a>(kind: Kind, all: &[&'a str]) -> Result<Vec<&'a str>> {
    const MODEL: [&str; 11] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ];
    let of = |wanted: &dyn Fn(&str) -> bool| all.iter().copied().filter(|f| wanted(f)).collect::<Vec<_>>();
    let chosen = match kind {
        Kind::Model => {
            let weights = |f: &str| f == "model.safetensors" || f.starts_with("model-") && f.ends_with(".safetensors") && !f.contains('/');
            let gguf = of(&|f| f.ends_with(".gguf"));
            if all.iter().any(|f| weights(f)) {
                of(&|f| weights(f) || MODEL.contains(&f))
            } else if gguf.len() > 1 {
                return Err(Error::invalid(format!("there are several GGUF files; choose one with --file: {}", some(&gguf))));
            } else {
                gguf
            }
        }
        Kind::Dataset => {
            let rows = |f: &str| [".csv", ".tsv", ".jsonl", ".ndjson"].iter().any(|e| f.ends_with(e));
            of(&rows)
        }
    };
    let needs = match kind {
        Kind::Model => "a model needs model.safetensors with config.json and a tokenizer, or a GGUF file",
        Kind::Dataset => "data are read from CSV, TSV or JSONL files; another file may be named with --file",
    };
    if chosen.is_empty() {
        return Err(Error::new(ErrorKind::Io, format!("nothing in it can be used: {needs}; it has {}", some(all))));
    }
    if chosen.len() > MOST_FILES {
        return Err(Error::invalid(format!("there are {} files; choose with --file", chosen.len())));
    }
    Ok(chosen)
}

/// A list that fits into a message.
fn some(files: &[&str]) -> String {
    const SHOWN: usize = 20;
    let mut shown: Vec<String> = files.iter().take(SHOWN).map(|f| f.escape_debug().to_string()).collect();
    if files.len() > SHOWN {
        shown.push(format!("and {} more", files.len() - SHOWN));
    }
    if shown.is_empty() { "no files".into() } else { shown.join(", ") }
}

/// A part of a path as an address has it.
fn encoded(part: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    part.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

fn encoded_path(path: &str) -> String {
    path.split('/').map(encoded).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_training_needs() {
        let whole = ["README.md", "config.json", "model.safetensors", "onnx/model.onnx", "pytorch_model.bin", "tokenizer.json"];
        assert_eq!(select(Kind::Model, &whole).unwrap(), ["config.json", "model.safetensors", "tokenizer.json"]);
        let sharded = [
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "x/model-1.safetensors",
        ];
        assert_eq!(
            select(Kind::Model, &sharded).unwrap(),
            ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
        );
        assert_eq!(select(Kind::Model, &["README.md", "m.Q4_0.gguf"]).unwrap(), ["m.Q4_0.gguf"]);
        let e = select(Kind::Model, &["a.gguf", "b.gguf"]).unwrap_err();
        assert!(e.message().contains("--file: a.gguf, b.gguf"), "{e}");
        assert_eq!(select(Kind::Dataset, &["README.md", "data/a.csv", "b.jsonl"]).unwrap(), ["data/a.csv", "b.jsonl"]);
        let e = select(Kind::Dataset, &["data/train.parquet"]).unwrap_err();
        assert!(e.message().contains("CSV, TSV or JSONL") && e.message().contains("train.parquet"), "{e}");
        assert!(select(Kind::Model, &[]).unwrap_err().message().contains("no files"));
    }

    #[test]
    fn addresses() {
        assert_eq!(encoded_path("a b/ü#.csv"), "a%20b/%C3%BC%23.csv");
        assert_eq!(encoded("refs/pr/1"), "refs%2Fpr%2F1");
    }
}
