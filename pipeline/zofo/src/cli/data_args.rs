//! Arguments that describe data.

use std::path::PathBuf;

use clap::Args;
use zofo::{
    Error, Result, TrainOptions,
    data::{Classes, DataSpec, Format, Template},
};

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
    /// Data: CSV or TSV with a header line, JSONL, or the JSON of SQuAD or MultiRC
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    pub data: Option<PathBuf>,
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
    /// The data, where they are named.
    pub fn spec(&self, seed: u64) -> Option<DataSpec> {
        let mut spec = DataSpec::new(self.data.clone()?);
        spec.format = self.format;
        spec.text_column = self.text_column.clone();
        spec.template = self.template.clone();
        spec.label_column = self.label_column.clone();
        spec.answer_column = self.answer_column.clone();
        spec.classes = self.classes.clone();
        spec.limit = self.limit;
        spec.seed = seed;
        Some(spec)
    }
}

#[derive(Args)]
pub struct EvalDataArgs {
    /// Data to evaluate on [default: a tenth of the data, held out]
    #[arg(long, value_name = "FILE", help_heading = "Evaluation")]
    pub eval_data: Option<PathBuf>,
    /// Its format [default: by the file's name]
    #[arg(long, value_name = "F", value_parser = format, requires = "eval_data", help_heading = "Evaluation")]
    pub eval_format: Option<Format>,
    /// Its text column [default: --text-column]
    #[arg(long, value_name = "C", requires = "eval_data", help_heading = "Evaluation")]
    pub eval_text_column: Option<String>,
    /// Its template [default: --template]
    #[arg(long, value_name = "T", value_parser = template, requires = "eval_data", help_heading = "Evaluation")]
    pub eval_template: Option<Template>,
    /// Its label column [default: --label-column]
    #[arg(long, value_name = "C", requires = "eval_data", help_heading = "Evaluation")]
    pub eval_label_column: Option<String>,
    /// Its answer column [default: --answer-column]
    #[arg(long, value_name = "C", requires = "eval_data", conflicts_with = "eval_label_column", help_heading = "Evaluation")]
    pub eval_answer_column: Option<String>,
    /// Examples to evaluate on at most; 0 does not evaluate
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().eval_samples, help_heading = "Evaluation")]
    pub eval_samples: usize,
}

impl EvalDataArgs {
    /// The evaluation data; what is not said of them is as for `train`.
    pub fn spec(&self, train: &DataSpec) -> Option<DataSpec> {
        let mut spec = train.clone();
        spec.path = self.eval_data.clone()?;
        spec.format = self.eval_format;
        spec.limit = None;
        spec.text_column = self.eval_text_column.clone().or(spec.text_column);
        spec.template = self.eval_template.clone().or(spec.template);
        spec.label_column = self.eval_label_column.clone().or(spec.label_column);
        spec.answer_column = self.eval_answer_column.clone().or(spec.answer_column);
        Some(spec)
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
