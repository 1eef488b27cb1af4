//! A checkpoint file: step, identity of the run, adapters and optimiser state, in exact bits.
//!
//! Little-endian: magic, u64 length of a JSON header, the header, then for each module its A and B (f32), then each stage's optimiser state, and
//! the CRC-32 of everything before it.

use crate::executor::Snapshot;
use serde::{Deserialize, Serialize};
use std::{fs, io::Write, path::Path};
use zofo_hal::{Error, Result, perturb::Projection};
use zofo_ops::lora::{HostAdapter, HostLora};

const MAGIC: &[u8; 8] = b"zofochk1";
/// Headers are a few hundred bytes a module.
const MAX_HEADER: u64 = 64 << 20;

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Steps done.
    pub step: u32,
    /// What a run must have in common with this one to continue it, by name.
    pub identity: Vec<(String, String)>,
    /// Adapters and optimisers.
    pub snapshot: Snapshot,
}

#[derive(Serialize, Deserialize)]
struct Header {
    step: u32,
    identity: Vec<(String, String)>,
    modules: Vec<Module>,
    optimisers: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
struct Module {
    layer: usize,
    projection: String,
    rank: usize,
    /// Bits of the f32.
    scale: u32,
    a: u64,
    b: u64,
}

impl Checkpoint {
    /// A checkpoint from its parts.
    pub fn new(step: u32, identity: Vec<(String, String)>, snapshot: Snapshot) -> Self {
        Self { step, identity, snapshot }
    }

    /// Writes to a temporary file beside `path`, flushes it to disk, and renames it.
    ///
    /// # Errors
    /// `Io`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let modules = self.snapshot.adapter.modules.iter().map(|((layer, p), m)| Module {
            layer: *layer,
            projection: p.name().to_owned(),
            rank: m.rank,
            scale: m.scale.to_bits(),
            a: m.a.len() as u64,
            b: m.b.len() as u64,
        });
        let header = Header {
            step: self.step,
            identity: self.identity.clone(),
            modules: modules.collect(),
            optimisers: self.snapshot.optimisers.iter().map(|o| o.len() as u64).collect(),
        };
        let header = serde_json::to_vec(&header).map_err(|e| Error::format(e.to_string()))?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend((header.len() as u64).to_le_bytes());
        bytes.extend(header);
        for m in self.snapshot.adapter.modules.values() {
            m.a.iter().chain(&m.b).for_each(|v| bytes.extend(v.to_le_bytes()));
        }
        self.snapshot.optimisers.iter().for_each(|o| bytes.extend(o));
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        let temporary = path.with_extension("tmp");
        let write = || -> std::io::Result<()> {
            let mut file = fs::File::create(&temporary)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, path)
        };
        write().map_err(|e| {
            let _ = fs::remove_file(&temporary);
            Error::io(path, e)
        })
    }

    /// Reads a checkpoint.
    ///
    /// # Errors
    /// `Io`; `Format` where the file is cut short, too long, or no checkpoint.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
        Self::parse(&bytes).map_err(|e| e.context(path.display()))
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let short = || Error::format("the checkpoint is cut short; use an earlier one");
        bytes.strip_prefix(MAGIC).ok_or_else(|| Error::format("this is no zofo checkpoint"))?;
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or_else(short)?;
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err(Error::format("the checkpoint is damaged: its checksum does not match; use an earlier one"));
        }
        let rest = body.strip_prefix(MAGIC).ok_or_else(short)?;
        let (length, rest) = rest.split_at_checked(8).ok_or_else(short)?;
        let length = u64::from_le_bytes(length.try_into().map_err(|_| short())?);
        if length > MAX_HEADER {
            return Err(Error::format(format!("the checkpoint's header claims {length} bytes")));
        }
        let (header, mut rest) = rest.split_at_checked(length as usize).ok_or_else(short)?;
        let header: Header = serde_json::from_slice(header).map_err(|e| Error::format(format!("the checkpoint's header: {e}")))?;
        let mut take = |n: u64| -> Result<&[u8]> {
            let n = usize::try_from(n).map_err(|_| short())?;
            let (head, tail) = rest.split_at_checked(n).ok_or_else(short)?;
            rest = tail;
            Ok(head)
        };
        let mut adapter = HostAdapter::default();
        for m in header.modules {
            let p = Projection::from_name(&m.projection)
                .ok_or_else(|| Error::format(format!("the checkpoint names an unknown projection `{}`", m.projection)))?;
            let mut floats = |n: u64| -> Result<Vec<f32>> {
                let bytes = take(n.checked_mul(4).ok_or_else(short)?)?;
                Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            };
            let (a, b) = (floats(m.a)?, floats(m.b)?);
            adapter.modules.insert((m.layer, p), HostLora { rank: m.rank, scale: f32::from_bits(m.scale), a, b });
        }
        let optimisers = header.optimisers.into_iter().map(|n| take(n).map(<[u8]>::to_vec)).collect::<Result<_>>()?;
        if !rest.is_empty() {
            return Err(Error::format(format!("the checkpoint has {} bytes too many", rest.len())));
        }
        Ok(Self { step: header.step, identity: header.identity, snapshot: Snapshot::new(adapter, optimisers) })
    }

    /// Whether a run with `identity` can continue this one.
    ///
    /// # Errors
    /// `InvalidArgument` naming the first setting that differs, with both values.
    pub fn check_identity(&self, identity: &[(String, String)]) -> Result<()> {
        for (name, value) in identity {
            let saved = self.identity.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str()).unwrap_or("nothing");
            if saved != value {
                return Err(Error::invalid(format!(
                    "the run to resume had another {name}: {saved} instead of {value}; resume with the settings it was started with"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> Checkpoint {
        let mut adapter = HostAdapter::default();
        let m = HostLora { rank: 1, scale: 2.0, a: vec![1.0, -0.0], b: vec![f32::MIN_POSITIVE] };
        adapter.modules.insert((0, Projection::Q), m.clone());
        adapter.modules.insert((3, Projection::Down), m);
        Checkpoint::new(7, vec![("seed".into(), "1".into())], Snapshot::new(adapter, vec![vec![1, 2, 3], Vec::new()]))
    }

    #[test]
    fn every_bit_comes_back_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        checkpoint().write(&path).unwrap();
        assert_eq!(Checkpoint::read(&path).unwrap(), checkpoint());
        let bytes = fs::read(&path).unwrap();
        for n in 0..bytes.len() {
            assert!(Checkpoint::parse(&bytes[..n]).is_err(), "cut at {n}");
        }
        assert!(Checkpoint::parse(&[bytes.clone(), vec![0]].concat()).is_err());
        for i in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[i] ^= 1 << (i % 8);
            assert!(Checkpoint::parse(&flipped).is_err(), "a bit of byte {i}");
        }
        let mut huge = bytes;
        huge[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Checkpoint::parse(&huge).is_err());
    }

    #[test]
    fn another_run_is_named() {
        let e = checkpoint().check_identity(&[("seed".into(), "2".into())]).unwrap_err();
        assert!(e.message().contains("another seed: 1 instead of 2"), "{e}");
    }
}
