//! Class words, and which label means which of them.

use std::{collections::HashMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use zofo_hal::{Error, Result};

/// A class: the word that the model should say, and the label that files have for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Class {
    /// The word.
    pub word: String,
    /// The label in files, where it is given; otherwise it is the word, or the class's number counted from 0 or 1.
    pub value: Option<String>,
}

/// The classes, in order.
///
/// Read from `World,Sports,Business`, or with labels from `1=World,2=Sports,3=Business`. A label in a file is a class where it is the class's
/// label or word. Where no labels are given, numbers count the classes, from 0 where a 0 is in the file, from 1 where the number of
/// classes is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Class>", into = "Vec<Class>")]
pub struct Classes(Vec<Class>);

impl Classes {
    /// Most classes: each is scored for each example.
    pub const MAX: usize = 256;

    /// These classes.
    ///
    /// # Errors
    /// `InvalidArgument` for fewer than two or too many, an empty word, a word or label that is there twice, or labels for some only.
    pub fn new(classes: Vec<Class>) -> Result<Self> {
        if classes.len() < 2 || classes.len() > Self::MAX {
            return Err(Error::invalid(format!("{} classes; give 2 to {}, for example World,Sports", classes.len(), Self::MAX)));
        }
        for (i, class) in classes.iter().enumerate() {
            if class.word.trim().is_empty() {
                return Err(Error::invalid(format!("class {} has no word", i + 1)));
            }
            if class.value.is_some() != classes[0].value.is_some() {
                return Err(Error::invalid(format!("some classes say which label means them and some do not (`{}`)", class.word)));
            }
            for other in &classes[..i] {
                if other.word == class.word || other.value.is_some() && other.value == class.value {
                    return Err(Error::invalid(format!("class {} is in the list twice", class)));
                }
            }
        }
        Ok(Self(classes))
    }

    /// Classes that are labelled by their words.
    ///
    /// # Errors
    /// Those of [`Classes::new`].
    pub fn words<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Result<Self> {
        Self::new(words.into_iter().map(|w| Class { word: w.into(), value: None }).collect())
    }

    /// Number of classes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never: there are at least two.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The classes.
    pub fn iter(&self) -> impl Iterator<Item = &Class> {
        self.0.iter()
    }

    /// The word of a class.
    pub fn word(&self, index: usize) -> &str {
        &self.0[index].word
    }

    fn explicit(&self) -> bool {
        self.0[0].value.is_some()
    }

    fn position(&self, label: &str) -> Option<usize> {
        self.0.iter().position(|c| c.value.as_deref() == Some(label)).or_else(|| self.0.iter().position(|c| c.word == label))
    }
}

impl TryFrom<Vec<Class>> for Classes {
    type Error = Error;

    fn try_from(classes: Vec<Class>) -> Result<Self> {
        Self::new(classes)
    }
}

impl From<Classes> for Vec<Class> {
    fn from(classes: Classes) -> Self {
        classes.0
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{value}={}", self.word),
            None => f.write_str(&self.word),
        }
    }
}

impl fmt::Display for Classes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, class) in self.0.iter().enumerate() {
            write!(f, "{}{class}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for Classes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let class = |entry: &str| match entry.split_once('=') {
            Some((value, word)) => Class { word: word.trim().to_owned(), value: Some(value.trim().to_owned()) },
            None => Class { word: entry.trim().to_owned(), value: None },
        };
        Self::new(text.split(',').map(class).collect())
    }
}

/// Collects the labels of a file and says at the end what they mean: whether numbers count from 0 or from 1 shows only then.
pub(super) struct Resolver {
    classes: Option<Classes>,
    /// Distinct labels with the line they are first on.
    values: Vec<(String, u64)>,
    index: HashMap<String, usize>,
}

impl Resolver {
    pub fn new(classes: Option<Classes>) -> Self {
        Self { classes, values: Vec::new(), index: HashMap::new() }
    }

    /// Number of a label among the distinct ones.
    pub fn note(&mut self, value: &str, line: u64) -> Result<usize> {
        let value = value.trim();
        if let Some(i) = self.index.get(value) {
            return Ok(*i);
        }
        if let Some(classes) = &self.classes {
            let number = value.parse::<usize>().ok().filter(|n| !classes.explicit() && *n <= classes.len());
            if classes.position(value).is_none() && number.is_none() {
                return Err(unknown(value, classes));
            }
        } else if self.values.len() == Classes::MAX {
            return Err(Error::format(format!(
                "label `{}` is the {}th different one; list the classes, or choose another label column",
                brief(value),
                Classes::MAX + 1
            )));
        }
        self.index.insert(value.to_owned(), self.values.len());
        self.values.push((value.to_owned(), line));
        Ok(self.values.len() - 1)
    }

    /// The classes, and the class of each distinct label.
    pub fn finish(self) -> Result<(Classes, Vec<usize>)> {
        let Some(classes) = self.classes else {
            return Self::from_values(self.values);
        };
        let number = |v: &str| if classes.position(v).is_none() { v.parse::<usize>().ok() } else { None };
        let find = |n: usize| self.values.iter().find(|(v, _)| number(v) == Some(n));
        let counts_from = match (find(0), find(classes.len())) {
            (Some(_), Some((value, line))) => return Err(unknown(value, &classes).context(format_args!("line {line}"))),
            (Some(_), None) => 0,
            (None, Some(_)) => 1,
            (None, None) => match self.values.iter().find(|(v, _)| number(v).is_some()) {
                None => 0,
                Some((value, line)) => {
                    return Err(Error::format(format!(
                        "line {line}: label `{value}` could count the classes {classes} from 0 or from 1, and neither 0 nor {} is in the file; \
                         say which label is which class, as in {value}={}",
                        classes.len(),
                        classes.word(0)
                    )));
                }
            },
        };
        let class = |v: &str| classes.position(v).or_else(|| number(v).and_then(|n| n.checked_sub(counts_from))).unwrap_or(0);
        let meaning = self.values.iter().map(|(v, _)| class(v)).collect();
        Ok((classes, meaning))
    }

    fn from_values(values: Vec<(String, u64)>) -> Result<(Classes, Vec<usize>)> {
        if let Some((value, line)) = values.iter().find(|(v, _)| v.is_empty() || v.parse::<f64>().is_ok()) {
            return Err(Error::format(format!(
                "line {line}: label `{value}` is no word that the model could say; list the classes, as in 1=World,2=Sports"
            )));
        }
        let mut words: Vec<&String> = values.iter().map(|(v, _)| v).collect();
        words.sort();
        let classes = Classes::words(words.iter().map(|w| w.as_str())).map_err(|e| e.context("the labels of the file"))?;
        let meaning = values.iter().map(|(v, _)| classes.position(v).unwrap_or(0)).collect();
        Ok((classes, meaning))
    }
}

fn unknown(value: &str, classes: &Classes) -> Error {
    Error::format(format!("label `{}` is not in the class list {classes}", brief(value)))
}

fn brief(value: &str) -> String {
    let mut short: String = value.chars().take(40).collect();
    if short.len() < value.len() {
        short.push_str("...");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(classes: &str, labels: &[&str]) -> Result<Vec<usize>> {
        let mut resolver = Resolver::new((!classes.is_empty()).then(|| classes.parse().unwrap()));
        let noted = labels.iter().zip(2..).map(|(l, line)| resolver.note(l, line)).collect::<Result<Vec<_>>>()?;
        let (_, meaning) = resolver.finish()?;
        Ok(noted.into_iter().map(|n| meaning[n]).collect())
    }

    #[test]
    fn words_and_numbers() {
        assert_eq!(resolve("World,Sports", &["Sports", " World "]).unwrap(), [1, 0]);
        assert_eq!(resolve("World,Sports", &["2", "1", "2"]).unwrap(), [1, 0, 1]);
        assert_eq!(resolve("World,Sports", &["1", "0"]).unwrap(), [1, 0]);
        assert_eq!(resolve("1=World,2=Sports", &["1", "Sports"]).unwrap(), [0, 1]);
        assert_eq!(resolve("", &["b", "a", "b"]).unwrap(), [1, 0, 1]);
    }

    #[test]
    fn what_means_nothing_is_refused_with_the_list() {
        for (classes, labels, part) in [
            ("World,Sports", &["Weather"][..], "`Weather` is not in the class list World,Sports"),
            ("World,Sports", &["3"], "`3` is not"),
            ("World,Sports", &["-1"], "`-1` is not"),
            ("1=World,2=Sports", &["0"], "`0` is not in the class list 1=World,2=Sports"),
            ("World,Sports", &["0", "2"], "line 3: label `2`"),
            ("World,Sports,Business", &["1", "2"], "from 0 or from 1"),
            ("", &["1", "2"], "line 2: label `1` is no word"),
            ("", &["a"], "1 classes"),
        ] {
            let e = resolve(classes, labels).unwrap_err();
            assert!(e.message().contains(part), "{classes} {labels:?}: {e}");
        }
    }

    #[test]
    fn class_lists_are_checked() {
        for bad in ["", "a", "a,a", "a,", "1=a,b", "1=a,1=b"] {
            assert!(bad.parse::<Classes>().is_err(), "{bad}");
        }
        let text = "1=World,2=Sports";
        assert_eq!(text.parse::<Classes>().unwrap().to_string(), text);
    }
}
