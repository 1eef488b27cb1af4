//! `zofo train --config FILE.toml`: the settings of the command line in a file, and back.
//!
//! The file's settings become arguments in front of those of the command line, where later ones win. So a setting means the same in both, and an
//! argument that is added is a setting at once.

use std::{
    ffi::OsString,
    fs,
    ops::Range,
    path::{Component, Path, PathBuf},
};

use clap::{Arg, ArgMatches, Command, error::ErrorKind};
use toml::de::{DeTable, DeValue};
use zofo::{
    Error, Result,
    cluster::{Cluster, DeviceEntry},
};

/// Largest file of settings or devices read; a thousand devices take a tenth of it.
const MAX_BYTES: u64 = 1 << 20;

/// What is asked of the program rather than of the run.
const NO_SETTINGS: [&str; 6] = ["resume", "json", "config", "print_config", "help", "version"];
/// Settings of the file's top.
const TOP: [&str; 4] = ["model", "out", "cluster", "plan"];
/// Settings that are paths, relative to the file.
const PATHS: [&str; 7] = ["model", "out", "cluster", "plan", "data", "data_dir", "eval_data"];
/// Where the library calls a setting otherwise than the command line does.
const RENAMED: [(&str, &str); 3] = [("optimizer", "optimiser"), ("zo_optimizer", "zo_optimiser"), (INVERTED, "truncate")];
/// The flag that says the opposite of its setting.
const INVERTED: &str = "no_truncate";
const SECTIONS: [&str; 3] = ["data", "eval_data", "train"];
const DEVICES: &str = "device";

/// A file, as arguments and what no argument can say.
#[derive(Default)]
pub struct Config {
    arguments: Vec<OsString>,
    /// The devices of the file.
    pub cluster: Option<Cluster>,
}

/// A setting of the file and its argument.
struct Setting {
    /// "" for the top.
    section: &'static str,
    key: String,
    id: String,
    long: String,
    takes_value: bool,
}

impl Setting {
    fn of(arg: &Arg) -> Option<Self> {
        let id = arg.get_id().as_str();
        if NO_SETTINGS.contains(&id) {
            return None;
        }
        let (section, key) = match arg.get_help_heading() {
            _ if TOP.contains(&id) => ("", id),
            _ if SECTIONS.contains(&id) => (SECTIONS[SECTIONS.iter().position(|s| *s == id)?], "path"),
            Some("Data") => ("data", id.strip_prefix("data_").unwrap_or(id)),
            Some("Evaluation") if id != "eval_samples" => ("eval_data", id.strip_prefix("eval_").unwrap_or(id)),
            _ => ("train", RENAMED.iter().find(|(from, _)| *from == id).map_or(id, |(_, to)| to)),
        };
        let takes_value = arg.get_action().takes_values();
        Some(Self { section, key: key.to_owned(), id: id.to_owned(), long: arg.get_long()?.to_owned(), takes_value })
    }

    /// The argument that says `value`; none for a flag that is off.
    fn argument(&self, value: &str) -> Option<String> {
        let inverted = match value {
            "true" => "false",
            "false" => "true",
            other => other,
        };
        let value = if self.id == INVERTED { inverted } else { value };
        match self.takes_value {
            true => Some(format!("--{}={value}", self.long)),
            false => (value == "true").then(|| format!("--{}", self.long)),
        }
    }
}

fn settings(train: &Command) -> Vec<Setting> {
    train.get_arguments().filter_map(Setting::of).collect()
}

/// Puts the settings of `--config FILE`, where `zofo train` is given one, in front of the other arguments.
///
/// # Errors
/// `Io` where the file cannot be read; `InvalidArgument` for what it says, with file, line and setting.
pub fn expand(args: &[OsString], train: &Command) -> Result<(Vec<OsString>, Option<Cluster>)> {
    let file = match args {
        [_, command, rest @ ..] if command == "train" => option(rest, "--config").map(PathBuf::from),
        _ => None,
    };
    let Some(file) = file else {
        let mut arguments = if embedded_applies(args) { embedded() } else { Vec::new() };
        if option(args, "--plan").is_some() {
            // A plan has directions of its own.
            arguments.retain(|a| !a.to_string_lossy().starts_with("--directions="));
        }
        let command = args.len().min(2);
        return Ok(([&args[..command], &arguments, &args[command..]].concat(), None));
    };
    let text = read(&file, "configuration")?;
    let config = parse(&text, &file, train)?;
    Ok(([&args[..2], &config.arguments, &args[2..]].concat(), config.cluster))
}

/// Whether the model that comes with the program is trained: where `zofo train` is given neither model nor data, or this model by name.
fn embedded_applies(args: &[OsString]) -> bool {
    let [_, command, rest @ ..] = args else { return false };
    if !cfg!(feature = "embedded") || command != "train" || option(rest, "--resume").is_some() {
        return false;
    }
    match option(rest, "--model") {
        Some(model) => model == "embedded",
        None => option(rest, "--data").is_none(),
    }
}

/// Model, data and settings that come with the program, as arguments; later ones win.
fn embedded() -> Vec<OsString> {
    #[cfg(feature = "embedded")]
    {
        let (name, o) = (zofo::embedded::NAME, zofo::embedded::options());
        let mut arguments = vec![format!("--model={name}"), format!("--data={name}")];
        arguments.extend([format!("--steps={}", o.steps), format!("--batch={}", o.batch), format!("--directions={}", o.directions)]);
        arguments.extend([format!("--lr={}", o.lr), format!("--warmup={}", o.warmup)]);
        arguments.extend(o.zo_lr.map(|lr| format!("--zo-lr={lr}")));
        arguments.extend(o.zo_optimiser.map(|o| format!("--zo-optimizer={}", o.name())));
        arguments.extend(o.targets.map(|t| format!("--targets={t}")));
        arguments.extend(o.decay.then(|| "--decay".to_owned()));
        arguments.into_iter().map(OsString::from).collect()
    }
    #[cfg(not(feature = "embedded"))]
    Vec::new()
}

/// The value of the last option of this name; "" where it stands last.
fn option(args: &[OsString], name: &str) -> Option<OsString> {
    let mut found = None;
    let mut args = args.iter().take_while(|a| *a != "--");
    while let Some(arg) = args.next() {
        let text = arg.to_string_lossy();
        if text == name {
            found = Some(args.next().cloned().unwrap_or_default());
        } else if let Some(value) = text.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')) {
            found = Some(value.into());
        }
    }
    found
}

/// A small text file.
pub fn read(path: &Path, what: &str) -> Result<String> {
    let meta = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if !meta.is_file() || meta.len() > MAX_BYTES {
        return Err(Error::invalid(format!("{}: a {what} file is a plain file of at most 1 MiB", path.display())));
    }
    fs::read_to_string(path).map_err(|e| Error::io(path, e))
}

/// An error in TOML is wrong use, whether of its form or of what it says.
pub fn malformed(path: &Path, e: &dyn std::fmt::Display) -> Error {
    Error::invalid(format!("{}: {}", path.display(), e.to_string().trim_end()))
}

fn parse(text: &str, path: &Path, train: &Command) -> Result<Config> {
    let root = DeTable::parse(text).map_err(|e| malformed(path, &e))?;
    let reader = Reader { text, path, train, settings: settings(train), base: path.parent().unwrap_or(Path::new("")) };
    let mut config = Config::default();
    for (key, value) in root.get_ref() {
        let name = key.get_ref().as_ref();
        match (SECTIONS.iter().find(|s| **s == name), value.get_ref()) {
            (Some(section), DeValue::Table(table)) => {
                for (key, value) in table {
                    config.arguments.extend(reader.setting(section, key.get_ref(), &key.span(), value.get_ref())?);
                }
            }
            (Some(section), _) => {
                return Err(reader.error(&key.span(), format!("`{section}` is a section: write [{section}] and its settings below it")));
            }
            (None, _) if name == DEVICES => config.cluster = Some(reader.cluster()?),
            (None, value) => config.arguments.extend(reader.setting("", name, &key.span(), value)?),
        }
    }
    if config.cluster.is_some() && root.get_ref().contains_key("cluster") {
        return Err(Error::invalid(format!("{}: it names a cluster file and has [[{DEVICES}]] of its own; leave one out", path.display())));
    }
    Ok(config)
}

struct Reader<'a> {
    text: &'a str,
    path: &'a Path,
    train: &'a Command,
    settings: Vec<Setting>,
    base: &'a Path,
}

impl Reader<'_> {
    fn error(&self, at: &Range<usize>, what: impl std::fmt::Display) -> Error {
        let line = 1 + self.text[..at.start.min(self.text.len())].matches('\n').count();
        Error::invalid(format!("{}: line {line}: {what}", self.path.display()))
    }

    fn setting(&self, section: &str, key: &str, at: &Range<usize>, value: &DeValue<'_>) -> Result<Option<OsString>> {
        let Some(setting) = self.settings.iter().find(|s| s.section == section && s.key == key) else {
            return Err(self.error(at, self.unknown(section, key)));
        };
        let mut text = scalar(value).map_err(|what| self.error(at, format!("`{key}`: {what}")))?;
        if PATHS.contains(&setting.id.as_str()) {
            text = located(self.base, &text, setting.id == "out");
        }
        let Some(argument) = setting.argument(&text) else { return Ok(None) };
        // By itself, so that the line is known; what it needs beside it is seen later.
        if let Err(e) = self.train.clone().no_binary_name(true).try_get_matches_from([&argument])
            && e.kind() != ErrorKind::MissingRequiredArgument
        {
            let message = e.to_string();
            let first = message.split("\n\n").next().unwrap_or_default().trim().trim_start_matches("error: ");
            return Err(self.error(at, format!("`{key}`: {first}")));
        }
        Ok(Some(argument.into()))
    }

    fn unknown(&self, section: &str, key: &str) -> String {
        let place = |section: &str| if section.is_empty() { "at the top of the file".to_owned() } else { format!("in [{section}]") };
        if let Some(other) = self.settings.iter().find(|s| s.key == key) {
            return format!("there is no `{key}` {}; it belongs {}", place(section), place(other.section));
        }
        let mut known: Vec<&str> = self.settings.iter().filter(|s| s.section == section).map(|s| s.key.as_str()).collect();
        if section.is_empty() {
            known.extend(SECTIONS.iter().chain([&DEVICES]));
        }
        let near = known.iter().map(|k| (distance(k, key), *k)).min().filter(|(d, _)| *d <= 2.max(key.len() / 3));
        match near {
            Some((_, near)) => format!("there is no `{key}` {}; did you mean `{near}`?", place(section)),
            None => format!("there is no `{key}` {}; there are: {}", place(section), known.join(", ")),
        }
    }

    fn cluster(&self) -> Result<Cluster> {
        #[derive(serde::Deserialize)]
        struct Devices {
            device: Vec<DeviceEntry>,
        }
        let devices: Devices = toml::from_str(self.text).map_err(|e| malformed(self.path, &e))?;
        let cluster = Cluster::new(devices.device);
        cluster.check().map_err(|e| e.context(self.path.display()))?;
        Ok(cluster)
    }
}

/// A value as the command line has it; a list is one with commas.
fn scalar(value: &DeValue<'_>) -> std::result::Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(n) if n.radix() == 10 => Ok(n.as_str().to_owned()),
        DeValue::Integer(n) => i64::from_str_radix(n.as_str(), n.radix()).map(|n| n.to_string()).map_err(|e| e.to_string()),
        DeValue::Float(x) => Ok(x.as_str().to_owned()),
        DeValue::Boolean(yes) => Ok(yes.to_string()),
        DeValue::Array(items) => {
            let items = items.iter().map(|i| scalar(i.get_ref())).collect::<std::result::Result<Vec<_>, _>>()?;
            match items.iter().find(|i| i.contains(',')) {
                Some(bad) => Err(format!("an entry of a list may have no comma (`{bad}`)")),
                None => Ok(items.join(",")),
            }
        }
        other => Err(format!("a {} where a value is expected", other.type_str())),
    }
}

/// Whether a word that might be a path names a known model or data set instead: nothing is there, and it does not look like a file either.
fn is_name(text: &str, path: &Path) -> bool {
    const FILES: [&str; 6] = ["csv", "tsv", "jsonl", "json", "gguf", "toml"];
    let extension = Path::new(text).extension().and_then(|e| e.to_str()).unwrap_or_default();
    !text.contains(['/', '\\']) && !FILES.contains(&extension) && !path.exists()
}

/// A path of the file, which is relative to its folder. A single word that is no file there is a name.
fn located(base: &Path, text: &str, is_new: bool) -> String {
    let joined = base.join(text);
    if !is_new && is_name(text, &joined) { text.to_owned() } else { tidy(&joined).display().to_string() }
}

/// Without `x/..`, where x is no link and so the same place is meant.
fn tidy(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        let folds = part == Component::ParentDir && matches!(out.components().next_back(), Some(Component::Normal(_))) && !out.is_symlink();
        match part {
            _ if folds => drop(out.pop()),
            Component::CurDir => {}
            part => out.push(part),
        }
    }
    if out.as_os_str().is_empty() { PathBuf::from(".") } else { out }
}

/// Letters to insert, remove or replace (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The settings in force as a file that says the same from anywhere.
pub fn print(matches: &ArgMatches, train: &Command, cluster: Option<&Cluster>) -> String {
    let mut out = String::from("# The settings of a run of `zofo train`; start it with: zofo train --config FILE\n");
    for section in ["", "data", "eval_data", "train"] {
        let of = |s: &Setting| {
            let raw = matches.get_raw(&s.id)?.next()?.to_string_lossy().into_owned();
            let value = match s.id.as_str() {
                // Devices are printed whole.
                "cluster" if cluster.is_some() => return None,
                INVERTED => (raw == "false").to_string(),
                id if PATHS.contains(&id) => absolute(&raw, id == "out"),
                _ => raw,
            };
            Some(format!("{} = {}\n", s.key, literal(&value)))
        };
        let lines: String = settings(train).iter().filter(|s| s.section == section).filter_map(of).collect();
        if !lines.is_empty() {
            out.push_str(&if section.is_empty() { lines } else { format!("\n[{section}]\n{lines}") });
        }
    }
    if let Some(cluster) = cluster {
        out.push_str(&format!("\n{}", cluster.to_toml()));
    }
    out
}

fn absolute(text: &str, is_new: bool) -> String {
    let path = Path::new(text);
    match std::path::absolute(path) {
        Ok(path) if is_new || !is_name(text, &path) => tidy(&path).display().to_string(),
        _ => text.to_owned(),
    }
}

/// A number or truth value as it is, other text in quotes.
fn literal(text: &str) -> String {
    let plain = DeValue::parse(text).is_ok_and(|v| match v.get_ref() {
        DeValue::Integer(n) => n.radix() == 10 && n.as_str() == text,
        DeValue::Float(x) => x.as_str() == text,
        DeValue::Boolean(_) => true,
        _ => false,
    });
    if plain {
        return text.to_owned();
    }
    // A text in JSON is one in TOML, on one line; TOML alone escapes the character 127 too.
    serde_json::to_string(text).unwrap_or_default().replace('\u{7f}', r"\u007f")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::train_args::train_command;

    fn arguments(text: &str) -> Vec<String> {
        let config = parse(text, Path::new("/nowhere/runs.toml"), &train_command()).unwrap();
        config.arguments.into_iter().map(|a| a.into_string().unwrap()).collect()
    }

    #[test]
    fn settings_are_arguments() {
        let text = "model = 'some-model'\nout = 'runs/x'\n[data]\npath = '../d.csv'\ntemplate = \"{a}\\nTopic:\"\nclasses = ['1=World', '2=Sports']\n\
                    [eval_data]\npath = '/abs/e.csv'\nlabel_column = 'class'\n[train]\nsteps = 1_000\nlr = 5e-4\nseed = 0x10\n\
                    zo_optimiser = 'sgd'\ntruncate = false\ndecay = true\ntargets = ['q', 'v']\neval_samples = 0\n";
        let mut got = arguments(text);
        got.sort();
        let mut wanted = [
            "--model=some-model",
            "--out=/nowhere/runs/x",
            "--data=/d.csv",
            "--template={a}\nTopic:",
            "--classes=1=World,2=Sports",
            "--eval-data=/abs/e.csv",
            "--eval-label-column=class",
            "--steps=1000",
            "--lr=5e-4",
            "--seed=16",
            "--zo-optimizer=sgd",
            "--no-truncate=true",
            "--decay=true",
            "--targets=q,v",
            "--eval-samples=0",
        ];
        wanted.sort_unstable();
        assert_eq!(got, wanted);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, part) in [
            ("[train]\nsteps = 1\nstepz = 2\n", "runs.toml: line 3: there is no `stepz` in [train]; did you mean `steps`?"),
            ("[train]\nzzzzzzzzzz = 2\n", "line 2: there is no `zzzzzzzzzz` in [train]; there are: "),
            ("steps = 3\n", "line 1: there is no `steps` at the top of the file; it belongs in [train]"),
            ("[trian]\nsteps = 3\n", "line 1: there is no `trian` at the top of the file; did you mean `train`?"),
            ("[train]\nsteps = 'many'\n", "line 2: `steps`: invalid value 'many'"),
            ("[train]\nestimator = 'magic'\n", "line 2: `estimator`: invalid value 'magic'"),
            ("[train]\nsteps = {a = 1}\n", "line 2: `steps`: a table where"),
            ("data = 'x.csv'\n", "line 1: `data` is a section"),
            ("[data]\ntemplate = '{a'\n", "line 2: `template`"),
            ("[train\n", "line 1"),
            ("[[device]]\nname = 'a'\nkind = 'bpx'\n", "line 3"),
            ("[[device]]\nname = 'a'\nkind = 'bp'\nspeed = 1\n", "speed"),
            ("cluster = 'c.toml'\n[[device]]\nname = 'a'\nkind = 'bp'\n", "leave one out"),
            ("[train]\nclasses = 'a,b'\n", "it belongs in [data]"),
        ] {
            let e = parse(text, Path::new("runs.toml"), &train_command()).map(|_| ()).unwrap_err();
            assert!(e.message().contains(part) && *e.kind() == zofo::ErrorKind::InvalidArgument, "{text}: {e}");
        }
    }

    #[test]
    fn the_files_that_come_with_zofo_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let mut runs = 0;
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let text = read(&path, "configuration").unwrap();
            if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("cluster-")) {
                Cluster::parse(&text).unwrap();
                continue;
            }
            let config = parse(&text, &path, &train_command()).unwrap();
            train_command().no_binary_name(true).try_get_matches_from(&config.arguments).unwrap();
            runs += 1;
        }
        assert!(runs > 0);
    }

    #[test]
    fn every_setting_has_one_place() {
        let all = settings(&train_command());
        for (i, s) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|o| (o.section, &o.key) != (s.section, &s.key)), "[{}] {}", s.section, s.key);
        }
        // All that the library's options have can be set.
        let options = serde_json::to_value(zofo::TrainOptions::default()).unwrap();
        for name in options.as_object().unwrap().keys() {
            assert!(all.iter().any(|s| s.section == "train" && s.key == *name), "[train] {name}");
        }
    }

    #[test]
    fn printed_settings_are_read_back() {
        let args = [
            "--template={a}\\n\\\\x \u{7f}\"q\"\n:",
            "--data=/d.csv",
            "--lr=1e-3",
            "--no-truncate",
            "--seed=18446744073709551615",
            "--classes=0x1=a,2=b",
        ];
        let train = train_command();
        let matches = train.clone().no_binary_name(true).try_get_matches_from(args).unwrap();
        let cluster = Cluster::virtual_cpus(1, 1);
        let text = print(&matches, &train, Some(&cluster));
        let config = parse(&text, Path::new("/elsewhere/c.toml"), &train).unwrap();
        assert_eq!(config.cluster, Some(cluster));
        let again = train.clone().no_binary_name(true).try_get_matches_from(&config.arguments).unwrap();
        for s in settings(&train) {
            let raw = |m: &ArgMatches| m.get_raw(&s.id).map(|v| v.map(ToOwned::to_owned).collect::<Vec<_>>());
            assert_eq!(raw(&matches), raw(&again), "{} in {text}", s.key);
        }
    }

    #[cfg(feature = "embedded")]
    #[test]
    fn without_a_model_the_embedded_one_is_trained_by_its_settings() {
        let matches = |args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            let (args, _) = expand(&args, &super::super::train_args::train_command()).unwrap();
            args.into_iter().map(|a| a.into_string().unwrap()).collect::<Vec<_>>()
        };
        let parsed = <super::super::args::Cli as clap::Parser>::try_parse_from(matches(&["zofo", "train"])).unwrap();
        let super::super::args::Command::Train(args) = parsed.command else { panic!("not train") };
        assert_eq!(args.options(), zofo::embedded::options());
        assert_eq!(args.model.as_deref(), Some(Path::new("embedded")));
        assert_eq!(matches(&["zofo", "train", "--steps", "2"]).last().unwrap(), "2");
        assert!(matches(&["zofo", "train", "--model=embedded"]).contains(&"--data=embedded".to_owned()));
        for other in
            [&["zofo", "train", "--model", "m"][..], &["zofo", "train", "--data=d"], &["zofo", "train", "--resume", "r"], &["zofo"]]
        {
            assert_eq!(matches(other), other);
        }
    }

    #[test]
    fn the_last_file_counts() {
        let named = |args: &[&str]| option(&args.iter().map(OsString::from).collect::<Vec<_>>(), "--config").map(PathBuf::from);
        assert_eq!(named(&["--steps", "1", "--config", "a", "--config=b", "--", "--config=c"]), Some("b".into()));
        assert_eq!(named(&["--steps", "1"]), None);
    }

    #[test]
    fn paths_are_tidied_and_names_left() {
        assert_eq!(tidy(Path::new("configs/../runs/./x")), Path::new("runs/x"));
        assert_eq!(tidy(Path::new("../a/..")), Path::new(".."));
        assert_eq!(tidy(Path::new("a/..")), Path::new("."));
        assert_eq!(located(Path::new("c"), "smollm2-135m", false), "smollm2-135m");
        assert_eq!(located(Path::new("c"), "qwen2.5-0.5b", false), "qwen2.5-0.5b");
        assert_eq!(located(Path::new("c"), "m.gguf", false), "c/m.gguf");
        assert_eq!(located(Path::new("c"), "x", true), "c/x");
    }

    #[test]
    fn distances() {
        for (a, b, d) in [("steps", "steps", 0), ("stepz", "steps", 1), ("", "ab", 2), ("kitten", "sitting", 3)] {
            assert_eq!((distance(a, b), distance(b, a)), (d, d));
        }
    }
}
