//! One file over HTTP: goes on where it stopped, tries again, checks what came.

use std::time::Duration;

use ureq::http::{StatusCode, header};
use zofo_hal::{Error, ErrorKind, Result};

use super::{
    Context, FetchEvent,
    http::{Answer, Client, Failure},
    store::{Check, Part, Store},
};
use crate::catalogue::ReceiptFile;

/// Largest file, in bytes: no model of these families has a larger one.
const MOST_BYTES: u64 = 1 << 40;

/// A file to download.
pub(super) struct Download<'a> {
    name: &'a str,
    url: String,
    checks: Vec<Check>,
    /// What to do where access is refused or nothing is there.
    advice: String,
}

/// How an attempt ended without the file.
enum Attempt {
    /// The same again may work.
    Again(Error),
    Failed(Error),
}

impl From<Error> for Attempt {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

impl<'a> Download<'a> {
    pub fn new(name: &'a str, url: String) -> Self {
        Self { name, url, checks: Vec::new(), advice: String::new() }
    }

    pub fn sha256(mut self, sum: Option<&str>) -> Self {
        self.checks.extend(sum.map(|s| Check::Sha256(s.to_owned())));
        self
    }

    pub fn advice(mut self, text: String) -> Self {
        self.advice = text;
        self
    }

    /// Downloads, unless the file is there already.
    pub fn run(mut self, client: &Client, store: &Store, context: &mut Context<'_>) -> Result<ReceiptFile> {
        Store::check_name(self.name)?;
        if let Some(done) = store.finished(self.name, &self.checks, context)? {
            return Ok(done);
        }
        let (mut left, mut wait) = (context.settings.retries, context.settings.retry_wait);
        loop {
            let before = store.part(self.name)?.length();
            match self.attempt(client, store, context) {
                Ok(done) => return Ok(done),
                Err(Attempt::Failed(e)) => {
                    if store.part(self.name).is_ok_and(|p| p.length() == 0) {
                        store.remove_part(self.name);
                    }
                    return Err(e);
                }
                Err(Attempt::Again(e)) => {
                    // A connection that brings something each time may be lost as often as it likes.
                    if store.part(self.name)?.length() > before {
                        (left, wait) = (context.settings.retries, context.settings.retry_wait);
                    }
                    if left == 0 {
                        return Err(e);
                    }
                    (context.on_event)(&FetchEvent::Retrying { file: self.name.into(), reason: e.message().to_owned() });
                    context.wait(wait)?;
                    (left, wait) = (left - 1, (wait * 2).min(Duration::from_secs(30)));
                }
            }
        }
    }

    fn attempt(&mut self, client: &Client, store: &Store, context: &mut Context<'_>) -> Result<ReceiptFile, Attempt> {
        context.check_cancel()?;
        let mut part = store.part(self.name)?;
        let from = part.length();
        let answer = client.get(&self.url, from).map_err(|f| match f {
            Failure::Unreachable(e) => Attempt::Failed(e.context(self.name)),
            Failure::Lost(e) => Attempt::Again(e.context(self.name)),
        })?;
        let checks = self.all_checks(&answer);
        match answer.status() {
            StatusCode::OK => part.restart()?,
            // Without a checksum nobody would notice that the rest is of another file.
            StatusCode::PARTIAL_CONTENT if !checks.is_empty() && starts_at(&answer) == Some(from) => {}
            StatusCode::PARTIAL_CONTENT => {
                part.restart()?;
                return Err(Attempt::Again(self.error("the server does not go on where the download stopped, so it begins anew")));
            }
            // Everything is here, or more than there is.
            StatusCode::RANGE_NOT_SATISFIABLE if from > 0 => return self.at_the_end(part, &checks, store, context),
            status => return Err(self.refused(status)),
        }
        if let Some(done) = store.finished(self.name, &checks, context)? {
            store.remove_part(self.name);
            return Ok(done);
        }
        let length = answer.header(header::CONTENT_LENGTH).and_then(|l| l.parse::<u64>().ok());
        let total = length.and_then(|l| l.checked_add(part.length()));
        if total.is_some_and(|t| t > MOST_BYTES) {
            return Err(Attempt::Failed(self.error("it is said to have more than a terabyte")));
        }
        let mut body = answer.response.into_body().into_with_config().limit(MOST_BYTES).reader();
        if let Err(e) = part.append(self.name, &mut body, total, MOST_BYTES, context)? {
            if checks.is_empty() {
                part.restart()?;
            }
            return Err(Attempt::Again(self.error(&format!("the connection was lost after {} bytes ({e})", part.length()))));
        }
        let resumed = from > 0 && part.length() > from;
        match store.finish(self.name, part, &checks, context) {
            // The beginning may be of an earlier version of the file.
            Err(e) if *e.kind() == ErrorKind::Format && resumed => Err(Attempt::Again(e)),
            other => Ok(other?),
        }
    }

    fn at_the_end(&self, mut part: Part, checks: &[Check], store: &Store, context: &Context<'_>) -> Result<ReceiptFile, Attempt> {
        if checks.is_empty() {
            part.restart()?;
            return Err(Attempt::Again(self.error("the server has no more bytes, so the download begins anew")));
        }
        store.finish(self.name, part, checks, context).map_err(|e| match e.kind() {
            ErrorKind::Format => Attempt::Again(e),
            _ => Attempt::Failed(e),
        })
    }

    /// What is known of the file beforehand, and what the hub says of it.
    fn all_checks(&self, answer: &Answer) -> Vec<Check> {
        let mut checks = self.checks.clone();
        let linked = answer.asked("x-linked-etag");
        let plain = answer.asked("etag").filter(|_| answer.asked("x-repo-commit").is_some());
        checks.extend(linked.or(plain).and_then(Check::of_etag));
        checks.dedup();
        checks
    }

    fn refused(&self, status: StatusCode) -> Attempt {
        let advice = if self.advice.is_empty() { String::new() } else { format!("; {}", self.advice) };
        let what = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => format!("access is refused ({}){advice}", status.as_u16()),
            StatusCode::NOT_FOUND | StatusCode::GONE => format!("there is no such file ({}){advice}", status.as_u16()),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                return Attempt::Again(self.error(&format!("the server asks to come back later ({})", status.as_u16())));
            }
            s if s.is_server_error() => {
                return Attempt::Again(self.error(&format!("the server has a problem of its own ({})", status.as_u16())));
            }
            _ => format!("the server answers {status}"),
        };
        Attempt::Failed(self.error(&what))
    }

    fn error(&self, what: &str) -> Error {
        Error::new(ErrorKind::Io, format!("{}: {what}", self.name))
    }
}

/// The byte that a partial answer begins with.
fn starts_at(answer: &Answer) -> Option<u64> {
    let range = answer.header(header::CONTENT_RANGE)?;
    range.strip_prefix("bytes")?.trim_start().split('-').next()?.parse().ok()
}
