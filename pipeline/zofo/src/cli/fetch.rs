//! `zofo fetch`

use std::{
    env, fs,
    io::IsTerminal,
    path::{Path, PathBuf},
};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use zofo::{
    CancelToken, Error, ErrorKind,
    catalogue::{self, Cache, Kind},
    hub::{self, FetchEvent, Fetched, Request, Settings},
};

use super::{Failure, cache, console, interrupt, usage};

pub const EXAMPLES: &str = "Files go to $ZOFO_CACHE, or $XDG_CACHE_HOME/zofo, or ~/.cache/zofo, where
--model and --data find them by name. Downloads that were interrupted go on
where they stopped; what comes is compared with the checksum that is known of
it. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean elsewhere.

Examples:
  zofo fetch                                  what has a name, and what is here
  zofo fetch smollm2-135m
  zofo fetch ag_news
  zofo fetch HuggingFaceTB/SmolLM2-360M-Instruct
  zofo fetch datasets/sh0416/ag_news
  zofo fetch owner/repo --file model.Q4_0.gguf --revision main";

#[derive(Args)]
pub struct FetchArgs {
    /// A known name, or a repository of the Hugging Face hub: owner/repo, datasets/owner/repo
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Branch, tag or commit of the repository [default: main]
    #[arg(long, value_name = "R")]
    pub revision: Option<String>,
    /// File to take from the repository; may be given several times [default: what training needs]
    #[arg(long = "file", value_name = "F")]
    pub files: Vec<String>,
    /// Leave the network alone: succeed where everything is here already
    #[arg(long)]
    pub offline: bool,
    /// Folder for fetched files
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: FetchArgs) -> Result<(), Failure> {
    let place = cache::cache(args.cache.as_deref()).map_err(usage)?;
    let Some(name) = &args.name else {
        list(&place, args.json);
        return Ok(());
    };
    let mut request = Request::parse(name).map_err(usage)?;
    match &mut request {
        Request::Repo { revision, files, .. } => {
            files.clone_from(&args.files);
            if let Some(other) = &args.revision {
                revision.clone_from(other);
            }
        }
        _ if args.revision.is_some() || !args.files.is_empty() => {
            return Err(Failure::Usage(Error::invalid(format!(
                "--revision and --file choose from a repository, as in owner/repo; what `{name}` stands for is fixed"
            ))));
        }
        _ => {}
    }
    let settings = settings(args.offline)?;
    let token = CancelToken::new();
    interrupt::watch(token.clone(), || "stopping; once more to end at once");
    let mut progress = Progress { quiet: args.json, bar: None, lines: !std::io::stderr().is_terminal() };
    let result = hub::fetch(&request, &place, &settings, &token, &mut |e| progress.event(e));
    progress.clear();
    match result {
        Ok(fetched) if args.json => {
            console::json(&fetched);
        }
        Ok(fetched) => report(&fetched, request.kind(), args.cache.as_deref()),
        Err(e) if *e.kind() == ErrorKind::Cancelled => {
            console::note(e.message());
            return Err(Failure::Interrupted);
        }
        Err(e) => return Err(usage(e)),
    }
    Ok(())
}

fn report(fetched: &Fetched, kind: Kind, elsewhere: Option<&Path>) {
    let bytes = fetched.files.iter().map(|f| f.bytes).sum();
    let how = if fetched.cached { "here already, " } else { "" };
    console::line(format!(
        "{}: {how}{}, {}, from {}",
        fetched.name,
        console::count(fetched.files.len() as u64, "file"),
        console::bytes(bytes),
        fetched.source
    ));
    for file in &fetched.files {
        console::line(format!("  {}", fetched.path.join(&file.name).display()));
    }
    let name = console::quoted(&fetched.name);
    let before = elsewhere.map_or_else(String::new, |dir| format!("ZOFO_CACHE={} ", console::quoted(&dir.display().to_string())));
    let named = catalogue::find(&fetched.name).is_some();
    match kind {
        Kind::Model => console::line(format!("try it: {before}zofo generate --model {name} --prompt 'Once upon a time'")),
        _ if named => console::line(format!("try it: {before}zofo train --model smollm2-135m --data {name}")),
        _ => true,
    };
}

fn list(place: &Cache, json: bool) {
    let all = || [Kind::Model, Kind::Dataset].into_iter().flat_map(catalogue::known);
    let here = |k: &catalogue::Known| place.receipt(k.kind, k.name).is_some();
    if json {
        let entries =
            all().map(|k| json!({"name": k.name, "kind": k.kind.name(), "about": k.about, "licence": k.licence, "here": here(k)}));
        console::json(&json!({"cache": place.root(), "known": entries.collect::<Vec<_>>()}));
        return;
    }
    let rows: Vec<_> = all().map(|k| vec![k.name.to_owned(), if here(k) { "here" } else { "" }.to_owned(), k.about.to_owned()]).collect();
    console::print(&console::table(&rows));
    console::line(format!("cache: {}", place.root().display()));
}

/// What the environment says, in the words of the hub's own programs.
fn settings(offline: bool) -> Result<Settings, Failure> {
    let mut s = Settings::default();
    let text = |name: &str| env::var(name).ok().map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
    if let Some(endpoint) = text("HF_ENDPOINT") {
        s.endpoint = endpoint.trim_end_matches('/').to_owned();
    }
    let on = |v: String| ["1", "true", "yes", "on"].contains(&v.to_ascii_lowercase().as_str());
    s.offline = offline || text("HF_HUB_OFFLINE").is_some_and(on);
    s.token = text("HF_TOKEN").or_else(stored_token);
    if s.token.as_ref().is_some_and(|t| t.contains(|c: char| !c.is_ascii_graphic())) {
        return Err(Failure::Usage(Error::invalid(
            "the token of the hub (HF_TOKEN, or the file with it) has characters that no token has",
        )));
    }
    s.proxy_from_environment = true;
    s.certificates = cache::folder("SSL_CERT_FILE").filter(|p| p.is_file());
    Ok(s)
}

/// The token that logging in has left.
fn stored_token() -> Option<String> {
    let home = || cache::folder("HF_HOME").or_else(|| Some(cache::user_cache()?.join("huggingface")));
    let path = cache::folder("HF_TOKEN_PATH").or_else(|| Some(home()?.join("token")))?;
    let token = fs::read_to_string(path).ok()?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}

/// A bar on a terminal, lines elsewhere.
struct Progress {
    quiet: bool,
    lines: bool,
    bar: Option<(String, ProgressBar)>,
}

impl Progress {
    fn event(&mut self, event: &FetchEvent) {
        if self.quiet {
            return;
        }
        match event {
            FetchEvent::Waiting => self.say("another zofo fetches this; waiting for it".into()),
            FetchEvent::Trying { source } => self.say(format!("trying {source}")),
            FetchEvent::Retrying { reason, .. } => self.say(format!("{reason}; trying again")),
            FetchEvent::Failed { source, reason } => self.say(format!("not from {source}: {reason}")),
            FetchEvent::Progress { file, done, total } if !self.lines => self.draw(file, *done, *total),
            _ => {}
        }
    }

    fn say(&mut self, text: String) {
        self.clear();
        console::note(text);
    }

    fn draw(&mut self, file: &str, done: u64, total: Option<u64>) {
        if self.bar.as_ref().is_none_or(|(name, _)| name != file) {
            self.clear();
            let bar = match total {
                Some(total) => {
                    ProgressBar::new(total).with_style(style("{prefix} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}"))
                }
                None => ProgressBar::no_length().with_style(style("{prefix} {bytes} {bytes_per_sec}")),
            };
            bar.set_position(done);
            bar.reset_eta();
            let short: String = file.chars().take(40).collect();
            self.bar = Some((file.to_owned(), bar.with_prefix(short)));
        }
        if let Some((_, bar)) = &self.bar {
            bar.set_position(done);
        }
    }

    fn clear(&mut self) {
        if let Some((_, bar)) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}
