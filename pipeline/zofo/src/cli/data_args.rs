//! Arguments that describe data.

use std::path::{Path, PathBuf};

use clap::Args;
use zofo::{
    Error, Result, TrainOptions,
    catalogue::{self, NamedData},
    data::{Classes, DataSpec, Format, Template},
};

use super::cache;

fn format(name: &str) -> Result<Format, String> {
    let known = || Format::ALL.map(|(n, _)| n).join(", ");
    Format::ALL.into_iter().find(|(n, _)| *n == name).map(|(_, f)| f).ok_or_else(|| format!("there are: {}", known()))
}

/// Text in which `\n`, `\t` and `\\` stand for what they do elsewhere, because shells pass them on as they are.
pub fn unescaped(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, chars.clone().next()) {
            ('\\', Some('n')) => out.push('\n'),
            ('\\', Some('t')) => out.push('\t'),
            ('\\', Some('\\')) => out.push('\\'),
            _ => {
                out.push(c);
                continue;
            }
        }
        chars.next();
    }
    out
}

/// The inverse of [`unescaped`].
pub fn escaped(text: &str) -> String {
    text.replace('\\', r"\\").replace('\n', r"\n").replace('\t', r"\t")
}

fn template(text: &str) -> Result<Template, String> {
    Template::parse(&unescaped(text)).map_err(|e| e.message().to_owned())
}

fn classes(text: &str) -> Result<Classes, String> {
    text.parse().map_err(|e: Error| e.message().to_owned())
}

#[derive(Args)]
pub struct DataArgs {
    /// Data: CSV or TSV with a header line, JSONL, the JSON of SQuAD or MultiRC; or a name: ag_news, multirc, squad
    #[arg(long, value_name = "FILE|NAME", help_heading = "Data")]
    pub data: Option<PathBuf>,
    /// Folder with the files of named data [default: where `zofo fetch` put them]
    #[arg(long, value_name = "DIR", requires = "data", help_heading = "Data")]
    pub data_dir: Option<PathBuf>,
    /// csv, tsv, jsonl, squad or multirc [default: by the file's name]
    #[arg(long, value_name = "F", value_parser = format, help_heading = "Data")]
    pub format: Option<Format>,
    /// Column that {text} stands for in the template
    #[arg(long, value_name = "C", help_heading = "Data")]
    pub text_column: Option<String>,
    /// What the model reads, with {column} for a column's text, {{ and }} for braces, \n, \t and \\ for a line break, a tab and a backslash [default: {text}, and with
    /// labels a line `Label:` behind it]
    #[arg(long, value_name = "T", value_parser = template, help_heading = "Data")]
    pub template: Option<Template>,
    /// Column with the label; without one, the text itself is learnt
    #[arg(long, value_name = "C", help_heading = "Data")]
    pub label_column: Option<String>,
    /// Column with the text that should follow the prompt, for answers that are no classes
    #[arg(long, value_name = "C", conflicts_with = "label_column", help_heading = "Data")]
    pub answer_column: Option<String>,
    /// Words for the labels, as in 1=World,2=Sports,3=Business,4=Sci/Tech, or the words alone in the order of their numbers [default: the labels themselves]
    #[arg(long, value_name = "W,...", value_parser = classes, help_heading = "Data")]
    pub classes: Option<Classes>,
    /// Take a random sample of so many rows
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub limit: Option<usize>,
}

impl DataArgs {
    /// The data to train on, where they are named, and those that belong to them to evaluate on.
    ///
    /// # Errors
    /// Those of [`catalogue::data`].
    pub fn spec(&self, seed: u64) -> Result<Option<(DataSpec, Option<DataSpec>)>> {
        let Some(given) = &self.data else { return Ok(None) };
        Ok(Some(match self.named(given)? {
            Some(named) => (self.over(named.train, seed), named.eval.map(|e| self.over(e, seed))),
            None => (self.over(DataSpec::new(given), seed), None),
        }))
    }

    /// What a name stands for; `None` for a file.
    fn named(&self, given: &Path) -> Result<Option<NamedData>> {
        let text = given.to_str().unwrap_or_default();
        let last = given.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let cache = cache::cache(None).ok();
        // What comes with the program goes before a file of its name.
        if cfg!(feature = "embedded") && text == "embedded" {
            return catalogue::data(text, None, None).map(Some);
        }
        match &self.data_dir {
            Some(folder) => catalogue::data(text, cache.as_ref(), Some(folder)).map(Some),
            None if given.is_dir() && catalogue::find(last).is_some() => catalogue::data(last, None, Some(given)).map(Some),
            // What has neither folder nor extension is no path that a user would write.
            None if !given.exists() && (catalogue::find(text).is_some() || text == last && given.extension().is_none()) => {
                catalogue::data(text, cache.as_ref(), None).map(Some)
            }
            None => Ok(None),
        }
    }

    /// What was said on the command line goes before what the name means.
    fn over(&self, mut spec: DataSpec, seed: u64) -> DataSpec {
        spec.format = self.format.or(spec.format);
        spec.text_column = self.text_column.clone().or(spec.text_column);
        spec.template = self.template.clone().or(spec.template);
        if self.label_column.is_some() || self.answer_column.is_some() {
            (spec.label_column, spec.answer_column) = (self.label_column.clone(), self.answer_column.clone());
            spec.classes = spec.classes.filter(|_| self.label_column.is_some());
        }
        spec.classes = self.classes.clone().or(spec.classes);
        spec.limit = self.limit;
        spec.seed = seed;
        spec
    }
}

#[derive(Args)]
pub struct EvalDataArgs {
    /// Data to evaluate on [default: a tenth of the data, held out]
    #[arg(long, value_name = "FILE", help_heading = "Evaluation")]
    pub eval_data: Option<PathBuf>,
    /// Its format [default: by the file's name]
    #[arg(long, value_name = "F", value_parser = format, help_heading = "Evaluation")]
    pub eval_format: Option<Format>,
    /// Its text column [default: --text-column]
    #[arg(long, value_name = "C", help_heading = "Evaluation")]
    pub eval_text_column: Option<String>,
    /// Its template [default: --template]
    #[arg(long, value_name = "T", value_parser = template, help_heading = "Evaluation")]
    pub eval_template: Option<Template>,
    /// Its label column [default: --label-column]
    #[arg(long, value_name = "C", help_heading = "Evaluation")]
    pub eval_label_column: Option<String>,
    /// Its answer column [default: --answer-column]
    #[arg(long, value_name = "C", conflicts_with = "eval_label_column", help_heading = "Evaluation")]
    pub eval_answer_column: Option<String>,
    /// Examples to evaluate on at most; 0 does not evaluate
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().eval_samples, help_heading = "Evaluation")]
    pub eval_samples: usize,
}

impl EvalDataArgs {
    /// The evaluation data: those that are given, which are as for `train` where nothing else is said of them, or those that belong to the training data.
    ///
    /// # Errors
    /// `InvalidArgument` where something is said of data that are not there.
    pub fn spec(&self, train: &DataSpec, belonging: Option<DataSpec>) -> Result<Option<DataSpec>> {
        let given = self.eval_data.clone().map(|path| {
            let mut spec = train.clone();
            (spec.path, spec.format) = (path, None);
            spec
        });
        let Some(mut spec) = given.or(belonging) else {
            let said = [
                ("--eval-format", self.eval_format.is_some()),
                ("--eval-text-column", self.eval_text_column.is_some()),
                ("--eval-template", self.eval_template.is_some()),
                ("--eval-label-column", self.eval_label_column.is_some()),
                ("--eval-answer-column", self.eval_answer_column.is_some()),
            ];
            return match said.iter().find(|(_, said)| *said) {
                Some((name, _)) => {
                    Err(Error::invalid(format!("{name} says something of evaluation data, but there are none; give --eval-data too")))
                }
                None => Ok(None),
            };
        };
        spec.format = self.eval_format.or(spec.format);
        spec.limit = None;
        // The sample stays what it is when a run is done again with another seed.
        spec.seed = 0;
        spec.text_column = self.eval_text_column.clone().or(spec.text_column);
        spec.template = self.eval_template.clone().or(spec.template);
        spec.label_column = self.eval_label_column.clone().or(spec.label_column);
        spec.answer_column = self.eval_answer_column.clone().or(spec.answer_column);
        Ok(Some(spec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_shells() {
        for (given, meant) in [(r"{a}\nTopic:", "{a}\nTopic:"), (r"{a}\t\\n\x\", "{a}\t\\n\\x\\")] {
            assert_eq!(template(given).unwrap(), Template::parse(meant).unwrap());
            assert_eq!(unescaped(&escaped(meant)), meant);
        }
    }
}
