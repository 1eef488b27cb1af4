//! Examples as token sequences: the prompt, then the label word or the answer, whose tokens are what is predicted.

use zofo_hal::{Error, Result};
use zofo_ops::{batch::Sequence, config::ModelConfig, files::Tokenizer};

use crate::data::{Dataset, Example, Template};

/// Longest sequence in tokens, where the user names none and the model allows it.
pub const DEFAULT_MAX_LENGTH: usize = 256;

/// The longest sequences to make for a model: `asked`, or [`DEFAULT_MAX_LENGTH`], within the model's context.
///
/// # Errors
/// `InvalidArgument` where more is asked for than the model has, or less than two tokens.
pub fn max_length(config: &ModelConfig, asked: Option<usize>) -> Result<usize> {
    let most = config.sliding_window.map_or(config.max_positions, |w| w.min(config.max_positions));
    match asked {
        None => Ok(most.min(DEFAULT_MAX_LENGTH)),
        Some(n) if n > most => Err(Error::invalid(format!(
            "sequences of up to {n} tokens are asked for, but this model was made for at most {most}; ask for less"
        ))),
        Some(n) if n < 2 => Err(Error::invalid(format!("sequences of up to {n} tokens have nothing to predict; allow at least 2"))),
        Some(n) => Ok(n),
    }
}

/// A prompt in tokens, and the class that should follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The class.
    pub label: Option<usize>,
}

/// Makes sequences of a data set's examples.
///
/// With classes, the label word stands behind the prompt, after a space unless the template ends in white space, and its tokens alone are
/// labelled. An answer stands there in the same way, and a token that ends the text follows it where the tokenizer has one; those are labelled.
/// Without classes and answers, every token of the text is, and a token that ends the text follows it where the tokenizer has one.
///
/// What is too long loses text from its fields (each is cut to the same number of characters, from the end), never of the template or the
/// label; an answer loses what is beyond half of the sequence.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a Template,
    name: &'a str,
    labels: Vec<Vec<u32>>,
    end: Option<u32>,
    max_length: usize,
    truncate: bool,
}

impl<'a> Encoder<'a> {
    /// An encoder for `data`, of sequences of at most `max_length` tokens. Without `truncate` a longer one is an error.
    ///
    /// # Errors
    /// `InvalidArgument` where two classes have the same tokens or a label leaves no room for a prompt.
    pub fn new(tokenizer: &'a Tokenizer, data: &'a Dataset, max_length: usize, truncate: bool) -> Result<Self> {
        let mut labels: Vec<Vec<u32>> = Vec::new();
        let end = tokenizer.eos();
        let words: Vec<&str> = data.classes.iter().flat_map(|c| c.iter()).map(|c| c.word.as_str()).collect();
        for word in &words {
            let ids = label_tokens(tokenizer, data.template.tail(), word).map_err(|e| e.context(format!("label `{word}`")))?;
            if ids.is_empty() {
                return Err(Error::invalid(format!("label `{word}`: this tokenizer cannot express it; choose another word")));
            }
            if let Some(same) = labels.iter().position(|l| *l == ids) {
                return Err(Error::invalid(format!(
                    "the classes `{}` and `{word}` are the same tokens to this model's tokenizer; choose other words",
                    words[same]
                )));
            }
            if ids.len() + 1 > max_length {
                return Err(Error::invalid(format!(
                    "label `{word}` has {} tokens, which leaves no room for a prompt in sequences of {max_length}",
                    ids.len()
                )));
            }
            labels.push(ids);
        }
        Ok(Self { tokenizer, template: &data.template, name: &data.name, labels, end, max_length, truncate })
    }

    /// The tokens of each class's word, as they follow the prompt.
    pub fn labels(&self) -> &[Vec<u32>] {
        &self.labels
    }

    /// Tokens that are predicted behind a prompt of class `label`.
    pub fn predicted(&self, label: usize) -> usize {
        self.labels[label].len()
    }

    /// The training sequence of an example.
    ///
    /// # Errors
    /// `InvalidArgument` with the example's line where it is too long and may not be cut, or where even the template is too long; those of
    /// [`Tokenizer::encode`].
    pub fn sequence(&self, example: &Example) -> Result<Sequence> {
        match (example.label, &example.answer) {
            (Some(label), _) => {
                let prompt = self.prompt(example)?;
                Ok(self.with_label(&prompt, label))
            }
            (None, Some(answer)) => self.answered(example, answer),
            (None, None) => self.text(example),
        }
    }

    /// `prompt` followed by class `label`, whose tokens are to be predicted.
    pub fn with_label(&self, prompt: &Prompt, label: usize) -> Sequence {
        let mut ids = prompt.ids.clone();
        ids.extend(&self.labels[label]);
        Sequence::predicting(ids, prompt.ids.len())
    }

    /// The prompt of an example, with room behind it for any class.
    ///
    /// # Errors
    /// Those of [`Encoder::sequence`].
    pub fn prompt(&self, example: &Example) -> Result<Prompt> {
        let room = (0..self.labels.len()).map(|l| self.predicted(l)).max().unwrap_or(0);
        let (ids, _) = self.fit(example, room)?;
        if ids.is_empty() {
            return Err(self.error(example, "its prompt has no token"));
        }
        Ok(Prompt { ids, label: example.label })
    }

    /// The prompt followed by the answer, which is to be predicted.
    fn answered(&self, example: &Example, answer: &str) -> Result<Sequence> {
        let answer = answer.trim();
        let mut target = label_tokens(self.tokenizer, self.template.tail(), answer).map_err(|e| e.context(self.place(example)))?;
        target.extend(self.end);
        if self.truncate {
            target.truncate(self.max_length.div_ceil(2));
        }
        if target.is_empty() {
            return Err(self.error(example, "its answer is empty, and this model has no token that ends a text"));
        }
        if target.len() >= self.max_length {
            return Err(self.error(
                example,
                &format!("its answer has {} tokens, which leaves no room for a prompt in sequences of {}", target.len(), self.max_length),
            ));
        }
        let (mut ids, _) = self.fit(example, target.len())?;
        if ids.is_empty() {
            return Err(self.error(example, "its prompt has no token"));
        }
        let prompt = ids.len();
        ids.extend(target);
        Ok(Sequence::predicting(ids, prompt))
    }

    fn text(&self, example: &Example) -> Result<Sequence> {
        let (mut ids, whole) = self.fit(example, 0)?;
        if let Some(end) = self.end.filter(|_| whole && ids.len() < self.max_length) {
            ids.push(end);
        }
        if ids.len() < 2 {
            return Err(self.error(example, "its text is empty, so there is nothing to predict"));
        }
        Ok(Sequence::predicting(ids, 1))
    }

    /// Tokens of the prompt, at most `max_length` less `room`, and whether nothing was cut.
    fn fit(&self, example: &Example, room: usize) -> Result<(Vec<u32>, bool)> {
        let most = self.max_length - room;
        // No token is shorter than a byte, but some are long; text far beyond this bound is not worth encoding to find out.
        let longest = example.fields.iter().map(|f| f.chars().count()).max().unwrap_or(0);
        let start = longest.min(most.saturating_mul(32));
        let encode = |cap: usize| {
            let text = self.template.render(&example.fields, cap);
            self.tokenizer.encode(text.trim_end_matches(' '), true).map_err(|e| e.context(self.place(example)))
        };
        let ids = encode(start)?;
        if ids.len() <= most && start == longest {
            return Ok((ids, true));
        }
        if !self.truncate {
            let tokens = if start == longest { ids.len().to_string() } else { format!("more than {}", ids.len()) };
            return Err(self.error(
                example,
                &format!(
                    "{tokens} tokens{}, but sequences may have {most}; allow longer ones, allow truncation, or shorten the text",
                    if room > 0 { " before the label or answer" } else { "" }
                ),
            ));
        }
        // The longest cut that fits. Token counts need not grow strictly with the text, but what is returned was counted.
        let (mut low, mut high, mut best) = (0, start, None);
        if ids.len() <= most {
            return Ok((ids, false));
        }
        while low < high {
            let middle = low + (high - low) / 2;
            let ids = encode(middle)?;
            if ids.len() <= most {
                best = Some(ids);
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let best = best.ok_or_else(|| {
            self.error(example, &format!("the template alone has more than the {most} tokens there is room for; allow longer sequences"))
        })?;
        Ok((best, false))
    }

    fn place(&self, example: &Example) -> String {
        format!("{}: line {}", self.name, example.line)
    }

    fn error(&self, example: &Example, what: &str) -> Error {
        Error::invalid(what.to_owned()).context(self.place(example))
    }
}

/// The tokens of `word` as they follow a prompt that ends in `tail`.
fn label_tokens(tokenizer: &Tokenizer, tail: &str, word: &str) -> Result<Vec<u32>> {
    // Prompts end without spaces, because tokenizers hold a space to be the beginning of the next word.
    let head = tail.trim_end_matches(' ');
    let space = match &tail[head.len()..] {
        "" if head.ends_with(char::is_whitespace) => "",
        "" => " ",
        spaces => spaces,
    };
    // Some text stands before it, because the beginning of a text may be treated apart.
    let before = format!("a{head}");
    let prompt = tokenizer.encode(&before, false)?;
    let whole = tokenizer.encode(&format!("{before}{space}{word}"), false)?;
    match whole.strip_prefix(prompt.as_slice()) {
        Some(label) => Ok(label.to_vec()),
        // The word's beginning merged with the end of the prompt; what follows the prompt as it is, is the word by itself.
        None => tokenizer.encode(&format!("{space}{word}"), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Classes;

    fn tokenizer() -> Option<Tokenizer> {
        let path = zofo_testkit::shared("models/stories260K/hf/tokenizer.model")?;
        Some(Tokenizer::open(&path).unwrap())
    }

    fn data(template: &str, classes: Option<&str>, fields: &[&str]) -> Dataset {
        let classes: Option<Classes> = classes.map(|c| c.parse().unwrap());
        let label = classes.is_some().then_some(1);
        let example = Example { fields: fields.iter().map(|f| (*f).to_owned()).collect(), label, answer: None, line: 7 };
        Dataset { name: "d.csv".into(), template: Template::parse(template).unwrap(), classes, examples: vec![example] }
    }

    #[test]
    fn the_label_word_is_what_is_predicted() {
        let Some(t) = tokenizer() else { return zofo_testkit::skip!("no stories260K tokenizer") };
        for template in ["{text}\nTopic:", "{text}\nTopic: ", "{text}"] {
            let data = data(template, Some("World,Sports"), &["A game"]);
            let encoder = Encoder::new(&t, &data, 64, true).unwrap();
            let s = encoder.sequence(&data.examples[0]).unwrap();
            let text = format!("{} Sports", data.template.render(&["A game".into()], 99).trim_end());
            assert_eq!(s.ids, t.encode(&text, true).unwrap());
            let label: Vec<u32> = s.labels.iter().flatten().copied().collect();
            assert_eq!(label.len(), encoder.predicted(1));
            assert_eq!(label, encoder.labels()[1]);
            assert_eq!(t.decode(&label).unwrap().trim(), "Sports");
        }
    }

    #[test]
    fn text_is_cut_and_the_rest_is_not() {
        let Some(t) = tokenizer() else { return zofo_testkit::skip!("no stories260K tokenizer") };
        let long = "once upon a time ".repeat(100);
        let data = data("{a}|{b}\nTopic:", Some("World,Sports"), &[&long, "short"]);
        for max in [25, 26, 40] {
            let encoder = Encoder::new(&t, &data, max, true).unwrap();
            let s = encoder.sequence(&data.examples[0]).unwrap();
            assert!(s.ids.len() <= max && s.ids.len() + 6 > max, "{} of {max}", s.ids.len());
            let text = t.decode(&s.ids).unwrap();
            assert!(text.ends_with("Topic: Sports") && text.contains("once"), "{text}");
        }
        let e = Encoder::new(&t, &data, 25, false).unwrap().sequence(&data.examples[0]).unwrap_err();
        assert!(e.message().starts_with("d.csv: line 7: ") && e.message().contains("tokens"), "{e}");
        let e = Encoder::new(&t, &data, 9, true).unwrap().sequence(&data.examples[0]).unwrap_err();
        assert!(e.message().contains("the template alone"), "{e}");
        assert!(Encoder::new(&t, &data, 2, true).is_err());
    }

    #[test]
    fn plain_text_is_predicted_throughout() {
        let Some(t) = tokenizer() else { return zofo_testkit::skip!("no stories260K tokenizer") };
        let data = data("{text}", None, &["A game"]);
        let s = Encoder::new(&t, &data, 64, true).unwrap().sequence(&data.examples[0]).unwrap();
        let mut ids = t.encode("A game", true).unwrap();
        ids.push(t.eos().unwrap());
        assert_eq!(s.labels.iter().flatten().copied().collect::<Vec<_>>(), ids[1..]);
        assert_eq!(s.ids, ids);
        let cut = Encoder::new(&t, &data, 3, true).unwrap().sequence(&data.examples[0]).unwrap();
        assert_eq!(cut.ids, ids[..cut.ids.len()]);
    }

    #[test]
    fn an_answer_is_what_is_predicted() {
        let Some(t) = tokenizer() else { return zofo_testkit::skip!("no stories260K tokenizer") };
        let mut data = data("{text}\nAnswer:", None, &["Who saw the ball?"]);
        let encode = |answer: &str, data: &mut Dataset, max, truncate| {
            data.examples[0].answer = Some(answer.to_owned());
            Encoder::new(&t, data, max, truncate).unwrap().sequence(&data.examples[0])
        };
        let s = encode(" Lily and Tom ", &mut data, 64, true).unwrap();
        let mut ids = t.encode("Who saw the ball?\nAnswer: Lily and Tom", true).unwrap();
        let prompt = t.encode("Who saw the ball?\nAnswer:", true).unwrap().len();
        ids.push(t.eos().unwrap());
        assert_eq!(s.labels.iter().flatten().copied().collect::<Vec<_>>(), ids[prompt..]);
        assert_eq!(s.ids, ids);
        // A question without an answer ends at once.
        let s = encode("", &mut data, 64, true).unwrap();
        assert_eq!(s.labels.iter().flatten().copied().last(), t.eos());
        let long = "the ball ".repeat(50);
        let s = encode(&long, &mut data, 32, true).unwrap();
        assert!(s.ids.len() <= 32 && s.labels.iter().flatten().count() == 16);
        let e = encode(&long, &mut data, 32, false).unwrap_err();
        assert!(e.message().contains("line 7") && e.message().contains("leaves no room"), "{e}");
    }

    #[test]
    fn lengths_stay_within_the_model() {
        let mut config = zofo_ops::llama::MemoryModel::tiny_config();
        assert_eq!(max_length(&config, None).unwrap(), 64);
        assert_eq!(max_length(&config, Some(8)).unwrap(), 8);
        config.max_positions = 4096;
        assert_eq!(max_length(&config, None).unwrap(), 256);
        config.sliding_window = Some(32);
        assert!(max_length(&config, Some(33)).unwrap_err().message().contains("at most 32"));
        assert!(max_length(&config, Some(1)).is_err());
    }
}
