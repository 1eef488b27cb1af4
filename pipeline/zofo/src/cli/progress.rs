//! How a run looks while it goes on: a bar on a terminal, lines where the output is piped, nothing beside JSON.

use std::io::IsTerminal;

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
    smooth: Option<f64>,
}

impl Progress {
    pub fn new(json: bool) -> Self {
        let terminal = std::io::stderr().is_terminal() && (json || std::io::stdout().is_terminal());
        let bar = terminal.then(|| ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr()));
        Self { lines: !json && bar.is_none(), bar, steps: 0, smooth: None }
    }

    pub fn event(&mut self, event: &Event) {
        match event {
            Event::Started { plan, parameters, examples, eval_examples, first_step, steps } => {
                self.steps = *steps;
                self.say(&format!(
                    "schedule {}, {parameters} trained values, {examples} examples, {eval_examples} for evaluation",
                    plan.name.name()
                ));
                for stage in &plan.stages {
                    let learns = match stage.role {
                        Role::FirstOrder => "first-order",
                        Role::ZerothOrder => "zeroth-order",
                        Role::Frozen => "frozen",
                    };
                    let (first, end) = (stage.layers.start, stage.layers.end);
                    let layers = if end - first == 1 { format!("layer {first}") } else { format!("layers {first} to {}", end - 1) };
                    self.say(&format!("  {:<12} {layers}, {learns}", stage.device));
                }
                if *first_step > 0 {
                    self.say(&format!("going on after step {first_step}"));
                }
            }
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
            Event::Checkpoint { step, path } if self.lines => self.say(&format!("checkpoint after {step} steps: {}", path.display())),
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
        let smooth = self.smooth.map_or(r.loss, |s| 0.9 * s + 0.1 * r.loss);
        self.smooth = Some(smooth);
        let done = r.step + 1;
        let rate = if r.seconds > 0.0 { r.samples as f64 / r.seconds } else { 0.0 };
        self.draw(done.into(), self.steps.into(), "training", &format!("loss {smooth:.4}  {rate:.1} samples/s"));
        let every = self.steps.div_ceil(LINES).max(1);
        if self.lines && (done == 1 || done.is_multiple_of(every) || done == self.steps) {
            console::line(format!(
                "step {done}/{}  loss {:.4}  {rate:.1} samples/s  busy {:.0} %",
                self.steps,
                r.loss,
                100.0 * r.utilisation()
            ));
        }
    }

    fn draw(&self, done: u64, total: u64, label: &str, message: &str) {
        let Some(bar) = &self.bar else { return };
        if bar.length() != Some(total) || bar.prefix() != label {
            let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {eta} {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
            bar.reset();
            bar.set_length(total);
            bar.set_prefix(label.to_owned());
        }
        bar.set_message(message.to_owned());
        bar.set_position(done);
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

/// Scores on one line.
pub fn scored(e: &Evaluation) -> String {
    let classes = match (e.f1, e.accuracy) {
        (Some(f1), Some(accuracy)) => format!("F1 {f1:.3}, accuracy {accuracy:.3}, "),
        _ => String::new(),
    };
    format!("{classes}loss {:.4} on {} examples", e.loss, e.examples)
}
