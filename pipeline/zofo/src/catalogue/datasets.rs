//! The data sets: what is fetched, and what the columns mean in every form that the files are found in.

use super::{Kind, Known, KnownFile, Preset, Source, Split, file};
use crate::data::Format;

const fn dataset(
    name: &'static str,
    about: &'static str,
    licence: &'static str,
    files: &'static [KnownFile],
    sources: &'static [Source],
    preset: &'static Preset,
) -> Known {
    Known { kind: Kind::Dataset, name, about, licence, files, sources, preset: Some(preset) }
}

const fn news(file: &'static str, format: Format, text: &'static str, label: &'static str) -> Split {
    Split {
        file,
        format,
        text: Some(text),
        template: "{text}\nTopic:",
        label: Some(label),
        answer: None,
        classes: Some("1=World,2=Sports,3=Business,4=Sci/Tech"),
    }
}

/// AG News (Zhang et al., NIPS 2015), the description alone: the title is not in every form.
const AG_NEWS: Preset = Preset {
    train: &[
        news("train.jsonl", Format::Jsonl, "description", "label"),
        news("train.csv", Format::Csv, "content", "label"),
        news("train.csv", Format::Csv, "description", "label"),
        news("train.csv", Format::Csv, "description", "class"),
        news("train.csv", Format::Csv, "Description", "Class Index"),
    ],
    eval: &[
        news("test.jsonl", Format::Jsonl, "description", "label"),
        news("test.csv", Format::Csv, "description", "class"),
        news("test.csv", Format::Csv, "description", "label"),
        news("test.csv", Format::Csv, "content", "label"),
        news("test.csv", Format::Csv, "Description", "Class Index"),
    ],
};

const fn multirc(file: &'static str) -> Split {
    Split {
        file,
        format: Format::MultiRc,
        text: None,
        template: "{passage}\nQuestion: {question}\nAnswer: {answer}\nCorrect:",
        label: Some("label"),
        answer: None,
        classes: Some("0=no,1=yes"),
    }
}

const fn squad(file: &'static str) -> Split {
    Split {
        file,
        format: Format::Squad,
        text: None,
        template: "{context}\nQuestion: {question}\nAnswer:",
        label: None,
        answer: Some("answer"),
        classes: None,
    }
}

/// The data sets that have a name.
pub const DATASETS: &[Known] = &[
    dataset(
        "ag_news",
        "AG News by topic, 4 classes, 120,000 + 7,600 rows",
        "for research, non-commercial",
        &[file("train.jsonl"), file("test.jsonl")],
        &[Source::Hub { repo: "sh0416/ag_news", revision: "main" }],
        &AG_NEWS,
    ),
    dataset(
        "multirc",
        "answers that are right or wrong, 27,243 + 4,848 rows",
        "MIT (SuperGLUE)",
        &[file("train.jsonl"), file("val.jsonl")],
        &[Source::Archive { url: "https://dl.fbaipublicfiles.com/glue/superglue/data/v2/MultiRC.zip", folder: "MultiRC/" }],
        &Preset { train: &[multirc("train.jsonl")], eval: &[multirc("val.jsonl")] },
    ),
    dataset(
        "squad",
        "SQuAD 1.1, answers out of a text, 87,599 + 10,570 rows",
        "CC-BY-SA-4.0",
        &[
            KnownFile { name: "train-v1.1.json", sha256: Some("3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955") },
            KnownFile { name: "dev-v1.1.json", sha256: Some("95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9") },
        ],
        &[Source::Web { base: "https://rajpurkar.github.io/SQuAD-explorer/dataset/" }],
        &Preset { train: &[squad("train-v1.1.json"), squad("train.json")], eval: &[squad("dev-v1.1.json"), squad("dev.json")] },
    ),
];
