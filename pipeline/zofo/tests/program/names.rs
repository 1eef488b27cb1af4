//! Names of models and data, and `zofo fetch` without a network.

use super::support::{Outcome, Place};

impl Place {
    /// The program with a cache of its own and nowhere to go.
    fn alone(&self, args: &[&str]) -> Outcome {
        let mut command = self.command(args);
        for name in [
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HUB_OFFLINE",
            "ALL_PROXY",
            "all_proxy",
            "HTTP_PROXY",
            "http_proxy",
            "HTTPS_PROXY",
            "https_proxy",
        ] {
            command.env_remove(name);
        }
        // Nobody listens on port 1.
        command.env("ZOFO_CACHE", self.path("cache")).env("HOME", self.path("home")).env("HF_ENDPOINT", "http://127.0.0.1:1");
        Outcome::from(command.output().unwrap())
    }
}

const NEWS: [&str; 8] = ["--micro-batches", "2", "--batch", "4", "--threads", "1", "--steps", "2"];

#[test]
fn named_data_come_with_their_meaning() {
    let place = Place::new();
    std::fs::create_dir(place.path("ag_news")).unwrap();
    let topics = ["World", "Sports", "Business", "Sci/Tech"];
    let train: String = (0..40).map(|i| format!("{},story {i}\n", i % 4 + 1)).collect();
    let test: String = (0..20).map(|i| format!("headline,story {i},{}\n", topics[i % 4])).collect();
    place.write("ag_news/train.csv", format!("label,content\n{train}"));
    place.write("ag_news/test.csv", format!("title,description,class\n{test}"));
    let train = |out: &str, args: &[&str]| {
        place.alone(&[&["train", "--model", "model", "--out", out], &NEWS[..], args].concat()).ok();
        place.json(&format!("{out}/run.json"))
    };
    let run = train("a", &["--data", "ag_news", "--data-dir", "ag_news"]);
    assert_eq!(run["data"]["template"], "{text}\nTopic:");
    assert_eq!((run["data"]["text_column"].as_str(), run["eval_data"]["text_column"].as_str()), (Some("content"), Some("description")));
    assert_eq!(place.json("a/summary.json")["eval_examples"], 20);
    // The folder itself, and words of the user before those of the name.
    let run = train("b", &["--data", "./ag_news", "--template", r"{text}\nKind:", "--eval-text-column", "title"]);
    assert_eq!((run["data"]["template"].as_str(), run["eval_data"]["template"].as_str()), (Some("{text}\nKind:"), Some("{text}\nKind:")));
    assert_eq!(run["eval_data"]["text_column"], "title");
    let scores = place.alone(&["eval", "--model", "model", "--data", "ag_news", "--data-dir", "ag_news", "--json"]).ok();
    assert!(scores.out.contains("\"examples\":20"), "{}", scores.out);
}

#[test]
fn answers_are_learnt() {
    let place = Place::new();
    let article = |i: usize| {
        format!(r#"{{"paragraphs":[{{"context":"box {i} is red","qas":[{{"question":"Colour?","answers":[{{"text":"red"}}]}}]}}]}}"#)
    };
    let articles: Vec<String> = (0..30).map(article).collect();
    std::fs::create_dir(place.path("q")).unwrap();
    place.write("q/train.json", format!(r#"{{"data":[{}]}}"#, articles.join(",")));
    let out = place.alone(
        &[&["train", "--model", "model", "--out", "a", "--data", "squad", "--data-dir", "q", "--steps", "12", "--lr", "0.05"], &NEWS[..6]]
            .concat(),
    );
    let out = out.ok();
    let summary = place.json("a/summary.json");
    assert!(summary["eval_loss_after"].as_f64() < summary["eval_loss_before"].as_f64(), "{summary}");
    assert!(out.out.contains("--answer-column answer"), "{}", out.out);
}

#[test]
fn what_was_not_fetched_says_how_to() {
    let place = Place::new();
    place
        .alone(&["train", "--model", "smollm2-135m", "--data", "data.csv", "--text-column", "text"])
        .refused(1, &["zofo fetch smollm2-135m"]);
    place.alone(&["generate", "--model", "smollm", "--prompt", "a"]).refused(1, &["no such model", "smollm2-135m"]);
    place.alone(&["eval", "--model", "model", "--data", "squad"]).refused(1, &["zofo fetch squad", "--data-dir"]);
    place.alone(&["eval", "--model", "model", "--data", "news"]).refused(2, &["`news`", "ag_news, multirc, squad"]);
    place
        .alone(&["train", "--model", "model", "--data", "data.csv", "--eval-template", "{a}"])
        .refused(2, &["--eval-template", "--eval-data"]);
}

#[cfg(feature = "hub")]
#[test]
fn fetching_without_a_network() {
    let place = Place::empty();
    let list = place.alone(&["fetch"]).ok().out;
    assert!(list.contains("smollm2-135m") && list.contains("squad") && list.contains("cache"), "{list}");
    place.alone(&["fetch", "nothing"]).refused(2, &["nothing", "smollm2-135m", "owner/repo"]);
    place
        .alone(&["fetch", "ag_news"])
        .refused(1, &["ag_news could not be fetched", "sh0416/ag_news", "127.0.0.1:1", "refuses connections"]);
    place.alone(&["fetch", "ag_news", "--offline"]).refused(1, &["not in the cache", "offline"]);
    place.alone(&["fetch", "ag_news", "--file", "x"]).refused(2, &["--file"]);
    place.alone(&["fetch", "o/r"]).refused(1, &["o/r", "refuses connections"]);
}
