//! Curves as SVG pictures: training loss over steps.
//!
//! The writer is plain text: the same numbers give the same bytes, and nothing outside the file is needed to show it.

mod axis;
mod svg;

use std::path::Path;

use zofo_hal::{Error, Result};

use crate::run_folder::{RunFolder, write_atomic};

/// A named curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// What the legend calls it.
    pub name: String,
    /// Points from left to right; those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// A curve.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points }
    }

    /// The training loss of the run in `folder`, per step.
    ///
    /// # Errors
    /// `Io` or `Format` where its `metrics.jsonl` cannot be read, `Format` where it has no steps.
    pub fn of_run(name: impl Into<String>, folder: &Path) -> Result<Self> {
        let points: Vec<_> = RunFolder::losses(folder)?.into_iter().map(|(step, loss)| (f64::from(step), loss)).collect();
        if points.is_empty() {
            return Err(Error::format(format!("{}: no step of this run is recorded, so it has no curve", folder.display())));
        }
        Ok(Self::new(name, points))
    }
}

/// A picture of curves that share their axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Above the curves.
    pub title: String,
    /// Below the horizontal axis.
    pub x: String,
    /// Beside the vertical axis.
    pub y: String,
    /// The curves; colour and dash tell them apart.
    pub curves: Vec<Curve>,
}

impl Chart {
    /// Training losses over steps.
    pub fn losses(title: impl Into<String>, curves: Vec<Curve>) -> Self {
        Self { title: title.into(), x: "optimiser step".into(), y: "training loss per label token (nats)".into(), curves }
    }

    /// The picture as SVG: each curve smoothed, and with few curves as it is, faintly behind.
    pub fn to_svg(&self) -> String {
        svg::write(self)
    }

    /// Writes the picture.
    ///
    /// # Errors
    /// `Io`.
    pub fn save(&self, path: &Path) -> Result<()> {
        write_atomic(path, self.to_svg().as_bytes())
    }
}
