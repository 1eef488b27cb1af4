//! `zofo compare`

use std::path::{Path, PathBuf};

use zofo::{
    Error,
    compare::{CompareSpec, Comparison, Interval, Scores, compare},
    curves::{Chart, Curve},
    eval::Predictions,
    events::When,
    run_folder::RunFolder,
};

use super::{Failure, args::CompareArgs, console, usage};

/// A run as it was named.
struct Named {
    given: String,
    name: String,
    path: PathBuf,
}

impl Named {
    /// `NAME=PATH`, or a path, whose name is what it has not in common with others.
    fn new(given: &str) -> Self {
        let split = given.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty() && !Path::new(given).exists());
        let (name, path) = split.unwrap_or((given.trim_end_matches('/'), given));
        Self { given: given.to_owned(), name: name.to_owned(), path: path.into() }
    }

    fn is(&self, other: &str) -> bool {
        [self.given.as_str(), &self.name].contains(&other) || self.path == Path::new(other)
    }

    fn predictions(&self) -> Result<Predictions, Failure> {
        if !self.path.is_dir() {
            return Ok(Predictions::read(&self.path)?);
        }
        let file = RunFolder::at(&self.path).predictions(When::After);
        if !file.is_file() {
            let what = "no predictions are here; give a run that was scored after training, or a file that `zofo eval --predictions` wrote";
            return Err(Error::new(zofo::ErrorKind::Io, format!("{}: {what}", self.path.display())).into());
        }
        Ok(Predictions::read(&file)?)
    }
}

/// The index of a run, which joins the others where it is not among them.
fn index(runs: &mut Vec<Named>, wanted: &str) -> usize {
    runs.iter().position(|r| r.is(wanted)).unwrap_or_else(|| {
        runs.push(Named::new(wanted));
        runs.len() - 1
    })
}

pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let mut runs: Vec<Named> = Vec::new();
    for given in &args.runs {
        index(&mut runs, given);
    }
    let mut spec = CompareSpec::default();
    if let Some([frozen, full]) = args.gap.as_deref() {
        let (frozen, full) = (index(&mut runs, frozen), index(&mut runs, full));
        spec = spec.gap(frozen, full);
    }
    if let Some(baseline) = &args.baseline {
        spec = spec.baseline(index(&mut runs, baseline));
    }
    let read = runs.iter().map(|r| Ok((r.name.clone(), r.predictions()?))).collect::<Result<Vec<_>, Failure>>()?;
    let comparison = compare(&read, &spec).map_err(usage)?;
    if let Some(path) = &args.svg {
        draw(&runs, path)?;
    }
    if args.json {
        console::json(&comparison);
        return Ok(());
    }
    report(&comparison);
    if let Some(path) = &args.svg {
        console::line(format!("\ncurves: {}", path.display()));
    }
    Ok(())
}

fn draw(runs: &[Named], path: &Path) -> Result<(), Failure> {
    let folders = runs.iter().filter(|r| r.path.is_dir());
    let curves = folders.map(|r| Curve::of_run(&r.name, &r.path)).collect::<Result<Vec<_>, _>>()?;
    if curves.is_empty() {
        return Err(Failure::Usage(Error::invalid("--svg draws the training losses of run folders, and none is given")));
    }
    Ok(Chart::losses("Training loss", curves).save(path)?)
}

/// Three numbers of a row, each with its interval.
fn cells(scores: &Scores, show: fn(&Interval) -> String) -> [Option<String>; 3] {
    [scores.f1.as_ref().map(show), scores.accuracy.as_ref().map(show), Some(show(&scores.loss))]
}

fn plain(i: &Interval) -> String {
    format!("{:.3} [{:.3} {:.3}]", i.value, i.low, i.high)
}

fn signed(i: &Interval) -> String {
    format!("{:+.3} [{:+.3} {:+.3}]", i.value, i.low, i.high)
}

fn report(c: &Comparison) {
    let counted = console::count(c.examples as u64, "example");
    console::line(format!("{counted}; [95 % intervals] from {} paired bootstrap draws; loss per label token", c.resamples));
    let scores = c.runs.iter().map(|r| (r.name.as_str(), cells(&r.scores, plain)));
    section("", ["macro-F1", "accuracy", "loss"], scores.collect());
    if let Some(baseline) = &c.baseline {
        let rows = c.runs.iter().filter_map(|r| Some((r.name.as_str(), cells(r.difference.as_ref()?, signed))));
        section(&format!("less {baseline}"), ["macro-F1", "accuracy", "loss"], rows.collect());
    }
    let Some(gap) = &c.gap else { return };
    let share = |i: Option<Interval>| i.map_or_else(|| "undefined".into(), |i| plain(&i));
    let shares = c.runs.iter().filter_map(|r| Some((r.name.as_str(), r.gap_share?)));
    // Text has no classes, so no share of their score either.
    let rows = shares.map(|(name, s)| (name, [gap.difference.f1.map(|_| share(s.f1)), Some(share(s.loss)), None])).collect();
    section(&format!("share of the gap from {} to {}", gap.frozen, gap.full), ["of macro-F1", "of loss", ""], rows);
    let closed = |i: Option<Interval>| i.is_some_and(|i| i.contains_zero());
    if closed(gap.difference.f1) || closed(Some(gap.difference.loss)) {
        let f1 = gap.difference.f1.map_or_else(String::new, |i| format!("macro-F1 {}, ", signed(&i)));
        console::line(format!("undefined: the gap itself may be none ({f1}loss {})", signed(&gap.difference.loss)));
    }
}

/// A table with a title; names that leave no room for the numbers stand on lines of their own.
fn section(title: &str, heads: [&str; 3], rows: Vec<(&str, [Option<String>; 3])>) {
    if rows.is_empty() {
        return;
    }
    let used: Vec<usize> = (0..3).filter(|i| rows.iter().any(|(_, cells)| cells[*i].is_some())).collect();
    let numbers = |cells: &[Option<String>; 3]| used.iter().map(|i| cells[*i].clone().unwrap_or_else(|| "-".into())).collect::<Vec<_>>();
    let head = || used.iter().map(|i| heads[*i].to_owned()).collect::<Vec<_>>();
    let table = |rows: Vec<(String, Vec<String>)>| {
        console::table(&rows.into_iter().map(|(name, cells)| [vec![name], cells].concat()).collect::<Vec<_>>())
    };
    let mut text =
        table(std::iter::once((title.to_owned(), head())).chain(rows.iter().map(|(n, c)| ((*n).to_owned(), numbers(c)))).collect());
    if text.lines().any(|l| l.chars().count() > console::WIDTH) {
        let below = table(std::iter::once((" ".into(), head())).chain(rows.iter().map(|(_, c)| (" ".into(), numbers(c)))).collect());
        let mut lines = below.lines();
        text = format!("{title}{}", if title.is_empty() { "" } else { "\n" });
        text.push_str(&lines.next().map_or_else(String::new, |l| format!("{l}\n")));
        for ((name, _), line) in rows.iter().zip(lines) {
            text.push_str(&format!("{name}\n{line}\n"));
        }
    }
    console::print(&format!("\n{text}"));
}
