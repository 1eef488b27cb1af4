//! A cursor over untrusted little-endian bytes.

use zofo_hal::{Error, Result};

use crate::files::mapped::MappedBytes;

/// Reads from the front; nothing is read past the end.
pub(super) struct Reader<'a> {
    all: &'a MappedBytes,
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(all: &'a MappedBytes) -> Self {
        Self { all, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.all.len() - self.at
    }

    /// The next `n` bytes.
    pub(super) fn bytes(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        if n > self.left() {
            return Err(Error::format(format!(
                "cut short: {what} takes {n} bytes at byte {}, the file has {} more; fetch it again",
                self.at,
                self.left()
            )));
        }
        let bytes = &self.all.as_ref()[self.at..self.at + n];
        self.at += n;
        Ok(bytes)
    }

    /// The next `n` bytes, shared.
    pub(super) fn shared(&mut self, n: usize, what: &str) -> Result<MappedBytes> {
        let start = self.at;
        self.bytes(n, what)?;
        self.all.slice(start..self.at).ok_or_else(|| Error::format(format!("cut short: {what}")))
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let bytes = self.bytes(N, what)?;
        bytes.try_into().map_err(|_| Error::format(format!("cut short: {what}")))
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A text behind its length, of at most `limit` bytes.
    pub(super) fn text(&mut self, limit: usize, what: &str) -> Result<&'a str> {
        let at = self.at;
        let length = self.u64(what)?;
        if length > limit as u64 {
            return Err(Error::format(format!("{what} at byte {at} is {length} bytes long; at most {limit} are read")));
        }
        // At most `limit`, so it fits.
        let bytes = self.bytes(length as usize, what)?;
        std::str::from_utf8(bytes).map_err(|_| Error::format(format!("{what} at byte {at} is not UTF-8")))
    }

    /// Checks that `count` things of at least `least` bytes can be in what is left.
    pub(super) fn check_count(&self, count: u64, least: usize, what: &str) -> Result<usize> {
        let most = self.left() / least;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(Error::format(format!(
                "cut short or damaged: it announces {count} {what} at byte {}, the rest of the file has room for {most} at most; fetch it again",
                self.at
            ))),
        }
    }
}
