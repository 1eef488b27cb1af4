//! The folder that a run leaves: what it was asked to do, what happened, and the adapter.
//!
//! | entry | what it holds |
//! |---|---|
//! | `run.json` | model, data, cluster and settings: enough to continue |
//! | `plan.json` | which device holds which layers, how each stage learns, in which order work is done |
//! | `metrics.jsonl` | a line per step |
//! | `journal.txt` | the seed journal ([`zofo_pipeline::journal`]) |
//! | `checkpoint/state` | adapters and optimisers, in exact bits |
//! | `adapter/` | the adapter in PEFT's format |
//! | `predictions.jsonl`, `predictions_before.jsonl` | what the model said to each evaluation example ([`crate::eval::Predictions`]) after training, and before |
//! | `curves.svg` | training loss over steps |
//! | `trace.json` | the last step on the clock, measured; opens in Perfetto |
//! | `report.html` | the result, the loss and the last step as a page |
//! | `summary.json` | the result ([`Summary`]) |
//!
//! Files are replaced whole or, where they grow by lines, cut back to the last checkpoint when a run goes on.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use zofo_hal::{Error, ErrorKind, Result};
use zofo_pipeline::{
    events::StepReport,
    ir::Step,
    journal::Entry,
    plan::{Plan, StageMember},
};

use crate::{events::When, summary::Summary};

/// A run folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder {
    path: PathBuf,
}

const RECORD: &str = "run.json";
const METRICS: &str = "metrics.jsonl";
const JOURNAL: &str = "journal.txt";
/// Locked while a process trains in the folder.
const LOCK: &str = ".lock";
const SUMMARY: &str = "summary.json";
const LARGEST_JSON: u64 = 16 << 20;

impl RunFolder {
    /// Makes a new run folder.
    ///
    /// # Errors
    /// `InvalidArgument` where something is there already, `Io` where it cannot be made.
    pub fn create(path: &Path) -> Result<Self> {
        match fs::read_dir(path) {
            Ok(mut entries) => {
                if entries.next().is_some() {
                    let what = if path.join(RECORD).is_file() { "holds a run already; resume it, or" } else { "is not empty;" };
                    return Err(Error::invalid(format!("{}: this folder {what} choose another one for the new run", path.display())));
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => fs::create_dir_all(path).map_err(|e| Error::io(path, e))?,
            Err(e) if e.kind() == io::ErrorKind::NotADirectory => {
                return Err(Error::invalid(format!("{}: this is a file; choose a folder for the run", path.display())));
            }
            Err(e) => return Err(Error::io(path, e)),
        }
        Ok(Self { path: path.to_owned() })
    }

    /// Makes the first of `parent/1`, `parent/2`, ... that is not there.
    ///
    /// # Errors
    /// `Io`.
    pub fn numbered(parent: &Path) -> Result<Self> {
        fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
        let entries = fs::read_dir(parent).map_err(|e| Error::io(parent, e))?;
        let last = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok()).max().unwrap_or(0);
        // Another process may take a number between looking and making.
        for number in last.saturating_add(1).. {
            let path = parent.join(number.to_string());
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path }),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io(&path, e)),
            }
        }
        Err(Error::invalid(format!("{}: no number is left for another run", parent.display())))
    }

    /// Opens the folder of an earlier run.
    ///
    /// # Errors
    /// `Io` where it is no run folder or has no checkpoint to go on from.
    pub fn open(path: &Path) -> Result<Self> {
        let missing = |what: &str| Err(Error::new(ErrorKind::Io, format!("{}: {what}", path.display())));
        if !path.join(RECORD).is_file() {
            return missing("this is no run folder (it has no run.json); give the folder that a training run wrote");
        }
        let folder = Self { path: path.to_owned() };
        if !folder.checkpoint().is_file() {
            return missing("this run has no checkpoint yet, so there is nothing to go on from; start it anew in another folder");
        }
        Ok(folder)
    }

    /// The folder at `path`, unchecked: what is in it is found out where it is read.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checkpoint file.
    pub fn checkpoint(&self) -> PathBuf {
        self.path.join("checkpoint").join("state")
    }

    /// The adapter folder.
    pub fn adapter(&self) -> PathBuf {
        self.path.join("adapter")
    }

    /// The picture of the training loss.
    pub fn curves(&self) -> PathBuf {
        self.path.join("curves.svg")
    }

    /// The last step's timeline.
    pub fn trace(&self) -> PathBuf {
        self.path.join("trace.json")
    }

    /// The page.
    pub fn report(&self) -> PathBuf {
        self.path.join("report.html")
    }

    /// The predictions of the evaluation before or after training.
    pub fn predictions(&self, when: When) -> PathBuf {
        self.path.join(match when {
            When::Before => "predictions_before.jsonl",
            When::After => "predictions.jsonl",
        })
    }

    /// Training losses of the run in `folder` by step, counted from 1: what its `metrics.jsonl` has, up to a line that is cut short.
    ///
    /// # Errors
    /// `Io`; `Format` for a line in the middle that is none.
    pub fn losses(folder: &Path) -> Result<Vec<(u32, f64)>> {
        let path = folder.join(METRICS);
        let file = File::open(&path).map_err(|e| Error::io(&path, e))?;
        let mut out = Vec::new();
        let mut lines = BufReader::new(file).lines().enumerate().peekable();
        while let Some((i, line)) = lines.next() {
            let line = line.map_err(|e| Error::io(&path, e))?;
            match serde_json::from_str::<Metrics>(&line) {
                Ok(m) => out.push((m.step, m.loss)),
                Err(_) if lines.peek().is_none() => break,
                Err(e) => return Err(Error::format(format!("{}: line {}: {e}", path.display(), i + 1))),
            }
        }
        Ok(out)
    }

    /// Removes what a further step makes wrong.
    pub(crate) fn outdated(&self) -> Result<()> {
        let path = self.predictions(When::After);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io(path, e)),
            _ => Ok(()),
        }
    }

    pub(crate) fn write_record(&self, record: &impl Serialize) -> Result<()> {
        self.write_json(RECORD, record)
    }

    pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> Result<T> {
        read_json(&path.join(RECORD))
    }

    /// Writes `summary.json`.
    ///
    /// # Errors
    /// `Io`.
    pub fn write_summary(&self, summary: &Summary) -> Result<()> {
        self.write_json(SUMMARY, summary)
    }

    /// Reads `summary.json`.
    ///
    /// # Errors
    /// `Io`, `Format`.
    pub fn read_summary(&self) -> Result<Summary> {
        read_json(&self.path.join(SUMMARY))
    }

    pub(crate) fn write_plan(&self, plan: &Plan, model_layers: usize) -> Result<()> {
        self.write_json("plan.json", &plan_json(plan, model_layers))
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let mut bytes = serde_json::to_vec_pretty(value).map_err(|e| Error::format(format!("{name}: {e}")))?;
        bytes.push(b'\n');
        write_atomic(&self.path.join(name), &bytes)
    }

    /// Makes the folder of checkpoints.
    pub(crate) fn prepare_checkpoint(&self) -> Result<PathBuf> {
        let folder = self.path.join("checkpoint");
        fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
        Ok(self.checkpoint())
    }

    /// Keeps the folder to this process for as long as the result lives.
    ///
    /// # Errors
    /// `Io` where another process has it.
    pub(crate) fn lock(&self) -> Result<RunLock> {
        let path = self.path.join(LOCK);
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(|e| Error::io(&path, e))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(Error::new(
                ErrorKind::Io,
                format!("{}: another process is training in this folder; let it end, or stop it, and try again", self.path.display()),
            )),
            // Some network file systems have no locks; a run is not refused for that.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(RunLock { _file: file }),
        }
    }

    /// Opens the files that grow, cut back to the first `steps` steps; `journals` says that each step has a line in the journal.
    pub(crate) fn logs(&self, steps: u32, journals: bool) -> Result<Logs> {
        let metrics_step = |line: &str| serde_json::from_str::<Metrics>(line).ok()?.step.checked_sub(1);
        let journal_step = |line: &str| Some(Entry::parse(line).ok()?.step);
        let (metrics, kept, metrics_note) = self.grow(METRICS, steps, true, &metrics_step)?;
        let (journal, _, journal_note) = self.grow(JOURNAL, steps, journals, &journal_step)?;
        let losses = kept.iter().filter_map(|l| serde_json::from_str::<Metrics>(l).ok()).collect();
        Ok(Logs { metrics, journal, earlier: losses, notes: metrics_note.into_iter().chain(journal_note).collect() })
    }

    /// Lines of the first `steps` steps stay, as far as they are whole. Where each step should have one (`all`) and some have none, the file is kept
    /// under another name and a note says so.
    fn grow(
        &self,
        name: &str,
        steps: u32,
        all: bool,
        step_of: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<(LogFile, Vec<String>, Option<String>)> {
        let path = self.path.join(name);
        let mut kept = Vec::new();
        let file = match File::open(&path) {
            Ok(file) => Some(file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io(&path, e)),
        };
        for line in file.iter().flat_map(|f| BufReader::new(f).lines()) {
            let line = match line {
                // Bytes that are no text are damage as any other.
                Err(e) if e.kind() == io::ErrorKind::InvalidData => break,
                line => line.map_err(|e| Error::io(&path, e))?,
            };
            // A line that a crash cut short belongs to a step that is done again.
            match step_of(&line) {
                Some(step) if step < steps && (!all || step as usize == kept.len()) => kept.push(line),
                _ => break,
            }
        }
        let missing = all && kept.len() < steps as usize;
        let note = missing.then(|| {
            let aside = format!("{name}.damaged");
            let kept_aside = file.is_some() && fs::copy(&path, self.path.join(&aside)).is_ok();
            let kept_as = if kept_aside { format!(" (kept as {aside})") } else { String::new() };
            format!(
                "{}: {} of the {steps} steps before the checkpoint are recorded{kept_as}; the run goes on from the checkpoint, with these steps \
                 missing from the record",
                path.display(),
                kept.len(),
            )
        });
        let text: String = kept.iter().flat_map(|l| [l.as_str(), "\n"]).collect();
        write_atomic(&path, text.as_bytes())?;
        let file = OpenOptions::new().append(true).open(&path).map_err(|e| Error::io(&path, e))?;
        Ok((LogFile { file, path }, kept, note))
    }
}

/// A run folder that no other process trains in.
pub(crate) struct RunLock {
    _file: File,
}

/// A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Metrics {
    /// Counted from 1.
    pub step: u32,
    pub loss: f64,
    pub samples: usize,
    pub labels: usize,
    pub tokens: usize,
    pub gradient_norm: Option<f64>,
    pub slope_rms: Option<f64>,
    pub seconds: f64,
    pub utilisation: f64,
}

impl From<&StepReport> for Metrics {
    fn from(r: &StepReport) -> Self {
        Self {
            step: r.step + 1,
            loss: r.loss,
            samples: r.samples,
            labels: r.labels,
            tokens: r.tokens,
            gradient_norm: r.gradient_norm,
            slope_rms: r.slope_rms,
            seconds: r.seconds,
            utilisation: r.utilisation(),
        }
    }
}

/// The files of a run that grow by lines.
pub(crate) struct Logs {
    metrics: LogFile,
    journal: LogFile,
    /// The steps that were there.
    pub earlier: Vec<Metrics>,
    /// What a user should know of them.
    pub notes: Vec<String>,
}

impl Logs {
    pub fn step(&mut self, metrics: &Metrics, journal: &[Entry]) -> Result<()> {
        let line = serde_json::to_string(metrics).map_err(|e| Error::format(format!("{METRICS}: {e}")))?;
        self.metrics.line(&line)?;
        journal.iter().try_for_each(|e| self.journal.line(&e.to_line()))
    }

    /// Waits until everything is on disk: a checkpoint must not be ahead of the lines it stands for.
    pub fn sync(&mut self) -> Result<()> {
        self.metrics.sync()?;
        self.journal.sync()
    }
}

struct LogFile {
    file: File,
    path: PathBuf,
}

impl LogFile {
    fn line(&mut self, line: &str) -> Result<()> {
        // One write, so that a reader sees whole lines.
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(|e| Error::io(&self.path, e))
    }

    fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io(&self.path, e))
    }
}

fn plan_json(plan: &Plan, model_layers: usize) -> Value {
    let w = &plan.schedule.workload;
    let members = |all: &[StageMember]| all.iter().map(|m| json!([m.device, m.share])).collect::<Vec<_>>();
    let stages: Vec<Value> = (plan.stages.iter().enumerate())
        .map(|(s, stage)| {
            json!({
                "devices": members(&stage.members),
                "split": stage.split.name(),
                "layers": [stage.layers.start, stage.layers.end],
                "role": stage.role.name(),
                "actions": plan.schedule.actions(s).map(|a| a.to_string()).collect::<Vec<_>>(),
            })
        })
        .collect();
    let order = |list: &Vec<Step>| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let workers: Vec<Value> = plan
        .schedule
        .lists
        .iter()
        .enumerate()
        .map(|(worker, list)| json!({"devices": members(plan.members(worker)), "order": order(list)}))
        .collect();
    json!({
        "schedule": plan.name.name(),
        "layers": model_layers,
        "micro_batches": w.micro_batches,
        "directions": w.directions,
        "stages": stages,
        "workers": workers,
    })
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let length = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if length > LARGEST_JSON {
        return Err(Error::format(format!("{}: {length} bytes are too many for this file", path.display())));
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::format(format!("{}: {e}", path.display())))
}

/// Writes beside the target and renames over it: a reader sees the old file or the new one.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|e| {
        let _ = fs::remove_file(&temporary);
        Error::io(path, e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(step: u32) -> Metrics {
        let report = StepReport::default();
        Metrics { step, loss: 1.0 / 3.0, ..Metrics::from(&report) }
    }

    #[test]
    fn what_is_there_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        RunFolder::create(&dir.path().join("a/b")).unwrap();
        RunFolder::create(&dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("a/b/notes"), "x").unwrap();
        assert!(RunFolder::create(&dir.path().join("a/b")).unwrap_err().message().contains("is not empty"));
        fs::write(dir.path().join("a/b").join(RECORD), "{}").unwrap();
        assert!(RunFolder::create(&dir.path().join("a/b")).unwrap_err().message().contains("resume it"));
        assert!(RunFolder::create(&dir.path().join("a/b/notes")).unwrap_err().message().contains("is a file"));
        assert!(RunFolder::open(&dir.path().join("a")).unwrap_err().message().contains("no run folder"));
        assert!(RunFolder::open(&dir.path().join("a/b")).unwrap_err().message().contains("no checkpoint"));
    }

    #[test]
    fn runs_are_numbered() {
        let dir = tempfile::tempdir().unwrap();
        let parent = dir.path().join("runs");
        for n in 1..4 {
            assert_eq!(RunFolder::numbered(&parent).unwrap().path(), parent.join(n.to_string()));
        }
        fs::create_dir(parent.join("17")).unwrap();
        assert_eq!(RunFolder::numbered(&parent).unwrap().path(), parent.join("18"));
    }

    #[test]
    fn logs_are_cut_back_to_the_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(dir.path()).unwrap();
        let mut logs = folder.logs(0, true).unwrap();
        (1..6).for_each(|s| logs.step(&metrics(s), &[entry(s - 1)]).unwrap());
        logs.sync().unwrap();
        let path = dir.path().join(METRICS);
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{whole}{{\"step\":6,\"lo")).unwrap();
        assert_eq!(RunFolder::losses(dir.path()).unwrap().last(), Some(&(5, 1.0 / 3.0)));
        let mut logs = folder.logs(3, true).unwrap();
        assert_eq!(logs.earlier, [metrics(1), metrics(2), metrics(3)]);
        assert!(logs.notes.is_empty());
        (4..6).for_each(|s| logs.step(&metrics(s), &[]).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
    }

    fn entry(step: u32) -> Entry {
        Entry::new(step, 1e-3, vec![0, 1], vec![0.5, -0.5])
    }

    #[test]
    fn missing_and_damaged_logs_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(dir.path()).unwrap();
        let mut logs = folder.logs(0, true).unwrap();
        (1..6).for_each(|s| logs.step(&metrics(s), &[entry(s - 1)]).unwrap());
        let path = dir.path().join(JOURNAL);
        let whole = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = whole.lines().collect();
        for (text, recorded) in [
            (String::new(), 0),
            ([lines[0], "step one", lines[2], lines[3], ""].join("\n"), 1),
            ([lines[0], lines[1], lines[3], ""].join("\n"), 2),
        ] {
            fs::write(&path, &text).unwrap();
            let notes = folder.logs(4, true).unwrap().notes;
            assert!(
                matches!(&notes[..], [n] if n.contains(&format!("{recorded} of the 4 steps")) && n.contains("journal.txt.damaged")),
                "{notes:?}"
            );
            assert_eq!(fs::read_to_string(dir.path().join("journal.txt.damaged")).unwrap(), text);
        }
        fs::remove_file(&path).unwrap();
        assert!(folder.logs(4, true).unwrap().notes[0].contains("0 of the 4 steps"));
        fs::remove_file(&path).unwrap();
        assert!(folder.logs(4, false).unwrap().notes.is_empty(), "guided steps have no entries");
    }

    #[test]
    fn one_process_trains_in_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(dir.path()).unwrap();
        let lock = folder.lock().unwrap();
        assert!(folder.lock().is_err_and(|e| e.message().contains("another process is training in this folder")));
        drop(lock);
        folder.lock().unwrap();
    }
}
