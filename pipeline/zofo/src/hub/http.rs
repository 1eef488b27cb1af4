//! Requests: one at a time, redirects by hand, so that a token goes to the hub alone and what the hub says of a file is seen.

use std::{fs, io};

use ureq::{
    Agent, Body, Proxy,
    http::{HeaderMap, Response, StatusCode, Uri, header},
    tls::{PemItem, RootCerts, TlsConfig, parse_pem},
};
use zofo_hal::{Error, ErrorKind, Result};

use super::Settings;

const MOST_REDIRECTS: usize = 10;

/// Makes requests.
pub(super) struct Client {
    agent: Agent,
    /// Where the token goes, and the token.
    token: Option<(Uri, String)>,
}

/// An answer, and what the answers that led to it said.
pub(super) struct Answer {
    pub response: Response<Body>,
    /// Headers of the last answer of the host that was asked, which may redirect to where it keeps its files.
    pub asked: HeaderMap,
}

impl Answer {
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// A header of the host that was asked.
    pub fn asked(&self, name: &str) -> Option<&str> {
        self.asked.get(name)?.to_str().ok()
    }

    /// A header.
    pub fn header(&self, name: impl header::AsHeaderName) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }
}

/// Why there is no answer.
pub(super) enum Failure {
    /// The server cannot be reached; that takes time to change.
    Unreachable(Error),
    /// The connection was lost.
    Lost(Error),
}

impl Client {
    /// # Errors
    /// `InvalidArgument` for an address of the hub that is none; `Io`, `Format` for a file of certificates without any.
    pub fn new(settings: &Settings) -> Result<Self> {
        let bad = |what: &str| Error::invalid(format!("the hub's address `{}` {what}", settings.endpoint));
        let endpoint: Uri = settings.endpoint.parse().map_err(|e| bad(&format!("is none: {e}")))?;
        if !matches!(endpoint.scheme_str(), Some("http" | "https")) || endpoint.host().is_none() {
            return Err(bad("does not begin with https:// and a host"));
        }
        let mut tls = TlsConfig::builder();
        if let Some(path) = &settings.certificates {
            let pem = fs::read(path).map_err(|e| Error::io(path, e))?;
            let certificates: Vec<_> =
                parse_pem(&pem).filter_map(|item| if let Ok(PemItem::Certificate(c)) = item { Some(c) } else { None }).collect();
            if certificates.is_empty() {
                return Err(Error::format(format!("{}: it has no certificate in PEM form", path.display())));
            }
            tls = tls.root_certs(RootCerts::from(certificates));
        }
        let proxy = if settings.proxy_from_environment { Proxy::try_from_env() } else { None };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(proxy)
            .tls_config(tls.build())
            .user_agent(concat!("zofo/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(settings.connect_timeout))
            .timeout_connect(Some(settings.connect_timeout))
            .timeout_per_read(Some(settings.read_timeout))
            .timeout_per_write(Some(settings.read_timeout))
            .build();
        let token = settings.token.clone().map(|t| (endpoint, t));
        Ok(Self { agent: config.into(), token })
    }

    /// Asks for `url`, from byte `from` on.
    pub fn get(&self, url: &str, from: u64) -> Result<Answer, Failure> {
        let mut uri: Uri = url.parse().map_err(|e| Failure::Unreachable(Error::invalid(format!("{url}: no address: {e}"))))?;
        let host = uri.authority().cloned();
        let mut asked = HeaderMap::new();
        for _ in 0..=MOST_REDIRECTS {
            let mut request = self.agent.get(uri.clone());
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            if let Some((endpoint, token)) = &self.token
                && (endpoint.scheme(), endpoint.authority()) == (uri.scheme(), uri.authority())
            {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| failure(&uri, e))?;
            if uri.authority() == host.as_ref() {
                asked = response.headers().clone();
            }
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED {
                return Ok(Answer { asked, response });
            }
            let target = response.headers().get(header::LOCATION).and_then(|l| l.to_str().ok());
            let next = target.and_then(|t| resolve(&uri, t));
            let Some(next) = next else {
                return Err(Failure::Unreachable(Error::new(ErrorKind::Io, format!("{} redirects to no address", place(&uri)))));
            };
            if uri.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                return Err(Failure::Unreachable(Error::new(
                    ErrorKind::Io,
                    format!("{} redirects to {}, which is not encrypted", place(&uri), place(&next)),
                )));
            }
            uri = next;
        }
        Err(Failure::Unreachable(Error::new(ErrorKind::Io, format!("{} redirects more than {MOST_REDIRECTS} times", place(&uri)))))
    }
}

/// The address that `target` means at `base`.
fn resolve(base: &Uri, target: &str) -> Option<Uri> {
    if target.contains("://") {
        return target.parse().ok();
    }
    let path = target.starts_with('/').then_some(target)?;
    Uri::builder().scheme(base.scheme()?.clone()).authority(base.authority()?.clone()).path_and_query(path).build().ok()
}

/// Scheme and host: queries may carry signatures.
fn place(uri: &Uri) -> String {
    format!("{}://{}", uri.scheme_str().unwrap_or("https"), uri.authority().map_or("?", |a| a.as_str()))
}

fn failure(uri: &Uri, e: ureq::Error) -> Failure {
    let at = place(uri);
    let io = |text: String| Error::new(ErrorKind::Io, text);
    match e {
        ureq::Error::HostNotFound => Failure::Unreachable(io(format!("{at}: there is no such host, or no network"))),
        ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => {
            Failure::Unreachable(io(format!("{at}: it cannot be reached (timeout)")))
        }
        ureq::Error::Timeout(_) => Failure::Lost(io(format!("{at}: it does not answer (timeout)"))),
        ureq::Error::Io(e) => match e.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Failure::Lost(io(format!("{at}: it does not answer (timeout)"))),
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::Interrupted => Failure::Lost(io(format!("{at}: the connection was lost ({e})"))),
            io::ErrorKind::ConnectionRefused => Failure::Unreachable(io(format!("{at}: it refuses connections"))),
            _ => Failure::Unreachable(io(format!("{at}: it cannot be reached ({e})"))),
        },
        e @ ureq::Error::Protocol(_) => Failure::Lost(io(format!("{at}: the connection was lost ({e})"))),
        e @ (ureq::Error::Tls(_) | ureq::Error::Rustls(_)) => Failure::Unreachable(io(format!(
            "{at}: no encrypted connection ({e}); behind a proxy with a certificate of its own, name its file in SSL_CERT_FILE"
        ))),
        e => Failure::Unreachable(io(format!("{at}: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects() {
        let base: Uri = "https://hub.example/a/b?c".parse().unwrap();
        assert_eq!(resolve(&base, "/x/y?z=1").unwrap(), "https://hub.example/x/y?z=1");
        assert_eq!(resolve(&base, "https://cdn.example/x").unwrap(), "https://cdn.example/x");
        assert_eq!(resolve(&base, "x"), None);
        assert_eq!(place(&"https://cdn.example/x?signature=secret".parse().unwrap()), "https://cdn.example");
    }

    #[test]
    fn the_hub_needs_an_address() {
        for bad in ["", "huggingface.co", "ftp://x", "https://"] {
            let settings = Settings { endpoint: bad.into(), ..Settings::default() };
            let e = Client::new(&settings).map(drop).unwrap_err();
            assert!(e.message().contains("hub's address"), "{bad}: {e}");
        }
    }
}
