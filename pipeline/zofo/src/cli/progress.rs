//! How a run looks while it goes on: a bar on a terminal, lines where the output is piped, nothing beside JSON.

use std::{
    io::IsTerminal,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use zofo::{
    Event,
    eval::Evaluation,
    events::{StepReport, When},
};
use zofo_pipeline::ir::Role;

use super::console;

/// Lines of steps at most, when piped.
const LINES: u32 = 50;

pub struct Progress {
    bar: Option<ProgressBar>,
    lines: bool,
    steps: u32,
    evaluates: bool,
    /// Steps seen and the seconds they took, for the time that is left.
    seen: (u32, f64),
    /// Whether an evaluation goes on, for who else wants to know.
    evaluating: Arc<AtomicBool>,
}

impl Progress {
    pub fn new(json: bool, evaluating: Arc<AtomicBool>) -> Self {
        let terminal = std::io::stderr().is_terminal() && (json || std::io::stdout().is_terminal());
        // Hidden until there is something to draw: plan and notes come first.
        let bar = terminal.then(|| hidden(0));
        Self { lines: !json && bar.is_none(), bar, steps: 0, evaluates: false, seen: (0, 0.0), evaluating }
    }

    pub fn event(&mut self, event: &Event) {
        match event {
            Event::Started { plan, parameters, examples, eval_examples, first_step, steps } => {
                (self.steps, self.evaluates) = (*steps, *eval_examples > 0);
                self.evaluating.store(self.evaluates && *first_step == 0, Ordering::Relaxed);
                self.say(&format!(
                    "schedule {}, {parameters} trained values, {examples} to train on, {eval_examples} held out for evaluation",
                    plan.name.name()
                ));
                for stage in &plan.stages {
                    let learns = match stage.role {
                        Role::FirstOrder => "first-order",
                        Role::ZerothOrder => "zeroth-order",
                        Role::Frozen => "frozen",
                    };
                    self.say(&format!("  {:<12} layers {}..{}, {learns}", stage.devices(), stage.layers.start, stage.layers.end));
                }
                if *first_step > 0 {
                    self.say(&format!("going on after {}", console::count(*first_step, "step")));
                }
            }
            Event::Memory { planned_bytes } => {
                self.say(&format!("memory on the devices at the peak of a step: {}", console::bytes(*planned_bytes)))
            }
            Event::Loaded(weights) => self.say(&format!("weights from {weights}")),
            Event::Evaluating { when, done, total } => {
                let label = match when {
                    When::Before => "scoring before",
                    When::After => "scoring after",
                };
                self.draw(*done as u64, *total as u64, label, "");
            }
            Event::Evaluated { when, scores } => {
                let when = match when {
                    When::Before => "before",
                    When::After => "after",
                };
                self.say(&format!("{when} training: {}", scored(scores)));
            }
            Event::Step(report) => self.step(report),
            Event::Checkpoint { step, path } if self.lines => {
                self.say(&format!("checkpoint after {}: {}", console::count(*step, "step"), path.display()))
            }
            Event::Note(text) => self.say(&format!("note: {text}")),
            _ => {}
        }
    }

    pub fn evaluating(&mut self, done: usize, total: usize) {
        self.draw(done as u64, total as u64, "scoring", "");
    }

    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn step(&mut self, r: &StepReport) {
        let done = r.step + 1;
        self.evaluating.store(self.evaluates && done >= self.steps, Ordering::Relaxed);
        self.seen = (self.seen.0 + 1, self.seen.1 + r.seconds);
        let left = self.seen.1 / f64::from(self.seen.0) * f64::from(self.steps.saturating_sub(done));
        let rate = if r.seconds > 0.0 { r.samples as f64 / r.seconds } else { 0.0 };
        self.draw(done.into(), self.steps.into(), "training", &format!("loss {:.4}  {rate:.1} samples/s", r.loss));
        let every = self.steps.div_ceil(LINES).max(1);
        if self.lines && (done == 1 || done.is_multiple_of(every) || done == self.steps) {
            console::line(format!(
                "step {done}/{}  loss {:.4}  {rate:.1} samples/s  busy {:.0} %  eta {}",
                self.steps,
                r.loss,
                100.0 * r.utilisation(),
                console::seconds(left)
            ));
        }
    }

    fn draw(&mut self, done: u64, total: u64, label: &str, message: &str) {
        let Some(bar) = &mut self.bar else { return };
        let fresh = bar.is_hidden() || bar.length() != Some(total) || bar.prefix() != label;
        if fresh {
            bar.finish_and_clear();
            *bar = hidden(total).with_prefix(label.to_owned());
        }
        bar.set_message(message.to_owned());
        bar.set_position(done);
        if fresh {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.tick();
        }
    }

    fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| console::note(text)),
            None if self.lines => {
                console::line(text);
            }
            None => {}
        }
    }
}

/// A bar that is not drawn yet, so that it appears as a whole.
fn hidden(total: u64) -> ProgressBar {
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden()).with_style(style())
}

fn style() -> ProgressStyle {
    let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} eta {eta} {msg}");
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

/// F1 of each class, on lines; nothing for data without classes.
pub fn by_class(e: &Evaluation) -> String {
    if e.classes.is_empty() {
        return String::new();
    }
    let score = |f1: Option<f64>| f1.map_or_else(|| "not in the data".into(), |f1| format!("{f1:.3}"));
    let rows: Vec<_> = e.classes.iter().map(|(word, f1)| vec![format!("  {word}"), score(*f1)]).collect();
    format!("F1 by class:\n{}", console::table(&rows))
}

/// Scores on one line.
pub fn scored(e: &Evaluation) -> String {
    let classes = match (e.f1, e.accuracy) {
        (Some(f1), Some(accuracy)) => format!("F1 {f1:.3}, accuracy {accuracy:.3}, "),
        _ => String::new(),
    };
    format!("{classes}loss {:.4} per label token on {}", e.loss, console::count(e.examples as u64, "example"))
}
