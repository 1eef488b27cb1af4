//! Data files as users have them.

use std::path::PathBuf;

use zofo::{
    ErrorKind,
    data::{DataSpec, Dataset, Format},
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
}

fn texts(data: &Dataset) -> Vec<&str> {
    data.examples.iter().map(|e| e.fields[0].as_str()).collect()
}

fn labels(data: &Dataset) -> Vec<usize> {
    data.examples.iter().filter_map(|e| e.label).collect()
}

#[test]
fn csv_with_quotes_line_breaks_and_a_byte_order_mark() {
    let files = Files::new();
    let path = files.write("a.csv", "\u{feff}label,text\r\n2,\"a, \"\"b\"\"\nc\"\r\n1,é\r\n");
    let spec = DataSpec::new(path).labels("label", "World,Sports".parse().unwrap());
    let data = spec.load().unwrap();
    assert_eq!(texts(&data), ["a, \"b\"\nc", "é"]);
    assert_eq!(labels(&data), [1, 0]);
    assert_eq!(data.examples.iter().map(|e| e.line).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(data.template.to_string(), "{text}\nLabel:");
}

#[test]
fn the_same_rows_in_every_format() {
    let files = Files::new();
    for (name, contents) in [
        ("a.csv", "body,n\nx,1\ny,0\n"),
        ("a.tsv", "body\tn\nx\t1\ny\t0\n"),
        ("a.jsonl", "\n{\"body\":\"x\",\"n\":1}\n  \n{\"n\":0,\"body\":\"y\"}"),
    ] {
        let spec = DataSpec::new(files.write(name, contents)).text("body").labels("n", "no,yes".parse().unwrap());
        let data = spec.load().unwrap();
        assert_eq!((texts(&data), labels(&data)), (vec!["x", "y"], vec![1, 0]), "{name}");
    }
    let mut spec = DataSpec::new(files.write("rows", "body\nx\n")).text("body");
    assert!(spec.load().unwrap_err().message().contains("csv, tsv, jsonl"));
    spec.format = Some(Format::Csv);
    assert_eq!(texts(&spec.load().unwrap()), ["x"]);
}

#[test]
fn errors_say_where() {
    let files = Files::new();
    let refused = |name: &str, contents: &[u8], kind: ErrorKind, parts: &[&str]| {
        let spec = DataSpec::new(files.write(name, contents)).labels("label", "a,b".parse().unwrap());
        let e = spec.load().unwrap_err();
        assert_eq!(*e.kind(), kind, "{e}");
        for part in [&[name], parts].concat() {
            assert!(e.message().contains(part), "`{e}` does not mention `{part}`");
        }
    };
    refused("a.csv", b"", ErrorKind::Format, &["empty"]);
    refused("a.csv", b"label,text\n", ErrorKind::Format, &["no rows"]);
    refused("a.csv", b"label,label\na,b\n", ErrorKind::Format, &["two columns", "`label`"]);
    refused("a.csv", b"label,body\na,b\n", ErrorKind::InvalidArgument, &["label, body"]);
    refused("a.csv", b"class,text\na,b\n", ErrorKind::InvalidArgument, &["no column `label`", "class, text"]);
    refused("a.csv", b"label,text\na,x\nc,y\n", ErrorKind::Format, &["line 3", "`c`", "a,b"]);
    refused("a.csv", b"label,text\na\n", ErrorKind::Format, &["line 2", "1 fields", "has 2"]);
    refused("a.csv", b"\xff\xfel\0a\0", ErrorKind::Format, &["UTF-16"]);
    refused("a.csv", b"label,text\na,\xff\n", ErrorKind::Format, &["line 2", "field 2", "UTF-8"]);
    refused("a.jsonl", b"\n \n", ErrorKind::Format, &["empty"]);
    refused("a.jsonl", b"{\"label\":\"a\",\"text\":\"x\"}\n[1]\n", ErrorKind::Format, &["line 2", "a list"]);
    refused("a.jsonl", b"{\"label\":\"a\",\"text\":\"x\"}\n{\"label\":}\n", ErrorKind::Format, &["line 2, column 10"]);
    refused("a.jsonl", b"{\"label\":\"a\",\"text\":\"x\"}\n{\"label\":\"a\"}\n", ErrorKind::Format, &["line 2, column `text`", "not have"]);
    refused("a.jsonl", b"{\"label\":\"a\",\"text\":null}\n", ErrorKind::Format, &["line 1, column `text`", "null"]);
    refused("a.jsonl", b"{\"label\":\"a\",\"text\":[\"x\"]}\n", ErrorKind::Format, &["a list where text"]);
    let deep = "[".repeat(100_000);
    refused("a.jsonl", format!("{{\"label\":{deep}").as_bytes(), ErrorKind::Format, &["line 1"]);
}

#[test]
fn what_is_huge_is_bounded() {
    let files = Files::new();
    let long = "x".repeat(zofo::data::MAX_FIELD_BYTES + 1);
    let e = DataSpec::new(files.write("a.csv", format!("text\nshort\n{long}\n"))).load().unwrap_err();
    assert!(e.message().contains("line 3, column `text`") && e.message().contains("quote"), "{e}");
    // A quote that is not closed takes all that follows into one field.
    let open = format!("text\nshort\n\"open\n{}", "line of text\n".repeat(zofo::data::MAX_ROW_BYTES / 10));
    let e = DataSpec::new(files.write("b.csv", open)).load().unwrap_err();
    assert!(e.message().contains("line 3") && e.message().contains("quote"), "{e}");
    let line = format!("{{\"text\":\"{}\"}}", "x".repeat(zofo::data::MAX_ROW_BYTES));
    let e = DataSpec::new(files.write("c.jsonl", line)).load().unwrap_err();
    assert!(e.message().contains("line 1") && e.message().contains("longer than"), "{e}");
}

#[test]
fn a_limit_is_a_random_sample_and_a_split_leaves_nothing_out() {
    let files = Files::new();
    let rows: String = (0..100).map(|i| format!("{i}\n")).collect();
    let spec = DataSpec::new(files.write("a.csv", format!("text\n{rows}")));
    let all = spec.load().unwrap();
    let sample = spec.clone().limit(10).load().unwrap();
    assert_eq!(sample.examples.len(), 10);
    assert!(sample.examples.iter().any(|e| e.line > 60) && sample.examples.is_sorted_by_key(|e| e.line));
    assert_eq!(sample, spec.clone().limit(10).load().unwrap());
    assert!(spec.clone().limit(0).load().is_err());

    let (train, held_out) = all.clone().split(30, 5).unwrap();
    assert_eq!((train.examples.len(), held_out.examples.len()), (70, 30));
    let mut lines: Vec<u64> = train.examples.iter().chain(&held_out.examples).map(|e| e.line).collect();
    lines.sort_unstable();
    assert_eq!(lines, all.examples.iter().map(|e| e.line).collect::<Vec<_>>());
    assert_ne!(held_out, all.clone().split(30, 6).unwrap().1);
    assert_eq!(all.split(1000, 5).unwrap().0.examples.len(), 1);
}

#[test]
fn both_shapes_of_ag_news() {
    let train = zofo_testkit::shared_or_skip!("data/ag_news/train.csv");
    let test = zofo_testkit::shared_or_skip!("data/ag_news/test.csv");
    let classes = "World,Sports,Business,Sci/Tech";
    let train = DataSpec::new(train).template("{content}\nTopic:").unwrap().labels("label", classes.parse().unwrap()).load().unwrap();
    let test = DataSpec::new(test).template("{description}\nTopic:").unwrap().labels("class", classes.parse().unwrap()).load().unwrap();
    assert!(train.examples.len() > 1000 && test.examples.len() > 1000);
    for data in [&train, &test] {
        let mut counts = [0usize; 4];
        labels(data).into_iter().for_each(|l| counts[l] += 1);
        assert!(counts.iter().all(|c| *c * 8 > data.examples.len()), "{counts:?}");
    }
    // The first rows, by eye: oil pipelines are world news in the training file, pensions business in the test file.
    assert_eq!((train.examples[0].label, test.examples[0].label), (Some(0), Some(2)));
    // Without a list, the words are the labels themselves, in alphabetical order.
    let mut spec = DataSpec::new(zofo_testkit::shared("data/ag_news/test.csv").unwrap()).text("description");
    spec.label_column = Some("class".into());
    assert_eq!(spec.load().unwrap().classes.unwrap().to_string(), "Business,Sci/Tech,Sports,World");
}
