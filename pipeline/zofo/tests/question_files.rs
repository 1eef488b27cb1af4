//! SQuAD's and MultiRC's files: rows, and what is refused.

use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};
use zofo::{
    ErrorKind, Result,
    data::{DataSpec, Dataset, Format, MAX_FIELD_BYTES, MAX_ROW_BYTES},
};

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, contents).unwrap();
        path
    }

    fn squad(&self, contents: impl AsRef<[u8]>) -> Result<Dataset> {
        DataSpec::new(self.write("a.json", contents)).template("{context}|{question}").unwrap().answer("answer").load()
    }

    fn multirc(&self, contents: impl AsRef<[u8]>) -> Result<Dataset> {
        let spec = DataSpec::new(self.write("a.jsonl", contents)).format(Format::MultiRc);
        spec.template("{passage}|{question}|{answer}").unwrap().labels("label", "0=no,1=yes".parse().unwrap()).load()
    }
}

fn articles() -> Value {
    json!({
        "version": "1.1",
        "data": [
            {"title": "a", "paragraphs": [
                {"context": "A said \"b\".", "qas": [
                    {"id": "1", "question": "Who?", "answers": [{"text": "A", "answer_start": 0}, {"text": "a", "answer_start": 0}]},
                    {"id": 2, "question": "What?", "answers": [{"text": "\"b\"", "answer_start": 7}]},
                ]},
                {"qas": [{"question": "Why?", "answers": [], "is_impossible": true}], "context": "c [{"},
                {"context": "nothing is asked", "qas": []},
            ]},
            {"paragraphs": [], "title": "b"},
        ],
    })
}

fn passages() -> String {
    let lines = [
        json!({"idx": 0, "version": 1.1, "passage": {"text": "p", "questions": [
            {"idx": 0, "question": "q", "answers": [{"text": "a", "idx": 0, "label": 0}, {"text": "b", "idx": 1, "label": 1}]},
            {"idx": 1, "question": "r", "answers": [{"text": "c", "idx": 2, "label": 1}]},
        ]}}),
        // The original release's names.
        json!({"id": "x", "paragraph": {"text": "s", "questions": [
            {"question": "t", "sentences_used": [0], "multisent": true, "answers": [{"text": "d", "isAnswer": false, "scores": {}}]},
        ]}}),
    ];
    lines.map(|l| format!("{l}\n\n")).concat()
}

fn rows(data: &Dataset) -> Vec<String> {
    data.examples
        .iter()
        .map(|e| format!("{}={}", e.fields.join("|"), e.answer.clone().unwrap_or_else(|| format!("{:?}", e.label))))
        .collect()
}

#[test]
fn a_row_for_each_question_of_squad() {
    let files = Files::new();
    let expected = ["A said \"b\".|Who?=A", "A said \"b\".|What?=\"b\"", "c [{|Why?="];
    for text in [articles().to_string(), serde_json::to_string_pretty(&articles()).unwrap()] {
        assert_eq!(rows(&files.squad(text).unwrap()), expected);
    }
    // Whatever the order of keys, and with a byte order mark.
    let text = articles().to_string();
    let (data, version) = (text.find("\"data\"").unwrap(), ",\"version\":\"1.1\"");
    assert!(data < 3 && text.contains(version));
    let turned = text.replace(version, "").replacen('{', "\u{feff}{\"version\":\"1.1\",", 1);
    assert_eq!(rows(&files.squad(turned).unwrap()), expected);
    let ids = DataSpec::new(files.write("a.json", articles().to_string())).text("id").limit(9);
    assert!(ids.load().unwrap_err().message().contains("column `id`: question or answer 1 of this text does not have it"));
    let e = DataSpec::new(files.write("a.json", articles().to_string())).text("body").load().unwrap_err();
    assert!(e.message().contains("no column `body`; the columns are: context, question, answer, id"), "{e}");
}

#[test]
fn a_row_for_each_answer_of_multirc() {
    let files = Files::new();
    let data = files.multirc(passages()).unwrap();
    assert_eq!(rows(&data), ["p|q|a=Some(0)", "p|q|b=Some(1)", "p|r|c=Some(1)", "s|t|d=Some(0)"]);
    assert_eq!(data.examples.iter().map(|e| e.line).collect::<Vec<_>>(), [1, 1, 1, 3]);
    // Test files have no labels.
    let unlabelled = passages().replace(r#","label":0"#, "").replace(r#""label":0,"#, "");
    let e = files.multirc(unlabelled).unwrap_err();
    assert!(e.message().contains("line 1, column `label`: question or answer 1"), "{e}");
}

#[test]
fn an_answer_is_no_label() {
    let files = Files::new();
    let mut spec = DataSpec::new(files.write("a.csv", "text,answer,label\nx,y,z\n")).answer("answer");
    let data = spec.load().unwrap();
    assert_eq!((data.template.to_string(), data.examples[0].answer.as_deref()), ("{text}\nAnswer:".into(), Some("y")));
    spec.label_column = Some("label".into());
    assert!(spec.load().unwrap_err().message().contains("a label column and an answer column"));
}

#[test]
fn errors_say_where() {
    let files = Files::new();
    let pretty = serde_json::to_string_pretty(&articles()).unwrap();
    for (text, parts) in [
        (String::new(), &["line 1, column 1", "ends here"][..]),
        ("[]".into(), &["line 1, column 1", "`[` where `{`"]),
        ("{}".into(), &["no `data`"]),
        ("{\"data\": []}".into(), &["no rows"]),
        ("{\"data\": {}}".into(), &["line 1, column 10", "`{` where `[`"]),
        (pretty.replace("\"Why?\"", "7"), &["invalid type: integer `7`, expected a string", "line "]),
        (pretty.replace("\"question\": \"Why?\"", "\"q\": 1"), &["missing field `question`"]),
        (format!("{pretty}x"), &["something follows"]),
    ] {
        let e = files.squad(&text).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::Format);
        parts.iter().for_each(|p| assert!(e.message().contains(p), "`{e}` does not mention `{p}`"));
    }
    // The line is that of the value, in a file as people format it.
    let line = pretty.lines().position(|l| l.contains("Why?")).unwrap() + 1;
    let e = files.squad(pretty.replace("\"Why?\"", "7")).unwrap_err();
    assert!(e.message().contains(&format!("line {line}, column")), "{e}");

    for (text, parts) in [
        ("[]", &["line 1, column", "MultiRC"][..]),
        ("{}", &["missing field `passage`"]),
        ("{\"passage\": {\"text\": 1}}", &["line 1, column 22", "expected a string"]),
        (
            "{\"passage\": {\"text\": \"\", \"questions\": [{\"question\": \"\", \"answers\": [{\"text\": \"\", \"label\": []}]}]}}",
            &["a list where"],
        ),
    ] {
        let e = files.multirc(text).unwrap_err();
        parts.iter().for_each(|p| assert!(e.message().contains(p), "`{e}` does not mention `{p}`"));
    }
}

#[test]
fn what_is_huge_is_bounded() {
    let files = Files::new();
    let long = articles().to_string().replace("c [{", &"x".repeat(MAX_FIELD_BYTES + 1));
    assert!(files.squad(long).unwrap_err().message().contains("column `context`"));
    let longer = articles().to_string().replace("c [{", &"x".repeat(MAX_ROW_BYTES));
    assert!(files.squad(longer).unwrap_err().message().contains("longer than"));
    let deep = format!("{{\"data\": {}", "[".repeat(1 << 20));
    assert!(files.squad(deep).is_err());
    let deep = format!("{{\"version\": {}", "[".repeat(1 << 20));
    assert!(files.squad(deep).unwrap_err().message().contains("deep"));
    let deep = format!("{{\"passage\": {}", "{\"a\":".repeat(1 << 18));
    assert!(files.multirc(deep).is_err());
}

#[test]
fn cut_off_anywhere_is_an_error() {
    let files = Files::new();
    let text = articles().to_string();
    for end in 0..text.len() {
        let e = files.squad(&text[..end]).unwrap_err();
        assert!(e.message().contains("line 1, column"), "{end}: {e}");
    }
    // Lines are whole where the cut is between them.
    let text = passages();
    let whole = |part: &str| part.lines().filter(|l| !l.is_empty()).all(|l| serde_json::from_str::<Value>(l).is_ok());
    for end in (1..text.len()).filter(|end| !whole(&text[..*end])) {
        assert!(files.multirc(&text[..end]).is_err(), "{end}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bytes_changed_anywhere_never_panic(at in any::<prop::sample::Index>(), byte: u8, pretty: bool) {
        let files = Files::new();
        let text = if pretty { serde_json::to_string_pretty(&articles()).unwrap() } else { articles().to_string() };
        for (text, squad) in [(text, true), (passages(), false)] {
            let mut bytes = text.into_bytes();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = if squad { files.squad(bytes) } else { files.multirc(bytes) };
        }
    }
}

#[test]
fn the_real_files() {
    let squad = |name| {
        let path = zofo_testkit::shared(name)?;
        let data = DataSpec::new(path).template("{context}\n{question}").unwrap().answer("answer").load().unwrap();
        assert!(data.examples.iter().all(|e| e.answer.as_ref().is_some_and(|a| e.fields[0].contains(a.as_str()))));
        Some(data.examples.len())
    };
    let multirc = |name| {
        let spec = DataSpec::new(zofo_testkit::shared(name)?).format(Format::MultiRc).template("{passage}").unwrap();
        let data = spec.labels("label", "0=no,1=yes".parse().unwrap()).load().unwrap();
        let right = data.examples.iter().filter(|e| e.label == Some(1)).count();
        Some((data.examples.len(), right))
    };
    let (Some(train), Some(dev)) = (squad("data/squad/train.json"), squad("data/squad/dev.json")) else {
        return zofo_testkit::skip!("no SQuAD files");
    };
    // Counted with Python's json module.
    assert_eq!((train, dev), (4639, 1190));
    let (Some(train), Some(dev)) = (multirc("data/multirc/train.jsonl"), multirc("data/multirc/val.jsonl")) else {
        return zofo_testkit::skip!("no MultiRC files");
    };
    assert_eq!((train, dev), ((27243, 12025), (4848, 2075)));
}
