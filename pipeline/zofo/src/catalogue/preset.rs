//! What the files of a data set mean.

use std::path::Path;

use zofo_hal::{Error, ErrorKind, Result};

use super::NamedData;
use crate::data::{DataSpec, Format, Template, columns};

/// The forms that training and evaluation files are found in; the first that fits is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Preset {
    /// Of training files.
    pub train: &'static [Split],
    /// Of evaluation files.
    pub eval: &'static [Split],
}

/// A file and its columns; the fields are those of [`DataSpec`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Split {
    /// Its name.
    pub file: &'static str,
    /// Its format.
    pub format: Format,
    /// The column that `{text}` stands for.
    pub text: Option<&'static str>,
    /// What the model reads.
    pub template: &'static str,
    /// The column with the label.
    pub label: Option<&'static str>,
    /// The column with the text that should follow.
    pub answer: Option<&'static str>,
    /// The classes.
    pub classes: Option<&'static str>,
}

impl Split {
    fn spec(&self, folder: &Path) -> Result<DataSpec> {
        let mut spec = DataSpec::new(folder.join(self.file)).format(self.format);
        spec.text_column = self.text.map(str::to_owned);
        spec.template = Some(Template::parse(self.template)?);
        spec.label_column = self.label.map(str::to_owned);
        spec.answer_column = self.answer.map(str::to_owned);
        spec.classes = self.classes.map(str::parse).transpose()?;
        Ok(spec)
    }

    fn fits(&self, columns: &[String]) -> bool {
        [self.text, self.label, self.answer].into_iter().flatten().all(|c| columns.iter().any(|other| other == c))
    }
}

impl Preset {
    /// The data in `folder`.
    ///
    /// # Errors
    /// `Io` where the folder has no file to train on; `Format` where one has other columns than are known.
    pub fn data(&self, folder: &Path) -> Result<NamedData> {
        let train = choose(self.train, folder)?.ok_or_else(|| {
            let mut names: Vec<_> = self.train.iter().map(|s| s.file).collect();
            names.dedup();
            Error::new(
                ErrorKind::Io,
                format!("{}: no training data are in this folder; they would be called {}", folder.display(), names.join(", ")),
            )
        })?;
        Ok(NamedData { train, eval: choose(self.eval, folder)? })
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        for split in self.train.iter().chain(self.eval) {
            let spec = split.spec("x".as_ref()).unwrap();
            assert!(spec.label_column.is_some() != spec.answer_column.is_some() && spec.label_column.is_some() == spec.classes.is_some());
        }
    }
}

/// The first of `splits` whose file is in `folder` and has its columns.
fn choose(splits: &[Split], folder: &Path) -> Result<Option<DataSpec>> {
    let mut other = None;
    for split in splits {
        let path = folder.join(split.file);
        if !path.is_file() {
            continue;
        }
        let found = columns(&path, split.format)?;
        if split.fits(&found) {
            return split.spec(folder).map(Some);
        }
        other.get_or_insert((path, found));
    }
    match other {
        None => Ok(None),
        Some((path, found)) => Err(Error::format(format!(
            "{}: it has the columns {}, which is no form that is known; give the file with --data and say what they mean",
            path.display(),
            found.join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::data;

    #[test]
    fn every_form_of_ag_news() {
        for (train, test) in [
            (
                ("train.jsonl", "{\"label\":3,\"title\":\"t\",\"description\":\"d\"}"),
                ("test.jsonl", "{\"label\":3,\"title\":\"t\",\"description\":\"d\"}"),
            ),
            (("train.csv", "label,content\n3,d\n"), ("test.csv", "title,description,class\nt,d,Business\n")),
            (("train.csv", "Class Index,Title,Description\n3,t,d\n"), ("test.csv", "Class Index,Title,Description\n3,t,d\n")),
        ] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(train.0), train.1).unwrap();
            assert_eq!(data("ag_news", None, Some(dir.path())).unwrap().eval, None);
            std::fs::write(dir.path().join(test.0), test.1).unwrap();
            let found = data("ag_news", None, Some(dir.path())).unwrap();
            for spec in [found.train, found.eval.unwrap()] {
                let data = spec.load().unwrap();
                assert_eq!((data.template.render(&data.examples[0].fields, 9), data.examples[0].label), ("d\nTopic:".into(), Some(2)));
            }
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("train.csv"), "a,b\n1,2\n").unwrap();
        let e = data("ag_news", None, Some(dir.path())).unwrap_err();
        assert!(e.message().contains("columns a, b") && e.message().starts_with("ag_news: "), "{e}");
    }

    #[test]
    fn the_real_folders() {
        let expected = [("ag_news", 8000, 7600), ("multirc", 27243, 4848), ("squad", 4639, 1190)];
        for (name, train, eval) in expected {
            let Some(folder) = zofo_testkit::shared(format!("data/{name}")) else {
                return zofo_testkit::skip!("no data sets");
            };
            let found = data(name, None, Some(&folder)).unwrap();
            let counts = (found.train.load().unwrap().examples.len(), found.eval.unwrap().load().unwrap().examples.len());
            assert_eq!(counts, (train, eval), "{name}");
        }
    }
}
