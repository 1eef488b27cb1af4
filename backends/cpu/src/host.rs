//! What the operating system allows the process: cores and memory.

use std::{collections::BTreeSet, fs, string::String, vec::Vec};

/// Physical cores within the affinity mask and the cgroup's quota.
///
/// `available_parallelism` knows mask and quota but counts hardware threads; siblings of one core share its vector units, so on Linux they
/// are counted once.
pub(crate) fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, Into::into);
    allowed_cores().map_or(logical, |cores| cores.clamp(1, logical))
}

/// Distinct cores behind the hardware threads that the affinity mask allows.
fn allowed_cores() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = BTreeSet::new();
    for cpu in parse_list(list.trim())? {
        let siblings = fs::read_to_string(std::format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
        cores.insert(siblings.map_or_else(|_| std::format!("{cpu}"), |s| s.trim().into()));
    }
    Some(cores.len())
}

/// `0-3,8` as numbers.
fn parse_list(list: &str) -> Option<Vec<usize>> {
    let mut out = Vec::new();
    for part in list.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        let (a, b): (usize, usize) = (a.parse().ok()?, b.parse().ok()?);
        // A hostile or broken list must not fill the memory.
        out.extend((a..=b).take(4096));
    }
    Some(out)
}

/// Bytes of memory that the process may use: the machine's, or the cgroup's limit if that is lower.
pub(crate) fn memory_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let total = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)?;
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit = limits.iter().find_map(|p| fs::read_to_string(p).ok()?.trim().parse::<u64>().ok());
    Some(limit.map_or(total, |l| l.min(total)))
}

/// The processor's model name.
pub(crate) fn model_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors() {
        assert_eq!(parse_list("0-2,5"), Some(std::vec![0, 1, 2, 5]));
        assert_eq!(parse_list("x"), None);
    }

    #[test]
    fn there_is_a_core() {
        assert!(physical_cores() >= 1);
    }
}
