//! `zofo compare`

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use zofo::{
    Error,
    compare::{CompareSpec, Comparison, Interval, Scores, compare},
    curves::{Chart, Curve},
    eval::Predictions,
    events::When,
    run_folder::RunFolder,
};

use super::{Failure, args::CompareArgs, console, output, usage};

/// A run as it was named.
struct Named {
    given: String,
    name: String,
    path: PathBuf,
}

impl Named {
    /// `NAME=PATH`, or a path, which is its own name.
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

/// Run folders without a name of their own go by their last part, where no two have the same.
fn shorten(runs: &mut [Named]) {
    let short = |r: &Named| {
        let unnamed = r.name == r.given.trim_end_matches('/') && r.path.is_dir();
        r.path.file_name().filter(|_| unnamed).map_or_else(|| r.name.clone(), |n| n.to_string_lossy().into_owned())
    };
    let names: Vec<String> = runs.iter().map(short).collect();
    if names.iter().collect::<HashSet<_>>().len() == names.len() {
        runs.iter_mut().zip(names).for_each(|(run, name)| run.name = name);
    }
}

/// The index of a run, which joins the others where it is not among them.
fn index(runs: &mut Vec<Named>, wanted: &str) -> Result<usize, Failure> {
    if let Some(found) = runs.iter().position(|r| r.is(wanted)) {
        return Ok(found);
    }
    let run = Named::new(wanted);
    if !run.path.exists() {
        let names: Vec<&str> = runs.iter().map(|r| r.name.as_str()).collect();
        let there = if names.is_empty() { String::new() } else { format!("; there are: {}", names.join(", ")) };
        return Err(Failure::Usage(Error::invalid(format!("`{}` is neither a path nor the name of a run{there}", wanted.escape_debug()))));
    }
    runs.push(run);
    Ok(runs.len() - 1)
}

/// Names tell runs apart in tables and options, so each belongs to one, and none has line breaks or other control characters.
fn check_names(runs: &[Named]) -> Result<(), Failure> {
    let mut seen = HashSet::new();
    for run in runs {
        let shown = run.name.escape_debug();
        let what = match () {
            () if run.name.chars().any(char::is_control) => format!("the name `{shown}` has control characters; choose another"),
            () if !seen.insert(run.name.as_str()) => format!("two runs are called `{shown}`; give each a name of its own, as in NAME=PATH"),
            () => continue,
        };
        return Err(Failure::Usage(Error::invalid(what)));
    }
    Ok(())
}

pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let mut runs: Vec<Named> = Vec::new();
    for given in &args.runs {
        match runs.iter().find(|r| r.given == *given) {
            Some(_) => continue,
            None => runs.push(Named::new(given)),
        }
    }
    check_names(&runs)?;
    let mut spec = CompareSpec::default();
    if let Some([frozen, full]) = args.gap.as_deref() {
        let (frozen, full) = (index(&mut runs, frozen)?, index(&mut runs, full)?);
        spec = spec.gap(frozen, full);
    }
    if let Some(baseline) = &args.baseline {
        spec = spec.baseline(index(&mut runs, baseline)?);
    }
    shorten(&mut runs);
    check_names(&runs)?;
    let read = runs.iter().map(|r| Ok((r.name.clone(), r.predictions()?))).collect::<Result<Vec<_>, Failure>>()?;
    let comparison = compare(&read, &spec).map_err(usage)?;
    if let Some(path) = &args.svg {
        output::replaceable(path, "<svg", "a drawing")?;
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

fn plain(i: &Interval) -> String {
    format!("{:.3} [{:.3} {:.3}]", i.value, i.low, i.high)
}

fn signed(i: &Interval) -> String {
    format!("{:+.3} [{:+.3} {:+.3}]", i.value, i.low, i.high)
}

/// A name and its numbers, which may be none.
type Row<'a> = (&'a str, Vec<Option<String>>);

fn report(c: &Comparison) {
    let counted = console::count(c.examples as u64, "example");
    console::line(format!("{counted}, loss per label token; [95 % intervals] of {} paired draws", c.resamples));
    let scores = |s: &Scores| vec![s.f1.as_ref().map(plain), s.accuracy.as_ref().map(plain), Some(plain(&s.loss))];
    section("", &["macro-F1", "accuracy", "loss"], c.runs.iter().map(|r| (r.name.as_str(), scores(&r.scores))).collect());
    // Of accuracy there is no room for a difference; JSON has it.
    let difference = |s: &Scores| vec![s.f1.as_ref().map(signed), Some(signed(&s.loss))];
    if let Some(baseline) = &c.baseline {
        let rows = c.runs.iter().filter_map(|r| Some((r.name.as_str(), difference(r.difference.as_ref()?))));
        section(&format!("less {baseline}:"), &["macro-F1", "loss"], rows.collect());
    }
    let Some(gap) = &c.gap else { return };
    let share = |i: Option<Interval>| i.map_or_else(|| "undefined".into(), |i| plain(&i));
    let shares = c.runs.iter().filter_map(|r| Some((r.name.as_str(), r.gap_share?)));
    // Text has no classes, so no share of their score either.
    let mut rows: Vec<Row> = shares.map(|(name, s)| (name, vec![gap.difference.f1.map(|_| share(s.f1)), Some(share(s.loss))])).collect();
    rows.push(("(the gap)", difference(&gap.difference)));
    section(&format!("share of the gap from {} to {}:", gap.frozen, gap.full), &["of macro-F1", "of loss"], rows);
    if gap.difference.f1.is_some_and(|i| i.contains_zero()) || gap.difference.loss.contains_zero() {
        console::line("undefined: the interval of the gap contains 0, so there may be none");
    }
}

/// A table below a title; names that leave no room for the numbers stand on lines of their own.
fn section(title: &str, heads: &[&str], rows: Vec<Row>) {
    if rows.is_empty() {
        return;
    }
    let used: Vec<usize> = (0..heads.len()).filter(|i| rows.iter().any(|(_, cells)| cells[*i].is_some())).collect();
    let head = || used.iter().map(|i| heads[*i].to_owned());
    let line = |name: &str, cells: &[Option<String>]| {
        std::iter::once(name.to_owned()).chain(used.iter().map(|i| cells[*i].clone().unwrap_or_else(|| "-".into()))).collect::<Vec<_>>()
    };
    let table = |names: bool| {
        let first = std::iter::once(std::iter::once(String::new()).chain(head()).collect());
        console::table(&first.chain(rows.iter().map(|(name, cells)| line(if names { name } else { "" }, cells))).collect::<Vec<_>>())
    };
    let mut text = table(true);
    if text.lines().any(|l| l.chars().count() > console::WIDTH) {
        let numbers = table(false);
        let mut lines = numbers.lines();
        text = lines.next().map_or_else(String::new, |l| format!("{l}\n"));
        rows.iter().zip(lines).for_each(|((name, _), line)| text.push_str(&format!("{name}\n{line}\n")));
    }
    let title = if title.is_empty() { String::new() } else { format!("{title}\n") };
    console::print(&format!("\n{title}{text}"));
}
